"""Ranks that share the tokens of trees train as one GPU in fp32, and compiled as in eager mode in bf16.

To debug without GPUs, run the same code on gloo with TITAN_TREE_ON_CPU=1.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import SMALL, read_metrics, tiny_config, train
from titan_tree.run.config import Config

ON_CPU = os.environ.get("TITAN_TREE_ON_CPU") == "1"
pytestmark = pytest.mark.slow if ON_CPU else [pytest.mark.gpu]
CUT: dict[str, Any] = {"data__max_tokens": 12}
CASES: dict[str, dict[str, Any]] = {
    "micro-batches": {"data__max_tokens": 70},
    "partitions": CUT,
    "hybrid": {**CUT, **SMALL["qwen3_5"]},
    "experts": {**CUT, **EXPERTS, "parallel__expert_parallel": 2},
}
# Head dims that the Hopper kernels support.
COMPILED: dict[str, dict[str, Any]] = {
    "dense": {"training__activation_checkpoint": "selective", "model__overrides__head_dim": 64},
    "hybrid": {
        **SMALL["qwen3_5"],
        "model__overrides__head_dim": 64,
        "model__overrides__linear_key_head_dim": 64,
        "model__overrides__linear_value_head_dim": 64,
    },
}


def config(folder: Path, options: dict[str, Any], **more: Any) -> Config:
    return tiny_config(folder, checkpoint__interval=4, optimizer__eps=1e-3, **options | more)


def run(rank: int, ports: list[int], made: Config) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with as_rank(rank, 2, ports[0]):
        train(made)


def launch(made: Config) -> None:
    if not ON_CPU and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run_ranks(run, 2, made, start="spawn")


@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_one_gpu(name: str, tmp_path: Path) -> None:
    """Losses, gradient norms, and weights after four steps are equal within 1e-5."""
    many = config(tmp_path / "many", CASES[name], parallel__sequence_parallel=2)
    launch(many)
    alone = config(tmp_path / "one", CASES[name] | {"parallel__expert_parallel": 1})
    assert_same_run(many, train(alone))


@pytest.mark.timeout(900)  # compilation takes minutes
@pytest.mark.parametrize("name", COMPILED)
def test_bf16_compiled_equals_one_gpu(name: str, tmp_path: Path) -> None:
    """Losses and gradient norms of four steps on partitioned trees agree within the rounding of bf16."""
    options = {**COMPILED[name], "training__dtype": "bfloat16", "data__max_tokens": 40}
    many = config(tmp_path / "many", options, parallel__sequence_parallel=2, training__compile=True)
    launch(many)
    one = config(tmp_path / "one", options)
    train(one)
    for ours, theirs in zip(read_metrics(many), read_metrics(one), strict=True):
        for column in ("loss", "grad_norm"):
            assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=2e-2), column
