"""Runs whose trees are balanced over ranks train as one rank does, resume exactly, and end with one line."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.processes import as_rank, process_group, run_ranks
from tests.support.same_run import assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train, write_config
from titan_tree.data.dataset import TreeDataset
from titan_tree.engine.device_clock import DeviceClock
from titan_tree.errors import AgreedError
from titan_tree.models.pretrained import build_model
from titan_tree.run.balance import balancing
from titan_tree.run.balance.balancing import Balancing, WorkTimer
from titan_tree.run.checkpoint.storage import read_manifest
from titan_tree.run.config import Config

CASES: dict[str, dict[str, Any]] = {
    "ragged": {"data__global_batch_groups": 7, "data__max_tokens": 70},
    "idle ranks": {"data__global_batch_groups": 1},
    "partitions": {"data__global_batch_groups": 7, "data__max_tokens": 12},
    "merged trees": {"data__global_batch_groups": 7, "data__max_tokens": 90, "data__merge": "batch"},
    "worker processes": {"data__global_batch_groups": 7, "data__max_tokens": 70, "data__workers": 2},
    "not balanced": {
        "data__global_batch_groups": 7,
        "data__max_tokens": 70,
        "parallel__balance": "false",
    },
}


def config(folder: Path, name: str) -> Config:
    fixed = {"training__steps": 3, "checkpoint__interval": 3, "optimizer__eps": 1e-3}
    return tiny_config(folder / name.replace(" ", "_"), **fixed, **CASES[name])


def train_all_cases(rank: int, ports: list[int], folder: Path) -> None:
    for name, port in zip(CASES, ports, strict=True):
        with as_rank(rank, 4, port):
            train(config(folder, name))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all cases, trained by four processes."""
    folder = tmp_path_factory.mktemp("four_ranks")
    for name in CASES:
        config(folder, name)  # writes the data before four processes read it
    run_ranks(train_all_cases, 4, folder, num_groups=len(CASES))
    return folder


