"""TokenPath: one training sample, the way the model saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from titan_tree.errors import UserError

PER_TOKEN = ("advantage", "old_logprobs", "ref_logprobs")
MAX_EXPERT = np.iinfo(np.int16).max


class ExpertSizes(NamedTuple):
    """Of a model with experts."""

    num_layers: int  # that have experts
    top_k: int  # experts of a token
    num_experts: int  # to choose from


class ModelLimits(NamedTuple):
    """What a model can read. None: this limit is not checked."""

    max_positions: int | None = None  # tokens of the longest path
    vocab_size: int | None = None  # token ids are smaller
    experts: ExpertSizes | None = None  # sizes that recorded experts must have


@dataclass(slots=True)
class TokenPath:
    """One training sample of T >= 1 tokens. Arrays are per token: entry t speaks of tokens[t].

    The first token of a path is predicted by nothing, so entry 0 of every per-token array is ignored, but
    for ``routed_experts``, which speak of tokens as they are read and not as they are predicted.

    Args:
        tokens: [T] token ids, any integer sequence; kept as int32.
        loss_mask: [T] finite and >= 0, usually 0 or 1: does the loss count this token? Default: all ones.
        weight: w_p >= 0, the path's weight in the loss.
        advantage: one number for the whole path, or [T]; kept as [T] float32.
        old_logprobs: [T] log-probabilities (nats) under the policy that sampled the path.
        ref_logprobs: [T] log-probabilities (nats) under a reference policy.
        routed_experts: [t, L, k] integers, t <= T: the experts that sampling used for each token in each of
            the L layers that have experts, k different ids in any order; k times -1: not recorded, as are
            tokens from the t-th on. Kept as [T, L, k] int16. Used where a TokenTree is made with ``replay``.
        id: shown in error messages and reports.

    Raises:
        UserError: a field of the wrong shape, type or range; the message names path and field.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray = None  # type: ignore[assignment]  # filled in by __post_init__
    weight: float = 1.0
    advantage: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    id: str = ""

    if TYPE_CHECKING:  # the constructor accepts more types than the fields have

        def __init__(
            self,
            tokens: ArrayLike,
            loss_mask: ArrayLike | None = None,
            weight: float = 1.0,
            advantage: ArrayLike | None = None,
            old_logprobs: ArrayLike | None = None,
            ref_logprobs: ArrayLike | None = None,
            routed_experts: ArrayLike | None = None,
            id: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        self.tokens = self._token_array(self.tokens)
        if self.loss_mask is None:
            self.loss_mask = np.ones(len(self.tokens), np.float32)
        else:
            self.loss_mask = self._per_token("loss_mask", self.loss_mask)
            if (self.loss_mask < 0).any():
                raise self._error("loss_mask", "every entry >= 0", float(self.loss_mask.min()))
        try:
            self.weight = float(self.weight)
        except (TypeError, ValueError):
            raise self._error("weight", "a number", self.weight) from None
        if not (np.isfinite(self.weight) and self.weight >= 0):
            raise self._error("weight", "a finite number >= 0", self.weight)
        for name in PER_TOKEN:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, self._per_token(name, value, scalar=name == "advantage"))
        if self.routed_experts is not None:
            self.routed_experts = self._expert_array(self.routed_experts)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss_tokens(self) -> float:
        """The sum of the loss mask: how many tokens the loss counts."""
        return float(self.loss_mask[1:].sum(dtype=np.float64))

    def check_limits(self, limits: ModelLimits) -> None:
        """Raises UserError if a model with these limits cannot read the path."""
        max_positions, vocab_size, experts = limits
        if max_positions is not None and len(self) > max_positions:
            raise UserError(
                f"path {self.id or '?'}: {len(self):,} tokens, more than the model's {max_positions:,} "
                "positions (max_positions); shorten the sample or take a model with more"
            )
        at = int(self.tokens.argmax())
        if vocab_size is not None and self.tokens[at] >= vocab_size:
            raise UserError(
                f"path {self.id or '?'}: token id {self.tokens[at]} at token {at}: expected ids below the "
                f"model's vocabulary size {vocab_size}; is this another model's tokenizer?"
            )
        if experts is None or self.routed_experts is None:
            return
        if self.routed_experts.shape[1:] != experts[:2]:
            num_layers, top_k = self.routed_experts.shape[1:]
            raise self._error(
                "routed_experts",
                f"{experts.num_layers} layers with experts and {experts.top_k} experts of a token",
                f"{num_layers} and {top_k}; are they another model's?",
            )
        token, layer, i = np.unravel_index(self.routed_experts.argmax(), self.routed_experts.shape)
        if self.routed_experts[token, layer, i] >= experts.num_experts:
            raise self._error(
                f"routed_experts of token {token}, layer {layer}",
                f"ids below the model's {experts.num_experts} experts",
                self.routed_experts[token, layer].tolist(),
            )

    def _token_array(self, tokens: Any) -> np.ndarray:
        try:
            array = np.asarray(tokens)
        except ValueError:  # lists of unequal lengths
            raise self._error("tokens", "a flat list of token ids", "a nested one") from None
        if array.ndim != 1 or array.size == 0:
            raise self._error("tokens", "a non-empty list of token ids", f"shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise self._error("tokens", "integer token ids", f"dtype {array.dtype}")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise self._error("tokens", "ids from 0 to 2**31 - 1", low if low < 0 else high)
        return array.astype(np.int32, copy=False)

    def _per_token(self, name: str, value: Any, scalar: bool = False) -> np.ndarray:
        try:
            array = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise self._error(name, "numbers", repr(value)[:40]) from None
        if scalar and array.ndim == 0:
            array = np.full(len(self.tokens), array)
        if array.shape != self.tokens.shape:
            raise self._error(name, f"{len(self.tokens)} entries, one per token", f"shape {array.shape}")
        if not np.isfinite(array[1:]).all():
            bad = 1 + int(np.flatnonzero(~np.isfinite(array[1:]))[0])
            raise self._error(name, "finite numbers", f"{array[bad]} at token {bad}")
        return array

    def _expert_array(self, value: Any) -> np.ndarray:
        field = "routed_experts"
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal lengths
            raise self._error(field, "as many layers and experts of every token", "unequal lists") from None
        if array.ndim != 3 or len(array) > len(self) or array.dtype.kind not in "iu" or not array.size:
            expected = f"integers [at most {len(self)} tokens, layers, experts of a token]"
            raise self._error(field, expected, f"{array.dtype} of shape {array.shape}")
        ordered = np.sort(array, axis=-1)
        none = (ordered[..., 0] == -1) & (ordered[..., -1] == -1)
        good = (ordered[..., 0] >= 0) & (ordered[..., -1] <= MAX_EXPERT) & (np.diff(ordered) > 0).all(-1)
        if not (none | good).all():
            token, layer = np.argwhere(~(none | good))[0]
            expected = f"different ids from 0 to {MAX_EXPERT}, or -1 alone"
            raise self._error(
                f"{field} of token {token}, layer {layer}", expected, array[token, layer].tolist()
            )
        padded = np.full((len(self), *array.shape[1:]), -1, np.int16)
        padded[: len(array)] = array
        return padded

    def _error(self, field: str, expected: str, got: object) -> UserError:
        return UserError(f"path {self.id or '?'}: {field}: expected {expected}, got {got}")
