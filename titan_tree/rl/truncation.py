"""Truncation: top-p, top-k and min-p sampling from a part of the vocabulary, and the record of that part.

B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.rl.sampler import UNIT
from titan_tree.rl.settings import RLConfig


class Truncation(NamedTuple):
    """Which ids sampling keeps. The filters run one after another, as in vLLM: min-p, top-k, top-p."""

    top_p: float = 1.0  # the smallest set of the likeliest ids whose probabilities add up to at least top_p
    top_k: int = 0  # the top_k likeliest ids; 0: all
    min_p: float = 0.0  # ids with at least min_p times the largest probability

    @staticmethod
    def of(rl: RLConfig) -> Truncation:
        return Truncation(rl.top_p, rl.top_k, rl.min_p)

    @property
    def is_on(self) -> bool:
        return self != ALL_IDS

    def apply(self, logits: Tensor) -> Tensor:
        """Returns logits [B, V] with -inf for the ids that sampling does not keep. The likeliest id stays."""
        if not self.is_on:
            return logits
        logits = logits.float()
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        keeps = p >= self.min_p * p[:, :1]
        if self.top_k:
            keeps[:, self.top_k :] = False
        if self.top_p < 1:
            mass = (p.masked_fill(~keeps, 0) * UNIT).long()  # integers, as in ``draw``
            ends = mass.cumsum(-1)
            keeps[:, 1:] &= ends[:, :-1] < self.top_p * ends[:, -1:]  # the likelier ids have less than top_p
        return logits.masked_fill(~torch.zeros_like(keeps).scatter(1, order, keeps), -torch.inf)

    def sizes(self, logits: Tensor) -> Tensor | None:
        """Returns how many ids of each row ``apply`` has kept, [B], or None if it is off."""
        return (logits != -torch.inf).sum(-1) if self.is_on else None


ALL_IDS = Truncation()  # sampling from the whole vocabulary


class KeptIds(NamedTuple):
    """The ids that sampling has kept for one token of each row. They stay on the GPU until they are read."""

    ids: Tensor  # int32, ascending within a row, one row after another
    sizes: list[int]  # of the rows, see ``Truncation.sizes``

    @staticmethod
    def of(logits: Tensor, sizes: list[int]) -> KeptIds:
        """Returns the ids of a result [B, V] of ``Truncation.apply``. It waits for no GPU."""
        return KeptIds(torch.nonzero_static(logits != -torch.inf, size=sum(sizes))[:, 1].int(), sizes)

    def rows(self) -> list[np.ndarray]:
        """Returns the ids of each row."""
        return np.split(self.ids.cpu().numpy(), np.cumsum(self.sizes)[:-1])
