"""Training with Lightning: a LightningModule and a LightningDataModule for the configuration of a run.

    TreeDataModule -> (StepInput, position, sizes) -> TreeLightningModule.training_step -> logs, checkpoints

Lightning runs the loop, the loggers and the callbacks. A step is the one of ``Trainer``. ``TreeCheckpoints``
writes and resumes the checkpoints of ``Trainer``. lightning_command.py makes Lightning's Trainer from the
configuration. No other file imports lightning.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from titan_tree.components.moe.routing import RouterBias
from titan_tree.data.data_files import DataSizes
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.loader import refuse_in_worker
from titan_tree.distributed.mesh import all_ranks
from titan_tree.distributed.optimizers import Optimizers, build_lr_schedulers, build_optimizers
from titan_tree.engine.step_io import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.integrations.lightning_callbacks import callback_states, load_callback_states
from titan_tree.models.lora.adapters import leave_out_frozen
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.balance.balancing import Balancing
from titan_tree.run.build import (
    build_balancing,
    build_dataset,
    build_loss,
    build_reader,
    build_router_bias,
    build_step_loader,
    build_tokenizer,
    build_tree_step,
    build_validation,
    num_steps,
    warm_up,
)
from titan_tree.run.checkpoint import Checkpoints, Progress, export_results
from titan_tree.run.checkpoint.changes import check_architecture
from titan_tree.run.config import Config
from titan_tree.run.inputs import SynchronizedInput, next_input, synchronized_inputs
from titan_tree.run.metrics import step_values, validation_values
from titan_tree.run.model_setup import build_parallel_model, describe_architecture
from titan_tree.run.optimizer_step import OptimizerStep
from titan_tree.run.rank_facts import check_ranks
from titan_tree.run.stopping import StopController
from titan_tree.run.trainer import in_background, restore_position, score_validation

try:
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        LearningRateFinder,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as error:
    raise UserError(
        f"titan_tree.integrations.lightning needs the package lightning ({error}); "
        "run pip install 'titan_tree[lightning]'"
    ) from None

T = TypeVar("T")
STATE = "titan_tree"  # key of Lightning's checkpoints


class TreeLightningModule(L.LightningModule):
    """Trains the model that ``config`` describes, on the data of a ``TreeDataModule``.

    The steps equal those of ``Trainer``. Training ends after ``training.steps`` or ``training.epochs``, or
    earlier, if Lightning's Trainer says so. The tables [metrics] and [profiler], and without
    ``TreeCheckpoints`` also [checkpoint] except ``allow_changes`` and ``export_hf``, have no effect, because
    Lightning does this work. With LoRA, checkpoints hold only the adapter, and a finished run exports it.

    Attributes:
        model: the TreeModel, as soon as Lightning has called ``configure_model``.

    Raises:
        UserError: Lightning's Trainer has a setting that contradicts the configuration.
    """

    model: TreeModel | None
    tree_step: TreeStep
    router_bias: RouterBias | None
    balancing: Balancing | None
    optimizer_container: Optimizers
    num_steps: int  # number of steps of the whole run; -1 until ``start``
    data_sizes: DataSizes | None  # None: not counted
    progress: Progress
    stopping: StopController | None  # None without ``TreeCheckpoints``
    data_state: Future[dict[str, Any]] | None  # what ``progress`` holds of the data besides the position

    def __init__(self, config: Config) -> None:
        super().__init__()
        refuse_in_worker()
        self.automatic_optimization = False
        self.config, self.model, self.stopping, self.progress = config, None, None, Progress()
        self.data_state = None
        self._logged: set[str] = set()  # names of the values of steps
        self._optimizer_step: OptimizerStep | None = None  # made in the first step of a fit

    def configure_callbacks(self) -> list[L.Callback]:
        """Checks the settings of Lightning's Trainer, which calls this before anything else."""
        _check_trainer(self.trainer, self.config)
        if self.config.validation.files is None or not self.config.validation.interval:
            self.trainer.limit_val_batches = 0
        else:
            self.trainer.val_check_interval = self.config.validation.interval
            self.trainer.check_val_every_n_epoch = None  # counts the steps of all epochs
        return []

    def configure_model(self) -> None:
        """Builds the model, sharded by FSDP2 on several ranks."""
        if self.model is not None:  # Lightning calls this once per fit, validate, ...
            return
        config, device = self.config, self.trainer.strategy.root_device
        loss = build_loss(config.loss)
        self.mesh = all_ranks(device.type)
        check_ranks(config)
        _check_backend(self.mesh.size())
        self.model = build_parallel_model(
            config.model, config.training, config.parallel, self.mesh, config.lora
        )
        leave_out_frozen(self)  # checkpoints omit frozen weights
        self.router_bias = build_router_bias(config.router_bias, self.model)
        self.tree_step = build_tree_step(config, self.model, loss, device)
        self.balancing = build_balancing(config, self.model, loss, self.mesh, device)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its scheduler, which ``training_step`` steps."""
        config = self.config
        assert self.model is not None
        files = _data_of(self.trainer).open_dataset().reader.files
        self.data_sizes = files.sizes() if config.training.epochs is not None else None
        self._optimizer_step, self.num_steps = None, -1  # an earlier fit had others
        self.optimizer_container = build_optimizers(config.optimizer, self.model)
        # ``start`` replaces the schedule, as soon as all that a fit resumes from is loaded.
        placeholder = max(config.lr_scheduler.warmup_steps, 1)
        lr_schedulers = build_lr_schedulers(config.lr_scheduler, self.optimizer_container, placeholder)
        (optimizer,), (scheduler,) = self.optimizer_container, lr_schedulers.schedulers
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def start(self) -> TreeDataset:
        """Moves the data to the position in ``progress``, and counts the steps of the run from there."""
        config, done, dataset = self.config, self.global_step, _data_of(self.trainer).dataset
        assert dataset is not None
        if data := self.progress.data:  # the dataset may be ahead of the last step that was trained
            restore_position(dataset, dataset.state_dict() | data, config.checkpoint.allow_changes)
        self.num_steps = num_steps(config, dataset, self.data_sizes, done)
        if self.stopping:
            self.stopping.num_steps = self.num_steps
        schedule = build_lr_schedulers(config.lr_scheduler, self.optimizer_container, self.num_steps, done)
        vars(self.lr_schedulers()).update(vars(schedule.schedulers[0]))
        return dataset

    def on_train_start(self) -> None:
        if self.num_steps < 0:  # Lightning has not fetched a batch ahead
            self.start()
        self.trainer.should_stop = self.global_step >= self.num_steps  # nothing is left after a resume
        if self.config.training.compile and not self.trainer.should_stop:
            warm_up(self.config, self.tree_step)

    def training_step(self, batch: Iterator[SynchronizedInput], batch_idx: int) -> None:
        """Runs one optimizer step on the next input, and logs its values under the names of metrics.csv."""
        with self.stopping.guard_step(saves=False) if self.stopping else nullcontext():
            self._train_step(batch)
        self.trainer.should_stop |= self.progress.step >= self.num_steps

    def _train_step(self, inputs: Iterator[SynchronizedInput]) -> None:
        started = time.perf_counter()
        step_input, position, total = next_input(inputs, self.global_step + 1, self.num_steps)
        optimizer: Any = self.optimizers()  # Lightning's wrapper, whose steps are counted
        scheduler: Any = self.lr_schedulers()
        step = self.global_step + 1
        if self._optimizer_step is None:
            self._optimizer_step = OptimizerStep(
                tree_step=self.tree_step,
                optimizers=[optimizer],
                lr_schedulers=[scheduler],
                router_bias=self.router_bias,
                balancing=self.balancing,
                max_grad_norm=self.config.optimizer.max_grad_norm,
                seed=self.config.training.seed,
                max_bad_steps=min(self.config.training.max_bad_steps, self.num_steps),
            )
        report = self._optimizer_step.run(step, step_input, total, epoch=position["epoch"], started=started)
        if self.global_step < step:
            optimizer.step()  # without the gradients of a bad step, it only counts the step
        data_state = self.data_state.result() if self.data_state else {}
        self.progress.step, self.progress.data = step, data_state | position
        if self.balancing:
            self.progress.data["balance"] = self.balancing.state_dict()
        if report is None:
            # Lightning would log the values of the step before again.
            self._log(dict.fromkeys(self._logged, math.nan) | {"bad_steps": self._optimizer_step.bad_steps})
            return
        values = step_values(report)
        self._logged |= values.keys()
        self._log(values)

    def validation_step(self, inputs: list[StepInput], batch_idx: int) -> None:
        """Scores all validation files."""
        self._log(validation_values(score_validation(self.tree_step, inputs)))

    def on_train_end(self) -> None:
        """Exports the adapter of a finished run, and its weights if the configuration says so.

        Raises:
            AgreedError: most of the run's steps were bad.
        """
        if self.global_step >= self.num_steps:
            assert self.model is not None
            tokenizer = build_tokenizer(self.config.data, self.config.model.hf_path)
            export_results(self.model, self.config, secrets.token_hex(4), tokenizer)
            if self._optimizer_step:  # none if nothing was left to train
                self._optimizer_step.check_learned()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the position in the data, the balance and the architecture, as plain types."""
        if self.progress.data:
            dataset = _data_of(self.trainer).dataset
            data = ({} if dataset is None else dataset.state_dict()) | self.progress.data
            checkpoint[STATE] = {"data": data, "architecture": self.architecture()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(STATE, {})
        if before := state.get("architecture"):
            check_architecture(Path(str(self.trainer.ckpt_path)), before, self.architecture())
        self.progress.data = state.get("data", {})
        self.progress.step = checkpoint["global_step"] if self.progress.data else 0
        self.load_balance()

    def load_balance(self) -> None:
        """Continues with the balance of the checkpoint that ``progress`` comes from."""
        if self.balancing and "balance" in self.progress.data:
            self.balancing.load_state_dict(self.progress.data["balance"])

    def architecture(self) -> dict[str, Any]:
        """Returns what a run must share with the checkpoints that it resumes from, as JSON values."""
        assert self.model is not None
        return json.loads(json.dumps(describe_architecture(self.config, self.model, self.mesh)))

    def _log(self, values: dict[str, float]) -> None:
        """Logs values that are the same on all ranks. The progress bar shows loss and norm."""
        shown = {name: value for name, value in values.items() if name in ("loss", "grad_norm")}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict({name: values[name] for name in values.keys() - shown.keys()}, batch_size=1)


class TreeDataModule(L.LightningDataModule):
    """The data of ``config`` for a ``TreeLightningModule``: this rank's inputs of each optimizer step.

    Raises:
        UserError: bad data, or the data have changed since the checkpoint.
    """

    dataset: TreeDataset | None  # ahead of training

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.dataset = config, None

    def open_dataset(self) -> TreeDataset:
        """Returns the stream of training data, at its start. ``train_dataloader`` reads it."""
        module, config = _module_of(self.trainer), self.config
        tokenizer = build_tokenizer(config.data, config.model.hf_path)
        reader = build_reader(config.data, tokenizer, module.model, config.loss)
        is_balanced = module.balancing is not None
        self.dataset = build_dataset(
            reader, config, config.training.epochs, module.mesh, is_balanced=is_balanced
        )
        return self.dataset

    def train_dataloader(self) -> Iterable[Iterator[SynchronizedInput]]:
        """Returns the iterator over the remaining inputs once per step.

        Lightning fetches a batch ahead of its step. An input is made and synchronized in its step, as in
        ``Trainer``.
        """
        return _Loader(self._inputs)

    def val_dataloader(self) -> Iterable[list[StepInput]]:
        """Returns all validation inputs as one batch, or nothing without validation files."""
        module, config = _module_of(self.trainer), self.config
        if config.validation.files is None:
            return []
        tokenizer = build_tokenizer(config.data, config.model.hf_path)
        held_out = build_validation(config, tokenizer, module.model, module.mesh)
        assert held_out is not None
        inputs = list(map(module.tree_step.preparer(), held_out))
        return _Loader(lambda: iter([inputs]))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Returns the batch as it is: TreeStep copies each micro-batch when it needs it."""
        return batch

    def _inputs(self) -> Iterator[Iterator[SynchronizedInput]]:
        """Yields an iterator for each of the steps after the last one that was trained.

        This starts with the first item, because Lightning makes iterators that it does not use.
        """
        module, config = _module_of(self.trainer), self.config
        done, dataset = module.global_step, module.start()
        left = max(module.num_steps - done, 0)
        loader = build_step_loader(config, module.tree_step, dataset, left, module.balancing, done)
        yield from repeat(synchronized_inputs(iter(loader), module.stopping), left)


class TreeCheckpoints(Checkpoint):
    """Writes and resumes the checkpoints of the table [checkpoint]. They are those of ``Trainer``.

    They hold the states of callbacks, too, also of those that average weights.

    A fit starts from the newest checkpoint, which either trainer may have written. It ends after a last
    checkpoint if a signal arrives or if the data of a rank are wrong.

    Raises:
        UserError: see ``Checkpoints``.
        Interrupted: a signal ended the run, after a checkpoint of the steps trained so far.
    """

    checkpoints: Checkpoints

    def on_fit_start(self, trainer: L.Trainer, *_: object) -> None:
        module = _module_of(trainer)
        config, progress = module.config, module.progress
        self.checkpoints = Checkpoints(
            config.checkpoint,
            Path(config.folder) / config.checkpoint.folder,
            model=module.model,
            optimizers=module.optimizer_container,
            progress=progress,
            architecture=module.architecture(),
            run_config=config,
        )
        callbacks = module.trainer.callbacks
        self.checkpoints.more_state = partial(callback_states, callbacks, trainer, module)
        self.checkpoints.resume()
        # ``start`` sets the number of steps.
        module.stopping = StopController(config, module.model, self.checkpoints, progress, num_steps=0)
        if progress.step:
            load_callback_states(callbacks, trainer, module, *self.checkpoints.more)
            _set_step(trainer, progress.step)
            module.load_balance()

    def on_train_start(self, trainer: L.Trainer, *_: object) -> None:
        module, dataset = _module_of(trainer), _data_of(trainer).dataset
        assert dataset is not None
        if module.config.checkpoint.interval:
            module.data_state = in_background(dataset.state_dict)  # reads the files for their checksums
        trainer._signal_connector.teardown()  # Lightning's handlers would end the run without a checkpoint
        module.stopping.signals.__enter__()

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        """Writes a checkpoint of the step before if it is due. Callbacks have seen all of that step."""
        _module_of(trainer).stopping.save()

    def on_train_epoch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Writes the last checkpoint of a run, which a setting of Lightning may have ended early.

        After this, a callback that averages weights writes the averages into the model.
        """
        if _module_of(trainer).progress.step:
            self.checkpoints.save(due=True)

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        self.checkpoints.close()

    def on_exception(self, trainer: L.Trainer, module: Any, error: BaseException) -> None:
        self._stop_deferring(module, error)

    def teardown(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        self._stop_deferring(module, None)

    def _stop_deferring(self, module: Any, error: BaseException | None) -> None:
        """Restores the handlers of signals, and sends one again that no step has answered."""
        stopping, module.stopping = module.stopping, None
        if stopping:
            stopping.signals.__exit__(error and type(error), error, None)


def _set_step(trainer: L.Trainer, step: int) -> None:
    """Sets the number of steps that Lightning's loops have done."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = step  # numbers the values of loggers
    for progress in (loop.manual_optimization.optim_step_progress.total, loop.batch_progress.total):
        vars(progress).update(dict.fromkeys(vars(progress), step))


@dataclass
class _Loader(Generic[T]):
    """An iterable whose iterators a function makes. Lightning would take a list for several loaders."""

    make: Callable[[], Iterator[T]]

    def __iter__(self) -> Iterator[T]:
        return self.make()


def _module_of(trainer: L.Trainer | None) -> Any:
    module = None if trainer is None else trainer.lightning_module
    if not isinstance(module, TreeLightningModule):
        raise UserError(
            f"TreeDataModule: expected a TreeLightningModule, got {type(module).__name__}; pass "
            "Trainer.fit(TreeLightningModule(config), TreeDataModule(config))"
        )
    return module


def _data_of(trainer: L.Trainer) -> TreeDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, TreeDataModule):
        raise UserError(
            f"TreeLightningModule: expected a TreeDataModule, got {type(data).__name__}; pass "
            "Trainer.fit(TreeLightningModule(config), TreeDataModule(config))"
        )
    return data


def _check_trainer(trainer: Any, config: Config) -> None:
    """Raises UserError if a setting of Lightning's Trainer contradicts the configuration."""

    def refuse(setting: str, expected: str, got: object, fix: str) -> None:
        raise UserError(f"lightning.Trainer: {setting}: expected {expected}, got {got!r}; {fix}")

    fixes: list[tuple[type, str, str]] = [
        (
            StochasticWeightAveraging,
            "none that counts epochs",
            "use EMAWeightAveraging or WeightAveraging, which count steps: a run has one epoch of Lightning",
        ),
        (LearningRateFinder, "none that trains to search", "compare short runs with other optimizer.lr"),
        (BatchSizeFinder, "none that trains to search", "titan-tree plan finds data.max_tokens"),
    ]
    for kind, expected, fix in fixes:
        if found := [each for each in trainer.callbacks if isinstance(each, kind)]:
            refuse("callbacks", expected, type(found[0]).__name__, fix)
    averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    if len(averaging) > 1:
        fix = "remove the others: each would average the averages of the one before"
        refuse("callbacks", "at most one that averages weights", ", ".join(averaging), fix)
    if trainer.gradient_clip_val is not None:
        fix = "set optimizer.max_grad_norm in the configuration"
        refuse("gradient_clip_val", "None", trainer.gradient_clip_val, fix)
    if trainer.accumulate_grad_batches != 1:
        fix = (
            "set data.global_batch_groups in the configuration: a step has as many micro-batches as it needs"
        )
        refuse("accumulate_grad_batches", "1", trainer.accumulate_grad_batches, fix)
    if trainer.precision != "32-true":
        fix = "set training.dtype in the configuration, the dtype of the computation"
        refuse("precision", "'32-true'", trainer.precision, fix)
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ModelParallelStrategy):
        fix = "pass lightning.pytorch.strategies.ModelParallelStrategy(), which leaves FSDP2 to the model"
        refuse("strategy", "ModelParallelStrategy on several ranks", type(trainer.strategy).__name__, fix)
    if trainer.world_size == 1 and isinstance(trainer.strategy, ModelParallelStrategy):
        refuse(
            "strategy", "'auto' on one rank", "ModelParallelStrategy", "remove it: there is nothing to shard"
        )
    interval = config.validation.interval
    if config.validation.files is not None and interval and trainer.val_check_interval not in (1.0, interval):
        fix = "set validation.interval in the configuration"
        refuse("val_check_interval", f"None or {interval}", trainer.val_check_interval, fix)
    if config.training.deterministic and not torch.are_deterministic_algorithms_enabled():
        refuse("deterministic", "True", False, "set it, as the configuration sets training.deterministic")


def _check_backend(num_ranks: int) -> None:
    """Raises UserError if ranks cannot exchange numbers of the host."""
    if num_ranks > 1 and "cpu:" not in (backends := dist.get_backend_config()):
        raise UserError(
            "ModelParallelStrategy: process_group_backend: expected 'cpu:gloo,cuda:nccl', got "
            f"{backends!r}; ranks exchange counts through gloo"
        )


if __name__ == "__main__":
    raise SystemExit(
        "run `python -m titan_tree train CONFIG.toml --trainer lightning` instead of this module"
    )
