"""StepForests: GRPO and RLOO score the rows of an optimizer step in its first micro-batch.

TRL then computes the loss of each micro-batch on its part of the scores:

    micro-batch 1        forward pass over the forest -> scores; loss on detached scores -> their gradient
    micro-batches 2 ..   loss on detached scores -> their gradient
    the last one         loss on scores -> their gradient + the collected one -> backward pass of the forest

The last backward pass is the only one that reaches parameters. Reduction over ranks, scaling and clipping of
gradients therefore work as in one micro-batch. Rows stay in TRL's order.

B rows of T tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback


class StepForests(TrainerCallback):
    """Scores the rows of an optimizer step of GRPO or RLOO in its first micro-batch, as one forest.

    ``per_device_train_batch_size`` then only says over which rows TRL computes a loss. If TRL generates
    within an optimizer step, each generation is a forest.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.scored: list[tuple[Tensor, Tensor]] = []  # log-probs and entropies of the next micro-batches
        self.score = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = self.scores
        self.set_mode = trainer.model.train
        trainer.model.train = self.train
        trainer.add_callback(self)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Forgets what an interrupted call of ``train`` has left of a step."""
        self.scored = []
        self.left = self.trainer.current_gradient_accumulation_steps  # micro-batches without scores

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of all modules, as ``Module.train``. For a micro-batch with scores, no module runs.

        The Trainer calls it in every micro-batch. A visit of all modules would let the GPU wait.
        """
        model = self.trainer.model
        return model if mode and model.training and self.scored else self.set_mode(mode)

    def scores(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores all rows at once. Rows to train on get their scores from the forest of their optimizer step.

        Args:
            batch_size: has no effect.
        """
        if not torch.is_grad_enabled():  # old and reference log-probs, evaluation
            return self.score(
                model, input_ids, attention_mask, logits_to_keep, None, compute_entropy, **kwargs
            )
        if not self.scored:
            buffered = self.trainer._buffered_inputs
            start = self.trainer._step % len(buffered)
            parts = buffered[start : start + self.left]
            self.left -= len(parts)
            ids, mask = (
                torch.cat([torch.cat([part[f"prompt_{x}"], part[f"completion_{x}"]], 1) for part in parts])
                for x in ("ids", "mask")
            )
            for name in [name for name in kwargs if isinstance(kwargs[name], Tensor | list)]:  # images
                values = [part[name] for part in parts]
                kwargs[name] = torch.cat(values) if isinstance(values[0], Tensor) else [*chain(*values)]
            with _reduced(model) if self.left == 0 else nullcontext():
                logprobs, entropies, _ = self.score(model, ids, mask, logits_to_keep, None, True, **kwargs)
            self.scored = list(zip(*(_parts(x, len(input_ids)) for x in (logprobs, entropies)), strict=True))
        return *self.scored.pop(0), None


def _parts(values: Tensor, rows: int) -> list[Tensor]:
    """Returns the values of each micro-batch. Backward passes of all but the last one only collect gradients.

    Args:
        values: [B, T] of all micro-batches. Their backward pass is part of the last micro-batch's, and gets
            the collected gradients, too.
        rows: the number of rows of a micro-batch.
    """
    leaf = values.detach().requires_grad_()
    values.register_hook(lambda gradient: gradient if leaf.grad is None else gradient + leaf.grad)
    return [*leaf.split(rows)[:-1], values.split(rows)[-1]]


@contextmanager
def _reduced(model: Any) -> Iterator[None]:
    """Lets the backward pass of what the model computes in here reduce gradients over ranks.

    DistributedDataParallel decides it in the forward pass, which is within ``no_sync`` of the first
    micro-batch. The backward pass is in the last micro-batch, without ``no_sync``.
    """
    before = getattr(model, "require_backward_grad_sync", None)
    try:
        if before is not None:
            model.require_backward_grad_sync = True
        yield
    finally:
        if before is not None:
            model.require_backward_grad_sync = before
