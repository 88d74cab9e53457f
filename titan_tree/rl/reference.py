"""Reference: the fixed policy that a loss compares the trained one with. It scores rollouts for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from titan_tree.config.rl_tables import RLRunConfig
from titan_tree.distributed.mesh import OneRank
from titan_tree.engine.scoring import path_logprobs
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.model_setup import build_parallel_model, start_weights
from titan_tree.models.hf.files import fingerprint, fingerprint_files
from titan_tree.models.lora import adapters_off
from titan_tree.models.peft import ADAPTER
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


class Reference:
    """Scores paths with the weights of ``rl.reference``, by default those at the start of the run.

    The weights at the start follow from the configuration, so a resumed run has the same reference. If they
    are the frozen base of LoRA, the trained model scores without its updates. Otherwise, the reference is a
    model of its own.

    Args:
        config: of the run.
        step: trains the model; its model, device and partitioner are used.

    Attributes:
        identity: what determines the weights. A run must resume with the same.

    Raises:
        UserError: the reference cannot be loaded, or has another vocabulary than the trained model.
    """

    def __init__(self, config: RLRunConfig, step: TreeStep) -> None:
        folder, lora = config.rl.reference, config.lora
        self.step, self.max_tokens = step, config.data.max_tokens
        if folder is not None and not Path(folder).is_dir():
            raise UserError(
                f"rl.reference: expected the folder of a snapshot, got {folder!r}, which does not exist; "
                "correct it"
            )
        self.identity = start_weights(config) if folder is None else f"snapshot {fingerprint(Path(folder))}"
        if folder is None and lora.adapter is not None:
            self.identity += f", adapter {fingerprint_files([Path(lora.adapter) / ADAPTER])}"
        self.model = step.model
        self.is_base = folder is None and lora.is_on and lora.adapter is None
        if self.is_base:
            return
        model = config.model
        if folder is not None:
            model = dataclasses.replace(model, flavor=None, hf_path=folder, overrides={})
        mesh = OneRank(step.device.type)
        adapted = lora if folder is None else None
        self.model = build_parallel_model(model, config.training, config.parallel, mesh, adapted)
        self.model.requires_grad_(False)
        got, expected = self.model.config.vocab_size, step.model.config.vocab_size
        if got != expected:
            raise UserError(
                f"rl.reference: expected a model with the {expected:,} token ids of the trained one, got "
                f"{got:,}; choose a model with the same tokenizer"
            )

    def check(self, identity: str | None) -> None:
        """Raises UserError unless a checkpoint's ``identity`` is this reference's. None: it had none."""
        if identity not in (None, self.identity):
            raise UserError(
                f"rl.reference: expected the reference of the run so far, {identity}, got {self.identity}; "
                "restore it, or set checkpoint.allow_changes = true"
            )

    def score(self, groups: Sequence[Sequence[TokenPath]]) -> None:
        """Sets ``ref_logprobs`` of all paths. Each group becomes a tree."""
        trees = [TokenTree.from_paths(paths) for paths in groups]
        with adapters_off(self.model) if self.is_base else nullcontext():
            logprobs = path_logprobs(self.model, trees, self.max_tokens, self.step.partitioner)
        for path, found in zip(chain.from_iterable(groups), logprobs, strict=True):
            path.ref_logprobs = found


def build_reference(config: RLRunConfig, step: TreeStep) -> Reference | None:
    """Returns the reference if the loss reads ref_logprobs, or else None.

    Raises:
        UserError: ``rl.reference`` is set, but not needed; it is not set, but needed; or see ``Reference``.
    """
    if config.loss.name == "distill" and config.rl.reference is None:
        raise UserError(
            'rl.reference: expected the teacher\'s snapshot, because loss.name = "distill", got none; set it'
        )
    if step.loss.needs_reference:
        return Reference(config, step)
    if config.rl.reference is not None:
        raise UserError(
            "rl.reference: expected none, because the loss reads no ref_logprobs, got "
            f"{config.rl.reference!r}; remove it, or set loss.kl.coefficient"
        )
    return None
