"""TokenPath: one training sample, as a sequence of tokens with the values that the loss needs per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from titan_tree.errors import UserError

PER_TOKEN = ("advantage", "old_logprobs", "ref_logprobs")  # optional fields with one number per token
MAX_EXPERT = np.iinfo(np.int16).max


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


@dataclass(slots=True)
class TokenPath:
    """One training sample of T >= 1 tokens. Entry t of every per-token array belongs to ``tokens[t]``.

    Nothing predicts the first token of a path. Entry 0 of the loss mask, the advantage and the log-probs is
    therefore ignored. ``routed_experts`` has a valid entry 0: the model reads the first token, too.

    Args:
        tokens: [T] token ids, any sequence of integers. Stored as int32.
        loss_mask: [T] finite and >= 0, usually 0 or 1: how much the token counts in the loss. Default: all 1.
        weight: weight of the path in the loss, w_p >= 0.
        advantage: one number for the whole path, or [T]. Stored as [T] float32.
        old_logprobs: [T] log-probabilities (nats) under the policy that sampled the path.
        ref_logprobs: [T] log-probabilities (nats) under a reference policy.
        routed_experts: [t, L, k] integers with t <= T: the experts that sampling used for the first t tokens
            in each of the L layers with experts. An entry holds k different ids in any order, or k times -1
            if they were not recorded. Stored as [T, L, k] int16, filled up with -1. Ignored unless the
            TokenTree is built with ``replay``.
        id: name of the path in error messages and reports.

    Raises:
        UserError: a field has the wrong shape, type or range. The message names the path and the field.
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
        """Sum of the loss mask without entry 0: the number of tokens that the loss counts."""
        return float(self.loss_mask[1:].sum(dtype=np.float64))

    def check_limits(self, limits: ModelLimits) -> None:
        """Checks that a model with these limits can read the path.

        Raises:
            UserError: the path is too long, or it holds token ids, layers or experts that the model lacks.
        """
        max_positions, vocab_size, experts = limits
        if max_positions is not None and len(self) > max_positions:
            raise UserError(
                f"path {self.id or '?'}: it has {len(self):,} tokens, but the model has {max_positions:,} "
                "positions (max_positions); shorten the sample or use a model with more positions"
            )
        at = int(self.tokens.argmax())
        if vocab_size is not None and self.tokens[at] >= vocab_size:
            raise UserError(
                f"path {self.id or '?'}: token id {self.tokens[at]} at token {at}: expected ids below the "
                f"model's vocabulary size {vocab_size}; check that tokenizer and model belong together"
            )
        if experts is None or self.routed_experts is None:
            return
        if self.routed_experts.shape[1:] != experts[:2]:
            num_layers, top_k = self.routed_experts.shape[1:]
            raise self._error(
                "routed_experts",
                f"{experts.num_layers} layers with experts and {experts.top_k} experts per token",
                f"{num_layers} and {top_k}; check that this model recorded them",
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
        except ValueError:  # nested lists of unequal lengths
            raise self._error("tokens", "a flat list of token ids", "a nested list") from None
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
            expected = "the same number of layers and experts for every token"
            raise self._error(field, expected, "lists of unequal lengths") from None
        if array.ndim != 3 or len(array) > len(self) or array.dtype.kind not in "iu" or not array.size:
            expected = f"integers [at most {len(self)} tokens, layers, experts per token]"
            raise self._error(field, expected, f"{array.dtype} of shape {array.shape}")
        ordered = np.sort(array, axis=-1)
        missing = (ordered[..., 0] == -1) & (ordered[..., -1] == -1)
        valid = (ordered[..., 0] >= 0) & (ordered[..., -1] <= MAX_EXPERT) & (np.diff(ordered) > 0).all(-1)
        if not (missing | valid).all():
            token, layer = np.argwhere(~(missing | valid))[0]
            expected = f"different ids from 0 to {MAX_EXPERT}, or only -1"
            raise self._error(
                f"{field} of token {token}, layer {layer}", expected, array[token, layer].tolist()
            )
        padded = np.full((len(self), *array.shape[1:]), -1, np.int16)
        padded[: len(array)] = array
        return padded

    def _error(self, field: str, expected: str, got: object) -> UserError:
        return UserError(f"path {self.id or '?'}: {field}: expected {expected}, got {got}")
