"""Routing: what a layer tells of its router. RouterLoss: what keeps routers from using few experts only, and
their logits from growing.

Of a *pool* of tokens in L layers, each token counted once per path through it:

    balance   E sum_e f_e P_e     f_e: share of the tokens that chose expert e; P_e: its mean probability
    z         mean of logsumexp(logits)^2

f and P are means over all layers' tokens together, as in transformers' ``load_balancing_loss_func``; f has
no gradient. Balance: Switch Transformer (arXiv:2101.03961); z: ST-MoE (arXiv:2202.08906). A pool is a
micro-batch, or all of the global batch (arXiv:2501.11873). As a product of two means the balance of several
pools is not that of all together; only the global batch's is the same however trees are packed, cut, or
flattened to paths. Several pools are averaged, weighted by their tokens on paths.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from titan_tree.errors import UserError

Scope = Literal["global_batch", "micro_batch"]


class Routing(NamedTuple):
    """Sums over a layer's tokens, fp32 at least; of a model each with a first dim for its L such layers.

    All but ``tokens`` count a token as often as paths run through it, as a batch of the paths would.
    """

    tokens: Tensor  # [E] distinct tokens that each expert has
    chosen: Tensor  # [E] the same, on paths
    probability: Tensor  # [E] the router's probabilities
    squared_lse: Tensor  # [] squares of the log-sum-exp of the router's logits


class RouterLoss:
    """Coefficients and the pool; 0 switches a loss off.

    Raises UserError for a coefficient that is negative or not finite, and for an unknown scope.
    """

    def __init__(self, balance: float = 0.0, z: float = 0.0, scope: Scope = "global_batch") -> None:
        for name, value in (("balance", balance), ("z", z)):
            if not 0 <= value < math.inf:
                raise UserError(f"router_loss.{name}: expected a finite number >= 0, got {value}")
        if scope not in get_args(Scope):
            expected = ", ".join(get_args(Scope))
            raise UserError(f"router_loss.scope: expected one of {expected}, got {scope!r}")
        self.balance, self.z, self.scope = balance, z, scope

    def __bool__(self) -> bool:
        """Whether there is anything to add to the loss."""
        return self.balance > 0 or self.z > 0

    def __call__(self, routing: Routing, chosen: Tensor, pool_tokens: int, all_tokens: int) -> Tensor:
        """A forward's share of the global batch's loss, 0-dim. Shares of all forwards add up.

        Args:
            routing: of the forward, of all its layers.
            chosen: [E] of the pool, ``Routing.chosen`` summed over its forwards and layers.
            pool_tokens: tokens on paths in the pool, > 0.
            all_tokens: the same of the global batch.
        """
        loss = routing.squared_lse.new_zeros(())
        if self.balance:
            loss = loss + self.balance * _balance(routing, chosen, pool_tokens, all_tokens)
        if self.z:
            loss = loss + self.z * _z(routing, all_tokens)
        return loss


def router_metrics(routing: Routing, all_tokens: int) -> dict[str, Tensor]:
    """Of a global batch, 0-dim, given the sum of its forwards' ``routing``.

    Both terms of ``RouterLoss`` without coefficients; and "expert_load", the most distinct tokens that one of
    a layer's experts has over their mean, mean over layers: 1 is balanced.
    """
    return {
        "router_balance": _balance(routing, routing.chosen.sum(0), all_tokens, all_tokens),
        "router_z": _z(routing, all_tokens),
        "expert_load": (routing.tokens.amax(1) / routing.tokens.mean(1)).mean(),
    }


def _balance(routing: Routing, chosen: Tensor, pool_tokens: int, all_tokens: int) -> Tensor:
    num_layers, num_experts = routing.probability.shape
    share = chosen / (num_layers * pool_tokens)
    return num_experts * (share * routing.probability.sum(0)).sum() / (num_layers * all_tokens)


def _z(routing: Routing, all_tokens: int) -> Tensor:
    return routing.squared_lse.sum() / (len(routing.squared_lse) * all_tokens)
