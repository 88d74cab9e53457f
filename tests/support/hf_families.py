"""Tiny random models of transformers, one for each supported architecture."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {  # multi-head latent attention and experts of DeepSeek-V3
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [],
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GLM_EXPERTS = {name: LATENT[name] for name in list(LATENT)[6:] if "group" not in name}
HYBRID = {  # a layer of Gated DeltaNet, and one with gated attention
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "tie_word_embeddings": False,
}
GRANITE = {
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
SHORT_CONV = {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": False}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
# What differs from SIZES.
FAMILIES: dict[str, dict[str, object]] = {
    "bailing_hybrid": {
        **LATENT,
        "head_dim": 16,  # of KDA
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "kda_lower_bound": -2.0,
    },
    "cohere2": LOCAL,
    "deepseek_v3": LATENT,
    "ernie4_5": {},
    "exaone4": LOCAL,
    "gemma2": {
        **LOCAL,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**LOCAL, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        **LOCAL,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
    },
    "glm4": {},
    "glm4_moe": GLM_EXPERTS,
    "glm4_moe_lite": LATENT,
    "gpt_oss": {**LOCAL, **LOCAL_EXPERTS},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "granitemoe": {**LOCAL_EXPERTS, **GRANITE},
    "granitemoe_swa": {
        **LOCAL_EXPERTS,
        **GRANITE,
        **LOCAL,
        "shared_intermediate_size": 24,
        "layer_rope_theta": [1e4, 0],  # none in the second layer
    },
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        **GRANITE,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "shared_intermediate_size": 24,
    },
    "granitemoeshared": {**LOCAL_EXPERTS, **GRANITE, "shared_intermediate_size": 24},
    "hunyuan_v1_dense": {},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "num_local_experts": 8,
        "n_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "lfm2": SHORT_CONV,
    "lfm2_moe": {**QWEN_EXPERTS, **SHORT_CONV, "num_dense_layers": 1},
    "lfm3": {
        **LOCAL,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "minimax_m2": {**LOCAL_EXPERTS, "sliding_window": None},
    "ministral3": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "mixtral": LOCAL_EXPERTS,
    "nemotron_h": {
        **LATENT,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "time_step_min": 1e-9,  # no lower limit, which transformers ignores when it generates
        "num_key_value_heads": 2,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 16,
    },
    "olmo2": {},
    "olmo3": LOCAL,
    "olmo_hybrid": HYBRID,
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {**QWEN_EXPERTS, **HYBRID},
    "qwen3_5_text": HYBRID,
    "qwen3_moe": QWEN_EXPERTS,
    "qwen3_next": {**QWEN_EXPERTS, **HYBRID},
    "seed_oss": NO_DROPOUT,
    "smollm3": {},
}


def known_config(name: str, **changes: object) -> transformers.PretrainedConfig:
    """Returns a config of an architecture. Skips the test if this transformers has no such one."""
    try:
        return AutoConfig.for_model(name, **changes)
    except ValueError:
        pytest.skip(f"this version of transformers has no {name}")


def hf_family(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """Returns a random model whose layers matter: its matrices are larger than at the start of training."""
    config = known_config(name, **{**SIZES, **FAMILIES.get(name, {}), **changes})
    torch.manual_seed(0)
    # The default experts multiply in bfloat16 only.
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def hf_logprobs(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Returns the log-probs [len(tokens) - 1] of one path alone, as transformers computes them."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


transformers.logging.set_verbosity_error()
