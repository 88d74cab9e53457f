"""ContextCache: keys and values for sampling, which rows with an equal context read together.

Shapes: B rows are sampled at once. Each row has a context of up to P tokens and a turn of up to T new tokens.
Rows with an equal context share one of U bundles with G places each. The model has L layers, K key-value
heads, R query heads per key-value head, H = K * R heads in all, and head dim D.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.models.layers import at_least_fp32

BUNDLE = 16  # number of rows that read a context together; further rows with this context read a copy


class Bundles(NamedTuple):
    """Assigns rows with an equal context to bundles of up to 16 rows.

    Attributes:
        bundle, place: [B], the bundle of each row and its place there.
        rows: [U, G], the row at each place. An empty place holds any row.
    """

    bundle: Tensor
    place: Tensor
    rows: Tensor

    @staticmethod
    def of(contexts: Sequence[int], device: torch.device) -> tuple[Bundles, Tensor]:
        """Puts rows with an equal context into bundles of at most ``BUNDLE``.

        Args:
            contexts: the number of each row's context.

        Returns:
            The bundles, and the context of each bundle [U].
        """
        next_index: defaultdict[int, Iterator[int]] = defaultdict(count)
        bundles: dict[tuple[int, int], int] = {}
        bundles_and_places = []
        for context in contexts:
            copy, place_of_row = divmod(next(next_index[context]), BUNDLE)
            bundle_of_row = bundles.setdefault((context, copy), len(bundles))
            bundles_and_places.append((bundle_of_row, place_of_row))
        bundle, place = torch.tensor(bundles_and_places).unbind(1)
        rows = torch.zeros(len(bundles), int(place.max()) + 1, dtype=torch.long)
        rows[bundle, place] = torch.arange(len(contexts))
        context_of_bundle = torch.tensor([context for context, _ in bundles])
        return Bundles(bundle.to(device), place.to(device), rows.to(device)), context_of_bundle.to(device)

    def gather(self, x: Tensor) -> Tensor:
        """Returns x [B, K, R, n] as [U, K, G * R, n], so that rows which share keys are in one matrix."""
        heads = torch.arange(x.shape[1], device=x.device)[:, None]
        return x[self.rows[:, None], heads].flatten(2, 3)

    def scatter(self, x: Tensor) -> Tensor:
        """Returns x [U, K, G * R, n] as [B, K, R, n]."""
        return x.unflatten(2, (self.rows.shape[1], -1))[self.bundle, :, self.place]


class ContextCache(NamedTuple):
    """Keys and values of a batch.

    A context is stored once for each bundle, and read once for all rows of the bundle, as in Hydragen
    (arXiv:2402.05099).

    Attributes:
        context: [L, 2, U, K, P, D], for each bundle all but the last token of its context.
        turn: [L, 2, B, K, T, D], for each row the last token of its context, and its turn.
        length: [B], the number of tokens that each row has in ``context``.
    """

    context: Tensor
    turn: Tensor
    length: Tensor
    bundles: Bundles

    def select(self, rows: Tensor) -> ContextCache:
        """Returns a cache with only ``rows``, as a copy. Bundles that lose all their rows are dropped."""
        bundles, old_bundles = Bundles.of(self.bundles.bundle[rows].tolist(), rows.device)
        context = self.context[:, :, old_bundles]
        return ContextCache(context, self.turn[:, :, rows], self.length[rows], bundles)

    def first_slots(self, slots: int) -> ContextCache:
        """Returns the same cache with at most the first ``slots`` of each turn. It shares the memory."""
        return self._replace(turn=self.turn[..., :slots, :])

    def mask(self, slot: Tensor) -> Tensor:
        """Returns [B, 1, 1, P + T] fp32: 0 for a token that a row sees at ``slot`` [1], else -inf."""
        position = torch.arange(max(self.size), device=slot.device)
        context = position[: self.size[0]] < self.length[:, None]
        turn = (position[: self.size[1]] <= slot).expand(len(context), -1)
        visible = torch.cat((context, turn), 1)[:, None, None]
        return torch.zeros(visible.shape, device=slot.device).masked_fill(~visible, -math.inf)

    def attend(self, layer: int, slot: Tensor, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes one token per row to a slot of the turns, and lets it attend to all that its row sees.

        Args:
            slot: [1].
            mask: the result of ``mask``.
            q: [B, H, D].
            k, v: [B, K, D].

        Returns:
            [B, H, D].
        """
        context_keys, context_values = self.context[layer]
        turn_keys, turn_values = self.turn[layer]
        turn_keys.index_copy_(2, slot, k[:, :, None])
        turn_values.index_copy_(2, slot, v[:, :, None])
        bundles, heads = self.bundles, q.unflatten(1, (k.shape[1], -1))
        context_scores = bundles.scatter(product(bundles.gather(heads), context_keys.mT))
        scores = torch.cat((context_scores, product(heads, turn_keys.mT)), -1)
        weights = torch.add(mask, scores, alpha=q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        context_weights, turn_weights = weights.split(self.size, -1)
        context_out = bundles.scatter(product(bundles.gather(context_weights), context_values))
        return (context_out + product(turn_weights, turn_values)).to(q.dtype).flatten(1, 2)

    @property
    def size(self) -> tuple[int, int]:
        """P and T."""
        return self.context.shape[-2], self.turn.shape[-2]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a [n, K, i, j] @ b [n, K, j, k] in fp32 or wider."""
    wide, x, y = at_least_fp32(a), a.flatten(0, 1), b.flatten(0, 1)
    is_half = a.is_cuda and a.dtype != wide  # a CPU cannot multiply bf16 matrices to fp32
    out = torch.bmm(x, y, out_dtype=wide) if is_half else torch.bmm(x.to(wide), y.to(wide))
    return out.unflatten(0, a.shape[:2])
