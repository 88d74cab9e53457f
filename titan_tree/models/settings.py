"""The settings [model] and [lora], and the registry of model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan_tree.components.backends import ATTENTION_BACKENDS, RECURRENCE_BACKENDS
from titan_tree.config.checks import Checked, at_least, one_of, positive_number, require, setting
from titan_tree.config.registry import Registry

if TYPE_CHECKING:
    from titan_tree.models.decoder import Decoder

MODELS: Registry[type[Decoder]] = Registry(
    "model",
    {
        "qwen3": "titan_tree.models.qwen3:Qwen3",
        "qwen3_moe": "titan_tree.models.qwen3:Qwen3Moe",
        "qwen3_5": "titan_tree.models.qwen3_5:Qwen35",
        "qwen3_5_moe": "titan_tree.models.qwen3_5_moe:Qwen35Moe",
        "qwen3_next": "titan_tree.models.qwen3_5_moe:Qwen3Next",
        "llama": "titan_tree.models.llama:Llama",
    },
    interface=("Config", "flavors"),
    key="model.name",
)


@dataclass(kw_only=True)
class ModelConfig(Checked, table="model"):
    """The model. Set either ``flavor`` (random weights) or ``hf_path`` (weights of a snapshot)."""

    name: str = setting("qwen3", one_of(MODELS))  # Model family. A snapshot overrides it.
    flavor: str | None = None  # Published size such as "0.6B", or "debug". The weights are random.
    hf_path: str | None = None  # Local Hugging Face snapshot, which sets the sizes and the initial weights.
    # Code that runs a snapshot: "native" is titan_tree's own model; "transformers" uses the layers of that
    # library; "auto" chooses "native" if there is such a model, and it computes what config.json asks for.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    attention: str = setting("auto", one_of("auto", ATTENTION_BACKENDS))  # Backend of TreeAttention.
    # The tower, for images in paths: "frozen" uses it, "train" also trains it, "off" does not load it.
    vision: Literal["off", "frozen", "train"] = "off"
    # Backend of TreeGDN, TreeKDA and TreeSSD, in models that have them.
    recurrence: str = setting("auto", one_of("auto", RECURRENCE_BACKENDS))
    overrides: dict[str, Any] = setting({})  # Sizes that replace those of the flavor.

    def __post_init__(self) -> None:
        expected = (
            "a family that titan_tree implements; remove it, and set model.hf_path to a snapshot of "
            'Kimi-Linear, which runs with model.implementation = "transformers"'
        )
        require(self.name != "kimi_linear", "model.name", expected, repr(self.name))
        super().__post_init__()


@dataclass(kw_only=True)
class LoRAConfig(Checked, table="lora"):
    """Low-rank updates of frozen weights (docs/lora.md). Set either ``rank`` or ``adapter``, or neither."""

    rank: int = setting(0, at_least(0))  # Rank of the updates. 0: all weights are trained.
    alpha: float = setting(16.0, positive_number)  # An update is multiplied by alpha / rank.
    # Names of linears, such as "q_proj", or ends of their names, such as "self_attn.q_proj". Routed experts
    # are "experts.gate_up_proj" and "experts.down_proj". Default: all linears of the layers, without routers
    # and routed experts.
    targets: list[str] = setting([])
    rslora: bool = False  # Multiply updates by alpha / sqrt(rank) instead.
    adapter: str | None = None  # Folder of a PEFT adapter to start from. It sets the keys above.
    quantize: Literal["none", "nf4"] = (
        "none"  # "nf4" stores frozen linears of the layers in 4 bits per weight.
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None or not self.rank:
            why = "together with lora.adapter, which sets it" if self.adapter else "without lora.rank"
            for name, default in (("rank", 0), ("alpha", 16.0), ("targets", []), ("rslora", False)):
                value = getattr(self, name)
                require(value == default, f"lora.{name}", f"no value {why}", value)
        require(
            self.quantize == "none" or self.is_on,
            "lora.quantize",
            "'none' without lora.rank or lora.adapter, because only frozen weights can be quantized",
            self.quantize,
        )

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or self.adapter is not None
