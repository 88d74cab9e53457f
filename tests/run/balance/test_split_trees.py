"""Two ranks that share a large tree in pieces train as one rank does, and say so once."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, REPEATED, assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import register_loss
from titan_tree.models.pretrained import build_model
from titan_tree.run.build import build_balancing, build_loss
from titan_tree.run.config import Config
from titan_tree.tree import costs

ROLLOUTS: dict[str, Any] = {
    "loss__name": "gspo",
    "loss__reduction": "path_token_mean",
    "loss__kl__coefficient": 0.1,
    "loss__correction__level": "sequence",
    "loss__correction__high": 1.5,
}
RANKS_SHARE_EXPERTS: dict[str, Any] = {
    "parallel__expert_parallel": 2,
    "router_bias__rate": 0.01,
    "router_bias__counts": "tokens",
    **EXPERTS,
}
CASES: dict[str, dict[str, Any]] = {
    "sft": {},  # resumed after two steps
    "whole paths, partitions": {"data__max_tokens": 70, **ROLLOUTS},
    "experts": RANKS_SHARE_EXPERTS,
}


def write_data(path: Path) -> None:
    """Writes groups of 1, 24 and 2 rollouts, again and again. Every step takes three groups."""
    lines = []
    for group, number in enumerate([1, 24, 2] * 4):
        for i in range(number):
            tokens = [*range(12), group, *((7 * i + j * (1 + i % 3)) % 64 for j in range(6 + i % 5))]
            mask = [0] * 11 + [1] * (len(tokens) - 11)
            fields = {"loss_mask": mask, "weight": 1 + i % 2, "advantage": 1 - i % 3}
            logprobs = {"old_logprobs": -4.0, "ref_logprobs": -3.5, "rollout_logprobs": -4.1 - 0.1 * (i % 2)}
            fields |= {name: [value] * len(tokens) for name, value in logprobs.items()}
            lines.append({"group_id": str(group), "id": str(i), "tokens": tokens, **fields})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def config(folder: Path, name: str, **options: Any) -> Config:
    folder = folder / name.replace(" ", "_")
    if not (file := folder / "data.jsonl").exists():  # another rank may be reading the file
        folder.mkdir(parents=True)
        write_data(file)
    fixed = {
        "data__max_tokens": 400,
        "data__shuffle_buffer": 0,
        "checkpoint__interval": 2,
        "optimizer__eps": 1e-3,
        "lr_scheduler__min_lr_factor": 1.0,
    }
    return tiny_config(folder, **fixed | CASES[name] | options)


def train_all_cases(rank: int, ports: list[int], folder: Path) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan_tree").addHandler(handler)
    stages = [("sft", 2), *((name, 4) for name in CASES)]
    for (name, steps), port in zip(stages, ports, strict=True):
        with as_rank(rank, 2, port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(costs, "LAUNCH_SECONDS", 1e-9)  # a pass of these small trees costs nothing
            lines.clear()
            train(config(folder, name, training__steps=steps))
        (folder / f"{name}-{rank}.json").write_text(json.dumps([x for x in lines if "pieces" in x]))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all cases, trained by two processes."""
    folder = tmp_path_factory.mktemp("two_ranks")
    for name in CASES:
        config(folder, name)  # writes the data before two processes read it
    run_ranks(train_all_cases, 2, folder, num_groups=len(CASES) + 1)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("split_trees")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_pieces_equal_one(two_ranks: Path, tmp_path: Path, name: str) -> None:
    one = train(config(tmp_path, name, training__steps=4, parallel__expert_parallel=1))
    many = config(two_ranks, name, training__steps=4)
    whole = [int(row["executed_tokens"]) for row in read_metrics(one.config)]
    rows = read_metrics(many)
    for row, tokens in zip(rows, whole, strict=True):
        assert tokens < int(row["executed_tokens"]) < 1.3 * tokens
        assert float(row["planned_idle_share"]) < 0.15  # 0.4 if the tree stays whole
    (line,) = json.loads((two_ranks / f"{name}-0.json").read_text())
    assert line.startswith("a tree of ")
    assert json.loads((two_ranks / f"{name}-1.json").read_text()) == []
    assert_same_run(many, one, but=REPEATED)


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, True),
        (ROLLOUTS, True),
        ({"loss__name": "of_pairs"}, False),
        ({**EXPERTS}, True),
        ({**EXPERTS, "router_loss__scope": "micro_batch"}, False),
        ({"model__name": "qwen3_moe", "router_loss__z": 0.1, "router_loss__scope": "micro_batch"}, True),
    ],
    ids=str,
)
def test_trees_stay_whole_if_pieces_would_change_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], splits: bool
) -> None:
    monkeypatch.setattr("titan_tree.run.build.Balancing", lambda *_, **options: SimpleNamespace(**options))
    register_loss("of_pairs", whole_paths=True)(lambda logprobs, pairs: -logprobs)
    config = tiny_config(tmp_path, **options)
    mesh = cast(DeviceMesh, SimpleNamespace(size=lambda: 2))
    with torch.device("meta"):
        model = build_model(config.model.name, "debug")
    made = build_balancing(config, model, build_loss(config.loss), mesh, torch.device("cpu"))
    assert made is not None
    assert made.splits == splits
