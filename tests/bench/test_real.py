"""Tests what `titan-tree bench real` computes from the metrics of two runs."""

from titan_tree.bench.real import compared, total

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
