"""The losses of Tinker's API, as sums over all targets of all data.

Their definitions are those of tinker-docs.thinkingmachines.ai/tinker/losses. A is the advantage, l the
log-prob of a target, and q that of the policy which sampled it; r = exp(l - q).

M targets of all data together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_tree.errors import UserError, shorten, unknown_name

PPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
GSPO_CLIP = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}  # section 5.1 of the paper
Inputs = Mapping[str, Tensor]  # by name, [M] each
Options = Mapping[str, float | Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss, and what it reads.

    Attributes:
        function: (log-probs [M], inputs, options, the number of each target's datum [M]) -> losses [M].
        inputs: names of its inputs beside target_tokens; whether a datum must have it.
        options: their defaults. An input of the same name overrides an option for each target.
    """

    function: Callable[[Tensor, Inputs, Options, Tensor], Tensor]
    inputs: Mapping[str, bool] = field(
        default_factory=lambda: {"target_tokens": True, "logprobs": True, "advantages": True}
    )
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[str, bool]:
        """The names of all inputs."""
        clips = {name: False for name in self.options if name.startswith("clip_")}
        return {**self.inputs, **clips}


def _cross_entropy(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """-w l with weights w of any sign, so that any loss can be trained whose gradient the client knows."""
    return -inputs["weights"] * logprobs


def _importance_sampling(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """-r A."""
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _ppo(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """-min(r A, clip(r) A), arXiv:1707.06347."""
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs, options)


def _cispo(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """-clip(r) A l with a constant clip(r), arXiv:2506.13585."""
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    return -_clip(ratio, options) * inputs["advantages"] * logprobs


def _dro(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """-(l A - beta / 2 (l - q)^2), arXiv:2405.19107."""
    penalty = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * options["beta"] * penalty)


def _gspo(logprobs: Tensor, inputs: Inputs, options: Options, datum: Tensor) -> Tensor:
    """GSPO-token, arXiv:2507.18071: a datum's ratio is the geometric mean over its sequence_ratio_mask."""
    is_counted = (inputs["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    size = int(datum.max()) + 1
    gap = (logprobs.detach() - inputs["logprobs"]) * is_counted
    counts = logprobs.new_zeros(size).index_add(0, datum, is_counted)
    mean = logprobs.new_zeros(size).index_add(0, datum, gap) / counts.clamp_min(1)
    ratio = (mean[datum] + logprobs - logprobs.detach()).exp()
    return _clipped(ratio, inputs, options)


def _clipped(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, options) * advantages)


def _clip(ratio: Tensor, options: Options) -> Tensor:
    low, high = (torch.as_tensor(options[f"clip_{end}_threshold"]).to(ratio) for end in ("low", "high"))
    return ratio.clamp(low, high)


LOSSES = {
    "cross_entropy": Loss(_cross_entropy, {"target_tokens": True, "weights": True}),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, options=PPO_CLIP),
    "cispo": Loss(_cispo, options=PPO_CLIP),
    "dro": Loss(_dro, options={"beta": 0.05}),
    "gspo": Loss(
        _gspo,
        {"target_tokens": True, "logprobs": True, "advantages": True, "sequence_ratio_mask": True},
        GSPO_CLIP,
    ),
}
NOT_HERE = {
    "stable_reinforce": "what it computes is not published; use importance_sampling, cispo or gspo",
    "custom": "losses of clients run there; create them with a server whose custom_loss_server_side is false",
}


def loss_of(name: str, options: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Returns a loss and its options. Raises UserError for an unknown name or option."""
    if name in NOT_HERE:
        raise UserError(f"loss_fn: {name!r}: {NOT_HERE[name]}")
    if name not in LOSSES:
        raise unknown_name("loss_fn", name, LOSSES)
    loss = LOSSES[name]
    chosen = dict(loss.options)
    for option, value in options.items():
        if option not in chosen:
            raise unknown_name(f"option of the loss {name}", option, chosen)
        if not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise UserError(f"loss_fn_config.{option}: expected a finite number, got {shorten(value)}")
        chosen[option] = float(value)
    return loss, chosen
