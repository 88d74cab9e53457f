"""A run on samples with images: from files of rows and pictures to checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.same_run import assert_same_run
from tests.support.tiny_run import HYBRID, read_metrics, tiny_config, train
from titan_tree.errors import UserError
from titan_tree.run.config import Config

pillow = pytest.importorskip("PIL.Image")
SIZES = ((8, 8), (8, 9))  # rows and columns of tokens


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


def test_images_without_a_tower_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'has no tower; set model.vision to "frozen" or "train"'):
        train(config(tmp_path, data, model__vision="off"))
