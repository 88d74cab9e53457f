"""A run on samples with images: from files of rows and pictures to checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cases import slow_except
from tests.support.same_run import assert_same_run
from tests.support.tiny_run import HYBRID, SMALL, read_metrics, tiny_config, train
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.config import Config

pillow = pytest.importorskip("PIL.Image")
SIZES = ((8, 8), (8, 9))  # rows and columns of tokens
TOKENIZER = TreeTokenizer.byte_level()
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
CALL = {"type": "function", "function": {"name": "click", "arguments": "{}"}}


def write_rows(folder: Path) -> None:
    """Writes three groups of two samples that share a picture; each goes on with a picture of its own."""
    draw = np.random.default_rng(0)

    def picture(name: str, rows: int, columns: int) -> str:
        pixels = draw.integers(256, size=(32 * rows, 32 * columns, 3), dtype=np.uint8)
        pillow.fromarray(pixels).save(folder / name)
        return name

    lines = []
    for group in range(3):
        shared = picture(f"{group}.png", *SIZES[0])
        for sample in range(2):
            tokens, mask, images = [1, 2], [0, 0], []
            for name, (rows, columns) in zip(
                (shared, picture(f"{group}_{sample}.png", *SIZES[1])), SIZES, strict=True
            ):
                images.append({"start": len(tokens), "image": name})
                tokens += [9] * rows * columns + draw.integers(10, 64, size=4).tolist()
                mask += [0] * rows * columns + [1] * 4
            lines.append({"group_id": f"g{group}", "tokens": tokens, "loss_mask": mask, "images": images})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_rows(folder)
    return folder


def config(folder: Path, data: Path, **options: Any) -> Config:
    sizes = {"data__max_tokens": 400, "checkpoint__interval": 1, "training__steps": 3, **HYBRID}
    model = {"model__name": "qwen3_5", "model__vision": "train", "optimizer__eps": 1e-3}
    return tiny_config(folder, **{"data__files": data / "data.jsonl", **sizes, **model, **options})


def test_partitions_and_a_resumed_run_equal_one_pass(data: Path, tmp_path: Path) -> None:
    """Losses, gradient norms, and weights of the model and its tower."""
    whole = config(tmp_path / "whole", data)
    trainer = train(whole)
    assert any(name.startswith("visual.") for name in trainer.model.state_dict())
    cut = config(tmp_path / "cut", data, data__max_tokens=70)
    train(cut)
    assert_same_run(cut, trainer, but={"forwards", "chain_peak_tokens", "gateway_gib"})
    shutil.copytree(whole.folder, tmp_path / "resumed" / "run")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "resumed" / "run" / "checkpoints" / f"step-{step}")
    resumed = config(tmp_path / "resumed", data)
    train(resumed)
    assert read_metrics(resumed) == read_metrics(whole)


def test_a_frozen_tower_does_not_change(data: Path, tmp_path: Path) -> None:
    trained, frozen = (train(config(tmp_path / v, data, model__vision=v)) for v in ("train", "frozen"))
    start = config(tmp_path / "start", data, training__steps=1, optimizer__lr=0)
    before = train(start).model.state_dict()
    for name, weight in frozen.model.state_dict().items():
        if name.startswith("visual."):
            assert weight.equal(before[name]), name
    assert not all(
        w.equal(before[n]) for n, w in trained.model.state_dict().items() if n.startswith("visual.")
    )


def token_row(turn: list[str], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the row of a prompt, an answer and what follows it, which show the pictures ``names``."""
    row: dict[str, Any] = {"tokens": [], "loss_mask": [], "images": []}
    for number, text in enumerate(turn):
        for token in TOKENIZER.encode(text):
            size = 1
            if token == TOKENIZER.special_tokens["<|image_pad|>"]:
                image = len(row["images"])
                row["images"].append({"start": len(row["tokens"]), "image": names[image]})
                size = int(np.prod(SIZES[image]))
            row["tokens"] += [token] * size
            row["loss_mask"] += [int(number == 1)] * size
    return row


def test_openai_rows_give_the_losses_of_token_rows(data: Path, tmp_path: Path) -> None:
    """Rollouts of two turns: the user shows a picture, and then a tool another one."""
    begin = "<|im_start|>assistant\n"
    asked = f"<|im_start|>user\nClick.{VISION}<|im_end|>\n{begin}"
    call = '<tool_call>\n{"name": "click", "arguments": {}}\n</tool_call><|im_end|>'
    seen = f"\n<|im_start|>user\n<tool_response>\n{VISION}\n</tool_response><|im_end|>\n{begin}"
    chats, rows = [], []
    for group, sample in [(group, sample) for group in range(3) for sample in range(2)]:
        names = f"{group}.png", f"{group}_{sample}.png"
        first, second = [{"type": "image_url", "image_url": {"url": name}} for name in names]
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Click."}, first]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": [second]},
            {"role": "assistant", "content": "ok"},
        ]
        chats.append({"group_id": f"g{group}", "messages": messages})
        ids = {"group_id": f"g{group}", "rollout_id": f"{group}/{sample}"}
        for turn in ([asked, call, "\n"], [asked + call + seen, "ok<|im_end|>", "\n"]):
            rows.append(token_row(turn, names) | ids)
    metrics = []
    for name, lines in (("chats", chats), ("rows", rows)):
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        options = {"data__files": data / f"{name}.jsonl", "data__tokenizer": "byte"}
        run = config(
            tmp_path / name, data, data__max_tokens=2000, model__overrides__vocab_size=300, **options
        )
        train(run)
        metrics.append(read_metrics(run))
    assert len(metrics[0]) == 3
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("name", slow_except(["qwen3_5"], ["qwen3", "qwen3_5"]))
def test_a_tower_changes_nothing_of_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen tower, all metrics and weights are equal bit for bit. No tower ever runs."""
    monkeypatch.setattr(TreeModel, "encode", lambda *_: pytest.fail("the tower ran"))
    options = {**SMALL[name], "data__max_tokens": 60, "model__name": name}
    runs = {v: tiny_config(tmp_path / v, model__vision=v, **options) for v in ("off", "frozen", "train")}
    weights = {v: train(run).model.state_dict() for v, run in runs.items()}
    assert read_metrics(runs["frozen"]) == read_metrics(runs["off"])
    of_text = {name: w for name, w in weights["frozen"].items() if not name.startswith("visual.")}
    assert of_text.keys() == weights["off"].keys() < weights["frozen"].keys()
    assert all(weight.equal(weights["off"][name]) for name, weight in of_text.items())
    # The norm of all gradients adds zeros of the tower, in another order.
    for trained, off in zip(read_metrics(runs["train"]), read_metrics(runs["off"]), strict=True):
        for column, value in off.items():
            assert float(trained[column]) == pytest.approx(float(value), rel=1e-6), column


def test_images_without_a_tower_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'has no tower; set model.vision to "frozen" or "train"'):
        train(config(tmp_path, data, model__vision="off"))
