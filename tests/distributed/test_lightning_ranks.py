"""A run with Lightning on two ranks equals one of the trainer, and resumes exactly."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint import FileSystemReader

from tests.support.lightning_run import expected, fit, lightning_trainer, logged, weights_of
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import tiny_config, train, write_groups
from titan_tree.integrations.lightning import TreeCheckpoints
from titan_tree.run.config import Config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("lightning"),
]


def config(folder: Path, name: str) -> Config:
    """Returns a run with partitions and validation, one of expert-parallel ranks, or one with LoRA."""
    folder.mkdir(exist_ok=True)
    held_out = folder / "held_out.jsonl"
    if not held_out.exists():
        write_groups(held_out, num_groups=3, seed=1)
    options: dict[str, Any] = {
        "training__steps": 20,
        "data__max_tokens": 24,
        "validation__files": held_out,
        "validation__interval": 6,
        "checkpoint__interval": 15,
    }
    if name == "experts":
        options = {"model__name": "qwen3_moe", "router_bias__rate": 0.01, "parallel__expert_parallel": 2}
    if name == "lora":
        options = {"lora__rank": 4, "optimizer__lr": 0.01, "optimizer__eps": 1e-3}
    return tiny_config(folder / name, **options)


CHECKPOINT = {"partitions": "step=15.ckpt", "experts": "step=3.ckpt", "lora": "step=3.ckpt"}


def train_both(rank: int, ports: list[int], folder: Path) -> None:
    """Trains each run with the trainer, with Lightning, and with Lightning from one of its checkpoints.

    If the trainer has written checkpoints, Lightning also trains from the first of them.
    """
    free = iter(ports)
    for name in CHECKPOINT:
        made = config(folder, name)
        with as_rank(rank, 2, next(free)):
            weights = [weights_of(train(made).model)]
        with as_rank(rank, 2, next(free)):
            parts = ["whole", "resumed"]
            if made.checkpoint.interval:
                parts.append("continued")
                if rank == 0:
                    shutil.rmtree(Path(made.folder) / "checkpoints" / "step-20")
            for part in parts:
                path = folder / part / name
                callbacks = [TreeCheckpoints()] if part == "continued" else []
                trainer = lightning_trainer(path, *callbacks, devices=2, strategy=ModelParallelStrategy())
                start = folder / "whole" / name / "checkpoints" / CHECKPOINT[name]
                module = fit(made, trainer, start if part == "resumed" else None)
                assert module.model is not None
                weights.append(weights_of(module.model))
            dist.destroy_process_group()
        torch.save(weights, folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in CHECKPOINT:
        config(folder, name)  # writes data before two processes read it
    run_ranks(train_both, 2, folder, num_groups=2 * len(CHECKPOINT))
    return folder


def test_two_ranks_continue_a_run_of_the_trainer(runs: Path) -> None:
    """The weights are compared below."""
    assert list(logged(runs / "continued" / "partitions")) == [16, 17, 18, 19, 20]
    assert {path.name for path in (runs / "partitions" / "run" / "checkpoints").glob("step-*")} == {
        "step-15",
        "step-20",
    }


@pytest.mark.parametrize("name", CHECKPOINT)
def test_two_ranks_with_lightning_equal_the_trainer(runs: Path, name: str) -> None:
    want = expected(config(runs, name))
    whole, resumed = (logged(runs / part / name) for part in ("whole", "resumed"))
    assert list(whole) == list(want)
    assert list(resumed) == list(want)[-len(resumed) :]
    assert 1 <= len(resumed) <= 5
    for step, values in [*whole.items(), *resumed.items()]:
        assert values == pytest.approx(want[step], rel=1e-6), step
    for rank in range(2):
        theirs, *ours = torch.load(runs / f"{name}-{rank}.pt")
        for weights in ours:
            for key, weight in theirs.items():
                torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-7, msg=key)


def test_with_lora_a_checkpoint_holds_only_the_adapter(runs: Path) -> None:
    reader = FileSystemReader(runs / "whole" / "lora" / "checkpoints" / CHECKPOINT["lora"])
    names = [n for n in reader.read_metadata().state_dict_metadata if n.startswith("state_dict.")]
    assert len(names) == 2 * 2 * 7  # A and B of 7 linears in 2 layers
    assert all("_lora_" in name for name in names)
