"""verl on a CPU: a platform, tiny models, and rollouts in the layout of verl's trainer.

Import it before verl, which has no platform for CPUs. ``CpuPlatform`` is all that its FSDP2 engines lack.
"""

import os
import types
from pathlib import Path
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "VERL_LOGGING_LEVEL": "ERROR"}

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        **{
            name: getattr(torch.cpu, name)
            for name in ("current_device", "device_count", "synchronize", "is_available")
        },
        **{
            f"{most}memory_{what}": lambda *_: 0
            for most in ("", "max_")
            for what in ("allocated", "reserved")
        },
        mem_get_info=lambda *_: (0, 0),
        empty_cache=lambda: None,
        get_device_name=lambda *_: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, **_: Any) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, *_: Any) -> None: ...
    def synchronize(self, *_: Any) -> None: ...
    def empty_cache(self, *_: Any) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"


from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

from tests.support.hf_families import VOCAB, hf_family  # noqa: E402
from titan_tree.integrations.verl import TreeEngine  # noqa: E402

EngineRegistry.register("language_model", backend=["fsdp2"], device="cpu")(TreeEngine)
ROWS = 8  # per rank


def snapshot(folder: Path, name: str = "llama", **changes: object) -> str:
    """Returns the folder of a tiny snapshot."""
    model = hf_family(name, **changes)
    path = folder / "_".join(map(str, (name, *changes.values())))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return str(path)


def configs(path: str, max_tokens: int | None, **model: Any) -> dict[str, Any]:
    """Returns verl's configurations of an engine in fp32.

    Args:
        max_tokens: of a forward pass; None: no dynamic batch size.
        model: settings of the model; "engine": a dict of settings of the engine.
    """
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = {
        "strategy": "fsdp2",
        "mixed_precision": fp32,
        "use_torch_compile": False,
        "use_dynamic_bsz": max_tokens is not None,
        "micro_batch_size_per_gpu": ROWS // 2,
        "infer_micro_batch_size_per_gpu": ROWS,
        "max_token_len_per_gpu": max_tokens,
        "infer_max_token_len_per_gpu": max_tokens,
        **model.pop("engine", {}),
    }
    fixed = {
        "load_tokenizer": False,
        "enable_gradient_checkpointing": False,
        "use_remove_padding": False,  # which needs FlashAttention
        "override_config": {"attn_implementation": "sdpa"},
    }
    return {
        "model_config": HFModelConfig(path=path, **fixed | model),
        "engine_config": FSDPEngineConfig(**engine),
        "optimizer_config": FSDPOptimizerConfig(
            lr=1e-3, weight_decay=0.0, total_training_steps=10, lr_warmup_steps=0, betas=(0.9, 0.95)
        ),
        "checkpoint_config": CheckpointConfig(),
    }


class StockEngine(FSDPEngineWithLMHead):
    """verl's own engine, which counts the tokens that it computes."""

    computed = 0

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        inputs, others = super().prepare_model_inputs(micro_batch)
        self.computed += inputs["input_ids"].numel()
        return inputs, others


def make_engine(kind: type, path: str, max_tokens: int | None = None, **model: Any) -> Any:
    torch.manual_seed(0)  # of adapters
    engine = kind(**configs(path, max_tokens, **model))
    engine.initialize()
    return engine


def rollouts(seed: int) -> TensorDict:
    """Returns rows as verl's trainer has them: prompts padded at the left, responses at the right.

    Two prompts have four responses each, which begin alike. Some tokens of responses are not trained.
    """
    draw = torch.Generator().manual_seed(seed)

    def tokens(number: int) -> Tensor:
        return torch.randint(3, VOCAB, (number,), generator=draw)

    size, prompt_size, response_size = ROWS, 12, 10
    rows = []
    for prompt_length in (12, 9):
        prompt, shared = tokens(prompt_length), tokens(3)
        rows += [(prompt, torch.cat([shared, tokens(3 + i + seed % 2)])) for i in range(size // 2)]
    prompts = torch.zeros(size, prompt_size, dtype=torch.long)
    responses = torch.zeros(size, response_size, dtype=torch.long)
    attention = torch.zeros(size, prompt_size + response_size, dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        prompts[i, prompt_size - len(prompt) :] = prompt
        responses[i, : len(response)] = response
        attention[i, prompt_size - len(prompt) : prompt_size + len(response)] = 1
    response_mask = attention[:, prompt_size:].clone()
    response_mask[::3, 2] = 0  # of a tool
    noise = torch.randn(3, size, response_size, generator=draw)
    fields = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "old_log_probs": -4.2 + 0.3 * noise[0],
        "ref_log_prob": -4.2 + 0.3 * noise[1],
        "advantages": noise[2, :, :1] * response_mask,
        "rollout_is_weights": (0.1 * noise[2]).exp(),
    }
    return TensorDict(fields, batch_size=[size])


def prepared(seed: int = 0, **options: Any) -> TensorDict:
    """Returns this rank's rollouts as engines get them."""
    data = left_right_2_no_padding(rollouts(2 * seed + dist.get_rank()))
    common = {
        "temperature": 1.0,
        "calculate_entropy": True,
        "global_batch_size": ROWS * dist.get_world_size(),
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": ROWS // 2,
    }
    for name, value in (common | options).items():
        if isinstance(value, Tensor):
            data[name] = value
        else:
            tensordict_utils.assign_non_tensor(data, **{name: value})
    return data


def gradients(engine: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
    return {name: g.full_tensor().clone() for name, g in found.items()}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Returns the largest difference, as a fraction of the largest number."""
    assert got.keys() == want.keys()
    assert got
    largest = max(float(x.abs().max()) for x in want.values())
    return max(float((got[name] - want[name]).abs().max()) for name in want) / largest
