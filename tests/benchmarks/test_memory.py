"""Tests the sizes of the tensors that `python -m benchmarks memory` reports."""

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.memory import tensor_bytes
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def test_tensors_of_edges_pairs_and_plans_are_counted() -> None:
    paths = [TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 3, 5, 6]), TokenPath([1, 2, 7])]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])  # 6 edges, 9 pairs, 3 paths
    edges = (batch.edge_source, batch.edge_label, batch.edge_number, batch.edge_temperature)
    assert tensor_bytes(edges) == 6 * 3 * 8
    assert tensor_bytes(batch.pairs) == 9 * (8 + 8 + 4) + 3 * (8 + 8 + 3 * 4)
    assert tensor_bytes({None: (torch.zeros(3), [torch.zeros(2, dtype=torch.int8)], "plan")}) == 14


@pytest.mark.slow
def test_a_push_is_timed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert main(["memory", "--quick", "--push", str(folder), "--csv", str(tmp_path / "rows.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.partition(":")[0] for line in lines[::2]] == ["each rank its share", "rank 0 alone"]
    assert all(line.startswith("  host memory of ranks: 0.0") for line in lines[1::2])
    assert list(tmp_path.iterdir()) == []
