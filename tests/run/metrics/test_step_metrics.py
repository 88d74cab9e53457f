"""The values of a step: their names, their order and their definitions."""

import dataclasses
from typing import Any

import pytest
import torch

from titan_tree.distributed import titan
from titan_tree.engine.step_io import StepCounts, StepResult
from titan_tree.errors import UserError
from titan_tree.run.metrics import StepReport, step_values
from titan_tree.run.metrics.step_metrics import METRICS

COUNTS = StepCounts(
    normalizer=1.0,
    loss_weight=1.0,
    advantage=0.0,
    advantage_square=0.0,
    num_trees=2,
    num_paths=4,
    logical_tokens=100,
    leaf_tokens=80,
    distinct_tokens=40,
    executed_tokens=50,
    split_tokens=0,
    scored_edges=38,
    forwards=3,
    gateway_bytes=2**29,
    flops=6e12,
    replayed_token_layers=0,
    disagreeing_token_layers=0,
    chain_peak=30,
)
RESULT = StepResult(
    loss=torch.tensor(0.5),
    loss_metrics={"nll": torch.tensor(0.25)},
    routing=None,
    router_metrics={"router_z": torch.tensor(4.0)},
    counts=COUNTS,
    extra_forward_tokens=torch.tensor(7),
    dummy_forwards=torch.tensor(1),
)
REPORT = StepReport(
    result=RESULT,
    seconds=2.0,
    passes_seconds=1.25,
    exchange_seconds=0.25,
    optimizer_seconds=0.25,
    world_size=2,
    device=torch.device("cpu"),
    loss=0.5,
    grad_norm=3.0,
    lr=1e-3,
    epoch=4,
    validation={},
)


def test_values_are_the_columns_of_metrics_csv_in_order() -> None:
    assert list(step_values(REPORT).items()) == [
        ("loss", 0.5),
        ("grad_norm", 3.0),
        ("lr", 1e-3),
        ("epoch", 4),
        ("por", 0.5),
        ("por_samples", 0.6),
        ("err", 0.375),
        ("logical_tokens", 100),
        ("leaf_tokens", 80),
        ("executed_tokens", 50),
        ("scored_edges", 38),
        ("forwards", 3),
        ("chain_peak_tokens", 30),
        ("gateway_gib", 0.5),
        ("extra_forward_tokens", 7.0),
        ("dummy_forwards", 1.0),
        ("leaf_tokens_per_s", 40.0),
        ("executed_tokens_per_s", 25.0),
        ("step_s", 2.0),
        ("passes_share", 0.625),
        ("optimizer_share", 0.125),
        ("exchange_share", 0.125),
        ("host_share", 0.125),
        ("nll", 0.25),
        ("router_z", 4.0),
    ]


def test_validation_adds_its_values() -> None:
    values = step_values(dataclasses.replace(REPORT, validation={"loss": 0.75, "accuracy": 0.5}))
    assert list(values.items())[-2:] == [("validation_loss", 0.75), ("validation_accuracy", 0.5)]


def test_a_step_that_replays_experts_reports_the_share_on_which_paths_disagree() -> None:
    counts = dataclasses.replace(COUNTS, replayed_token_layers=8, disagreeing_token_layers=2)
    report = dataclasses.replace(REPORT, result=dataclasses.replace(RESULT, counts=counts))
    names = list(values := step_values(report))
    assert names[names.index("host_share") :] == [
        "host_share",
        "replayed_rows",
        "replay_disagreement",
        "nll",
        "router_z",
    ]
    assert (values["replayed_rows"], values["replay_disagreement"]) == (8, 0.25)


def test_a_gpu_reports_utilization_of_all_gpus_and_its_own_peak_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(titan, "peak_flops", lambda name: 1e12)
    values = METRICS["gpu"](dataclasses.replace(REPORT, device=torch.device("cuda", 0)))
    assert values == {"mfu": 6e12 / 2.0 / (2 * 1e12), "peak_memory_gib": 3.0}


def test_a_registered_metric_precedes_those_of_the_loss() -> None:
    METRICS.register("mine", lambda report: {"paths": 4, "trees": torch.tensor(2.0)})
    values = step_values(REPORT)
    assert list(values)[-4:] == ["paths", "trees", "nll", "router_z"]
    assert (str(values["paths"]), str(values["trees"])) == ("4", "2.0")


@pytest.mark.parametrize("taken", ["loss", "por", "step", "bad_steps"])
def test_a_metric_with_a_name_in_use_is_refused(taken: str) -> None:
    METRICS.register("mine", lambda report: {taken: 1.0})
    with pytest.raises(UserError, match=f"metric 'mine': returns a value called '{taken}'"):
        step_values(REPORT)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mine": "1"}, "metric 'mine': mine: expected a number, got '1'"),
        ({"mine": None}, "metric 'mine': mine: expected a number, got None"),
        ({"mine": torch.ones(2)}, "metric 'mine': mine: expected a number, got tensor"),
        (None, "metric 'mine': expected numbers by name, got None"),
    ],
)
def test_a_metric_that_returns_no_numbers_is_refused(value: Any, message: str) -> None:
    METRICS.register("mine", lambda report: value)
    with pytest.raises(UserError, match=f"^{message}"):
        step_values(REPORT)


@pytest.mark.parametrize("taken", ["loss", "por", "step", "bad_steps"])
def test_a_loss_metric_with_a_name_in_use_is_refused(taken: str) -> None:
    result = dataclasses.replace(RESULT, loss_metrics={taken: torch.tensor(1.0)})
    with pytest.raises(UserError, match=f"loss: returns a value called '{taken}'"):
        step_values(dataclasses.replace(REPORT, result=result))


def without_arguments() -> dict[str, float]:
    return {}


def test_a_metric_that_fails_is_one_line() -> None:
    expected = r"^metric 'mine', called with \(report\): TypeError: .* takes 0 positional"
    with METRICS.registered("mine", without_arguments), pytest.raises(UserError, match=expected):
        step_values(REPORT)
