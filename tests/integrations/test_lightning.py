"""A run with Lightning equals one of the trainer bit for bit; it resumes exactly, and refuses misuse."""

import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch.multiprocessing import ProcessExitedException

from tests.support.hf_families import hf_family
from tests.support.lightning_run import expected, fit, lightning_trainer, logged, weights_of
from tests.support.processes import run_ranks
from tests.support.tiny_run import tiny_config, train, write_groups
from titan_tree import Trainer
from titan_tree.distributed.settings import OPTIMIZERS, OptimizerSpec
from titan_tree.errors import UserError
from titan_tree.integrations.lightning import TreeCheckpoints, TreeDataModule, TreeLightningModule
from titan_tree.integrations.lightning_callbacks import callback_states, load_callback_states
from titan_tree.models.settings import ModelConfig
from titan_tree.run.build import build_step_loader
from titan_tree.run.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lightning")]

MOE = {
    "model__name": "qwen3_moe",
    "router_bias__rate": 0.01,
    "router_loss__balance": 0.1,
    "training__dtype": "bfloat16",
}
EPOCHS = {"training__steps": "null", "training__epochs": 2, "data__global_batch_groups": 4}
# Group 4 has no loss. Its step is bad before the optimizer, of which "sgd" is not fused, sees it.
BAD_STEP = {"data__global_batch_groups": 1, "training__steps": 9, "optimizer__name": "sgd"}
# The loss is not finite from the second step on, which the fused kernel of AdamW skips.
NOT_FINITE = {"optimizer__lr": 1e30, "training__max_bad_steps": 4}


def partitions(folder: Path, **options: Any) -> Config:
    """Returns the configuration of 20 steps with partitions and validation."""
    folder.mkdir(exist_ok=True)
    held_out = folder / "held_out.jsonl"
    if not held_out.exists():
        write_groups(held_out, num_groups=3, seed=1)
    validation = {"validation__files": held_out, "validation__interval": 6}
    fixed = {"training__steps": 20, "data__max_tokens": 24, "optimizer__lr": 4e-3}
    return tiny_config(folder, **fixed | validation | options)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, torch.Tensor]]:
    """Returns the configuration and the weights of a run of the trainer with partitions."""
    config = partitions(tmp_path_factory.mktemp("runs") / "native")
    return config, weights_of(train(config).model)


def assert_equal_weights(module: TreeLightningModule, theirs: dict[str, torch.Tensor]) -> None:
    assert module.model is not None
    for name, ours in weights_of(module.model).items():
        assert torch.equal(ours, theirs[name]), name


def test_lightning_equals_the_trainer(tmp_path: Path, native: tuple[Config, dict[str, torch.Tensor]]) -> None:
    """All logged values and the weights are the same."""
    config, weights = native
    trainer = lightning_trainer(tmp_path)
    module = fit(config, trainer)
    assert trainer.global_step == 20
    want, got = expected(config), logged(tmp_path)
    assert len(want) == 20
    assert [step for step in want if "validation_loss" in want[step]] == [6, 12, 18, 20]
    for step in want:
        assert got[step] == want[step], step
    assert trainer.callback_metrics["validation_loss"] == want[20]["validation_loss"]
    assert_equal_weights(module, weights)


