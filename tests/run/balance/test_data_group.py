"""Ranks share the trees of a step: every tree reaches its owner once, and every error reaches all ranks.

The ranks are threads of this process, each with a gloo group of its own.
"""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch.distributed as dist

from tests.data.test_token_store import assert_same_tree
from tests.support.cases import slow_except
from tests.support.datasets import tree_dataset
from tests.support.tiny_run import write_groups
from titan_tree.data.packing import MicroBatches
from titan_tree.errors import LostRankError, UserError
from titan_tree.run.balance.assignment import Assignment, assign_freely, assign_in_step
from titan_tree.run.balance.data_group import DataAddress, DataGroup
from titan_tree.run.balance.sharing import BalancedSharing
from titan_tree.tree.costs import TreeCosts, tree_sizes
from titan_tree.tree.token_tree import TokenTree

T = TypeVar("T")
COSTS = TreeCosts(token=1e-3, visible_pair=1e-6, edge=1e-4, chunk=1e-3, pixel=0, pixel_pair=0, forward=0.05)
NUM_STEPS = 4


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


def addresses(store: dist.TCPStore, num_ranks: int, timeout_s: float = 60) -> list[DataAddress]:
    return [
        DataAddress(
            host="127.0.0.1",
            port=store.port,
            prefix="data",
            rank=rank,
            num_ranks=num_ranks,
            start_timeout_s=60,
            timeout_s=timeout_s,
            start_steps=1,
        )
        for rank in range(num_ranks)
    ]


def on_ranks(store: dist.TCPStore, num_ranks: int, function: Callable[[DataAddress], T]) -> list[T]:
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(function, addresses(store, num_ranks)))


def test_bytes_of_any_length_reach_every_rank(store: dist.TCPStore) -> None:
    def content(sender: int, receiver: int) -> bytes:
        return bytes([sender, receiver]) * (1000 * sender * receiver)

    def run(address: DataAddress) -> None:
        group, rank = DataGroup(address, 0), address.rank
        for _ in range(2):
            assert group.gather(lambda: rank, lambda r: content(r, 7)) == (
                rank,
                [content(r, 7) for r in range(3)],
            )
            parts = group.exchange([content(rank, r) for r in range(3)])
            assert parts == [content(r, rank) for r in range(3)]

    on_ranks(store, 3, run)


def test_an_error_of_one_rank_reaches_all(store: dist.TCPStore) -> None:
    def run(address: DataAddress) -> str:
        def make() -> bytes:
            if address.rank:
                raise UserError(f"é.jsonl:{address.rank}: wrong")
            return b"fine"

        group = DataGroup(address, 0)
        with pytest.raises(UserError) as error:
            group.gather(make, bytes)
        assert not isinstance(error.value, LostRankError)
        return str(error.value)

    assert on_ranks(store, 3, run) == ["é.jsonl:1: wrong"] * 3


@pytest.mark.parametrize(
    ("hangs", "reason"), [(False, "Connection (closed|reset) by peer"), (True, "Timed out waiting 500ms")]
)
def test_a_lost_rank_is_one_line(store: dist.TCPStore, hangs: bool, reason: str) -> None:
    """Rank 1 takes part in one step. Then it ends, or it does not come to the next step in time."""

    def run(address: DataAddress) -> None:
        group = DataGroup(dataclasses.replace(address, timeout_s=0.5), 3)
        group.gather(bytes, bytes)
        if address.rank:
            time.sleep(3 * hangs)
            return
        started = time.monotonic()
        with pytest.raises(LostRankError, match=rf"rank 0: data worker 3 cannot .*: .*{reason}.*; the data"):
            group.gather(bytes, bytes)
        assert time.monotonic() - started < 3

    on_ranks(store, 2, run)


def test_workers_wait_for_costs_and_get_the_same_bits(store: dist.TCPStore) -> None:
    costs = TreeCosts(*np.random.default_rng(0).random(7))

    def run(address: DataAddress) -> None:
        if address.rank == 0:
            time.sleep(0.3)
            address.publish_costs(4, costs)
        group = DataGroup(address, 0)
        assert TreeCosts(*group.costs(4)) == costs
        group.gather(bytes, bytes)  # the other rank may still be connecting

    on_ranks(store, 2, run)


