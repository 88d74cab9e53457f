"""Tests what `titan-tree bench real` computes from the metrics of two runs."""

from pathlib import Path

import pytest

from titan_tree.bench.real import compared, read_metrics, total
from titan_tree.errors import UserError

COMMON = {"step": 1.0, "loss": 2.0}
TREE = COMMON | {"step_s": 1.0, "executed_tokens": 10.0, "mfu": 0.4, "peak_memory_gib": 3.0}
ROWS = COMMON | {"step_s": 5.0, "executed_tokens": 80.0, "mfu": 0.5, "peak_memory_gib": 4.0, "loss": 2.5}


def test_the_speed_up_is_compared_with_tokens_and_operations() -> None:
    row = total([TREE, TREE], [ROWS, ROWS])
    assert (row["speed-up"], row["tokens x"], row["operations x"]) == (5.0, 8.0, 6.25)
    assert row["of operations"] == 0.8
    assert (row["tree MFU"], row["rows MFU"]) == (0.4, 0.5)
    assert (row["tree GiB"], row["rows GiB"]) == (3.0, 4.0)
    assert row["loss difference"] == "2.0e-01"


def test_each_step_has_a_row_with_both_losses() -> None:
    first, second = compared([TREE, TREE | {"step": 2.0, "step_s": 2.0}], [ROWS, ROWS | {"step": 2.0}])
    assert (first["step"], first["tree loss"], first["rows loss"]) == (1, 2.0, 2.5)
    assert (first["speed-up"], second["speed-up"]) == (5.0, 2.5)


def test_metrics_may_lack_values_but_no_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,validation_loss,bad_steps\n1,2.5,,\n2,2.0,3.0,\n")
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2, "validation_loss": 3}]
    path.write_text(path.read_text() + "3,,,1\n")
    with pytest.raises(UserError, match=r"expected the loss of every step, but step 3 was skipped; see the"):
        read_metrics(path)
