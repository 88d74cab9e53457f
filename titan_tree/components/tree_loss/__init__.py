"""TreeLoss: any per-sequence loss on a token tree.

A loss is written for one sequence: from the log-probs of its tokens to one number per token. It runs on
the F (edge, path) pairs of a batch, where every path's tokens stand in a row as if the paths had been
batched one by one; gathering the shared edges' log-probs to pairs is all there is to it, and autograd
scatters the gradients back. With c_{p,t} = w_p m_{p,t}:

    L = (1 / Z) sum_p sum_t c_{p,t} l_{p,t}

    path_mean        Z = sum_p w_p             token losses summed over a path, paths averaged
    token_mean       Z = sum_p sum_t c_{p,t}   all counted tokens averaged
    path_token_mean  Z = sum_p w_p and c / (sum_t m_{p,t}): a path's mean, paths averaged

Sums run over the *global* batch: Z is known before the first backward, and losses of micro-batches and
ranks add up. Tree Training (arXiv:2511.00413) is path_mean; its per-token weights are what the scatter
computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs, TreeBatch
from titan_tree.tree.paths import TokenPath

Reduction = Literal["path_mean", "token_mean", "path_token_mean"]
# (log-probs [F] in nats, pairs, options) -> losses [F], or those and metrics, each [F]
LossFunction = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]
LOSSES: dict[str, LossFunction] = {}
WHOLE_PATHS: set[str] = set()  # losses of which a token's depends on the other tokens of its path


def register_loss(name: str, whole_paths: bool = False) -> Callable[[LossFunction], LossFunction]:
    """Makes ``loss(logprobs [F], pairs, **options) -> [F]`` available as ``TreeLoss(name)``.

    whole_paths: say so where a token's loss depends on other tokens of its path. Where a tree is cut into
        partitions each sees parts of the paths only; such a loss then gets a pass of its own before.
    """

    def register(function: LossFunction) -> LossFunction:
        LOSSES[name] = function
        (WHOLE_PATHS.add if whole_paths else WHOLE_PATHS.discard)(name)
        return function

    return register


@register_loss("sft")
def sft(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Negative log-likelihood."""
    return -logprobs


