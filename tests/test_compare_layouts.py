"""Tests the summary of scripts/compare_layouts.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import compare_layouts


def test_the_speed_up_is_compared_with_tokens_and_operations() -> None:
    common = {"step": 1.0, "loss": 2.0}
    tree = common | {"step_s": 1.0, "executed_tokens": 10.0, "mfu": 0.4}
    leaf = common | {"step_s": 5.0, "executed_tokens": 80.0, "mfu": 0.5}
    cold = {name: 100 * value for name, value in tree.items()}  # a step of the warm-up
    lines = compare_layouts.summary({"tree": [cold, tree, tree], "leaf": [cold, leaf, leaf]}, warmup=1)
    assert "speed-up over one row per leaf path: 5.00x, 62.5% of the ratio of executed tokens, 8.00x" in lines
    assert "80.0% of the ratio of operations, 6.25x" in lines