def shared_steps(
    address: DataAddress, file: Path, ranks_per_owner: int, options: dict[str, Any], splits: bool = False
) -> tuple[list[MicroBatches], int]:
    """Returns a rank's steps, and the number of groups that it has read."""
    if address.rank == 0:
        address.publish_costs(0, COSTS)
    sharing = BalancedSharing(
        address,
        options["max_tokens"],
        ranks_per_owner=ranks_per_owner,
        splits=splits,
    )
    data = tree_dataset(file, allow_larger=True, rank=address.rank, world_size=address.num_ranks, **options)
    read: list[Any] = []
    paths = data.reader.paths
    data.reader.paths = lambda group: (read.append(group), paths(group))[1]  # type: ignore[method-assign]
    return list(sharing.steps(data, NUM_STEPS)), len(read)


def reference(file: Path, options: dict[str, Any], num_owners: int) -> Iterator[list[MicroBatches]]:
    """Yields each owner's micro-batches of each step, from one process and the assignment of all trees."""
    whole = tree_dataset(file, allow_larger=True, **options)
    for micro_batches in whole.steps(NUM_STEPS):
        trees = sorted(itertools.chain(*micro_batches), key=key)
        sizes = tree_sizes(trees)
        assign = assign_freely if max(map(len, trees)) > options["max_tokens"] else assign_in_step
        assignment: Assignment = assign(sizes, COSTS, num_owners, options["max_tokens"])
        yield [[[trees[i] for i in chosen] for chosen in owner] for owner in assignment]


def key(tree: TokenTree) -> Any:
    return sorted((path.id, path.tokens.tolist()) for path in tree.paths)


def load(micro_batches: MicroBatches) -> float:
    return float(COSTS.seconds(tree_sizes(list(itertools.chain(*micro_batches)))).sum())