@register_loss("reinforce")
def reinforce(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """-A log p, the policy gradient (Williams, 1992), on-policy."""
    return -_field(pairs, "advantage") * logprobs


@register_loss("ppo")
def ppo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate (PPO, arXiv:1707.06347) with the ratio kept in [1 - clip_low, 1 + clip_high]."""
    advantage = _field(pairs, "advantage")
    log_ratio = logprobs - _field(pairs, "old_logprobs")
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    cut = (clipped - ratio) * advantage < 0  # the clipped term is the smaller one: no gradient
    # Schulman's k3: an unbiased, non-negative estimate of KL(old || new).
    return loss, {"clip_fraction": cut.float(), "old_kl": ratio - 1 - log_ratio}


@register_loss("grpo")
def grpo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate plus ``kl`` times the k3 estimate of KL(new || reference) (GRPO, arXiv:2402.03300).

    Advantages come with the paths; ``data.advantage = "group"`` makes them of rewards as GRPO does.
    """
    loss, metrics = ppo(logprobs, pairs, clip_low, clip_high)
    if kl:
        log_ratio = _field(pairs, "ref_logprobs") - logprobs
        metrics["ref_kl"] = log_ratio.exp() - 1 - log_ratio
        loss = loss + kl * metrics["ref_kl"]
    return loss, metrics


@register_loss("gspo", whole_paths=True)
def gspo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate with a ratio per path: the geometric mean of its tokens' (GSPO, arXiv:2507.18071).

    Meant for the reduction path_token_mean, which counts each path once.
    """
    log_ratio = (logprobs - _field(pairs, "old_logprobs")) * pairs.loss_mask
    mean = torch.zeros_like(pairs.loss_tokens, dtype=log_ratio.dtype).index_add(0, pairs.path, log_ratio)
    mean = mean / pairs.loss_tokens.clamp_min(1e-30)
    ratio, advantage = mean.exp()[pairs.path], _field(pairs, "advantage")
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    return loss, {"clip_fraction": ((clipped - ratio) * advantage < 0).float()}


_INSTEAD = {
    "advantage": ", or data.advantage = 'group' with rewards",
    "old_logprobs": ", or take loss.name = 'reinforce' if the model as it is now sampled them",
}


def _field(pairs: PathPairs, name: str) -> Tensor:
    if (value := getattr(pairs, name)) is None:
        raise UserError(f"loss: the paths have no {name}; give it to every path{_INSTEAD.get(name, '')}")
    return value


class TreeLoss:
    """A registered loss, reduced over the paths of a global batch.

    Args:
        name: "sft", "reinforce", "ppo", "grpo", "gspo", or a name given to ``register_loss``.
        reduction: see the module's docstring.
        entropy: coefficient of an entropy bonus: ``entropy * H`` is subtracted from every token's loss.
        options: keyword arguments of the loss function.

    Raises UserError for a name, reduction or option that does not exist.
    """

    def __init__(
        self, name: str = "sft", reduction: Reduction = "path_mean", entropy: float = 0.0, **options: float
    ) -> None:
        if name not in LOSSES:
            raise UserError(f"loss.name: expected one of {', '.join(LOSSES)}, got {name!r}")
        if reduction not in get_args(Reduction):
            raise UserError(
                f"loss.reduction: expected one of {', '.join(get_args(Reduction))}, got {reduction!r}"
            )
        known = list(inspect.signature(LOSSES[name]).parameters)[2:]
        if unknown := [option for option in options if option not in known]:
            raise UserError(
                f"loss {name!r}: has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}"
            )
        self.name, self.reduction, self.entropy, self.options = name, reduction, entropy, options
        self.function = LOSSES[name]

    @property
    def needs_whole_paths(self) -> bool:
        return self.name in WHOLE_PATHS

    @property
    def needs_entropy(self) -> bool:
        return self.entropy != 0.0

    def normalizer(self, paths: Iterable[TokenPath]) -> float:
        """What these paths add to Z. Sum it over all micro-batches and ranks of the global batch."""
        if self.reduction == "token_mean":
            return float(sum(path.weight * path.loss_tokens for path in paths))
        return float(sum(path.weight for path in paths))

    def __call__(
        self, logprobs: Tensor, batch: TreeBatch, normalizer: float, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This batch's share of the global batch's loss, an fp32 scalar, and metrics.

        Args:
            logprobs: [E] fp32, nats, of the batch's edges.
            normalizer: Z of the global batch, > 0.
            entropy: [E] fp32, nats; needed where ``needs_entropy``, a metric otherwise.

        Returns the loss and a dict of detached scalars: sums over pairs weighted by w_p m_{p,t}, and
        ``token_weight``, the sum of these weights: their quotient is a mean over tokens, and both add
        up over micro-batches and ranks.
        """
        pairs = batch.pairs
        if not normalizer > 0:
            raise UserError(
                f"loss: nothing to train on: the weights of the global batch sum to {normalizer}; "
                "check loss masks and path weights"
            )
        token_weight = pairs.weight[pairs.path] * pairs.loss_mask
        coefficient = token_weight
        if self.reduction == "path_token_mean":
            coefficient = token_weight / pairs.loss_tokens.clamp_min(1e-30)[pairs.path]

        # 0 where nothing is counted, as old and reference log-probs are: a ratio of 1, never 0 * inf.
        path_logprobs = torch.where(pairs.loss_mask > 0, logprobs[pairs.edge], 0.0)
        result: Any = self.function(path_logprobs, pairs, **self.options)
        losses, metrics = result if isinstance(result, tuple) else (result, {})
        metrics["nll"] = -path_logprobs
        if entropy is not None:
            metrics["entropy"] = entropy[pairs.edge]
        if self.needs_entropy:
            if entropy is None:
                raise ValueError(
                    "TreeLoss: entropy != 0 needs the model's entropy: model(batch, entropy=True)"
                )
            losses = losses - self.entropy * metrics["entropy"]

        loss = (coefficient * losses).sum() / normalizer
        sums = {name: (token_weight * value.detach()).sum() for name, value in metrics.items()}
        return loss, sums | {"token_weight": token_weight.sum()}
