"""python -m benchmarks quality: both choices of paths take equal steps on the same tasks."""

import json

import pytest

from benchmarks import quality
from titan_tree.cli.bench import parse
from titan_tree.rl.environment import Desk


def test_demonstrations_are_written_with_all_their_turns(tmp_path):
    file = tmp_path / "tasks.jsonl"
    quality.write_demonstrations(Desk(), file, ["a", "b"])
    lines = list(map(json.loads, file.read_text().splitlines()))
    assert [line["id"] for line in lines] == ["a", "b"]
    for line in lines:
        assert len(line["trajectories"]) == 4
        for path in line["trajectories"]:
            said = [t for t, m in zip(path["tokens"], path["loss_mask"], strict=True) if m]
            turns = quality.TOKENIZER.decode(said).split("<|im_end|>")
            assert turns[0].startswith("?")
            assert turns[1].isdecimal()


@pytest.mark.slow
def test_both_choices_take_equal_steps_on_the_same_tasks(tmp_path):
    """Every task is trained once: all its distinct tokens, or those of its longest path."""
    rows = list(quality.run(parse(quality, "quality", ["--quick", "--seeds", "1"])))
    assert [(row["paths"], row["seed"]) for row in rows] == [
        *(("all", 0), ("longest", 0), ("all", "mean"), ("longest", "mean")),
    ]
    assert [(row["steps"], row["groups"]) for row in rows] == [(4, 2)] * 4
    quality.write_demonstrations(Desk(), tmp_path / "tasks.jsonl", [f"train/{task}" for task in range(8)])
    tokens = {"all": 0, "longest": 0}
    for line in map(json.loads, (tmp_path / "tasks.jsonl").read_text().splitlines()):
        paths = [path["tokens"] for path in line["trajectories"]]
        tokens["all"] += len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})
        tokens["longest"] += max(map(len, paths))
    for row in rows:
        assert row["k tokens"] == pytest.approx(tokens[row["paths"]] / 1e3, abs=0.051)
        assert 4 < row["NLL"] < 6  # almost untrained: ln 282 = 5.6
        assert 0.5 < row["demonstrations"] < 1
    for seed, mean in zip(rows[:2], rows[2:], strict=True):
        assert mean == seed | {"seed": "mean", "s.e.": 0.0}
