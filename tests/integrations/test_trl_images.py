"""TRL's trainers with images on trees beside the stock trainers. Every distinct image is encoded once."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trl_vision import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    RLOOTrainer,
    SFTTrainer,
    VisionRun,
    assert_same,
    inputs,
    make,
    shown,
    train,
)
from titan_tree.errors import UserError
from titan_tree.integrations.hugging_face import treeify

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trl")]  # importing trl takes ten seconds

STEPS = {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.1, "max_steps": 4}
FROZEN = {"tower": False, "lora": True, "gradient_checkpointing": True}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "GRPO": (GRPOTrainer, {}),
    "GRPO, two iterations, reference model": (GRPOTrainer, STEPS),
    "GRPO, LoRA, frozen tower, checkpointing": (GRPOTrainer, FROZEN),
    "RLOO": (RLOOTrainer, {}),
    "SFT": (SFTTrainer, {}),  # also trains on placeholders, as TRL does
    "SFT, some rows without image": (
        SFTTrainer,
        {"images": [[] if i % 4 == 3 else shown(i) for i in range(16)], "gradient_checkpointing": True},
    ),
    "SFT, completions, frozen tower": (SFTTrainer, {"data": "completion", "tower": False}),
    "SFT, Qwen3.5": (SFTTrainer, {"kind": "Qwen3_5"}),
    "SFT, Qwen3.5 with experts": (SFTTrainer, {"kind": "Qwen3_5Moe", "router_aux_loss_coef": 0.0}),
    "SFT, Qwen3-VL with experts": (SFTTrainer, {"kind": "Qwen3VLMoe", "router_aux_loss_coef": 0.0}),
    "GRPO, Qwen3.5": (GRPOTrainer, {"kind": "Qwen3_5", "gradient_accumulation_steps": 2}),
    "DPO": (DPOTrainer, {}),
    "KTO": (KTOTrainer, {}),
}
PARTITIONED = (
    "GRPO, two iterations, reference model",
    "SFT",
    "SFT, Qwen3.5",
    "GRPO, LoRA, frozen tower, checkpointing",
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionRun]:
    """Returns the run of the stock trainer for a case. Each is trained once."""
    folder = tmp_path_factory.mktemp("stock")

    @functools.cache
    def of(name: str) -> VisionRun:
        cls, options = CASES[name]
        return train(cls, folder, **options)

    return of


@pytest.mark.parametrize(
    ("name", "max_tokens"), [*((name, None) for name in CASES), *((name, 14) for name in PARTITIONED)]
)
def test_runs_equal_those_of_the_stock_trainer(
    tmp_path: Path, stock: Callable[[str], VisionRun], name: str, max_tokens: int | None
) -> None:
    """Rows have 16 to 40 tokens, and up to 10 of them are of images, so partitions cut images."""
    cls, options = CASES[name]
    tree = train(cls, tmp_path, {"max_tokens": max_tokens}, **options)
    assert_same(stock(name), tree)
    is_frozen = not options.get("tower", True)
    assert tree.has_graph == (not is_frozen)
    if is_frozen:
        assert not any("visual" in name for name in tree.gradients[0])
    else:
        assert sum("visual" in name for name in tree.gradients[0]) > 40
    assert tree.run.logs[0]["tree/distinct_tokens"] < tree.run.logs[0]["tree/row_tokens"]


def test_each_distinct_image_is_encoded_once(tmp_path: Path, stock: Callable[[str], VisionRun]) -> None:
    """The 8 rows of a step show 2 prompts. TRL's trainer encodes an image in each of its 4 rows."""
    tree = train(GRPOTrainer, tmp_path, {})
    generation, step = slice(0, None, 2), slice(1, None, 2)
    assert tree.encoded[generation] == stock("GRPO").encoded[generation] == stock("GRPO").encoded[step]
    assert [4 * size for size in tree.encoded[step]] == stock("GRPO").encoded[step]


def test_bf16_is_no_worse_than_in_the_stock_trainer(
    tmp_path: Path, stock: Callable[[str], VisionRun]
) -> None:
    """The gradients of the tower and of the text model, each beside those of fp32."""
    exact = stock("SFT")
    noisy, tree = train(SFTTrainer, tmp_path, bf16=True), train(SFTTrainer, tmp_path, {}, bf16=True)

    def error(run: VisionRun, part: str) -> float:
        gradients = run.gradients[0].items()
        return (
            sum(float((g - exact.gradients[0][n]).square().sum()) for n, g in gradients if part in n) ** 0.5
        )

    for part in ("visual", "language_model"):
        assert 0 < error(tree, part) < 1.2 * error(noisy, part)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make(SFTTrainer, tmp_path_factory.mktemp("model"))
    treeify(trainer)
    return trainer


