"""The settings of TreeLoss, [loss] with [loss.kl] and [loss.correction], and the registry of losses.

Nothing here imports torch, so a configuration is checked at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.config.checks import Checked, finite, one_of, require, setting
from titan_tree.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

# Called as function(log-probs [F] in nats, pairs, **options), where F counts the (edge, path) pairs of a
# batch. It returns losses [F], or losses and a dict of metrics, [F] each.
LossFunction = Callable[..., "Tensor | tuple[Tensor, dict[str, Tensor]]"]

Reduction = Literal[
    "path_mean",
    "token_mean",
    "path_token_mean",
    "rollout_token_mean",
    "distinct_token_mean",
    "first_path_token_mean",
]


# spec.py describes how these functions declare what they need.
LOSSES: Registry[LossFunction] = Registry(
    "loss",
    {
        "sft": "titan_tree.components.tree_loss.token_losses:sft",
        "reinforce": "titan_tree.components.tree_loss.token_losses:reinforce",
        "ppo": "titan_tree.components.tree_loss.token_losses:ppo",
        "grpo": "titan_tree.components.tree_loss.token_losses:grpo",
        "dr_grpo": "titan_tree.components.tree_loss.token_losses:dr_grpo",
        "dapo": "titan_tree.components.tree_loss.token_losses:dapo",
        "cispo": "titan_tree.components.tree_loss.token_losses:cispo",
        "sapo": "titan_tree.components.tree_loss.token_losses:sapo",
        "dppo_tv": "titan_tree.components.tree_loss.token_losses:dppo_tv",
        "dppo_kl": "titan_tree.components.tree_loss.token_losses:dppo_kl",
        "decoupled_ppo": "titan_tree.components.tree_loss.token_losses:decoupled_ppo",
        "distill": "titan_tree.components.tree_loss.token_losses:distill",
        "distill_topk": "titan_tree.components.tree_loss.token_losses:distill_topk",
        "gspo": "titan_tree.components.tree_loss.sequence_ratios:gspo",
        "gspo_token": "titan_tree.components.tree_loss.sequence_ratios:gspo_token",
        "luspo": "titan_tree.components.tree_loss.sequence_ratios:luspo",
        "gmpo": "titan_tree.components.tree_loss.sequence_ratios:gmpo",
        "vespo": "titan_tree.components.tree_loss.sequence_ratios:vespo",
        "dpo": "titan_tree.components.tree_loss.preferences:dpo",
        "ipo": "titan_tree.components.tree_loss.preferences:ipo",
        "apo_zero": "titan_tree.components.tree_loss.preferences:apo_zero",
        "kto": "titan_tree.components.tree_loss.preferences:kto",
        "simpo": "titan_tree.components.tree_loss.preferences:simpo",
        "orpo": "titan_tree.components.tree_loss.preferences:orpo",
        "cpo": "titan_tree.components.tree_loss.preferences:cpo",
    },
    key="loss.name",
)


@dataclass(kw_only=True)
class LossConfig(Checked, table="loss"):
    """The loss that TreeLoss computes."""

    name: str = setting("sft", one_of(LOSSES))  # Loss function (docs/components/losses.md).
    # How token losses are added up (docs/concepts.md, "The loss over paths"). Default: that of the loss, or
    # "path_mean" if the loss has none of its own.
    reduction: Reduction | None = setting(None, one_of(*get_args(Reduction)))
    entropy: float = setting(0.0, finite)  # Coefficient of an entropy bonus.
    # What has one ratio, in losses of whole paths and loss.correction: a "path", or all paths of a "rollout".
    sequence: Literal["path", "rollout"] = "path"
    whiten: bool = False  # Normalize advantages over the tokens of the global batch (TreePO, REINFORCE++).
    options: dict[str, Any] = setting({})  # Numbers that the loss function takes, such as a clip range.
    kl: KLPenalty = field(default_factory=KLPenalty)
    correction: RolloutCorrection = field(default_factory=lambda: RolloutCorrection(level="off"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            key = f"loss.options.{name}"
            require(name not in vars(self), key, f"no such option (set loss.{name} instead)", repr(value))
            require(finite(value) is None, key, "a finite number", repr(value))
