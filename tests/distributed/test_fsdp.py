"""Two ranks with different trees train exactly as one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import tiny_config, train
from titan_tree.engine import activations
from titan_tree.run.config import Config

# With three groups per step, rank 0 has two groups and rank 1 has one; with one group, rank 1 has none. The
# trees of a rank do not fit one micro-batch of 70 tokens, so the ranks have different numbers of
# micro-batches. All trees but one exceed 24 tokens, so their numbers of partitions differ too.
CUT: dict[str, Any] = {"data__max_tokens": 24}
ONE_GROUP: dict[str, Any] = {"data__global_batch_groups": 1}
MICRO_BATCHES: dict[str, Any] = {"data__max_tokens": 70}
CASES: dict[str, dict[str, Any]] = {
    "reduce after every micro-batch": {**MICRO_BATCHES, "parallel__reduce_gradients": "every"},
    "merged trees": {"data__max_tokens": 90, "data__merge": "batch"},
    "offload": {**CUT, "partition__activations": "offload"},
    # The MLPs are wide enough for 8-bit states in some shards. Quantization blocks are those of one rank.
    "8-bit states": {
        **MICRO_BATCHES,
        "model__overrides__intermediate_size": 256,
        "optimizer__name": "adamw8bit",
    },
    "experts": {**MICRO_BATCHES, **EXPERTS},
    "experts, partitions of one rank": {**CUT, **ONE_GROUP, **EXPERTS},
}


def config(folder: Path, name: str) -> Config:
    # A large eps: otherwise AdamW turns rounding errors of gradients near 0 into steps of size lr.
    fixed = {"training__steps": 2, "checkpoint__interval": 2, "optimizer__eps": 1e-3}
    folder = folder / name.replace(" ", "_")
    validation = {"validation__files": folder / "data.jsonl", "validation__interval": 1}
    return tiny_config(folder, **fixed, **validation, **CASES[name])


EVERYDAY = ("merged trees", "experts")


def train_case(rank: int, ports: list[int], folder: Path, name: str) -> None:
    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BLOCK_BYTES", 64)  # the tensors of the model are tiny
        train(config(folder, name))


@pytest.mark.parametrize("name", slow_except(EVERYDAY, CASES))
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    many = config(tmp_path / "two", name)  # writes the data before two processes read it
    run_ranks(train_case, 2, tmp_path / "two", name)
    # A gradient's rounding error may move a state to the next 8-bit code. The weight then differs by a
    # fraction of its step, which is about 1e-3.
    atol = 1e-4 if name == "8-bit states" else 1e-6
    assert_same_run(many, train(config(tmp_path / "one", name)), atol)