class KillAfter(L.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(rank: int, ports: list[int], folder: Path, config: Config) -> None:
    fit(config, lightning_trainer(folder, KillAfter(11)))


def test_a_killed_run_resumes_exactly(tmp_path: Path, native: tuple[Config, dict[str, torch.Tensor]]) -> None:
    config, weights = native
    with pytest.raises(ProcessExitedException, match="signal SIGKILL"):
        run_ranks(train_until_killed, 1, tmp_path / "a", config)
    checkpoint = tmp_path / "a" / "checkpoints" / "step=9.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["titan_tree"]
    assert json.loads(json.dumps(saved)) == saved  # plain types
    module = fit(config, lightning_trainer(tmp_path / "b"), checkpoint)
    want, got = expected(config), logged(tmp_path / "b")
    assert list(got) == list(range(10, 21))
    assert all(got[step] == want[step] for step in got)
    assert_equal_weights(module, weights)

    # After the last step, nothing is left. The files of another run are refused.
    last = tmp_path / "c.ckpt"
    module.trainer.save_checkpoint(last)
    again = lightning_trainer(tmp_path / "d")
    assert_equal_weights(fit(config, again, last), weights)
    assert again.global_step == 20
    with pytest.raises(UserError, match=r"data\.seed: the checkpoint was written with 0, but it is now 1"):
        fit(partitions(tmp_path / "e", data__seed=1), lightning_trainer(tmp_path / "e"), checkpoint)


@pytest.mark.parametrize("options", [MOE, EPOCHS, BAD_STEP, NOT_FINITE], ids=lambda o: next(iter(o)))
def test_other_runs_equal_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Router biases, epochs, and both kinds of bad steps, which count as steps. Most steps must be good."""
    OPTIMIZERS.register("sgd", OptimizerSpec(import_class=lambda: torch.optim.SGD))
    config = tiny_config(tmp_path, checkpoint__export_hf=options is EPOCHS, **options)
    theirs = Trainer(config)
    ends = pytest.raises(UserError, match="were skipped") if options is NOT_FINITE else nullcontext()
    with ends:
        theirs.train()
    want = expected(config)
    assert any("bad_steps" in values for values in want.values()) == (options in (BAD_STEP, NOT_FINITE))
    export = Path(config.folder) / "hf" / "model.safetensors"
    exported = export.read_bytes() if options is EPOCHS else b""
    trainer = lightning_trainer(tmp_path)
    with ends:
        fit(config, trainer)
    assert trainer.global_step == theirs.num_steps
    got = logged(tmp_path)
    for values in got.values():
        if "loss" in values:  # Lightning repeats the number of bad steps
            values.pop("bad_steps", None)
    assert got == want
    assert_equal_weights(trainer.lightning_module, theirs.model.state_dict())
    assert options is not EPOCHS or export.read_bytes() == exported


def test_a_resume_with_another_batch_size_trains_the_rest_of_the_epochs(tmp_path: Path) -> None:
    """9 groups, 2 epochs. The first has 3 steps of 3 groups, and the second 5 steps of 2 groups."""
    options = {"training__steps": "null", "training__epochs": 2, "lr_scheduler__warmup_steps": 0}
    options |= {"checkpoint__interval": 3, "checkpoint__allow_changes": True}
    first = train(tiny_config(tmp_path, data__global_batch_groups=3, **options))
    shutil.rmtree(Path(first.config.folder) / "checkpoints" / "step-6")
    config = tiny_config(tmp_path, data__global_batch_groups=2, **options)
    trainer = lightning_trainer(tmp_path, callbacks=[TreeCheckpoints()])
    module = fit(config, trainer)
    assert (module.num_steps, trainer.global_step, module.progress.data["epoch"]) == (8, 8, 1)
    got = logged(tmp_path)
    assert list(got) == list(range(4, 9))
    expected_lr = [config.optimizer.lr * (1 + math.cos(math.pi * (step - 1) / 8)) / 2 for step in got]
    assert [values["lr"] for values in got.values()] == pytest.approx(expected_lr, rel=1e-6)


def test_steps_continue_in_the_next_epoch_of_lightning(tmp_path: Path) -> None:
    """Lightning asks for a new iterator over the data every 3 steps, having fetched one step more."""
    config = tiny_config(tmp_path, training__steps=7)
    train(config)
    fit(config, lightning_trainer(tmp_path, limit_train_batches=3))
    want, got = expected(config), logged(tmp_path)
    assert [got[step]["loss"] for step in want] == [want[step]["loss"] for step in want]


def test_too_many_bad_steps_end_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, optimizer__lr=1e30, training__max_bad_steps=2)
    with pytest.raises(UserError, match=r"step 3: .* is nan.* after 2 bad steps in a row"):
        fit(config, lightning_trainer(tmp_path))


def test_a_model_of_transformers_equals_the_trainer(tmp_path: Path) -> None:
    hf_family("qwen3", pad_token_id=None).save_pretrained(tmp_path / "snapshot")
    config = tiny_config(tmp_path, data__max_tokens=70)
    config.model = ModelConfig(hf_path=str(tmp_path / "snapshot"), implementation="transformers")
    theirs = train(config)
    module = fit(config, lightning_trainer(tmp_path))
    assert logged(tmp_path) == expected(config)
    assert len(logged(tmp_path)) == 4
    assert_equal_weights(module, theirs.model.state_dict())


def test_with_lora_checkpoints_hold_only_the_adapter(tmp_path: Path) -> None:
    """The run, its adapter and a resume equal the trainer's. Another base model is refused."""
    lora = {"lora__rank": 4, "lora__targets": "[q_proj,experts.down_proj]", "lora__alpha": 7}
    lora |= {"model__name": "qwen3_moe", "router_bias__rate": 0.01, "training__activation_checkpoint": "full"}
    config = tiny_config(tmp_path, training__steps=6, optimizer__lr=0.01, **lora)
    theirs = weights_of(train(config).model)
    adapter = Path(config.folder) / "adapter"
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    trainer = lightning_trainer(tmp_path / "a")
    assert_equal_weights(fit(config, trainer), theirs)
    assert logged(tmp_path / "a") == expected(config)
    assert adapter.with_name("adapter.earlier").is_dir()
    assert {file.name: file.read_bytes() for file in adapter.iterdir()} == files
    checkpoint = tmp_path / "a" / "checkpoints" / "step=3.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    names = saved["state_dict"].keys()
    assert all("_lora_" in name or name.endswith("e_score_correction_bias") for name in names)
    assert len(names) == 2 * (2 * 2 + 1)
    assert len(saved["optimizer_states"][0]["state"]) == 2 * 2 * 2

    assert_equal_weights(fit(config, lightning_trainer(tmp_path / "b"), checkpoint), theirs)
    assert list(logged(tmp_path / "b")) == [4, 5, 6]
    other = tiny_config(tmp_path, training__steps=6, training__seed=1, **lora)
    with pytest.raises(
        UserError, match=r"base = random weights, training\.seed 0 \(now .*seed 1\)"
    ) as caught:
        fit(other, lightning_trainer(tmp_path / "c"), checkpoint)
    assert "\n" not in str(caught.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clip_val": 1.0}, r"gradient_clip_val: expected None, got 1\.0; set optimizer\.max_grad_norm"),
    ({"accumulate_grad_batches": 4}, r"accumulate_grad_batches: .* got 4; set data\.global_batch_groups"),
    ({"precision": "bf16-mixed"}, r"precision: expected '32-true', got 'bf16-mixed'; set training\.dtype"),
    ({"devices": 2, "strategy": DDPStrategy}, r"strategy: expected ModelParallelStrategy .* 'DDPStrategy'"),
    ({"strategy": ModelParallelStrategy}, r"strategy: expected 'auto' on one rank, .* remove it"),
    ({"val_check_interval": 5}, r"val_check_interval: .* or 6, got 5; set validation\.interval"),
    ({}, r"deterministic: expected True, got False; set it"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:20])
def test_settings_that_contradict_the_configuration_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    # As if torchrun had started this process. Lightning would otherwise start the second one, from the
    # command line of the tests, and kill this process as soon as the other one failed.
    monkeypatch.setenv("LOCAL_RANK", "0")
    if strategy := options.get("strategy"):
        options = options | {"strategy": strategy()}
    config = partitions(tmp_path, training__deterministic=not options)
    with pytest.raises(UserError, match=rf"lightning\.Trainer: {message}") as caught:
        fit(config, lightning_trainer(tmp_path, **options))
    assert "\n" not in str(caught.value)


def test_16_mixed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning itself refuses it on a CPU."""
    trainer = lightning_trainer(tmp_path)
    monkeypatch.setattr(trainer.precision_plugin, "precision", "16-mixed", raising=False)
    with pytest.raises(UserError, match="precision: expected '32-true', got '16-mixed'"):
        fit(tiny_config(tmp_path), trainer)


def test_module_and_data_module_belong_together(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    module, data = TreeLightningModule(config), TreeDataModule(config)
    with pytest.raises(UserError, match="expected a TreeDataModule, got NoneType; pass"):
        lightning_trainer(tmp_path).fit(module, [0])
    with pytest.raises(UserError, match="expected a TreeLightningModule, got BoringModel; pass"):
        lightning_trainer(tmp_path).fit(
            import_module("lightning.pytorch.demos.boring_classes").BoringModel(), data
        )


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "titan_tree.integrations.lightning")
    with pytest.raises(
        UserError, match=r"needs the package lightning .*run pip install 'titan_tree\[lightning\]'"
    ):
        import_module("titan_tree.integrations.lightning")


def test_wrong_data_end_a_run_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(*arguments: Any) -> Iterator[Any]:
        yield from islice(build_step_loader(*arguments), 2)
        raise UserError("data.jsonl:7: wrong")

    monkeypatch.setattr("titan_tree.integrations.lightning.build_step_loader", loader)
    newest = tmp_path / "run" / "checkpoints" / "step-2"
    ended = f"data.jsonl:7: wrong; the run ended after step 2; the same command continues from {newest}"
    with pytest.raises(UserError, match=f"^{re.escape(ended)}$"):
        fit(tiny_config(tmp_path, checkpoint__interval=100), lightning_trainer(tmp_path, TreeCheckpoints()))
    assert newest.is_dir()


class Elapsed(Timer):
    """Counts 100 seconds for each step."""

    steps = 0

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        return 100.0 * self.steps + self._offset if stage == RunningStage.TRAINING else 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


def test_a_resume_continues_averages_and_states_of_callbacks(tmp_path: Path) -> None:
    """A run that ends early and is resumed equals one without a break, in both kinds of checkpoints."""
    write_groups(tmp_path / "held_out.jsonl", num_groups=3, seed=1)
    validation = {"validation__files": tmp_path / "held_out.jsonl", "validation__interval": 2}
    ended = {}
    for name, interval, stops in (("whole", 10, [-1]), ("ends early", 10, [2, -1]), ("interval", 2, [3, -1])):
        options = {
            "checkpoint__interval": interval,
            "optimizer__lr": 0.01,
            "training__steps": 6,
            **validation,
        }
        config = tiny_config(tmp_path / name, **options)
        for stop in stops:
            stopping = EarlyStopping("validation_loss", patience=99, mode="max")  # counts every validation
            callbacks = [EMAWeightAveraging(decay=0.5), Elapsed("01:00:00:00"), stopping, TreeCheckpoints()]
            trainer = lightning_trainer(tmp_path / name, callbacks=callbacks, max_steps=stop)
            if stop == -1 and name == "interval":  # the run was killed after step 3
                shutil.rmtree(tmp_path / name / "run" / "checkpoints" / "step-3")
            module = fit(config, trainer)
        losses = {step: values["loss"] for step, values in logged(tmp_path / name).items() if step > 3}
        states = stopping.state_dict(), callbacks[1].time_elapsed()
        ended[name] = weights_of(module.model), losses, states
    weights, losses, states = ended["whole"]
    assert losses.keys() == {4, 5, 6}
    assert states[0]["wait_count"] == 2
    assert states[1] == 600
    for name in ("ends early", "interval"):
        assert ended[name][1:] == (losses, states), name
        for key, average in ended[name][0].items():
            assert torch.equal(average, weights[key]), (name, key)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([StochasticWeightAveraging(0.1)], "got 'StochasticWeightAveraging'; use EMAWeightAveraging"),
        (
            [LearningRateFinder()],
            "expected none that trains to search, got 'LearningRateFinder'; compare short",
        ),
        (
            [EMAWeightAveraging(), WeightAveraging()],
            "at most one .* got 'EMAWeightAveraging, WeightAveraging'",
        ),
    ],
)
def test_a_callback_that_would_train_something_else_is_refused(
    callbacks: list[L.Callback], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"callbacks: .*{message}"):
        fit(tiny_config(tmp_path), lightning_trainer(tmp_path, *callbacks))


def test_a_state_that_contains_itself_is_refused() -> None:
    class Endless(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = {}
            return state | {"again": [state.setdefault("state", state)]}

    with pytest.raises(UserError, match="the state of a callback contains itself, or is nested too deeply"):
        callback_states([Endless()], None, torch.nn.Linear(1, 1), {})


def test_states_with_equal_paths_are_kept_apart() -> None:
    class Slashes(L.Callback):
        loaded: ClassVar[dict[str, Any]] = {}

        def state_dict(self) -> dict[str, Any]:
            return {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded.update(state_dict)

    callback, module, tensors = Slashes(), torch.nn.Linear(1, 1), dict[str, torch.Tensor]()
    saved = json.loads(json.dumps(callback_states([callback], None, module, tensors)))
    load_callback_states([callback], None, module, saved, tensors)
    assert callback.loaded == callback.state_dict()


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Odd(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path}

    config = tiny_config(tmp_path, checkpoint__interval=2)
    with pytest.raises(
        UserError, match=r"^lightning/callbacks/.*Odd.*/path: expected numbers, .* got PosixPath"
    ):
        fit(config, lightning_trainer(tmp_path, callbacks=[Odd(), TreeCheckpoints()]))


def test_another_batch_size_with_a_checkpoint_of_lightning_trains_the_rest(tmp_path: Path) -> None:
    options = {"training__steps": "null", "training__epochs": 2, "checkpoint__allow_changes": True}
    fit(tiny_config(tmp_path, data__global_batch_groups=3, **options), lightning_trainer(tmp_path / "a"))
    config = tiny_config(tmp_path, data__global_batch_groups=18, lr_scheduler__warmup_steps=4, **options)
    trainer = lightning_trainer(tmp_path / "b")
    fit(config, trainer, tmp_path / "a" / "checkpoints" / "step=3.ckpt")
    assert trainer.global_step == 4
    assert logged(tmp_path / "b")[4]["lr"] == pytest.approx(config.optimizer.lr, rel=1e-6)
