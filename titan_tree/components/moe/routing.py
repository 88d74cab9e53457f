"""Routing: what a layer reports about its router. RouterLoss and RouterBias: two ways to balance experts.

The losses prevent routers from using only a few experts, and their logits from growing. They are defined on a
*balancing scope*: the tokens that are balanced together, in L layers, each token counted once per path
through it.

    balance   E sum_e f_e P_e     f_e: share of the tokens that chose expert e; P_e: its mean probability
    z         mean of logsumexp(logits)^2

f and P are means over the tokens of all layers together, as in transformers' ``load_balancing_loss_func``. f
has no gradient. The balance loss is from Switch Transformer (arXiv:2101.03961), z from ST-MoE
(arXiv:2202.08906).

The scope is a micro-batch or the global batch (arXiv:2501.11873). The balance loss is a product of two means,
so its average over several scopes differs from its value on all of them together. Only the global batch makes
the loss independent of how trees are packed, partitioned, or flattened to paths. With several scopes, the
losses are averaged, weighted by the scopes' tokens on paths.

E experts, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from titan_tree.config.checks import Checked, non_negative, require, setting

if TYPE_CHECKING:  # a configuration is checked without torch
    from torch import Tensor


class Routing(NamedTuple):
    """Sums over a layer's tokens, in fp32 or wider. For a whole model, each has a leading dim L.

    All but ``tokens`` count a token once per path through it, as a batch of the paths would.
    """

    tokens: Tensor  # [E] distinct tokens routed to each expert
    chosen: Tensor  # [E] tokens on paths routed to each expert
    probability: Tensor  # [E] the router's probabilities
    squared_lse: Tensor  # [] squared log-sum-exp of the router's logits


@dataclass
class RouterLoss(Checked, table="router_loss"):
    """Auxiliary losses on the router of a mixture of experts (docs/routing.md). A coefficient of 0 is off."""

    # Coefficient of the load-balancing loss. About 1e-3 in pre-training.
    balance: float = setting(0.0, non_negative)
    z: float = setting(0.0, non_negative)  # Coefficient of the z-loss.
    # Tokens over which expert loads are balanced. "global_batch" does not depend on how trees are packed. If
    # a rank has several forward passes per scope, each runs twice: to count tokens, and to train.
    scope: Literal["global_batch", "micro_batch"] = "global_batch"

    def __bool__(self) -> bool:
        return self.balance > 0 or self.z > 0

    def __call__(self, routing: Routing, chosen: Tensor, scope_tokens: int, all_tokens: int) -> Tensor:
        """Returns the contribution of one forward pass to the global batch's loss, 0-dim.

        Args:
            routing: sums over the tokens of the forward pass, for all layers.
            chosen: [E], ``Routing.chosen`` summed over all forward passes and layers of the balancing scope.
            scope_tokens: tokens on paths in the balancing scope, > 0.
            all_tokens: tokens on paths in the global batch.
        """
        loss = routing.squared_lse.new_zeros(())
        if self.balance:
            loss = loss + self.balance * _balance(routing, chosen, scope_tokens, all_tokens)
        if self.z:
            loss = loss + self.z * _z(routing, all_tokens)
        return loss


def router_metrics(routing: Routing, all_tokens: int) -> dict[str, Tensor]:
    """Returns the router metrics of a global batch, 0-dim each.

    They are the two terms of ``RouterLoss`` without coefficients and "expert_load", which is the maximum
    number of distinct tokens per expert over the mean, averaged over layers; 1 is perfectly balanced.

    Args:
        routing: summed over the forward passes of the global batch, for all layers.
        all_tokens: tokens on paths in the global batch.
    """
    return {
        "router_balance": _balance(routing, routing.chosen.sum(0), all_tokens, all_tokens),
        "router_z": _z(routing, all_tokens),
        "expert_load": (routing.tokens.amax(1) / routing.tokens.mean(1)).mean(),
    }


def _balance(routing: Routing, chosen: Tensor, scope_tokens: int, all_tokens: int) -> Tensor:
    num_layers, num_experts = routing.probability.shape
    share = chosen / (num_layers * scope_tokens)
    return num_experts * (share * routing.probability.sum(0)).sum() / (num_layers * all_tokens)


def _z(routing: Routing, all_tokens: int) -> Tensor:
    return routing.squared_lse.sum() / (len(routing.squared_lse) * all_tokens)


@dataclass
class RouterBias(Checked, table="router_bias"):
    """A bias on the router's choice balances the experts, without a loss (docs/routing.md).

        choice = the k experts with the largest p_e + b_e;   the weights come from p alone
        after a step:  b_e += rate * sign(mean load - load_e)

    Each layer has its own biases. An expert's load is the number of tokens routed to it in the global batch.
    The method is from arXiv:2408.15664 and DeepSeek-V3 (arXiv:2412.19437). There p is a sigmoid. In
    the models here it is a softmax, with probabilities near 1 / E, so the same rate changes choices faster.
    """

    # Change of a bias per optimizer step. DeepSeek-V3 uses 1e-3. Default: no biases are added, and those of a
    # snapshot stay constant. 0: biases are added, and stay constant.
    rate: float | None = setting(None, non_negative)
    # How often a token counts in the load of an expert. "paths": once per path; "tokens": once.
    counts: Literal["paths", "tokens"] = "paths"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rate is not None or self.counts == "paths",
            "router_bias.counts",
            "router_bias.rate to be set as well",
            repr(self.counts),
        )

    def update(self, biases: Iterable[Tensor], routing: Routing) -> None:
        """Updates the biases in place.

        Args:
            biases: [E] fp32 for each layer with experts.
            routing: sums over the global batch, the same on all ranks.
        """
        assert self.rate is not None, "a RouterBias needs a rate"
        load = routing.chosen if self.counts == "paths" else routing.tokens
        steps = self.rate * (load.mean(1, keepdim=True) - load).sign()
        for bias, step in zip(biases, steps, strict=True):
            bias += step
