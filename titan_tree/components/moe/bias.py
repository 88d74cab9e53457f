"""RouterBias: balances experts without a loss, and so without gradients that know nothing of the data.

    choice = the k experts of the largest p_e + b_e;   weights are made of p alone
    after a step:  b_e += rate * sign(mean load - load_e)

Of each layer on its own; a load is the number of tokens that an expert had in the global batch. From
arXiv:2408.15664 and DeepSeek-V3, arXiv:2412.19437. There p is a sigmoid; in the models here it is a softmax,
about 1 / E each, so that the same rate moves choices faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from titan_tree.components.moe.balance import Routing
from titan_tree.errors import UserError

Counts = Literal["paths", "tokens"]


class RouterBias:
    """How biases move.

    Args:
        rate: of a step; 0 leaves them as they are.
        counts: loads of distinct "tokens", as the hardware has them, or on "paths", where a token counts once
            per path: those of a batch of the paths.
    Raises:
        UserError: a rate that is negative or not finite; unknown counts.
    """

    def __init__(self, rate: float, counts: Counts = "paths") -> None:
        if not 0 <= rate < math.inf:
            raise UserError(f"router_bias.rate: expected a finite number >= 0, got {rate}")
        if counts not in get_args(Counts):
            expected = ", ".join(get_args(Counts))
            raise UserError(f"router_bias.counts: expected one of {expected}, got {counts!r}")
        self.rate, self.counts = rate, counts

    @torch.no_grad()
    def update(self, biases: Iterable[Tensor], routing: Routing) -> None:
        """In place. biases: [E] fp32 of each layer. routing: of the global batch, the same on all ranks."""
        load = routing.chosen if self.counts == "paths" else routing.tokens
        steps = self.rate * (load.mean(1, keepdim=True) - load).sign()
        for bias, step in zip(biases, steps, strict=True):
            bias += step
