"""Runs of TRL's trainers on a small model with images. Skips the tests without TRL."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from tests.support.trl_runs import (  # skips without TRL
    WORDS,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    Run,
    SFTConfig,
    SFTTrainer,
    arguments,
    assert_equal,
    reward,
    run,
)
from tests.support.vision import PATCH, vision_model
from titan_tree.integrations.hugging_face import treeify

from datasets import Dataset  # isort: skip
from peft import LoraConfig  # isort: skip
from tokenizers import Tokenizer, models, pre_tokenizers  # isort: skip
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, TrainerCallback, set_seed  # isort: skip
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # isort: skip
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor  # isort: skip

SPECIAL = {58: "<|image_pad|>", 57: "<|video_pad|>", 59: "<|vision_start|>", 60: "<|vision_end|>"}
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message.role == 'assistant' %}<eos> {% endif %}{% endfor %}"
)


class Processor(Qwen3VLProcessor):
    """That of Qwen3-VL without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=TEMPLATE)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def processor() -> Processor:
    words = [SPECIAL.get(i, word) for i, word in enumerate(WORDS)]
    table = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=table,
        padding_side="left",  # as TRL loads it
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL.values()),
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH // 2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": PATCH**2, "longest_edge": 100 * PATCH**2},
    )
    return Processor(images, tokenizer)


def picture(rows: int, columns: int, seed: int) -> Pillow.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def shown(i: int) -> list[Pillow.Image]:
    """Returns one or two images. Equal ones are equal pictures, not one object."""
    return [picture(2, 2 + i // 4 % 2, i % 2), *([picture(3, 2, 5)] if i % 4 == 2 else [])]


def text(start: int, size: int) -> str:
    return " ".join(f"w{(7 * start + 3 * j) % 50}" for j in range(size))


PROMPTS = [
    [{"role": "system", "content": "w40 w41 w42"}, {"role": "user", "content": text(i, 4 + i % 3)}]
    for i in range(16)
]
ANSWERS = [[{"role": "assistant", "content": text(i // 2, 5 + i % 4)}] for i in range(16)]
IMAGES = [shown(i) for i in range(16)]  # TRL generates only if every prompt has an image
DATA: dict[str, dict[str, list[Any]]] = {
    "prompt": {"prompt": PROMPTS},
    "completion": {"prompt": PROMPTS, "completion": ANSWERS},
    "chosen": {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ANSWERS[::-1]},
    "label": {"prompt": PROMPTS, "completion": ANSWERS, "label": [i % 3 > 0 for i in range(16)]},
    "messages": {"messages": [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]},
}
ROLLOUTS: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8}
ROLLOUTS |= {"generation_kwargs": {"suppress_tokens": [*SPECIAL]}}
CONFIGS: dict[type, tuple[type, str, dict[str, Any]]] = {
    GRPOTrainer: (GRPOConfig, "prompt", ROLLOUTS),
    RLOOTrainer: (RLOOConfig, "prompt", ROLLOUTS),
    SFTTrainer: (SFTConfig, "messages", {"max_length": None}),
    DPOTrainer: (DPOConfig, "chosen", {"max_length": None}),
    KTOTrainer: (KTOConfig, "label", {"max_length": None}),
}


class VisionRun(NamedTuple):
    """What a trainer did beside ``Run``."""

    run: Run
    logprobs: list[Tensor]  # of each call
    gradients: list[dict[str, Tensor]]  # of each step
    encoded: list[int]  # image tokens of each call of the tower
    has_graph: bool  # whether autograd has recorded some call


class Gradients(TrainerCallback):
    """Copies the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def make(
    cls: type,
    folder: Path,
    *,
    kind: str = "Qwen3VL",
    tower: bool = True,
    lora: bool = False,
    data: str | None = None,
    images: list[list[Pillow.Image]] = IMAGES,
    **options: Any,
) -> Any:
    """Returns a trainer of a small model with images.

    Args:
        tower: whether the tower is trained.
        data: a key of ``DATA``; None: that of the trainer.
    """
    set_seed(7)
    config, columns, defaults = CONFIGS[cls]
    extra: dict[str, Any] = {"reward_funcs": reward} if columns == "prompt" else {}
    if lora:
        targets = r".*language_model.*(q_proj|v_proj|down_proj)"
        extra["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    vision_model(kind, tied=False).save_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.model.visual.requires_grad_(tower)
    return cls(
        model=model,
        args=arguments(config, folder, **defaults | options),
        train_dataset=Dataset.from_dict(DATA[data or columns] | {"images": images}),
        processing_class=processor(),
        **extra,
    )


def inputs(trainer: Any, samples: list[int]) -> dict[str, Any]:
    """Returns the arguments of the model for some samples of a trainer of SFT."""
    return dict(trainer.data_collator([trainer.train_dataset[i] for i in samples]))


def train(cls: type, folder: Path, tree: dict[str, Any] | None = None, **options: Any) -> VisionRun:
    """Trains a small model with images.

    Args:
        tree: the options of ``treeify``; None: the stock trainer.
        options: those of ``make``.
    """
    trainer = make(cls, folder, **options)
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if tree is not None:
        treeify(trainer, **tree)
    gradients, logprobs, rows = Gradients(), list[Tensor](), list[Tensor]()
    trainer.add_callback(gradients)
    hook = model.model.visual.merger.register_forward_hook(lambda *args: rows.append(args[-1]))
    if hasattr(trainer, "_get_per_token_logps_and_entropies"):
        score = trainer._get_per_token_logps_and_entropies

        def recorded(*args: Any, **kwargs: Any) -> Any:
            out = score(*args, **kwargs)
            logprobs.append(out[0].detach())
            return out

        trainer._get_per_token_logps_and_entropies = recorded
    else:
        forward = model.forward

        def recorded_forward(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            logprobs.append(out.log_probs.detach())
            return out

        model.forward = recorded_forward
    result = run(trainer)
    hook.remove()
    encoded = [len(each) for each in rows]
    return VisionRun(result, logprobs, gradients.steps, encoded, any(each.requires_grad for each in rows))


def assert_same(stock: VisionRun, tree: VisionRun) -> None:
    """Asserts equal samples, losses, metrics, weights, log-probs, and gradients of all steps."""
    assert_equal(stock.run, tree.run)
    for want, got in zip(stock.logprobs, tree.logprobs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(stock.gradients) == len(stock.run.logs) > 0
    for wants, gots in zip(stock.gradients, tree.gradients, strict=True):
        assert wants.keys() == gots.keys()
        for name, want in wants.items():
            assert (gots[name] - want).norm() <= 1e-5 * want.norm(), name
