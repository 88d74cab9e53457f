"""The tables [model] and [lora]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titan_tree.config.checks import Checked, at_least, one_of, positive_number, require, setting
from titan_tree.registry import ATTENTION_BACKENDS, GDN_BACKENDS, MODELS


@dataclass
class ModelConfig(Checked, table="model"):
    """The model. Set either ``flavor`` (random weights) or ``hf_path`` (weights of a snapshot)."""

    name: str = setting("qwen3", one_of(MODELS))  # model family; a snapshot overrides it
    flavor: str | None = None  # a published size such as "0.6B", or "debug"; random weights
    hf_path: str | None = None  # local Hugging Face snapshot: sizes and initial weights
    # Of a snapshot: "native", titan_tree's own model; "transformers", the layers of that library; "auto":
    # native if there is such a model.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    attention: str = setting("auto", one_of("auto", ATTENTION_BACKENDS))  # backend of TreeAttention
    gdn: str = setting("auto", one_of("auto", GDN_BACKENDS))  # backend of TreeGDN, in models that have it
    overrides: dict[str, Any] = setting({})  # sizes that replace those of the flavor


@dataclass
class LoRAConfig(Checked, table="lora"):
    """Trains low-rank updates of frozen weights, see LoRA. Set either ``rank`` or ``adapter``, or neither."""

    rank: int = setting(0, at_least(0))  # of the updates; 0: all weights are trained
    alpha: float = setting(16.0, positive_number)  # an update is multiplied by alpha / rank
    # Names of linears, such as "q_proj", or ends of their names, such as "self_attn.q_proj". Routed experts
    # are "experts.gate_up_proj" and "experts.down_proj". Default: all linears of the layers, without routers
    # and routed experts.
    targets: list[str] = setting([])
    rslora: bool = False  # multiply by alpha / sqrt(rank) instead
    adapter: str | None = None  # folder of a PEFT adapter to start from; it sets the keys above
    quantize: Literal["none", "nf4"] = "none"  # "nf4": frozen linears of the layers have 4 bits per weight

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None:
            default = LoRAConfig()
            for name in ("rank", "alpha", "targets", "rslora"):
                value = getattr(self, name)
                require(
                    value == getattr(default, name),
                    f"lora.{name}",
                    "no value together with lora.adapter, which sets it",
                    value,
                )
        require(
            self.quantize == "none" or self.is_on,
            "lora.quantize",
            "'none' without lora.rank or lora.adapter, because only frozen weights can be quantized",
            self.quantize,
        )

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or self.adapter is not None
