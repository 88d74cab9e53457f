"""ContextCache: keys and values for sampling, where rows with an equal context read them together.

B rows are sampled at once. Each has a context of up to P tokens and a turn of up to T new ones. Rows with an
equal context are in one of U bundles, which has G places. L layers, K key-value heads, R query heads for each
of them, H = K * R, D head dim.
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

BUNDLE = 16  # rows that read a context together; more rows with this context read a copy


class Bundles(NamedTuple):
    """Rows with an equal context, up to 16 together, and where each row is.

    Attributes:
        bundle, place: [B], of each row.
        rows: [U, G], the row at each place; any row at a place that is empty.
    """

    bundle: Tensor
    place: Tensor
    rows: Tensor

    @staticmethod
    def of(contexts: Sequence[int], device: torch.device) -> tuple[Bundles, Tensor]:
        """Puts rows with an equal context into bundles of at most ``BUNDLE``.

        Args:
            contexts: number of the context of each row.

        Returns:
            The bundles, and the context of each bundle [U].
        """
        numbers: defaultdict[int, Iterator[int]] = defaultdict(count)
        bundles: dict[tuple[int, int], int] = {}
        places = []
        for context in contexts:
            part, at = divmod(next(numbers[context]), BUNDLE)
            places.append((bundles.setdefault((context, part), len(bundles)), at))
        bundle, place = torch.tensor(places).unbind(1)
        rows = torch.zeros(len(bundles), int(place.max()) + 1, dtype=torch.long)
        rows[bundle, place] = torch.arange(len(places))
        of_bundle = torch.tensor([context for context, _ in bundles])
        return Bundles(bundle.to(device), place.to(device), rows.to(device)), of_bundle.to(device)

    def gather(self, x: Tensor) -> Tensor:
        """Returns x [B, K, R, n] as [U, K, G * R, n]: what shares a key is in one matrix."""
        heads = torch.arange(x.shape[1], device=x.device)[:, None]
        return x[self.rows[:, None], heads].flatten(2, 3)

    def scatter(self, x: Tensor) -> Tensor:
        """Returns x [U, K, G * R, n] as [B, K, R, n]."""
        return x.unflatten(2, (self.rows.shape[1], -1))[self.bundle, :, self.place]


class ContextCache(NamedTuple):
    """Keys and values of a batch.

    A context is stored once for each bundle, and read once for all rows of it, as in Hydragen
    (arXiv:2402.05099).

    Attributes:
        context: [L, 2, U, K, P, D], of each bundle: all but the last token of its context.
        turn: [L, 2, B, K, T, D], of each row: the last token of its context, and its turn.
        length: [B] tokens of each row in ``context``.
    """

    context: Tensor
    turn: Tensor
    length: Tensor
    bundles: Bundles

    def select(self, rows: Tensor) -> ContextCache:
        """Returns a copy of some rows. Bundles without rows leave."""
        bundles, kept = Bundles.of(self.bundles.bundle[rows].tolist(), rows.device)
        return ContextCache(self.context[:, :, kept], self.turn[:, :, rows], self.length[rows], bundles)

    def begin(self, slots: int) -> ContextCache:
        """Returns the same cache with at most the first ``slots`` of each turn. It shares the memory."""
        return self._replace(turn=self.turn[..., :slots, :])

    def mask(self, slot: Tensor) -> Tensor:
        """Returns [B, 1, 1, P + T] fp32: 0 for what a row sees at ``slot`` [1] of its turn, else -inf."""
        position = torch.arange(max(self.size), device=slot.device)
        context = position[: self.size[0]] < self.length[:, None]
        turn = (position[: self.size[1]] <= slot).expand(len(context), -1)
        visible = torch.cat((context, turn), 1)[:, None, None]
        return torch.zeros(visible.shape, device=slot.device).masked_fill(~visible, -math.inf)

    def attend(self, layer: int, slot: Tensor, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes a token of each row to ``slot`` [1] of its turn, and lets it attend to what the row sees.

        Args:
            mask: see ``mask``.
            q: [B, H, D].
            k, v: [B, K, D].

        Returns:
            [B, H, D].
        """
        (keys, values), (own_keys, own_values) = self.context[layer], self.turn[layer]
        own_keys.index_copy_(2, slot, k[:, :, None])
        own_values.index_copy_(2, slot, v[:, :, None])
        bundles, heads = self.bundles, q.unflatten(1, (k.shape[1], -1))
        shared = bundles.scatter(product(bundles.gather(heads), keys.mT))
        scores = torch.cat((shared, product(heads, own_keys.mT)), -1)
        weights = torch.add(mask, scores, alpha=q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        of_context, of_turn = weights.split(self.size, -1)
        out = bundles.scatter(product(bundles.gather(of_context), values)) + product(of_turn, own_values)
        return out.to(q.dtype).flatten(1, 2)

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
