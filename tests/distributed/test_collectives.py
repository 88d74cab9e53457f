"""Collective operations over two ranks, and the ranks of tests themselves."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.processes import process_group, run_ranks
from titan_tree.distributed.collectives import all_reduce_max, all_reduce_named, all_reduce_sum, world_size


def check_collectives(rank: int, ports: list[int]) -> None:
    with process_group(rank, 2, ports[0]):
        assert world_size() == 2
        values = torch.tensor([1.0 + rank, 5.0 - rank])
        assert all_reduce_sum(values).tolist() == [3.0, 9.0]
        assert all_reduce_max(values).tolist() == [2.0, 5.0]
        assert values.tolist() == [1.0 + rank, 5.0 - rank]
        sums = (
            {"nll": torch.tensor(2.0), "count": torch.tensor(3)} if rank == 0 else {"entropy": torch.ones(())}
        )
        loss, total = all_reduce_named(torch.tensor(0.5), sums)
        assert loss == 1.0
        assert {name: value.item() for name, value in total.items()} == {"count": 3, "entropy": 1, "nll": 2}
        assert list(total) == ["count", "entropy", "nll"]
        assert all(value.dtype == torch.float32 for value in total.values())


def test_ranks_may_sum_different_names() -> None:
    run_ranks(check_collectives, 2)


def test_one_rank_gets_its_values_back() -> None:
    assert world_size() == 1
    loss, sums = torch.ones(()), {"nll": torch.ones(())}
    assert all_reduce_sum(loss) is all_reduce_max(loss) is loss
    assert all_reduce_named(loss, sums) == (loss, sums)


def leave_behind(rank: int, ports: list[int], folder: Path) -> None:
    assert os.environ.setdefault("LEFT_BEHIND", f"{ports}") == f"{ports}"
    (folder / f"{rank}-{os.getpid()}").touch()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_a_session_keeps_ranks_that_forget(tmp_path: Path, start: str) -> None:
    for _ in range(2):
        run_ranks(leave_behind, 2, tmp_path, start=start)
    assert len(list(tmp_path.iterdir())) == 2
