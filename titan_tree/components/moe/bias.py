"""RouterBias: balances experts without a loss, and therefore without changing any gradient.

    choice = the k experts with the largest p_e + b_e;   the weights come from p alone
    after a step:  b_e += rate * sign(mean load - load_e)

Each layer has its own biases. An expert's load is the number of tokens routed to it in the global batch. The
method is from arXiv:2408.15664 and DeepSeek-V3 (arXiv:2412.19437). There p is a sigmoid. In the models here
it is a softmax, with probabilities near 1 / E, so the same rate changes choices faster.

E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from titan_tree.components.moe.balance_loss import Routing
from titan_tree.errors import UserError

Counts = Literal["paths", "tokens"]


class RouterBias:
    """Updates router biases after each optimizer step.

    Args:
        rate: size of an update; 0 keeps the biases as they are.
        counts: how the load counts a token: "paths" once per path, as in a batch of the paths; "tokens" once,
            as on the hardware.
    Raises:
        UserError: the rate is negative or not finite, or ``counts`` is unknown.
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
        """Updates the biases in place.

        Args:
            biases: [E] fp32 for each layer with experts.
            routing: sums over the global batch, the same on all ranks.
        """
        load = routing.chosen if self.counts == "paths" else routing.tokens
        steps = self.rate * (load.mean(1, keepdim=True) - load).sign()
        for bias, step in zip(biases, steps, strict=True):
            bias += step
