"""TokenPath: one training sample, as a sequence of tokens with the values that the loss needs per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from titan_tree.errors import UserError, shorten
from titan_tree.tree.images import Image, ImageLimits, PathImages, path_images
from titan_tree.tree.path_fields import (
    FLOAT32_MAX,
    SamplingMask,
    TokenTargets,
    TopK,
    advantage_array,
    expert_array,
    logprob_array,
    mask_array,
    number,
    sampling_mask_of,
    teacher_topk_of,
    token_array,
    version_array,
    wrong,
)

Logprobs = Sequence[float | None] | ArrayLike  # None and NaN: the token was not scored

LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")  # each also as shifted_..., see TokenPath
PER_TOKEN = ("advantage", *LOGPROBS)  # optional fields with one number per token
PREFERENCES = ("chosen", "rejected", "desirable", "undesirable", "mismatched")


class ExpertSizes(NamedTuple):
    """The sizes of a mixture-of-experts model that recorded experts must match."""

    num_layers: int  # layers with experts
    top_k: int  # experts that a token uses in each of these layers
    num_experts: int  # experts to choose from


class ModelLimits(NamedTuple):
    """The limits of a model. None: this limit is not checked."""

    max_positions: int | None = None  # tokens of the longest path
    vocab_size: int | None = None  # token ids are smaller
    experts: ExpertSizes | None = None  # sizes that recorded experts must have
    images: ImageLimits | None = None


@dataclass(slots=True, init=False)
class TokenPath:
    """One training sample of T >= 1 tokens. Entry t of every per-token array belongs to ``tokens[t]``.

    Nothing predicts the first token of a path. Entry 0 of the loss mask, the advantage and the log-probs is
    therefore ignored. ``routed_experts`` has a valid entry 0: the model reads the first token, too.

    Log-probs are in nats and of the distribution at ``temperature``. None or NaN stands for a token that was
    not scored; the loss mask must be 0 there. Each of the three fields has a second name for arrays of
    T - 1 entries: entry t of ``shifted_old_logprobs``, ``shifted_ref_logprobs`` and
    ``shifted_rollout_logprobs`` belongs to ``tokens[t + 1]``. They are stored as [T], NaN first.

    Args:
        tokens: [T] token ids, any sequence of integers. Stored as int32.
        loss_mask: [T] numbers >= 0, usually 0 or 1: how much the token counts in the loss. Default: all 1.
        weight: weight of the path in the loss, w_p >= 0. As all numbers of a path, it is at most 1e12.
        advantage: one number for the whole path, or [T]. Stored as [T] float32.
        old_logprobs: [T] log-probs under the policy before the update, as the trainer computes them. The
            ratios of ppo, grpo and gspo are relative to it.
        ref_logprobs: [T] log-probs under a reference policy.
        routed_experts: [t, L, k] integers with t <= T: the experts that sampling used for the first t tokens
            in each of the L layers with experts. An entry holds k different ids in any order, or k times -1
            if they were not recorded. Stored as [T, L, k] int16, filled up with -1. Ignored unless the
            TokenTree is built with ``replay``.
        id: name of the path in error messages and reports.
        rollout_logprobs: [T] log-probs as the sampling engine reported them. Its numerics differ from the
            trainer's.
        temperature: the sampling temperature, > 0. The model computes log-probs and entropies of
            logits / temperature.
        sampling_mask: T lists of the token ids that top-p, top-k or min-p sampling kept when it drew each
            token, which must be among them. Log-probs and entropies are then those of the distribution over
            these ids, and all log-prob fields must be, too. None and [] stand for the whole vocabulary.
            Stored as a SamplingMask, without the lists of tokens that the loss does not count.
        policy_version: version of the policy that sampled the path: one integer, or [T], as a rollout may
            span versions. None or -1 stands for a token that was not sampled, such as one of a prompt; the
            loss mask must be 0 there. Stored as [T] int32, with -1. Give it to all paths or to none. The
            metrics of a step show its mean over counted tokens, and how far the mean lags behind the newest
            version.
        preference: "chosen" or "rejected", for losses of preference pairs. For the loss "kto", also
            "desirable" or "undesirable", which have no partner, and "mismatched": an answer to another
            prompt. It has no loss, so its weight becomes 0.
        pair: name of the pair that the path belongs to. In a micro-batch, the i-th chosen and the i-th
            rejected path with one name form a pair. Both must be in one tree, which keeps them together.
        rollout_tokens: sum of ``loss_tokens`` over all paths of the rollout that this path is part of, see
            ``join_rollout``. Default: this path is a rollout of its own. For the reduction
            "rollout_token_mean".
        rollout: name of this rollout, see ``join_rollout``. For losses with one ratio per rollout.
        images: (index of the image's first token, Image) of each image, in order. An image takes the place
            of ``len(image)`` tokens, which all have one placeholder id and loss mask 0. Paths share image
            tokens if they are the same part of equal images, see tree/images.py. Stored as a tuple.
        teacher_topk: T mappings of token ids to their log-probs under a teacher, for distillation: of the
            likeliest ids in place of each token. As all log-probs, they are those at ``temperature`` and over
            ``sampling_mask``. In place of a log-prob, there may be an object with "logprob", as in vLLM's
            prompt_logprobs. None and {} stand for a token that was not scored; the loss mask must be 0 there.
            Stored as TokenTargets, without those of tokens that the loss does not count.
        teacher: name of the teacher. Paths of one tree with one teacher must have the same targets where they
            share a counted token.

    Attributes:
        edge_weight: [T] float32, set by ``TokenTree.weigh_edges``: the sum of weight * loss_mask over all
            paths of the tree that predict the token after the same tokens. None: not set.
        is_first: [T] bool, likewise: whether this path is the first of them that counts the token.

    Raises:
        UserError: a field has the wrong shape, type or range. The message names the path and the field.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    weight: float
    advantage: np.ndarray | None
    old_logprobs: np.ndarray | None
    ref_logprobs: np.ndarray | None
    routed_experts: np.ndarray | None
    id: str
    rollout_logprobs: np.ndarray | None
    temperature: float
    policy_version: np.ndarray | None
    rollout_tokens: float | None
    rollout: str | None
    preference: str | None
    pair: str | None
    edge_weight: np.ndarray | None = field(init=False)
    is_first: np.ndarray | None = field(init=False)
    sampling_mask: SamplingMask | None
    images: PathImages
    teacher_topk: TokenTargets | None
    teacher: str | None

    def __init__(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike | None = None,
        weight: float = 1.0,
        advantage: ArrayLike | None = None,
        old_logprobs: Logprobs | None = None,
        ref_logprobs: Logprobs | None = None,
        routed_experts: ArrayLike | None = None,
        id: str = "",
        rollout_logprobs: Logprobs | None = None,
        temperature: float = 1.0,
        policy_version: ArrayLike | None = None,
        rollout_tokens: float | None = None,
        preference: str | None = None,
        pair: str | None = None,
        sampling_mask: SamplingMask | Sequence[Sequence[int] | np.ndarray | None] | None = None,
        shifted_old_logprobs: Logprobs | None = None,
        shifted_ref_logprobs: Logprobs | None = None,
        shifted_rollout_logprobs: Logprobs | None = None,
        images: Sequence[tuple[int, Image]] | None = None,
        rollout: str | None = None,
        teacher_topk: TokenTargets | Sequence[TopK | None] | None = None,
        teacher: str | None = None,
    ) -> None:
        self.id, self.rollout, self.edge_weight, self.is_first = id, rollout, None, None
        with self._named_errors():
            self.tokens = token_array(tokens)
            size = len(self.tokens)
            mask = (
                np.ones(size, np.float32) if loss_mask is None else mask_array("loss_mask", loss_mask, size)
            )
            self.loss_mask = mask
            self.weight = number("weight", weight, "a number from 0 to 1e12", lambda x: x >= 0)
            self.advantage = None if advantage is None else advantage_array("advantage", advantage, size)
            self.old_logprobs = logprob_array("old_logprobs", old_logprobs, shifted_old_logprobs, mask)
            self.ref_logprobs = logprob_array("ref_logprobs", ref_logprobs, shifted_ref_logprobs, mask)
            self.rollout_logprobs = logprob_array(
                "rollout_logprobs", rollout_logprobs, shifted_rollout_logprobs, mask
            )
            self.routed_experts = None if routed_experts is None else expert_array(routed_experts, size)
            expected = "a number > 0 and up to 1e12"
            self.temperature = number("temperature", temperature, expected, lambda x: x > 0)
            self.policy_version = None
            if policy_version is not None:
                self.policy_version = version_array("policy_version", policy_version, mask)
            self.sampling_mask = None
            if sampling_mask is not None:
                self.sampling_mask = sampling_mask_of(sampling_mask, self.tokens, mask)
            self.images = () if images is None else path_images(images, self.tokens, mask)
            self.teacher_topk, self.teacher = None, teacher
            if teacher_topk is not None:
                self.teacher_topk = teacher_topk_of(teacher_topk, self.tokens, mask, self.sampling_mask)
            if not isinstance(teacher, str | None):
                raise wrong("teacher", "a name", shorten(teacher))
            self.rollout_tokens = self._rollout_tokens(rollout_tokens)
            self.preference, self.pair = None, pair
            if preference is not None:
                self.set_preference(preference, pair)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss_tokens(self) -> float:
        """Sum of the loss mask without entry 0: the number of tokens that the loss counts."""
        return float(self.loss_mask[1:].sum(dtype=np.float64))

    @property
    def num_positions(self) -> int:
        """The number of positions that a model needs: one per token, but fewer for images."""
        return len(self) - sum(len(image) - image.num_positions for _, image in self.images)

    @property
    def rollout_share(self) -> float:
        """``loss_tokens`` as a fraction of ``rollout_tokens``; 0 if the loss counts no token."""
        loss_tokens = self.loss_tokens
        return loss_tokens / (self.rollout_tokens or loss_tokens) if loss_tokens else 0.0

    @staticmethod
    def join_rollout(paths: Sequence[TokenPath], name: str) -> None:
        """Makes ``paths`` the samples of one rollout: sets the ``rollout_tokens`` of each to their sum.

        Args:
            name: becomes their ``rollout``. Other rollouts of the micro-batch have other names.
        """
        total = sum(path.loss_tokens for path in paths)
        for path in paths:
            path.rollout_tokens, path.rollout = total, name

    def set_preference(self, preference: object, pair: str | None) -> None:
        """Sets the preference, one of ``PREFERENCES``, and the name of the pair.

        Raises:
            UserError: ``preference`` is something else, or the loss counts no token of the path.
        """
        if preference not in PREFERENCES:
            raise wrong("preference", f"one of {', '.join(PREFERENCES)}", shorten(preference))
        if not self.loss_tokens:
            raise UserError("preference: expected at least one token that the loss counts, got none")
        self.preference, self.pair = str(preference), pair
        if preference == "mismatched":
            self.weight = 0.0

    def check_limits(self, limits: ModelLimits) -> None:
        """Checks that a model with these limits can read the path.

        Raises:
            UserError: the path is too long, or it holds token ids, layers or experts that the model lacks.
        """
        with self._named_errors():
            self._check_limits(limits)

    def _rollout_tokens(self, value: object) -> float | None:
        if value is None:
            return None
        own = self.loss_tokens
        expected = f"at least the path's own {own:g} loss tokens"
        return number("rollout_tokens", value, expected, lambda x: x >= own * (1 - 1e-6), FLOAT32_MAX)

    def _check_limits(self, limits: ModelLimits) -> None:
        max_positions, vocab_size, experts, images = limits
        if images is not None:
            images.check(self.tokens, self.images)
        if max_positions is not None and self.num_positions > max_positions:
            noun = "positions" if self.images else "tokens"
            raise UserError(
                f"it has {self.num_positions:,} {noun}, but the model has {max_positions:,} positions "
                "(max_positions); shorten the sample or use a model with more positions"
            )
        if vocab_size is not None and self.tokens[at := int(self.tokens.argmax())] >= vocab_size:
            raise UserError(
                f"token id {self.tokens[at]} at token {at}: expected ids below the model's vocabulary size "
                f"{vocab_size}; check that tokenizer and model belong together"
            )
        for name, hint in (
            ("sampling_mask", "check that this model sampled"),
            ("teacher_topk", "choose a teacher with the tokenizer of this model"),
        ):
            ids = getattr(getattr(self, name), "ids", None)
            if vocab_size is not None and ids is not None and (largest := ids.max()) >= vocab_size:
                expected = f"ids below the model's vocabulary size {vocab_size}"
                raise wrong(name, expected, f"{largest}; {hint}")
        if experts is None or self.routed_experts is None:
            return
        if self.routed_experts.shape[1:] != experts[:2]:
            num_layers, top_k = self.routed_experts.shape[1:]
            raise wrong(
                "routed_experts",
                f"{experts.num_layers} layers with experts and {experts.top_k} experts per token",
                f"{num_layers} and {top_k}; check that this model recorded them",
            )
        token, layer, i = np.unravel_index(self.routed_experts.argmax(), self.routed_experts.shape)
        if self.routed_experts[token, layer, i] >= experts.num_experts:
            raise wrong(
                f"routed_experts of token {token}, layer {layer}",
                f"ids below the model's {experts.num_experts} experts",
                self.routed_experts[token, layer].tolist(),
            )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"path {self.id or '?'}: {error}") from None
