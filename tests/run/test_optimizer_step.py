"""Where the time of a step goes; log-probs in data files that the model cannot have computed are noticed."""

import json
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR

from tests.support.cases import for_each
from tests.support.tiny_run import VOCAB, tiny_config, train
from titan_tree.distributed.settings import OPTIMIZERS
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.run import model_setup
from titan_tree.run.metrics.step_metrics import METRICS
from titan_tree.run.optimizer_step import OptimizerStep
from titan_tree.scoring.score_trees import tree_logprobs


def test_a_gradient_that_stays_zero_and_repeated_groups_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantage": 0}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    options = {"loss__name": "reinforce", "training__steps": 12, "metrics__loggers": "[csv]"}
    train(tiny_config(tmp_path, **options, data__global_batch_groups=2))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "data.global_batch_groups: 2, but the data have only 1 group, so each step repeats groups; set it "
        "to at most 1",
        "steps 1 to 5: the gradient is 0, so nothing is learned; check that advantages are not all 0 (groups "
        "whose rewards are equal), and that ratios are not all clipped",
    ]


def test_a_run_that_cannot_fit_is_refused_before_its_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model__overrides": "{}", "model__flavor": "8B", "optimizer__name": "adamw"}
    monkeypatch.setattr(model_setup, "host_memory", lambda: 122.0 * 2**30)
    message = r"8,190,735,360 parameters need at least 122 GiB .* the 122 GiB of"
    with pytest.raises(UserError, match=message) as error:
        train(tiny_config(tmp_path, **options))
    (advised,) = re.findall(r"optimizer\.name=(\w+)", str(error.value))
    assert advised in OPTIMIZERS
    with torch.device("meta"):
        model = build_model("qwen3", "8B")
    config = tiny_config(tmp_path, **options)
    assert model_setup.least_bytes(config, model) == 16 * 8_190_735_360


@for_each(
    ("given", "got"),
    [
        (lambda own: own - 0.4, ""),  # as after some steps of training: KL 0.09
        (
            lambda own: own - 1.0,
            r"with a KL divergence of (\S+) nats per token from them; check that they are",
        ),
        (lambda own: own / math.log(2), r"that seem to have base 2; multiply them by 0.6931"),
        (lambda own: own / math.log(10), r"that seem to have base 10; multiply them by 2.3026"),
    ],
)
def test_logprobs_of_a_file_are_compared_with_those_of_the_first_step(
    given: Callable[[Tensor], Tensor],
    got: str,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    caplog.clear()
    kl = write_rollouts(folder / "data.jsonl", given)
    config = tiny_config(folder, loss__name="ppo", training__steps=2, metrics__loggers="[csv]")
    train(config)
    warnings = [record.getMessage() for record in caplog.records if "log-probs" in record.getMessage()]
    assert len(warnings) == bool(got)
    for warning in warnings:
        found = re.match(rf"step 1: old_logprobs: expected .*, got values {got}", warning)
        assert found is not None, warning
        assert [float(value) for value in found.groups()] in ([], [pytest.approx(kl, rel=0.01)])


def write_rollouts(path: Path, given: Callable[[Tensor], Tensor]) -> float:
    """Writes the groups of one step, with ``given(log-probs of the untrained model)`` as old_logprobs.

    Returns:
        The KL divergence of the definition, averaged over all counted tokens.
    """
    model = build_model("qwen3", "debug", vocab_size=VOCAB, hidden_size=32, head_dim=16)
    model.init_weights(tiny_config(path.parent).training.seed)
    draw, records, terms = random.Random(0), [], []
    for group in range(3):
        for _ in range(2):
            tokens = draw.choices(range(VOCAB), k=12)
            with torch.no_grad():
                (own,) = tree_logprobs(model, [tokens])
            old = given(own)
            record = {
                "group_id": str(group),
                "tokens": tokens,
                "loss_mask": [0] * 6 + [1] * 6,
                "advantage": 1.0,
            }
            records.append(record | {"old_logprobs": [0.0, *old.tolist()]})
            terms += [math.expm1(log_ratio) - log_ratio for log_ratio in (own - old)[5:].tolist()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return sum(terms) / len(terms)


def test_the_shares_of_a_step_are_what_a_clock_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s pass before the step starts, 5 s in its passes, 0.5 s in the optimizer, and 0.5 s after it."""
    now = [10.0]
    weight = torch.nn.Parameter(torch.ones(2))

    def advance(seconds: float) -> None:
        now[0] += seconds

    def passes(step_input: Any, sizes: Any) -> Any:
        advance(5.0)
        weight.grad = torch.ones(2)
        counts = SimpleNamespace(leaf_tokens=32, executed_tokens=16)
        return SimpleNamespace(loss=torch.ones(()), loss_metrics={}, counts=counts)

    def finish_step(*_: Any, **__: Any) -> dict[str, float]:
        advance(0.5)
        return {}

    optimizer = torch.optim.SGD([weight])
    optimizer.register_step_post_hook(lambda *_: advance(0.5))
    step: Any = OptimizerStep(
        tree_step=cast(Any, SimpleNamespace(device=torch.device("cpu"), model=torch.nn.Module(), run=passes)),
        optimizers=[optimizer],
        lr_schedulers=[ConstantLR(optimizer)],
        router_bias=None,
        balancing=cast(Any, SimpleNamespace(start_step=int, finish_step=finish_step)),
        max_grad_norm=1.0,
        seed=0,
        max_bad_steps=1,
    )
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    report = step.run(1, None, None, epoch=0, started=8.0)
    assert METRICS["speed"](report) == {
        "leaf_tokens_per_s": 4.0,
        "executed_tokens_per_s": 2.0,
        "step_s": 8.0,
        "passes_share": 5 / 8,
        "optimizer_share": 1 / 16,
        "host_share": 5 / 16,
    }
