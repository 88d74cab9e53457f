"""Which architectures of transformers are exact on trees, and the reasons why others are refused.

A layer is exact if attention, or a mixer of mixers.py, is all that mixes tokens, and if it depends on a
token's depth but not on the length of its path; rope.py has the exceptions. Tests compare each supported
architecture with itself on every path alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedConfig

from titan_tree.errors import UserError

SUPPORTED = frozenset(
    {
        "bailing_hybrid",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_dense",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
    }
)

# Models with a tower for images, and a text model of the same type with "_text". Attention is causal also for
# images, and positions are those of tree/images.py.
VISION = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})

STATE_SPACE = "its recurrent layers would carry the state of one branch into the next"
INDEXER = "its sparse attention chooses keys without regard to branches"
ALIBI = "its attention biases do not depend on the depth in the tree"
CHUNKS = "its attention works in chunks of a sequence"
PARALLEL = "each of its layers has both attention and a recurrence"
TWO_WAY = "the tokens of an image see each other in both directions"
TUPLES = "its layers return tuples instead of hidden states"
REASONS = {
    "bamba": TUPLES,
    "bloom": ALIBI,
    "deepseek_v32": INDEXER,
    "deepseek_v4": INDEXER,
    "falcon_h1": PARALLEL,
    "falcon_mamba": STATE_SPACE,
    "gemma3": TWO_WAY,
    "gemma4": TWO_WAY,
    "glm5_next_text": INDEXER,
    "glm_moe_dsa": INDEXER,
    "jamba": STATE_SPACE,
    "llama4_text": CHUNKS,
    "mamba": STATE_SPACE,
    "mamba2": STATE_SPACE,
    "mpt": ALIBI,
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": STATE_SPACE,
    "rwkv": STATE_SPACE,
    "zamba": STATE_SPACE,
    "zamba2": STATE_SPACE,
}
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Architectures with recurrent layers (mixers.py): the types of layers that they may also have, and the option
# that names the activation of their convolutions; None: these have none.
LINEAR = {"linear_attention"}
RECURRENT: dict[str, tuple[set[str], str | None]] = {
    "bailing_hybrid": (LINEAR, "hidden_act"),
    "granitemoehybrid": (LINEAR, "hidden_act"),
    "kimi_linear": (LINEAR, "hidden_act"),
    "lfm2": ({"conv"}, None),
    "lfm2_moe": ({"conv"}, None),
    "lfm3": ({"conv"}, None),
    "nemotron_h": (LINEAR | {"mlp", "moe"}, "mamba_hidden_act"),
    "olmo_hybrid": (LINEAR, "hidden_act"),
    "qwen3_5_moe_text": (LINEAR, "hidden_act"),
    "qwen3_5_text": (LINEAR, "hidden_act"),
    "qwen3_next": (LINEAR, "hidden_act"),
}
RANDOM = ("dropout", "pdrop", "jitter")  # parts of the names of options that draw random numbers
# How logits follow from hidden states and the output projection. Other architectures ignore these fields.
LOGIT_DIVISOR = {"granite", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"}
LOGIT_CAP = {"gemma2", "gemma3_text", "gemma4_text"}


def check_supported(config: PreTrainedConfig, where: str, quantization: Collection[str] = ()) -> None:
    """Raises UserError unless a model with this config is exact on trees.

    Args:
        config: the model's configuration, or that of its text model if it runs without its tower.
        where: the config's source, for the message.
        quantization: methods of quantization that the caller's layers may have.
    """
    text = config.get_text_config()
    name = text.model_type
    for kind in (config.model_type, name):
        if reason := REASONS.get(kind):
            raise UserError(f"{where}: model_type: {kind} cannot run on trees: {reason}")
    if text is not config and config.model_type not in VISION:
        raise UserError(
            f"{where}: model_type: {config.model_type} is more than a text model; expected one of "
            f"{', '.join(sorted(VISION))}; or save its text model by itself"
        )
    if name not in SUPPORTED and name.removesuffix("_text") not in VISION:
        raise UserError(
            f"{where}: model_type: {name} has not been tested on trees; expected one of "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    types, activation = RECURRENT.get(name, (set(), None))
    expected = LAYER_TYPES | types
    if others := set(getattr(text, "layer_types", None) or ()) - expected:
        raise UserError(
            f"{where}: layer_types: only {' and '.join(sorted(expected))} can run on trees, got "
            f"{', '.join(sorted(others))}"
        )
    if activation and (got := getattr(text, activation)) != "silu":
        raise UserError(
            f"{where}: {activation}: expected silu, which the convolutions of {name} use on trees, got {got}"
        )
    for field, value in text.to_dict().items():
        if value and any(word in field for word in RANDOM):
            raise UserError(f"{where}: {field}: expected 0 on trees, got {value}; set it to 0")
    quantized = getattr(config, "quantization_config", None)
    if quantized and getattr(quantized, "quant_method", None) not in quantization:
        raise UserError(
            f"{where}: quantization_config: expected unquantized weights; dequantize the model with "
            "transformers and save it"
        )
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise UserError(
            f"{where}: use_bidirectional_attention: expected false, because a token of a tree sees only the "
            "tokens before it"
        )
    if number := getattr(text, "num_kv_shared_layers", None):
        raise UserError(
            f"{where}: num_kv_shared_layers: only models whose layers have keys of their own can run on "
            f"trees, got {number}"
        )


def logit_scale(config: PreTrainedConfig) -> float:
    if config.model_type == "cohere2":
        return config.logit_scale
    return 1 / config.logits_scaling if config.model_type in LOGIT_DIVISOR else 1.0


def logit_cap(config: PreTrainedConfig) -> float | None:
    return config.final_logit_softcapping if config.model_type in LOGIT_CAP else None


def check_windows(config: PreTrainedConfig, windows: Sequence[int | None]) -> None:
    """Raises UserError if a layer hides tokens by its mask alone, which does not exist on trees.

    Args:
        windows: the window that each layer gives the attention function.
    """
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        expected = config.sliding_window if kind == "sliding_attention" else None
        if windows[i] != expected:
            raise UserError(
                f"model: {config.model_type}: layer {i} has a sliding window of {expected} tokens, but asks "
                f"its attention for {windows[i]}; such a model cannot run on trees"
            )
