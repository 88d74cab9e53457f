"""FusedHead: answers a call of TRL's fused head with a forward pass over the forest of its rows.

B rows of T tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from titan_tree.errors import UserError
from titan_tree.integrations.images import row_images
from titan_tree.integrations.rows import Rows
from titan_tree.integrations.tree_view import RowForest, TreeView, row_scores
from titan_tree.tree.images import PathImages

# Arguments of the fused head that do not change what it returns.
_IGNORED = {"use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@dataclass
class TreeOutput(ModelOutput):
    """The fields of TRL's FusedCausalLMOutput: values [B, T - 1] of the next tokens."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class FusedHead:
    """Returns what TRL's fused head returns, from a forward pass over the forest of the rows.

    Args:
        view: the model.
        forests: those of all models of the trainer.
        log: gets the tokens of the rows and the tokens that were computed.
        temperature: divides the logits.
        outputs: fields of TreeOutput that the trainer needs.
    """

    def __init__(
        self,
        view: TreeView,
        forests: Forests,
        log: Callable[[int, int], None],
        temperature: float,
        outputs: tuple[str, ...],
    ) -> None:
        if unknown := ", ".join(sorted(set(outputs) - TreeOutput.__annotations__.keys())):
            raise UserError(f"fused head: {unknown}: trees lack this output; install an earlier trl")
        self.view, self.forests, self.log, self.temperature = view, forests, log, temperature
        self.entropy = "entropy" in outputs
        self.statistics: Any = [name for name in outputs if name not in ("log_probs", "entropy")]

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> TreeOutput:
        """Scores rows.

        Args:
            input_ids: [B, T], or [1, T] with all rows one after another if position_ids are given.
            labels: [B, T], the token itself or -100.
            attention_mask, position_ids: at most one of them, [B, T]. Neither: all tokens are real.
            num_items_in_batch: divisor of the loss; None: the number of labels.
            pixel_values, image_grid_thw, mm_token_type_ids: images, see ``row_images``.
        """
        if unknown := sorted(name for name in others.keys() - _IGNORED if others[name] is not None):
            raise UserError(
                f"model: {', '.join(unknown)}: expected rows without it, of text or with images as "
                "pixel_values, image_grid_thw and mm_token_type_ids; remove the setting"
            )
        scored = labels != -100
        if ((labels != input_ids) & scored).any():
            raise UserError("labels: expected the token itself or -100, got other tokens; check the collator")
        inputs = {
            "tokens": input_ids.int(),
            "scored": scored,
            "real": None if attention_mask is None else attention_mask.bool(),
            "positions": None if position_ids is None else position_ids.int(),
        }
        on_host = {name: x.cpu() for name, x in inputs.items() if x is not None}
        images = row_images(self.view, on_host, mm_token_type_ids, pixel_values, image_grid_thw)
        forest, order = self.forests.get(self.view, on_host, self.temperature, images)
        self.log(forest.rows.tree.stats.n_flat, len(forest.rows.tree))
        values = row_scores(self.view, forest, self.entropy, self.statistics)
        # TRL's head computes in fp32 for weights of any dtype.
        single = (value.float() if value.dtype == torch.float64 else value for value in values.values())
        logprobs, *columns = (value.view(input_ids.shape)[order, :-1] for value in single)
        mask = scored[:, 1:]
        divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        fields = dict(zip([*(["entropy"] if self.entropy else []), *self.statistics], columns, strict=True))
        return TreeOutput(loss=-logprobs.sum() / divisor, log_probs=logprobs, label_mask=mask, **fields)


class Forests:
    """The forests of the last calls. Rows that come again, in any order, have the forest that they had.

    The old, current and reference log-probs of a step, and all iterations over it, then share one layout.

    Args:
        max_tokens: see ``treeify``.
        size: the number of forests to keep.
    """

    def __init__(self, max_tokens: int | None, size: int) -> None:
        self.max_tokens, self.size = max_tokens, size
        self._kept: dict[object, RowForest] = {}

    def get(
        self,
        view: TreeView,
        inputs: Mapping[str, Tensor],
        temperature: float,
        images: Sequence[PathImages] | None = None,
    ) -> tuple[RowForest, Tensor]:
        """Returns the forest of rows, and for each of them its index among the rows of the forest, [B].

        Args:
            inputs: the arguments of ``_rows``, on the host.
            images: see ``Rows.padded``.
        """
        data = torch.cat([x.contiguous().view(torch.uint8) for x in inputs.values()], 1)
        rows = [row.tobytes() for row in data.numpy()]
        if images is not None:  # their places follow from the tokens
            keys = ["".join(image.key for _, image in of_row).encode() for of_row in images]
            rows = [row + key for row, key in zip(rows, keys, strict=True)]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        key = (*inputs, inputs["tokens"].shape, temperature, *(rows[i] for i in order))
        if (forest := self._kept.pop(key, None)) is None:
            in_order: dict[str, Any] = {name: x[order] for name, x in inputs.items()}
            in_order["images"] = None if images is None else [images[i] for i in order]
            forest = RowForest.make(_rows(temperature=temperature, **in_order), view, self.max_tokens)
            while len(self._kept) >= self.size:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = forest  # the last one is the newest
        return forest, torch.tensor(order).argsort().to(forest.batch.tokens.device)


def _rows(
    tokens: Tensor,
    scored: Tensor,
    real: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: float = 1.0,
    images: Sequence[PathImages] | None = None,
) -> Rows:
    """Returns the rows of a call, see ``FusedHead``.

    Args:
        tokens, positions: [B, T] int32.
        scored, real: [B, T] bool: whether a token has a label, and whether it is none of the padding.
        images: see ``Rows.padded``; only without positions.
    Raises:
        UserError: labels or positions are not what trees can score.
    """
    if positions is None:
        real = torch.ones_like(scored) if real is None else real
        rows = Rows.padded(tokens, real, scored, temperature, images)
    elif real is None and len(tokens) == 1:
        rows = Rows.jagged(tokens[0], _offsets(positions[0]), scored[0], temperature)
    else:
        raise UserError(
            "model: expected rows with an attention_mask, or one padding-free row with position_ids, got "
            f"position_ids, {'no' if real is None else 'an'} attention_mask and {len(tokens)} rows"
        )
    if len(rows.index) != scored[:, 1:].sum():
        raise UserError(
            "labels: expected -100 for padding and for the first token of each row, which nothing "
            "predicts; check the collator"
        )
    return rows


def _offsets(positions: Tensor) -> Tensor:
    """Returns the first token of each row, and the end of the last one, from the positions [T] of tokens."""
    starts = (positions == 0).nonzero()[:, 0]
    offsets = torch.cat([starts, torch.tensor([len(positions)])])
    expected = torch.cat([torch.arange(int(size)) for size in offsets.diff()] or [positions[:0]])
    if not torch.equal(positions, expected.to(positions.dtype)):
        raise UserError("position_ids: expected 0, 1, 2, ... in each row, got other positions")
    return offsets
