"""Reference: the fixed policy with which a loss compares the trained one. It scores rollouts for training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.hf.snapshot_files import fingerprint, fingerprint_files
from titan_tree.models.lora.adapters import adapters_off
from titan_tree.models.lora.peft import ADAPTER
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.settings import RLRunConfig, is_address
from titan_tree.run.model_setup import (
    build_frozen_model,
    build_model_without_weights,
    snapshot_model,
    start_weights,
)
from titan_tree.scoring.score_trees import set_logprobs
from titan_tree.tree.token_tree import TokenTree


class Reference:
    """Scores paths with the weights of ``rl.reference``, by default those at the start of the run.

    The weights at the start follow from the configuration, so a resumed run has the same reference. If they
    are the frozen base of LoRA, the trained model scores without its updates. Otherwise, the reference is a
    model of its own, which ranks share as they share the trained one.

    Args:
        config: the run's configuration.
        step: the training step, whose model and partitioner the reference uses.
        mesh: all ranks.

    Attributes:
        identity: a text that determines the weights. A run must resume with the same identity.

    Raises:
        UserError: the reference cannot be loaded.
    """

    def __init__(self, config: RLRunConfig, step: TreeStep, mesh: DeviceMesh) -> None:
        folder, lora = config.rl.reference, config.lora
        self.step, self.max_tokens = step, config.data.max_tokens
        self.identity = start_weights(config) if folder is None else f"snapshot {fingerprint(Path(folder))}"
        if folder is None and lora.adapter is not None:
            self.identity += f", adapter {fingerprint_files([Path(lora.adapter) / ADAPTER])}"
        self.model = step.model
        self.is_base = folder is None and lora.is_on and lora.adapter is None
        if self.is_base:
            return
        model = config.model if folder is None else snapshot_model(config.model, folder)
        adapted = lora if folder is None else None
        self.model = build_frozen_model(model, config.training, config.parallel, mesh, adapted)

    def set_ref_logprobs(self, trees: Sequence[TokenTree]) -> None:
        """Sets ``ref_logprobs`` of all paths of this rank's trees. Collective."""
        with adapters_off(self.model) if self.is_base else nullcontext():
            set_logprobs(
                self.model,
                trees,
                "ref_logprobs",
                max_tokens=self.max_tokens,
                partitioner=self.step.partitioner,
            )


def check_reference(config: RLRunConfig, loss: TreeLoss) -> None:
    """Raises UserError if ``rl.reference`` is no folder, or set but not needed, or needed but not set."""
    folder = config.rl.reference
    if folder is None and config.loss.name == "distill":
        raise UserError(
            'rl.reference: expected the teacher\'s snapshot, because loss.name = "distill", got none; set it'
        )
    if folder is not None and not loss.needs_reference:
        raise UserError(
            f"rl.reference: expected none, because the loss reads no ref_logprobs, got {folder!r}; remove "
            "it, or set loss.kl.coefficient"
        )
    if folder is not None and not Path(folder).is_dir():
        raise UserError(
            f"rl.reference: expected the folder of a snapshot, got {folder!r}, which does not exist; "
            "correct it"
        )


def check_vocabulary(config: RLRunConfig, model: TreeModel) -> None:
    """Raises UserError if the reference or a teacher is a snapshot with another vocabulary than ``model``."""
    folders = [("rl.reference", config.rl.reference)] if config.rl.reference else []
    models = config.rl.teacher.models.values()
    folders += [("rl.teacher.models", where) for where in models if not is_address(where)]
    for key, folder in folders:
        with torch.device("meta"):
            other = build_model_without_weights(snapshot_model(config.model, folder))
        got, expected = other.config.vocab_size, model.config.vocab_size
        if got != expected:
            raise UserError(
                f"{key}: expected a model with the {expected:,} token ids of the trained one, got {got:,}; "
                "choose a model with the same tokenizer"
            )
