"""DecoderConfig: the sizes of a decoder, and how they are written in a Hugging Face ``config.json``.

Every field is declared with ``size``, ``number``, ``flag`` or ``indices``, which attach its check. A config
that exists is therefore valid.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, NamedTuple, Self

from titan_tree.errors import UserError

INIT_STD = 0.02


class Check(NamedTuple):
    """What a field's value must be."""

    is_valid: Callable[[Any], bool]
    expected: str  # in words, for the error message


def size(default: Any = MISSING, *, optional: bool = False) -> Any:
    """Declares a field that is an integer > 0.

    Args:
        default: the field's default; MISSING: it must be given.
        optional: a ``config.json`` may omit the field, because transformers has the same default.
    """
    return _field(Check(_is_size, "an integer > 0"), optional, default=default)


def number(default: Any = MISSING, *, optional: bool = False) -> Any:
    """Declares a field that is a finite number > 0. For the arguments see ``size``."""
    return _field(Check(_is_positive, "a number > 0"), optional, default=default)


def flag(default: Any = MISSING, *, optional: bool = False) -> Any:
    """Declares a field that is true or false. For the arguments see ``size``."""
    return _field(Check(lambda value: isinstance(value, bool), "true or false"), optional, default=default)


def indices(*, optional: bool = False) -> Any:
    """Declares a field that is a list of layer indices, empty by default. For the argument see ``size``."""
    return _field(Check(_is_indices, "a list of integers >= 0"), optional, default_factory=list)


def _field(check: Check, optional: bool, **default: Any) -> Any:
    return dataclasses.field(metadata={"check": check, "optional": optional}, **default)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_indices(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes that every decoder has, by Hugging Face's names. Raises UserError for impossible sizes."""

    family: ClassVar[str]  # name of the published models, for error messages

    vocab_size: int = size()
    hidden_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int = size()
    head_dim: int = size(128)
    rms_norm_eps: float = number(1e-6, optional=True)
    rope_theta: float = number(1e6)
    max_position_embeddings: int = size(40_960)
    tie_word_embeddings: bool = flag(False, optional=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check, value = field.metadata["check"], getattr(self, field.name)
            if not check.is_valid(value):
                raise UserError(f"{field.name}: expected {check.expected}, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number, got {self.head_dim}")

    @property
    def rotary_dim(self) -> int:
        """Number of a head's dims, from the first, that the rotary embedding rotates."""
        return self.head_dim

    @classmethod
    @abstractmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        """Reads a ``config.json`` with the old or the new spelling of RoPE's fields.

        Args:
            hf: content of the file.
            where: its path, for error messages.
        Raises:
            UserError: a size is missing, or the config asks for something that this model does not compute.
        """

    @abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """Returns the ``config.json`` that transformers loads as the same model."""

    @classmethod
    def _expect(cls, hf: Mapping[str, Any], where: str, field: str, ok: bool, expected: str) -> None:
        """Raises UserError unless ``ok``."""
        if not ok:
            raise UserError(
                f"{where}: {field}: titan_tree's {cls.family} supports {expected} only, got {hf.get(field)}"
            )

    @classmethod
    def _read(cls, hf: Mapping[str, Any], where: str, **given: float | None) -> Self:
        """Makes a config of the fields in ``hf``. Values in ``given`` take precedence, except None."""
        for field, ok, expected in (
            ("attention_bias", not hf.get("attention_bias"), "false"),
            ("attention_dropout", not hf.get("attention_dropout"), "0"),
            ("hidden_act", hf.get("hidden_act", "silu") == "silu", "silu"),
            ("quantization_config", not hf.get("quantization_config"), "unquantised weights"),
        ):
            cls._expect(hf, where, field, ok, expected)
        fields = dataclasses.fields(cls)
        values = {field.name: hf[field.name] for field in fields if hf.get(field.name) is not None}
        values |= {name: value for name, value in given.items() if value is not None}
        missing = [f.name for f in fields if f.name not in values and not f.metadata["optional"]]
        if missing:
            raise UserError(
                f"{where}: missing {', '.join(missing)}; expected the config.json of a {cls.family} model"
            )
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def _read_rope(cls, hf: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns RoPE's fields, and refuses every type but the default.

        transformers writes them to "rope_parameters" since version 5. Older versions wrote them to the top
        level, beside "rope_scaling".
        """
        top_level = {name: hf.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        rope = hf.get("rope_parameters") or top_level
        scaling = hf.get("rope_scaling") or {}
        for field, spelling in (("rope_parameters", rope), ("rope_scaling", scaling)):
            cls._expect(hf, where, field, isinstance(spelling, dict), "a table")
            if spelling.get("rope_type", spelling.get("type", "default")) != "default":
                raise UserError(
                    f"{where}: titan_tree's {cls.family} supports RoPE of type default only, got "
                    f"{dict(spelling)}"
                )
        return {**scaling, **rope}
