"""Bad steps change nothing, are counted and explained, and end a run after several of them in a row."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.optimizers import plain_state
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_loss.spec import LossSpec
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.run.config import Config
from titan_tree.run.trainer import Trainer
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

PROMPT = [1, 2, 3, 4]
ORDERED: dict[str, Any] = {
    "data__shuffle_buffer": 0,
    "data__global_batch_groups": 1,
    "loss__name": f"{__name__}:unbounded",
    "training__steps": 4,
}
INFINITE = {"old_logprobs": [0, 0, 0, 0, -1e4, -1e4], "advantage": -1.0}
EMPTY = {"loss_mask": [0] * 6}


def unbounded(logprobs: torch.Tensor, pairs: PathPairs) -> torch.Tensor:
    """Overflows. The losses of the package bound their ratios."""
    assert pairs.advantage is not None
    return -pairs.advantage * (logprobs - pairs.old_logprobs).exp()


unbounded_paths = LossSpec(unbounded, needs_whole_paths=True)


def write_steps(path: Path, *changes: dict[str, Any]) -> Path:
    """Writes one group of three samples per step. ``changes`` replace fields of its second sample."""
    with path.open("w") as file:
        for group, change in enumerate(changes):
            for i in range(3):
                fields = {
                    "group_id": f"g{group}",
                    "id": f"s{i}",
                    "tokens": [*PROMPT, 10 + group, 20 + i],
                    "loss_mask": [0, 0, 0, 0, 1, 1],
                    "advantage": 1.0 - i,
                    "old_logprobs": [0.0, 0.0, 0.0, 0.0, -4.0, -4.0],
                }
                is_changed = i == 1 or change is EMPTY
                file.write(json.dumps(fields | (change if is_changed else {})) + "\n")
    return path


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Returns copies of all weights, buffers and optimizer states."""
    values = [*trainer.model.state_dict().values(), *plain_state(trainer.optimizers)]
    return [value.detach().clone() for value in values]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (INFINITE, "loss is inf and grad_norm is nan; paths with a loss .* not finite: g1/s1; check"),
        (EMPTY, "the loss counts no token of this step's global batch"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer__name": "adamw8bit", "model__overrides__intermediate_size": 128},
        {"model__name": "qwen3_moe", "router_bias__rate": 0.01, "router_loss__balance": 0.1},
        {"data__max_tokens": 6, "partition__strategy": "redundancy_free"},
        {"data__max_tokens": 6, "loss__name": f"{__name__}:unbounded_paths", "training__dtype": "bfloat16"},
    ],
    ids=["dense", "8-bit", "experts", "partitions", "whole paths"],
)
def test_a_bad_step_changes_only_the_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], change: dict, cause: str
) -> None:
    data = write_steps(tmp_path / "steps.jsonl", {}, change, {}, {})
    config = tiny_config(tmp_path, **ORDERED | options, data__files=data)
    caplog.set_level(logging.INFO, "titan_tree")
    trainer, states = Trainer(config), []
    train_step = trainer.train_step

    def recorded_step(inputs: Any) -> None:
        train_step(inputs)
        states.append(state(trainer))
        assert all(p.grad is None for p in trainer.model.parameters())

    trainer.train_step = recorded_step  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    (line,) = [line for line in caplog.messages if "is skipped" in line]
    assert line.startswith("step 2 is skipped: ")
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert not torch.equal(states[1][0], states[2][0])  # the next step trains again
    assert re.search(cause, line), line
    rows = read_metrics(config)
    assert [row["bad_steps"] for row in rows] == ["", "1", "", ""]
    assert [bool(row["loss"]) for row in rows] == [True, False, True, True]
    assert trainer.progress.step == 4
    assert trainer.optimizer_step.good_steps == 3
    assert any(line.endswith("; skipped 1 bad step") for line in caplog.messages)


def test_a_step_whose_paths_are_all_finite_names_its_trees(tmp_path: Path, caplog: Any) -> None:
    """After a step with a huge learning rate, log-probs are finite, but their gradients are not."""
    config = tiny_config(tmp_path, optimizer__lr=1e30, training__steps=3)
    with pytest.raises(UserError, match="2 of 3 steps were skipped"):
        train(config)
    (line, _) = [line for line in caplog.messages if "is skipped" in line]
    assert re.search(r"step 2 .*every single path is finite; the first paths of .* trees: g\d/\d+, g\d", line)


@pytest.mark.parametrize(
    ("options", "last_step"),
    [({}, 4), ({"training__max_bad_steps": 1}, 2), ({"training__max_bad_steps": 2}, 3)],
)
def test_too_many_bad_steps_in_a_row_end_the_run(
    tmp_path: Path, options: dict[str, Any], last_step: int
) -> None:
    data = write_steps(tmp_path / "steps.jsonl", {}, INFINITE, EMPTY, INFINITE)
    config = tiny_config(tmp_path, **ORDERED, **options, data__files=data, checkpoint__interval=1)
    limit = options.get("training__max_bad_steps", 3)
    line = rf"^step {last_step}: .*after {limit} bad steps? in a row, .* from .*step-{last_step - 1}$"
    with pytest.raises(UserError, match=line):
        train(config)
    assert len(read_metrics(config)) == last_step - 1


