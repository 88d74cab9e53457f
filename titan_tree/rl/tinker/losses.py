"""The losses of Tinker's API, as sums over all targets of all data.

Their definitions are those of tinker-docs.thinkingmachines.ai/tinker/losses. A is the advantage, l the
log-prob of a target, and q that of the policy which sampled it; r = exp(l - q).

M targets of all data together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError, shorten, unknown_name
from titan_tree.serve.tinker.wire import Datum

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

    def check(self, data: Sequence[Datum]) -> None:
        """Checks that all data have the inputs of the loss, one number per token, or k numbers.

        Raises:
            UserError: an input is missing, unknown, or of another shape.
        """
        clips = {name: False for name in self.options if name.startswith("clip_")}
        names = {**self.inputs, **clips}
        for index, datum in enumerate(data):
            where = f"data[{index}]"
            if not len(datum.tokens):
                raise UserError(f"{where}.model_input: expected at least one token, got none")
            if unknown := sorted(datum.inputs.keys() - names.keys()):
                raise UserError(f"{where}.{unknown[0]}: expected only {', '.join(names)} for this loss")
            shape = datum.inputs["target_tokens"].shape if "target_tokens" in datum.inputs else ()
            for name, is_required in names.items():
                if name not in datum.inputs:
                    if is_required:
                        raise UserError(f"{where}.{name}: missing; this loss reads {', '.join(names)}")
                    continue
                got = datum.inputs[name]
                if got.shape != shape or len(got) != len(datum.tokens) or 0 in got.shape:
                    raise UserError(
                        f"{where}.{name}: expected {len(datum.tokens)} entries, one per token, and as many "
                        f"as target_tokens, got shape {list(got.shape)}"
                    )
                if name == "target_tokens" and got.dtype.kind != "i":
                    raise UserError(f"{where}.{name}: expected integers, got {got.dtype} numbers")
                if not np.isfinite(got).all():
                    raise UserError(
                        f"{where}.{name}: expected finite numbers, got {got[~np.isfinite(got)][0]}"
                    )


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
    gap = (logprobs.detach() - inputs["logprobs"]) * is_counted
    zeros = torch.zeros_like(logprobs)  # there are at most as many data as targets
    mean = zeros.index_add(0, datum, gap) / zeros.index_add(0, datum, is_counted).clamp_min(1)
    ratio = (mean[datum] + logprobs - logprobs.detach()).exp()
    return _clipped(ratio, inputs, options)


def _clipped(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, options) * advantages)


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(min=options["clip_low_threshold"]).clamp(max=options["clip_high_threshold"])


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


class Evaluation:
    """Computes a loss from the log-probs of all targets, and keeps both.

    Attributes:
        logprobs, losses: [N] fp32.
    """

    logprobs: Tensor
    losses: Tensor

    def __init__(self, loss: Loss, options: Mapping[str, float], data: Sequence[Datum], device: torch.device):
        def flat(name: str) -> Tensor:
            """Returns an input of all targets; an option where a datum does not override it."""
            parts = [
                np.full(datum.inputs["target_tokens"].size, options.get(name, 0.0), np.float32)
                if name not in datum.inputs
                else datum.inputs[name].ravel().astype(np.float32)
                for datum in data
            ]
            return torch.from_numpy(np.concatenate(parts)).to(device)

        given = {name for datum in data for name in datum.inputs} - {"target_tokens"}
        self.loss, self.inputs = loss, {name: flat(name) for name in given}
        self.options = {name: self.inputs.get(name, value) for name, value in options.items()}
        sizes = [datum.inputs["target_tokens"].size for datum in data]
        self.datum = torch.from_numpy(np.repeat(np.arange(len(data)), sizes)).to(device)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None = None) -> Tensor:
        losses = self.loss.function(logprobs, self.inputs, self.options, self.datum)
        self.logprobs, self.losses = logprobs.detach().float(), losses.detach().float()
        return losses.sum()
