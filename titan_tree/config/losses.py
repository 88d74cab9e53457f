"""The tables [loss], [router_loss] and [router_bias].

KLPenalty, RolloutCorrection, RouterLoss and RouterBias are subclasses of their tables, with the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_tree.config.checks import Checked, at_least, finite, non_negative, one_of, require, setting
from titan_tree.registry import LOSSES

Reduction = Literal[
    "path_mean",
    "token_mean",
    "path_token_mean",
    "rollout_token_mean",
    "distinct_token_mean",
    "first_path_token_mean",
]


@dataclass(frozen=True)
class KLConfig(Checked, table="loss.kl"):
    """A penalty for diverging from the reference policy (docs/components/losses.md)."""

    # Factor of the penalty, which needs ref_logprobs. 0: off.
    coefficient: float = setting(0.0, finite, at_least(0))
    estimator: Literal["k1", "k2", "k3"] = "k3"  # Estimator of the KL divergence.
    importance: bool = False  # Multiply the estimate by p / p_old, for tokens of an older policy.
    as_reward: bool = False  # Subtract the penalty from the advantages. This is usual with k1.

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = not (self.importance and self.as_reward)
        require(is_valid, "loss.kl.importance", "false together with loss.kl.as_reward", "true")


@dataclass(frozen=True)
class CorrectionConfig(Checked, table="loss.correction"):
    """Weights for rollout_logprobs that differ from old_logprobs (docs/components/losses.md)."""

    # What the weight w = p_old / p_rollout belongs to: a "token", its path ("sequence"), or the "geometric"
    # mean of its path. "max" is the largest of its path, for the estimators "k2" and "k3". "off": all weights
    # are 1.
    level: Literal["off", "token", "sequence", "geometric", "max"] = "off"
    # "truncate" clamps weights to [low, high], "mask" sets those outside to 0, and "reject" also sets those
    # inside to 1.
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = setting(0.0, finite, at_least(0))  # Lower bound of the weights.
    high: float = setting(2.0, finite)  # Upper bound of the weights.
    # What is compared with the bounds: the "ratio" above, or an estimate of KL(rollout || old), which needs
    # mode = "reject".
    estimator: Literal["ratio", "k2", "k3"] = "ratio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "off":
            return
        low, high, is_ratio = self.low, self.high, self.estimator == "ratio"
        expected = f"at least 0 and below loss.correction.high = {high:g}"
        require(low < high, "loss.correction.low", expected, f"{low:g}")
        expected = "'max' only with the estimator 'k2' or 'k3'"
        require(self.level != "max" or not is_ratio, "loss.correction.level", expected, "'ratio'")
        require(
            is_ratio or (self.mode == "reject" and low == 0),
            "loss.correction.estimator",
            f"mode = 'reject' and low = 0 with {self.estimator!r}",
            f"{self.mode!r} and {low:g}",
        )


@dataclass(kw_only=True)
class LossConfig(Checked, table="loss"):
    """The loss that TreeLoss computes."""

    name: str = setting("sft", one_of(LOSSES))  # Loss function (docs/components/losses.md).
    # How token losses are added up (docs/concepts.md, "The loss over paths").
    reduction: Reduction = "path_mean"
    entropy: float = setting(0.0, finite)  # Coefficient of an entropy bonus.
    whiten: bool = False  # Normalize advantages over the tokens of the global batch (TreePO, REINFORCE++).
    options: dict[str, Any] = setting({})  # Numbers that the loss function takes, such as a clip range.
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            key = f"loss.options.{name}"
            require(name not in vars(self), key, f"no such option (set loss.{name} instead)", repr(value))
            require(finite(value) is None, key, "a finite number", repr(value))


@dataclass
class RouterLossConfig(Checked, table="router_loss"):
    """Auxiliary losses on the router of a mixture of experts (docs/routing.md). A coefficient of 0 is off."""

    # Coefficient of the load-balancing loss. About 1e-3 in pre-training.
    balance: float = setting(0.0, non_negative)
    z: float = setting(0.0, non_negative)  # Coefficient of the z-loss.
    # Tokens over which expert loads are balanced. "global_batch" does not depend on how trees are packed. If
    # a rank has several forward passes per scope, each runs twice: to count tokens, and to train.
    scope: Literal["global_batch", "micro_batch"] = "global_batch"


@dataclass
class RouterBiasConfig(Checked, table="router_bias"):
    """A bias on the router's choice balances the experts, without a loss (docs/routing.md)."""

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