@pytest.mark.parametrize("ranks_per_owner", slow_except([2], [1, 2]))
@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_groups": 7, "max_tokens": 70},
        {"global_batch_groups": 7, "max_tokens": 30},
        {"global_batch_groups": 1, "max_tokens": 70},
        {"global_batch_groups": 6, "max_tokens": 90, "merge": "batch"},
        {"global_batch_groups": 6, "max_tokens": 90, "layout": "flat"},
    ],
    ids=str,
)
def test_owners_train_on_all_trees_of_a_step(
    store: dist.TCPStore, tmp_path: Path, options: dict[str, Any], ranks_per_owner: int
) -> None:
    options = options | {"shuffle_buffer": 4}
    file = write_groups(tmp_path / "x.jsonl")
    results = on_ranks(store, 4, lambda address: shared_steps(address, file, ranks_per_owner, options))
    steps, num_read = zip(*results, strict=True)
    assert sum(num_read) == NUM_STEPS * options["global_batch_groups"]  # nothing is read twice
    owners = [steps[rank] for rank in range(0, 4, ranks_per_owner)]
    for rank in range(4):  # the ranks of an owner get the same trees
        for ours, theirs in zip(steps[rank], owners[rank // ranks_per_owner], strict=True):
            assert [list(map(key, trees)) for trees in ours] == [list(map(key, trees)) for trees in theirs]
    for step, expected in enumerate(reference(file, options, len(owners))):
        ours = sorted((t for owner in owners for t in itertools.chain(*owner[step])), key=key)
        theirs = sorted((t for owner in expected for t in itertools.chain(*owner)), key=key)
        for tree, same in zip(ours, theirs, strict=True):
            assert_same_tree(tree, same)
        loads = [sorted(load(owner[step]) for owner in owners), sorted(map(load, expected))]
        assert max(loads[0]) == pytest.approx(max(loads[1]), rel=0.15)  # equal but for the order of trees


@pytest.mark.parametrize("ranks_per_owner", slow_except([1], [1, 2]))
@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_groups": 3, "max_tokens": 2000},
        {"global_batch_groups": 3, "max_tokens": 40},
        {"global_batch_groups": 3, "max_tokens": 2000, "merge": "batch"},
    ],
    ids=str,
)
def test_a_large_tree_is_split_over_owners(
    store: dist.TCPStore,
    tmp_path: Path,
    options: dict[str, Any],
    ranks_per_owner: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every path is on one owner, all ranks make the same plan, and rank 0 says so once."""
    file, options = write_large_group(tmp_path / "x.jsonl"), options | {"shuffle_buffer": 0}
    results = on_ranks(store, 4, lambda address: shared_steps(address, file, ranks_per_owner, options, True))
    steps = [steps for steps, _ in results]
    owners = [steps[rank] for rank in range(0, 4, ranks_per_owner)]
    for rank in range(4):
        for ours, theirs in zip(steps[rank], owners[rank // ranks_per_owner], strict=True):
            for trees, same in zip(ours, theirs, strict=True):
                assert list(map(key, trees)) == list(map(key, same))
    whole = tree_dataset(file, allow_larger=True, **options).steps(NUM_STEPS)
    for step, expected in enumerate(whole):
        units = [tree for owner in owners for tree in itertools.chain(*owner[step])]
        trees = list(itertools.chain(*expected))
        assert paths_of(units) == paths_of(trees)
        assert sum(unit.is_counted for unit in units) == len(trees)
        assert sum(unit.counted_tokens for unit in units) == sum(map(len, trees)) < sum(map(len, units))
        loads = [load(owner[step]) for owner in owners]
        assert max(loads) < 0.8 * max(map(load, [[[tree]] for tree in trees]))  # no rank has all of it
    (message,) = [record.getMessage() for record in caplog.records if "split into" in record.getMessage()]
    assert re.match(
        r"a tree of [\d,]+ tokens is split into [2-9] pieces, because other ranks would wait", message
    )


def write_large_group(path: Path) -> Path:
    """Writes groups of 8, 24 and 1 paths. With four owners, two of them are candidates for a split."""
    lines = [
        {"group_id": group, "id": i, "tokens": [*range(20), group, i, *range(60)]}
        for group, number in enumerate((8, 24, 1))
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def paths_of(trees: Iterable[TokenTree]) -> list[Any]:
    return sorted((path.id, path.tokens.tolist()) for tree in trees for path in tree.paths)


def test_ranks_wait_for_a_tree_that_stays_whole(
    store: dist.TCPStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_large_group(tmp_path / "x.jsonl")
    options = {"global_batch_groups": 3, "max_tokens": 2000, "shuffle_buffer": 0}
    results = on_ranks(store, 2, lambda address: shared_steps(address, file, 1, options, splits=False))
    assert sorted(len(trees) for steps, _ in results for trees in steps[0]) == [1, 2]
    (record,) = caplog.records
    assert re.match(
        r"other ranks wait for a tree of 1,485 tokens, which takes 1\.\d times", record.getMessage()
    )
    assert record.getMessage().endswith("a larger parallel.sequence_parallel would share its tokens")


@pytest.mark.parametrize("merge", ["group", "batch"])
def test_unused_records_do_not_travel(store: dist.TCPStore, tmp_path: Path, merge: str) -> None:
    """They may be of different models."""
    file = tmp_path / "x.jsonl"
    lines = [
        {"group_id": i // 2, "tokens": [1, i + 2], "routed_experts": [[[0]] * (1 + i % 2)] * 2}
        for i in range(8)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"global_batch_groups": 4, "max_tokens": 3, "merge": merge}
    results = on_ranks(store, 4, lambda address: shared_steps(address, file, 1, options))
    paths = [path for steps, _ in results for trees in steps[0] for tree in trees for path in tree.paths]
    assert sorted(path.tokens.tolist() for path in paths) == [[1, i + 2] for i in range(8)]


def test_a_bad_line_of_one_rank_is_the_error_of_all(store: dist.TCPStore, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    lines = [{"tokens": [1, 2]}, {"tokens": [1, "x"]}, {"tokens": [1, 3]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(address: DataAddress) -> str:
        with pytest.raises(UserError) as error:
            shared_steps(address, file, 1, {"global_batch_groups": 3, "max_tokens": 9, "shuffle_buffer": 0})
        return str(error.value)

    messages = on_ranks(store, 3, run)
    assert messages[0].startswith(f"{file}:2: tokens[1]: expected an integer")
    assert len(set(messages)) == 1
