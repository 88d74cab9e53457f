"""Experts sharded over GPUs train as on one GPU in fp32, and compiled as in eager mode in bf16.

To debug without GPUs, run the same code on gloo with TITAN_TREE_EP_ON_CPU=1.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.config import Config

ON_CPU = os.environ.get("TITAN_TREE_EP_ON_CPU") == "1"
pytestmark = pytest.mark.distributed if ON_CPU else [pytest.mark.distributed, pytest.mark.gpu]
CUT: dict[str, Any] = {"data__max_tokens": 12, **EXPERTS}
CASES: dict[str, dict[str, Any]] = {
    "micro-batches": {"data__max_tokens": 70, **EXPERTS},
    "partitions": CUT,
    "recompute": {**CUT, "partition__activations": "recompute", "training__activation_checkpoint": "full"},
    "hybrid": {**CUT, "model__name": "qwen3_5_moe"},
}
WORLDS = [(2, 2), (4, 2), (4, 4)]  # ranks, and how many of them share the experts of a layer


def config(folder: Path, name: str, expert_parallel: int = 1, **options: Any) -> Config:
    return tiny_config(
        folder / name.replace(" ", "_"),
        checkpoint__interval=4,
        optimizer__eps=1e-3,
        parallel__expert_parallel=expert_parallel,
        **{"model__name": "qwen3_moe"} | options,
    )


def run(rank: int, ports: list[int], num_ranks: int, made: Config) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with as_rank(rank, num_ranks, ports[0]):
        train(made)


def launch(num_ranks: int, made: Config) -> None:
    if not ON_CPU and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    run_ranks(run, num_ranks, num_ranks, made, start="spawn")


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_one_gpu(name: str, num_ranks: int, expert_parallel: int, tmp_path: Path) -> None:
    """Losses, gradient norms, and weights after four steps are equal within 1e-5."""
    many = config(tmp_path / "many", name, expert_parallel, **CASES[name])
    launch(num_ranks, many)
    assert_same_run(many, train(config(tmp_path / "one", name, **CASES[name])))


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), WORLDS)
@pytest.mark.timeout(900)  # compilation takes minutes
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_bf16_compiled_equals_eager(
    checkpoint: str, num_ranks: int, expert_parallel: int, tmp_path: Path
) -> None:
    """Losses and gradient norms of four steps on partitioned trees agree within the rounding of bf16."""
    options = {"training__dtype": "bfloat16", "training__activation_checkpoint": checkpoint, **CUT}
    options["data__max_tokens"] = 40
    rows = []
    for compile in (False, True):
        name = f"compile {compile}"
        made = config(tmp_path, name, expert_parallel, training__compile=compile, **options)
        launch(num_ranks, made)
        rows.append(read_metrics(made))
    for eager, compiled in zip(*rows, strict=True):
        for column in ("loss", "grad_norm"):
            assert float(compiled[column]) == pytest.approx(float(eager[column]), rel=2e-2), column
