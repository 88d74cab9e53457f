"""Two ranks with different trees train exactly as one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import SMALL, tiny_config, train
from titan_tree.config import Config
from titan_tree.engine import activations

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("fsdp")]

# With three groups per step, rank 0 has two groups and rank 1 has one; with one group, rank 1 has none. The
# trees of a rank do not fit one micro-batch of 70 tokens, so the ranks have different numbers of
# micro-batches. No tree fits 12 tokens, so their numbers of partitions differ too.
CUT: dict[str, Any] = {"data__max_tokens": 12}
ONE_GROUP: dict[str, Any] = {"data__global_batch_groups": 1}
MICRO_BATCHES: dict[str, Any] = {"data__max_tokens": 70}
CASES: dict[str, dict[str, Any]] = {
    "reduce after the last micro-batch": MICRO_BATCHES,
    "reduce after every micro-batch": {**MICRO_BATCHES, "parallel__reduce_gradients": "every"},
    "merged trees": {"data__max_tokens": 90, "data__merge": "batch"},
    "one group": ONE_GROUP,
    "partitions": CUT,
    "offload": {**CUT, "partition__activations": "offload"},
    "recompute": {**CUT, "partition__activations": "recompute"},
    "partitions of one rank": {**CUT, **ONE_GROUP},
    "hybrid": {**CUT, **SMALL["qwen3_5"]},
    # The MLPs are wide enough for 8-bit states in some shards. Quantization blocks are those of one rank.
    "8-bit states": {
        **MICRO_BATCHES,
        "model__overrides__intermediate_size": 256,
        "optimizer__name": "adamw8bit",
    },
    "experts": {**MICRO_BATCHES, **EXPERTS},
    "experts, one group": {**ONE_GROUP, **EXPERTS},
    "experts, partitions": {**CUT, **EXPERTS},
    "experts with biases": {**MICRO_BATCHES, "router_bias__rate": 1e-2, **EXPERTS},
    "experts, partitions of one rank": {**CUT, **ONE_GROUP, **EXPERTS},
}


def config(folder: Path, name: str) -> Config:
    # A large eps: otherwise AdamW turns rounding errors of gradients near 0 into steps of size lr.
    fixed = {"training__steps": 3, "checkpoint__interval": 3, "optimizer__eps": 1e-3}
    folder = folder / name.replace(" ", "_")
    validation = {"validation__files": folder / "data.jsonl", "validation__interval": 1}
    return tiny_config(folder, **fixed, **validation, **CASES[name])


def train_all_cases(rank: int, ports: list[int], folder: Path) -> None:
    activations.MIN_BLOCK_BYTES = 64  # the tensors of the model are tiny
    for name, port in zip(CASES, ports, strict=True):
        with as_rank(rank, 2, port):
            train(config(folder, name))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all cases, trained by two processes."""
    folder = tmp_path_factory.mktemp("two_ranks")
    for name in CASES:
        config(folder, name)  # writes the data before two processes read it
    run_ranks(train_all_cases, 2, folder, num_groups=len(CASES))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(two_ranks: Path, tmp_path: Path, name: str) -> None:
    # A gradient's rounding error may move a state to the next 8-bit code. The weight then differs by a
    # fraction of its step, which is about 1e-3.
    atol = 1e-4 if name == "8-bit states" else 1e-6
    assert_same_run(config(two_ranks, name), train(config(tmp_path, name)), atol)
