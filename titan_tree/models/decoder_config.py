"""Sizes of a decoder, and how they stand in a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from titan_tree.errors import UserError

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes that every decoder has, by Hugging Face's names. Raises UserError for sizes that cannot be."""

    family: ClassVar[str]  # the published models, as messages call them

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40_960
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                ok, expected = isinstance(value, bool), "true or false"
            elif field.type == "list[int]":
                is_list = isinstance(value, list)
                ok = is_list and all(type(item) is int and item >= 0 for item in value)
                expected = "a list of integers >= 0"
            else:
                kinds = (int,) if field.type == "int" else (int, float)
                number = isinstance(value, kinds) and not isinstance(value, bool)
                ok, expected = number and 0 < value < math.inf, f"{field.type} > 0"
            if not ok:
                raise UserError(f"{field.name}: expected {expected}, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number, got {self.head_dim}")

    @property
    def rotary_dim(self) -> int:
        """The first dims of a head, which are rotated."""
        return self.head_dim

    @classmethod
    @abstractmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        """From a ``config.json``, old or new spelling of RoPE's fields.

        Raises UserError, naming ``where``, for missing sizes and for whatever this model does not compute.
        """

    @abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers loads as the same model."""

    @classmethod
    def _expect(cls, hf: Mapping[str, Any], where: str, field: str, ok: bool, expected: str) -> None:
        if not ok:
            raise UserError(
                f"{where}: {field}: {cls.family} here supports {expected} only, got {hf.get(field)}"
            )

    @classmethod
    def _read(cls, hf: Mapping[str, Any], where: str, optional: Sequence[str], **given: float | None) -> Self:
        """The fields in ``hf`` and, before these, those ``given``. optional: may be missing."""
        for field, ok, expected in (
            ("attention_bias", not hf.get("attention_bias"), "false"),
            ("attention_dropout", not hf.get("attention_dropout"), "0"),
            ("hidden_act", hf.get("hidden_act", "silu") == "silu", "silu"),
            ("quantization_config", not hf.get("quantization_config"), "unquantised weights"),
        ):
            cls._expect(hf, where, field, ok, expected)
        fields = [field.name for field in dataclasses.fields(cls)]
        sizes = {name: hf[name] for name in fields if hf.get(name) is not None}
        sizes |= {name: value for name, value in given.items() if value is not None}
        missing = [name for name in fields if name not in (*sizes, *optional)]
        if missing:
            raise UserError(
                f"{where}: missing {', '.join(missing)}; is it the config.json of a {cls.family}?"
            )
        try:
            return cls(**sizes)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def _read_rope(cls, hf: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields of RoPE, which must be of type default.

        They are in "rope_parameters" since transformers 5; before, in the open beside "rope_scaling".
        """
        open_fields = {name: hf.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        rope = hf.get("rope_parameters") or open_fields
        scaling = hf.get("rope_scaling") or {}
        for field, spelling in (("rope_parameters", rope), ("rope_scaling", scaling)):
            cls._expect(hf, where, field, isinstance(spelling, dict), "a table")
            if spelling.get("rope_type", spelling.get("type", "default")) != "default":
                raise UserError(
                    f"{where}: {cls.family} here supports RoPE of type default only, got {dict(spelling)}"
                )
        return {**scaling, **rope}