def test_bad_steps_between_good_ones_do_not_end_the_run(tmp_path: Path) -> None:
    data = write_steps(tmp_path / "steps.jsonl", INFINITE, {}, EMPTY, {})
    trainer = train(tiny_config(tmp_path, **ORDERED, training__max_bad_steps=2, data__files=data))
    assert trainer.optimizer_step.bad_steps == 2
    assert [row["bad_steps"] for row in read_metrics(trainer.config)] == ["1", "", "2", ""]


@pytest.mark.filterwarnings("error")
def test_a_run_in_which_no_step_trains_ends_with_an_error(tmp_path: Path) -> None:
    data = write_steps(tmp_path / "steps.jsonl", EMPTY, EMPTY)
    with pytest.raises(UserError, match=r"^step 2: the loss counts no token of this step's global batch"):
        train(tiny_config(tmp_path, **ORDERED | {"training__steps": 2}, data__files=data))


# Two ranks: only the second group of a step, which rank 1 trains on, is bad.
PAIRS: dict[str, dict[str, Any]] = {
    "whole paths": {"data__max_tokens": 6, "loss__name": f"{__name__}:unbounded_paths"},
    "experts": {"model__name": "qwen3_moe", "router_bias__rate": 0.01, "parallel__expert_parallel": 2},
}


def pair_config(folder: Path, name: str, **options: Any) -> Config:
    folder = folder / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "steps.jsonl"
    if not data.exists():  # another rank may be reading the file
        write_steps(data, {}, {}, {}, INFINITE, EMPTY, EMPTY, {}, {})
    fixed = {"data__global_batch_groups": 2, "checkpoint__interval": 4, "optimizer__eps": 1e-3}
    return tiny_config(folder, **ORDERED | fixed | PAIRS[name] | options, data__files=data)


def warnings_of(messages: list[str]) -> list[str]:
    return [message for message in messages if "is skipped" in message]


def train_pairs(rank: int, ports: list[int], folder: Path) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan_tree").addHandler(handler)
    for name, port in zip(PAIRS, ports, strict=True):
        with as_rank(rank, 2, port):
            assert train(pair_config(folder, name)).optimizer_step.bad_steps == 2
        (folder / f"{name}-{rank}.json").write_text(json.dumps(warnings_of(lines)))
        lines.clear()


@pytest.mark.slow
def test_two_ranks_skip_the_same_steps_as_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in PAIRS:
        pair_config(tmp_path / "two", name)  # writes the data before two processes read it
    run_ranks(train_pairs, 2, tmp_path / "two", num_groups=len(PAIRS))
    for name in PAIRS:
        alone = {"parallel__expert_parallel": 1}
        caplog.clear()
        one = train(pair_config(tmp_path / "one", name, **alone))
        lines = warnings_of(caplog.messages)
        assert [line.partition(" is skipped")[0] for line in lines] == ["step 2", "step 3"]
        assert re.search(r"not finite: g3/s1; check", lines[0]), lines
        assert json.loads((tmp_path / "two" / f"{name}-0.json").read_text()) == lines
        assert json.loads((tmp_path / "two" / f"{name}-1.json").read_text()) == []
        two = train(pair_config(tmp_path / "two", name, **alone))  # no step is left
        assert not two.optimizer_step.good_steps
        for (label, ours), theirs in zip(
            two.model.state_dict().items(), one.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=f"{name}: {label}")


@pytest.mark.parametrize("whole_paths", [False, True])
@pytest.mark.parametrize("partitioner", [None, TreePartitioner("redundancy_free", 4)])
def test_the_cause_may_be_in_any_tree_of_any_micro_batch(
    partitioner: TreePartitioner | None, whole_paths: bool
) -> None:
    """The loss is finite, but its derivative is not: the square root has none at advantage 0."""
    register_loss("root", whole_paths)(lambda logprobs, pairs: (pairs.advantage * -logprobs).sqrt())

    def trees(bad: set[str]) -> list[list[TokenTree]]:
        def path(name: str, last: int) -> TokenPath:
            fields = {"advantage": 0.0 if name in bad else 1.0, "loss_mask": [0, 1, 1, 0, 1]}
            return TokenPath([1, 2, 3, 4, last], id=name, **fields)

        def tree(name: str, size: int) -> TokenTree:
            return TokenTree.from_paths([path(f"{name}{i}", 5 + i) for i in range(size)])

        return [[tree("a", 2)], [tree("b", 1), tree("c", 5)], [tree("d", 2), tree("e", 3)]]

    model = build_model("qwen3", "debug", vocab_size=16)
    step = TreeStep(model, TreeLoss("root"), partitioner=partitioner)
    for bad, listed in (
        ({"c3"}, "c3"),
        ({"a1", "c0", "d0"}, "a1, c0, d0"),
        ({"a0", "b0", "c0", "c1", "c4", "d1", "e2"}, "a0, b0, c0, c1, c4 and 2 more"),
    ):
        expected = f"paths with a loss or a derivative that is not finite: {listed}"
        assert step.find_cause(step.prepare(trees(bad))) == expected
        assert all(p.grad is None for p in model.parameters())
    expected = (
        "the loss of every single path is finite; the first paths of the step's trees: a0, b0, c0, d0, e0"
    )
    assert step.find_cause(step.prepare(trees(set()))) == expected
