"""Truncation: top-p, top-k and min-p sampling from a part of the vocabulary, and the record of that part.

B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.config.rl import RLConfig
from titan_tree.rl.sampler import UNIT


class Truncation(NamedTuple):
    """Which ids sampling keeps. The filters run one after another, as in vLLM: min-p, top-k, top-p.

    Before them, the temperature divides the logits. Reinforcement learning samples at 1.
    """

    top_p: float = 1.0  # the smallest set of the likeliest ids whose probabilities add up to at least top_p
    top_k: int = 0  # the top_k likeliest ids; 0: all
    min_p: float = 0.0  # ids with at least min_p times the largest probability
    temperature: float = 1.0

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
        logits = logits.float() / self.temperature
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

    def kept(self, logits: Tensor) -> list[np.ndarray] | None:
        """Returns the ids of each row that ``apply`` has kept, ascending, or None if it is off."""
        if not self.is_on:
            return None
        rows, ids = (logits != -torch.inf).nonzero().int().t().cpu().numpy()
        return np.split(ids, np.searchsorted(rows, np.arange(1, len(logits))))


ALL_IDS = Truncation()  # sampling from the whole vocabulary