def column(config: Config, name: str) -> list[float]:
    with (Path(config.folder) / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.exhaustive
@pytest.mark.xdist_group("balancing")
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_equal_one(four_ranks: Path, tmp_path: Path, name: str) -> None:
    one, many = train(config(tmp_path, name)), config(four_ranks, name)
    assert not {"idle_share", "planned_idle_share"} & read_metrics(one.config)[0].keys()
    assert_same_run(many, one)


@pytest.mark.exhaustive
@pytest.mark.xdist_group("balancing")
def test_balanced_ranks_wait_less(four_ranks: Path) -> None:
    balanced, other = (config(four_ranks, name) for name in ("ragged", "not balanced"))
    for name in ("idle_share", "planned_idle_share"):
        assert all(0 <= share < 0.75 for share in column(balanced, name))
        assert name not in read_metrics(other)[0]
    parts = [column(other, f"{part}_share") for part in ("passes", "optimizer", "exchange", "host")]
    for shares in zip(*parts, strict=True):
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(1)
    idle = column(config(four_ranks, "idle ranks"), "planned_idle_share")
    assert idle == pytest.approx([0.75] * 3)  # one tree on four ranks
    assert max(column(balanced, "planned_idle_share")) < 0.5


def fixed_times(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Fits the costs after 4 steps, to times that do not vary between runs."""
    patch.setattr(balancing, "FIT_STEPS", 4)
    patch.setattr(WorkTimer, "_seconds", lambda timer, marks: len(marks) * 0.1 + rank)


def run(rank: int, ports: list[int], folder: Path, workers: list[int]) -> None:
    for port, number in zip(ports, workers, strict=True):
        options = {"training__steps": 12, "checkpoint__interval": 6, "data__global_batch_groups": 5}
        with as_rank(rank, 2, port), pytest.MonkeyPatch.context() as patch:
            fixed_times(rank, patch)
            trainer = train(tiny_config(folder, **options, data__workers=number, data__max_tokens=70))
            assert trainer.balancing is not None
            start = trainer.balancing.estimated
            assert start == trainer.model.costs().tree_costs() != trainer.balancing.fitted is not None


@pytest.mark.exhaustive
def test_a_run_resumes_with_the_costs_of_its_checkpoint(tmp_path: Path) -> None:
    """Steps 7 and 8 use the start costs, steps 9 to 12 those that were fitted before the checkpoint."""
    for name in ("whole", "resumed"):
        tiny_config(tmp_path / name)
    run_ranks(run, 2, tmp_path / "whole", [0])
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "resumed" / "run")
    shutil.rmtree(tmp_path / "resumed" / "run" / "checkpoints" / "step-12")
    run_ranks(run, 2, tmp_path / "resumed", [3])
    whole, resumed = (read_metrics(tiny_config(tmp_path / name)) for name in ("whole", "resumed"))
    assert len(whole) == 12
    assert resumed == whole  # digit for digit
    shares = [float(row["planned_idle_share"]) for row in whole]
    assert len(set(shares)) > 8  # steps differ
    before, after = read_manifest(tmp_path / "whole/run/checkpoints/step-6")["data"]["balance"]["costs"]
    assert before != after


def test_a_resume_before_the_fit_keeps_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "WorkTimer", lambda *_: None)  # FSDP2 has not sharded the model
    model, device = build_model("qwen3", "debug", vocab_size=64), torch.device("cpu")
    fixed: dict[str, Any] = {"sequence_parallel": 1, "expert_parallel": False, "fixed": False, "splits": True}
    whole, resumed = (Balancing(model, device, 64, **fixed) for _ in range(2))
    measured = [(np.array([100 * i + 50, 900, 40, 3, 0, 0, 1]), 0.1 * i + 1) for i in range(4)]
    whole.fit_step = 4
    for sizes, seconds in measured[:2]:
        whole.fit.add(sizes, seconds)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.fit_step == 4
    for each in (whole, resumed):
        for sizes, seconds in measured[2:]:
            each.fit.add(sizes, seconds)
    assert resumed.fit.solve() == whole.fit.solve() != whole.estimated
    old = {"costs": [[1.0] * 5], "fit_step": 4, "fit": {}}  # of an earlier version, which knew no pixels
    resumed.load_state_dict(old)
    assert resumed.estimated == whole.estimated


def bad_line(rank: int, ports: list[int], folder: Path, workers: list[int]) -> None:
    for port, number in zip(ports, workers, strict=True):
        with as_rank(rank, 2, port):
            started = time.monotonic()
            with pytest.raises(AgreedError) as error:
                train(tiny_config(folder, data__workers=number, data__shuffle_buffer=0))
            assert f"{folder}/data.jsonl:" in str(error.value)
            assert "expected an integer, got 'x'" in str(error.value)
            assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_bad_line_ends_all_ranks(tmp_path: Path) -> None:
    write_config(tmp_path)
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({"group_id": "bad", "tokens": [1, "x"]})
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    run_ranks(bad_line, 2, tmp_path, [0, 1], num_groups=2)


class DyingDataset(TreeDataset):
    def own_trees(self, batch: Any) -> Any:
        if self.group > 3:  # in the second step
            os.kill(os.getpid(), signal.SIGKILL)
        return super().own_trees(batch)


def lose_a_worker(rank: int, ports: list[int], folder: Path) -> None:
    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("titan_tree.run.build.TreeDataset", DyingDataset)
        with pytest.raises(AgreedError, match=r"data\.workers: a worker process ended unexpectedly"):
            train(tiny_config(folder, data__workers=1))


@pytest.mark.exhaustive
def test_a_killed_worker_ends_all_ranks_with_its_own_message(tmp_path: Path) -> None:
    """The other rank only knows that it has lost a worker."""
    write_config(tmp_path)
    run_ranks(lose_a_worker, 2, tmp_path)


class Layers(nn.Module):
    """Works for 0.08 s: 0.02 s, and 0.03 s in each of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        for layer in self.layers:
            layer.register_forward_hook(lambda *_: time.sleep(0.03))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        for layer in self.layers:
            x = layer(x)
        return x


def time_sharded_layers(rank: int, ports: list[int]) -> None:
    """FSDP2 waits 0.1 s for the weights of each block, in the forward and in the backward pass."""
    with process_group(rank, 1, ports[0]):
        model = Layers()
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        for layer in model.layers:
            weights = layer._get_fsdp_state()._fsdp_param_group  # type: ignore[operator,union-attr]
            wait = weights.wait_for_unshard
            weights.wait_for_unshard = lambda wait=wait: (time.sleep(0.1), wait())
        exchange = DeviceClock(torch.device("cpu"), model)
        timer = WorkTimer(model, torch.device("cpu"))
        model(torch.zeros(1, 2)).sum().backward()
        exchange.start()
        timer.start()
        for _ in range(2):
            started = time.perf_counter()
            model(torch.zeros(1, 2)).sum().backward()
            assert time.perf_counter() - started > 0.48
        timer.stop()
        exchange.stop()
        assert 0.8 <= exchange.exchange_seconds() < 1.0
        model(torch.zeros(1, 2))
        assert exchange.exchange_seconds() < 1.0
        assert len(passes := timer.seconds()) == 2
        assert all(0.08 <= seconds < 0.16 for seconds in passes), passes


@pytest.mark.slow
def test_timers_measure_work_without_waits_and_the_waits() -> None:
    run_ranks(time_sharded_layers, 1)
