"""DecoderConfig: the sizes of a decoder, and how they are written in a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from titan_tree.config.checks import Checked, boolean, positive_int, positive_number, required, setting
from titan_tree.errors import UserError, printable, shorten

ConfigJson = dict[str, Any]  # content of a config.json, or a part of it: values by field

INIT_STD = 0.02
# Sizes that the flavors "debug" of all families share: models for the byte-level demo and for tests on a CPU,
# with less than a million parameters, or with experts about a million.
DEBUG: ConfigJson = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
# Fields of a config.json that change no log-prob, and names of token ids, which end with "_token_id".
HARMLESS = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path"),
        *("architectures", "attn_implementation", "auto_map", "do_sample", "dtype", "id2label"),
        *("initializer_range", "label2id", "max_length", "max_new_tokens", "model_type", "name_or_path"),
        *("num_labels", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("pretraining_tp", "problem_type", "repetition_penalty", "return_dict", "router_aux_loss_coef"),
        *("temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers_version"),
        *("unsloth_fixed", "unsloth_version", "use_cache"),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # of weights that are not loaded
        "_model_name_or_path",  # transformers writes it for a file in GGUF's format
        "mamba_ssm_dtype",  # of states, which are fp32 here
    }
)
# Fields of the table rope_parameters. Those of images' axes change nothing for text.
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
MAX_SIZES = {"num_hidden_layers": 10_000, "vocab_size": 1 << 24, "max_position_embeddings": 1 << 40}


class UnsupportedConfigError(UserError):
    """A config.json asks for what titan_tree's own model of this family does not compute."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Checked, ABC):
    """Sizes that every decoder has, by Hugging Face's names.

    Every field declares its check, so a config that exists is valid. Construction raises UserError for
    impossible sizes.
    """

    title: ClassVar[str]  # name of the models in messages, such as "Qwen3"
    # Fields that a config.json may omit, because transformers has the same defaults.
    hf_optional: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "tie_word_embeddings")
    # Further fields of a config.json, and the values with which this model computes what transformers does.
    hf_accepted: ClassVar[Mapping[str, Collection[object]]] = {"hidden_act": ("silu",)}
    hf_read: ClassVar[tuple[str, ...]] = ()  # further fields that ``from_hf`` checks by itself
    rope_scalings: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # types of scaled RoPE, and their keys

    vocab_size: int = required(positive_int)
    hidden_size: int = required(positive_int)
    num_hidden_layers: int = required(positive_int)
    num_attention_heads: int = required(positive_int)
    num_key_value_heads: int = required(positive_int)
    head_dim: int = setting(128, positive_int)
    rms_norm_eps: float = setting(1e-6, positive_number)
    rope_theta: float = setting(1e6, positive_number)
    max_position_embeddings: int = setting(40_960, positive_int)
    tie_word_embeddings: bool = setting(False, boolean)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            # A product of three sizes still fits in 64 bits, and no published model comes close.
            limit = MAX_SIZES.get(field.name, 1 << 19)
            if isinstance(value := getattr(self, field.name), int) and value > limit:
                raise UserError(f"{field.name}: expected at most {limit:,}, got {shorten(value)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number, got {self.head_dim}")

    @property
    def rotary_dim(self) -> int:
        """Number R of rotated dims: the rotary embedding rotates the first R dims of each head."""
        return self.head_dim

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        """Reads a ``config.json`` with the old or the new spelling of RoPE's fields.

        Families override it to refuse what their model does not compute.

        Args:
            hf: content of the file.
            where: its path, for error messages.
        Raises:
            UserError: a size is missing, or the config asks for something that this model does not compute.
        """
        rope = cls.rope_fields(hf, where)
        return cls.from_fields(hf, where, rope_theta=rope.get("rope_theta"), **cls.default_heads(hf))

    @classmethod
    def text_part(cls, hf: ConfigJson, where: str) -> ConfigJson:
        """Returns the text model's part of a ``config.json``: for a model without vision, all of it."""
        text = hf.get("text_config", hf)
        cls.check_field(hf, where, "text_config", isinstance(text, dict), "a table")
        if text is not hf:
            parts = ("text_config", "vision_config")
            cls.check_unknown({name: value for name, value in hf.items() if name not in parts}, where)
        return {**text, "tie_word_embeddings": hf.get("tie_word_embeddings")}  # which the top level sets

    @abstractmethod
    def to_hf(self) -> ConfigJson:
        """Returns the ``config.json`` that transformers loads as the same model.

        This method returns what most families have in common. Families add "architectures", "model_type" and
        other fields.
        """
        return {
            **vars(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": INIT_STD,
            "use_cache": True,
        }

    @staticmethod
    def default_heads(hf: ConfigJson) -> dict[str, int]:
        """Returns what most models of transformers use for sizes of heads that older snapshots leave out."""
        heads, hidden = hf.get("num_attention_heads"), hf.get("hidden_size")
        if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0):
            return {}
        defaults = {"head_dim": hidden // heads, "num_key_value_heads": heads}
        return {name: size for name, size in defaults.items() if hf.get(name) is None}

    @classmethod
    def check_field(cls, hf: ConfigJson, where: str, field: str, ok: bool, expected: str) -> None:
        """Raises UnsupportedConfigError unless ``ok``."""
        if not ok:
            got = shorten(hf[field]) if field in hf else "no such field"
            field = printable(field[:60])
            raise UnsupportedConfigError(
                f"{where}: {field}: titan_tree's {cls.title} supports {expected} only, got {got}"
            )

    @classmethod
    def from_fields(cls, hf: ConfigJson, where: str, **overrides: float | None) -> Self:
        """Makes a config of the fields in ``hf``. ``overrides`` take precedence, except None."""
        cls.check_unknown(hf, where)
        fields = [field.name for field in dataclasses.fields(cls)]
        values = {name: hf[name] for name in fields if hf.get(name) is not None}
        values |= {name: value for name, value in overrides.items() if value is not None}
        missing = [name for name in fields if name not in (*values, *cls.hf_optional)]
        if missing:
            raise UserError(
                f"{where}: missing {', '.join(missing)}; expected the config.json of a {cls.title} model"
            )
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def check_unknown(cls, hf: ConfigJson, where: str) -> None:
        """Raises UnsupportedConfigError for a field that is on and may change log-probs."""
        read = {*HARMLESS, *cls.hf_read, "rope_parameters", "rope_scaling", "partial_rotary_factor"}
        read |= {field.name for field in dataclasses.fields(cls)}
        for field, value in hf.items():
            if field in cls.hf_accepted:
                accepted = cls.hf_accepted[field]
                expected = " or ".join(str(each).lower() for each in accepted)
                cls.check_field(hf, where, field, value is None or value in accepted, expected)
            elif field not in read and not field.endswith("_token_id"):
                cls.check_field(hf, where, field, not value, "null, false, 0 or no such field")

    @classmethod
    def rope_fields(cls, hf: ConfigJson, where: str) -> ConfigJson:
        """Returns RoPE's fields, as transformers finds them. Refuses what ``rope_scalings`` does not name.

        transformers writes them to "rope_parameters" since version 5. Older versions wrote "rope_scaling",
        and other fields to the top level. If there are both tables, "rope_scaling" counts.
        """
        field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        table = hf.get(field) or {}
        cls.check_field(hf, where, field, isinstance(table, dict), "a table")
        kind = table.get("rope_type", table.get("type", "default"))
        types = {"default": (), **cls.rope_scalings}
        known = isinstance(kind, str) and kind in types
        cls.check_field(hf, where, field, known, f"RoPE of type {' and '.join(types)}")
        missing = [key for key in types[kind] if key not in table]
        cls.check_field(hf, where, field, not missing, f"{kind} with {', '.join(types[kind])}")
        others = [str(key) for key, value in table.items() if value and key not in {*ROPE_KEYS, *types[kind]}]
        cls.check_field(hf, where, field, not others, f"RoPE without {shorten(others)}")
        found = {name: hf.get(name) for name in ("rope_theta", "partial_rotary_factor")} | table
        if "partial_rotary_factor" not in (each.name for each in dataclasses.fields(cls)):
            part = found["partial_rotary_factor"]
            cls.check_field(found, where, "partial_rotary_factor", part in (None, 1), "RoPE on whole heads")
        return found


C = TypeVar("C", bound=DecoderConfig)


def flavor_table(
    config: type[C], columns: str, table: Mapping[str, Sequence[float | bool]], **common: float
) -> dict[str, C]:
    """Returns the published sizes of a family by flavor.

    Args:
        config: class of the family's configs.
        columns: fields of the config, separated by spaces, in the order of a row.
        table: values of these fields for each flavor.
        common: fields that are equal in all flavors.
    """
    sizes: dict[str, ConfigJson] = {
        flavor: common | dict(zip(columns.split(), row, strict=True)) for flavor, row in table.items()
    }
    return {flavor: config(**fields) for flavor, fields in sizes.items()}
