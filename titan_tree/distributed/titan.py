"""The parts of torchtitan that titan_tree uses. No other file imports torchtitan.

torchtitan's releases follow PyTorch's nightly builds, so its version is pinned and the imported surface is
small. The names below work with every supported torch, with and without a GPU. torchtitan's Trainer,
ParallelDims and MetricsProcessor do not.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.profiler import Profiler
from torchtitan.tools.utils import get_peak_flops

from titan_tree.components import moe, tree_attention  # noqa: F401  # registers operators
from titan_tree.distributed import sequence_parallel  # noqa: F401  # registers operators
from titan_tree.distributed.experts import exchange  # noqa: F401  # registers operators
from titan_tree.errors import warnings_hidden

__all__ = [
    "FullAC",
    "LRSchedulersContainer",
    "OptimizersContainer",
    "Profiler",
    "SelectiveAC",
    "TreeSelectiveAC",
    "canonical_fqn",
    "peak_flops",
]


@functools.cache
def peak_flops(device_name: str) -> float:
    """Returns the peak dense bf16 FLOP/s of a GPU by its name, or an A100's for an unknown name."""
    with warnings_hidden():  # torchtitan warns if the tool lspci is missing, and works without it
        return get_peak_flops(device_name)


class TreeSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also stores what some of our operators return.

    The outputs of tree attention, the choice of experts and what arrives from other ranks are not recomputed.
    """

    def get_save_ops(self) -> set:
        ops = torch.ops.titan_tree
        saved = ops.tree_attention, ops.top_k, ops.gather_tokens, ops.to_heads, ops.to_tokens
        return super().get_save_ops() | {operator.default for operator in saved}

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        assert isinstance(wrapped, CheckpointWrapper)
        wrapped.checkpoint_fn.keywords["context_fn"] = _checkpoint_contexts
        return wrapped


def _checkpoint_contexts() -> tuple[Any, Any]:
    """Returns the contexts of ``TreeSelectiveAC`` for a forward pass and for its recomputation.

    torch.compile keeps a traced graph on disk only if this function can be pickled, which torchtitan's own, a
    lambda, cannot, and if its attribute ``cache_hash`` says what it depends on.
    """
    return _torchtitan_contexts()()


@functools.cache
def _torchtitan_contexts() -> Any:
    """Returns torchtitan's function. It is the same for all blocks: none has a module moe.router.gate."""
    wrapped = SelectiveAC._wrap_block(TreeSelectiveAC(SelectiveAC.Config()), nn.Identity())
    assert isinstance(wrapped, CheckpointWrapper)
    return wrapped.checkpoint_fn.keywords["context_fn"]


_checkpoint_contexts.cache_hash = (  # type: ignore[attr-defined]
    version("torchtitan"),
    *sorted(map(str, TreeSelectiveAC(SelectiveAC.Config()).get_save_ops())),
)
