"""Ranks that communicate within a forward pass run the same schedule."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from titan_tree.engine.schedule import equal_schedule, lineages
from titan_tree.tree.batch import TreeBatch


def test_larger_subtrees_come_first() -> None:
    """The first of two roots has a small child, and a large child with two children of its own."""
    batches = [SimpleNamespace(parent=parent) for parent in (-1, 0, 0, 2, 2, -1)]
    found = lineages(cast(list[TreeBatch], batches))
    assert found == [(0,), (0, 1), (0, 0), (0, 0, 0), (0, 0, 1), (1,)]


def test_a_schedule_is_the_union_of_all_ranks_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = [[[-1, 0, 0], [-1]], [[-1, 0, 1]], []]  # by rank, micro-batch and partition
    own = [
        [[cast(TreeBatch, SimpleNamespace(parent=parent)) for parent in tree] for tree in rank]
        for rank in parents
    ]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = [[lineages(batches) for batches in rank] for rank in own]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(
        "titan_tree.engine.schedule.dataclasses.replace", lambda batch, parent: (batch, parent)
    )
    monkeypatch.setattr("titan_tree.engine.schedule.dummy_batch", lambda share: "dummy")
    group = cast(dist.ProcessGroup, SimpleNamespace(size=lambda: 3))
    for batches in own:
        schedule = equal_schedule(batches, group, min_micro_batches=3)
        assert [[parent for _, parent in tree] for tree in schedule] == [[-1, 0, 1, 0], [-1], [-1]]
        ran = [batch for tree in schedule for batch, _ in tree if batch != "dummy"]
        assert sorted(map(id, ran)) == sorted(id(batch) for tree in batches for batch in tree)
