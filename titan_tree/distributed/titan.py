"""The parts of torchtitan that titan_tree is built on. No other file imports torchtitan.

torchtitan's releases follow PyTorch's nightlies, so the version is pinned and the surface kept small: these
names run on every supported torch, with and without a GPU; its Trainer, ParallelDims and MetricsProcessor
do not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.profiler import Profiler
from torchtitan.tools.utils import get_peak_flops

from titan_tree.components import tree_attention  # noqa: F401  # registers an operator saved below
from titan_tree.distributed import ao, exchange  # noqa: F401  # exchange: registers the others

__all__ = [
    "CheckpointManager",
    "FullAC",
    "LRSchedulersContainer",
    "Optimizers",
    "OptimizersContainer",
    "ParamGroupConfig",
    "Profiler",
    "SelectiveAC",
    "TreeSelectiveAC",
    "peak_flops",
]


@functools.cache
def peak_flops(device_name: str) -> float:
    """Peak dense bf16 FLOP/s of a GPU by its name; that of an A100 where torchtitan does not know it."""
    logging.disable(logging.WARNING)  # it complains where the tool lspci is missing, and does without
    try:
        return get_peak_flops(device_name)
    finally:
        logging.disable(logging.NOTSET)


class Optimizers(OptimizersContainer):
    """torchtitan's container of optimizers, for ``AdamW8bit`` too."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "AdamW8bit":
            return ao.adamw_8bit()
        return OptimizersContainer._resolve_optimizer_factory(name)


class TreeSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing that keeps the outputs of tree attention too, and what
    has arrived from other ranks for the experts here."""

    def get_save_ops(self) -> set:
        ops = torch.ops.titan_tree
        kept = {ops.tree_attention.default, ops.plan_exchange.default, ops.to_experts.default}
        return super().get_save_ops() | kept