def score(trainer: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = trainer.model(**batch, fused_lm_head=True).log_probs
    return out


def test_a_pixel_of_one_row_changes_nothing_else(trainer: Any) -> None:
    """Rows 0 and 8 have equal tokens, and show equal images until one value of row 8 changes."""
    batch = inputs(trainer, [0, 1, 0, 3])
    before = score(trainer, batch)
    assert torch.equal(before[0], before[2])
    changed = copy.deepcopy(batch)
    patches = batch["image_grid_thw"].prod(-1).tolist()
    changed["pixel_values"][sum(patches[:2])] += 0.05
    after = score(trainer, changed)
    torch.testing.assert_close(after[[0, 1, 3]], before[[0, 1, 3]], rtol=0, atol=2e-6)
    behind = (batch["mm_token_type_ids"][2] == 1).nonzero()[0, 0]
    torch.testing.assert_close(after[2, :behind], before[2, :behind], rtol=0, atol=2e-6)
    assert (after[2] - before[2])[behind:].abs().max() > 1e-4


def edit(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: batch | {name: change(batch[name])}


def more_placeholders(batch: dict[str, Any]) -> dict[str, Any]:
    """Makes the token behind the first image one of its placeholders."""
    row = batch["mm_token_type_ids"][0]
    last = int((row == 1).nonzero()[-1]) + 1
    ids, types = (batch[name].clone() for name in ("input_ids", "mm_token_type_ids"))
    ids[0, last], types[0, last] = 58, 1
    return batch | {"input_ids": ids, "mm_token_type_ids": types, "labels": torch.full_like(ids, -100)}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "video": (
        lambda batch: (
            batch | {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": torch.ones(1, 3)}
        ),
        "model: pixel_values_videos, video_grid_thw: expected rows without it, of text or with images as",
    ),
    "other processor": (
        lambda batch: batch | {"image_sizes": torch.ones(1, 2)},
        "model: image_sizes: expected rows without it",
    ),
    "no types": (
        edit("mm_token_type_ids", lambda types: None),
        "expected pixel_values, image_grid_thw and mm_token_type_ids together",
    ),
    "types of other tokens": (
        edit("mm_token_type_ids", lambda types: types.roll(1, 1)),
        "mm_token_type_ids: expected 1 at placeholders of images, token id 58, and 0 elsewhere, got 0",
    ),
    "types of videos": (
        edit("mm_token_type_ids", lambda types: 2 * types),
        "and 0 elsewhere, got 2 at token id 58 in row 0; set the tokenizer's padding_side",
    ),
    "no images": (edit("pixel_values", lambda values: None), "image_grid_thw and mm_token_type_ids together"),
    "frames": (
        edit("image_grid_thw", lambda grids: grids * torch.tensor([2, 1, 1])),
        "image_grid_thw: expected images of one frame, of 32 patches in all, got [[2, 4, 4], [2, 4, 4]]",
    ),
    "patches": (edit("pixel_values", lambda values: values[:-1]), "of 31 patches in all, got [[1, 4, 4]"),
    "cut image": (
        edit("attention_mask", lambda mask: mask * (torch.arange(mask.shape[1]) < 6)),
        "pixel_values: expected an image of 4 placeholders, as image_grid_thw says, in one row, got another",
    ),
    "too many placeholders": (more_placeholders, "pixel_values: expected an image of 4 placeholders"),
    "padding-free": (
        lambda batch: batch | {"position_ids": batch["attention_mask"].cumsum(1) - 1, "attention_mask": None},
        "pixel_values: expected padded rows of a model with images, got padding-free rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_on_trees_is_refused(trainer: Any, name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(message)) as error:
        score(trainer, change(inputs(trainer, [0, 1])))
    assert "\n" not in str(error.value)


def test_rows_of_text_need_no_images(trainer: Any) -> None:
    batch = inputs(trainer, [0, 1])
    text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    zeros = torch.zeros_like(text["input_ids"])
    assert torch.equal(score(trainer, text), score(trainer, text | {"mm_token_type_ids": zeros}))
