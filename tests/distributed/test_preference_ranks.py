"""Two ranks train on preference pairs as one rank does. Pairs are never divided."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.run.config import Config

OPTIONS: dict[str, Any] = {
    "loss__name": "dpo",
    "loss__reduction": "path_token_mean",
    "loss__options__beta": 0.5,
    "data__max_tokens": 70,  # partitions the tree of 12 pairs
    "data__shuffle_buffer": 0,
    "checkpoint__interval": 2,
    "optimizer__eps": 1e-3,
}


def write_pairs(path: Path) -> None:
    """Writes groups of 1, 12 and 2 pairs, again and again. Every step takes three groups."""
    with path.open("w") as file:
        for group, number in enumerate([1, 12, 2] * 4):
            for i in range(2 * number):
                answer = [(7 * i + j * (1 + i % 3)) % 64 for j in range(6 + i % 5)]
                tokens = [*range(12), group, *answer]
                record = {
                    "group_id": str(group),
                    "tokens": tokens,
                    "loss_mask": [0] * 13 + [1] * len(answer),
                    "ref_logprobs": [-4.0 - 0.01 * i] * len(tokens),
                    "preference": ("chosen", "rejected")[i % 2],
                    "pair": str(i // 2),
                }
                file.write(json.dumps(record) + "\n")


def config(folder: Path) -> Config:
    folder.mkdir(exist_ok=True)
    if not (file := folder / "data.jsonl").exists():  # another rank may be reading the file
        write_pairs(file)
    return tiny_config(folder, **OPTIONS)


def train_on_rank(rank: int, ports: list[int], folder: Path) -> None:
    with as_rank(rank, 2, ports[0]):
        train(config(folder))


@pytest.mark.slow
def test_two_ranks_train_on_pairs_as_one_does(tmp_path: Path) -> None:
    many = config(tmp_path / "many")  # writes the data before two processes read it
    run_ranks(train_on_rank, 2, tmp_path / "many", num_groups=1)
    one = train(config(tmp_path / "one"))
    assert_same_run(many, one)
    rows = read_metrics(many)
    assert max(int(row["forwards"]) for row in rows) > 3  # partitions
    assert {"margin", "accuracy"} <= rows[0].keys()
