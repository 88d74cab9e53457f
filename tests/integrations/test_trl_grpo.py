"""TRL's GRPO on trees beside the stock trainer: equal samples, losses, metrics and weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.trl_runs import (
    ACCUMULATE,
    LOSSES,
    ON_RANKS,
    Run,
    assert_equal,
    cases,
    grpo,
    save_model,
    with_tool,
)

pytest.importorskip("trl")

from tests.support.processes import as_rank, run_ranks
from titan_tree.integrations.tree_view import RowForest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trl")]  # importing trl takes ten seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_five_steps_equal_those_of_grpo_trainer(folder: Path) -> None:
    stock, tree = (grpo(folder, tree, loss_type="dapo", max_steps=5) for tree in (None, {}))
    assert_equal(stock, tree)
    assert len(tree.losses) == 5
    steps = [tree.rows[start : start + 8] for start in range(0, 40, 8)]
    for rows, log in zip(steps, tree.logs, strict=True):
        prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        assert log["tree/distinct_tokens"] == len(prefixes)
        assert log["tree/row_tokens"] == sum(map(len, rows)) > 2 * len(prefixes)


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
CASES: dict[str, dict[str, Any]] = {
    **LOSSES,
    "sequence level": {"loss_type": "grpo", "num_iterations": 2, **SEQUENCE},
    "reference model": {"loss_type": "grpo", "beta": 0.1},
    "LoRA": {"loss_type": "grpo", "beta": 0.1, "peft": True},
    "truncated rows": {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True},
    "tool mask": {"loss_type": "dapo", "rollout": with_tool, "max_completion_length": 32},
    "rewards over the batch": {"loss_type": "grpo", "scale_rewards": "batch"},
    "rewards as they are": {"loss_type": "grpo", "scale_rewards": "none"},
    "temperature": {"loss_type": "dapo", "temperature": 0.7},
    "entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.1},
    "entropy quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.5, **ACCUMULATE},
    "accumulation": {"loss_type": "grpo", **ACCUMULATE},
    "mean over micro-batches": {"loss_type": "bnpo", **ACCUMULATE},
    "truncated rows, mean over micro-batches": {
        "loss_type": "bnpo",
        "beta": 0.1,
        "num_iterations": 2,
        "mask_truncated_completions": True,
        **ACCUMULATE,
    },
    "two generations per step": {
        "loss_type": "dapo",
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
    },
    "entropy bonus, accumulation": {"loss_type": "grpo", "entropy_coef": 0.1, **ACCUMULATE},
    "two steps per generation": {"loss_type": "dapo", "steps_per_generation": 4, **ACCUMULATE},
    "uneven last step": {  # an epoch has 16 micro-batches
        "loss_type": "dapo",
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 6,
        "per_device_train_batch_size": 4,
    },
    "LoRA, checkpointing, two iterations, accumulation": {
        "loss_type": "grpo",
        "beta": 0.1,
        "num_iterations": 2,
        "gradient_checkpointing": True,
        "peft": True,
        **ACCUMULATE,
    },
    "checkpointing": {"loss_type": "dapo", "gradient_checkpointing": True, "peft": True},
    "reentrant checkpointing": {
        "loss_type": "dapo",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


LONG_TAIL = ("temperature", "reentrant checkpointing", "bnpo", "mean over micro-batches")
LONG_TAIL += ("two steps per generation", "uneven last step", "truncated rows")
LONG_TAIL += ("rewards over the batch", "rewards as they are")
LONG_TAIL += ("dr_grpo", "sapo", "vespo", "luspo")  # TRL computes the losses


@pytest.fixture(scope="module")
def stock(folder: Path) -> Callable[[str, int], Run]:
    """Returns the run of the stock trainer for a case and a number of steps. Each is trained once."""
    return functools.cache(lambda name, steps: grpo(folder, **CASES[name], max_steps=steps))


@pytest.mark.parametrize(("name", "max_tokens", "steps"), cases(CASES, LONG_TAIL, ("sequence level", "LoRA")))
def test_grpo(
    folder: Path, stock: Callable[[str, int], Run], name: str, max_tokens: int | None, steps: int
) -> None:
    """In partitions, at most 30 tokens run at once, and a row has 30 to 44. Logged metrics are equal, too."""
    tree = grpo(folder, {"max_tokens": max_tokens}, **CASES[name], max_steps=steps)
    assert_equal(stock(name, steps), tree)


def test_the_rows_of_a_step_are_one_forest(folder: Path) -> None:
    """TRL spreads the groups of 4 rows over the 4 micro-batches of a step. One forward pass has them all."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2}
    modes: list[list[bool]] = []

    def record_modes(trainer: Any) -> None:
        layer = trainer.model.model.layers[0]
        set_mode, of_run = layer.train, list[bool]()
        layer.train = lambda mode=True: of_run.append(mode) or set_mode(mode)
        modes.append(of_run)

    stock, tree = (
        grpo(folder, tree, loss_type="dapo", prepare=record_modes, **options) for tree in (None, {})
    )
    assert_equal(stock, tree)
    assert len(tree.losses) == 8
    # In 3 of 4 micro-batches of 2 steps, no module runs.
    assert modes[0].count(True) - modes[1].count(True) == 2 * 3
    assert modes[0].count(False) == modes[1].count(False)
    for rows, log, passes in zip((tree.rows[:16], tree.rows[16:]), tree.logs, tree.passes, strict=True):
        assert passes == 1
        assert log["tree/distinct_tokens"] == len(
            {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        )
        assert log["tree/row_tokens"] == sum(map(len, rows))


def test_all_log_probs_of_a_generation_share_one_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old, reference and current ones, in two iterations. TRL shuffles the rows in between."""
    forests: list[RowForest] = []

    def make(*args: Any) -> RowForest:
        forests.append(plain(*args))
        return forests[-1]

    plain = RowForest.make
    monkeypatch.setattr(RowForest, "make", make)
    options = {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "max_steps": 4, **ACCUMULATE}
    stock, tree = (grpo(folder, tree, **options) for tree in (None, {}))
    assert_equal(stock, tree)
    assert len(forests) == 2  # generations
    assert tree.passes == [3, 1, 3, 1]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.exhaustive
@pytest.mark.parametrize("max_tokens", [None, 30])
def test_compiled_layers_train_as_the_stock_trainer_does(folder: Path, max_tokens: int | None) -> None:
    """Layers share their graphs. Generation does not use them."""
    torch._dynamo.reset()
    counters.clear()
    options = {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True}
    stock, tree = (
        grpo(folder, tree, **options) for tree in (None, {"compile": True, "max_tokens": max_tokens})
    )
    assert_equal(stock, tree)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (4 if max_tokens is None else 6)


@pytest.mark.parametrize("max_tokens", [None, 30])
def test_mixed_precision_is_no_worse_than_in_the_stock_trainer(folder: Path, max_tokens: int | None) -> None:
    """bf16 is TRL's default. The reference is fp32."""
    options: dict[str, Any] = {"loss_type": "dapo", "max_steps": 1}
    exact, stock = (grpo(folder, **options | extra) for extra in ({}, {"bf16": True}))
    tree = grpo(folder, {"max_tokens": max_tokens}, **options, bf16=True)

    def error(run: Run) -> float:
        return sum(float((p - exact.weights[name]).square().sum()) for name, p in run.weights.items()) ** 0.5

    assert exact.rows == tree.rows
    assert 0 < error(tree) < 1.2 * error(stock)


def train_on_ranks(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(rank, 2, ports[0]):
        for options in ON_RANKS:
            stock = grpo(folder, **options)
            assert stock.trainer.accelerator.num_processes == 2
            for max_tokens in (None, 30):
                tree = grpo(folder, {"max_tokens": max_tokens}, **options)
                assert type(tree.trainer.model_wrapped).__name__ == "DistributedDataParallel"
                assert_equal(stock, tree)
        own = torch.cat([p.flatten() for p in tree.weights.values()])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        assert torch.equal(*both)
        lists: list[Any] = [None, None]
        dist.all_gather_object(lists, tree.rows)
        assert lists[0] != lists[1]
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_train_as_the_stock_trainer_does(folder: Path) -> None:
    """Every loss, and LoRA, with accumulation and a reference model, in one pass and in partitions."""
    run_ranks(train_on_ranks, 2, folder)
