"""The demo of the README runs from its command line to its last checkpoint."""

import csv
import math
from pathlib import Path

from titan_tree.cli import main

CONFIG = Path(__file__).parents[2] / "train_configs" / "demo.toml"


def test_the_demo_trains_and_saves_a_checkpoint(tmp_path: Path) -> None:
    overrides = ["training.steps=4", "checkpoint.interval=4", "lr_scheduler.warmup_steps=1"]
    assert main(["train", str(CONFIG), f"folder={tmp_path}", *overrides]) == 0
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows]
    shares = [[float(row[f"{part}_share"]) for part in ("passes", "optimizer", "host")] for row in rows]
    assert all(min(parts) > 0 and math.isclose(sum(parts), 1) for parts in shares)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoints" / "step-4").is_dir()
