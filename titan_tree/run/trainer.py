"""The training loop: data -> TreeStep -> clip -> optimizer -> schedule -> log -> checkpoint.

The same code runs on a laptop, on one GPU and on many. A run writes into one folder: config.toml (resolved),
metrics.csv, tensorboard/ and checkpoints/, with several ranks flight_recorder/, and on request hf/ and
profiling/.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.moe.routing import RouterBias
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.data_files import DataSizes
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.loader import refuse_in_worker
from titan_tree.data.show import render_sample
from titan_tree.distributed import titan
from titan_tree.distributed.compiling import keep_compiled
from titan_tree.distributed.faults import record_collectives, set_timeout, start_timeout
from titan_tree.distributed.launch import Launch
from titan_tree.distributed.mesh import init_distributed
from titan_tree.distributed.optimizers import (
    Optimizers,
    build_lr_schedulers,
    build_optimizers,
    optimizer_class,
)
from titan_tree.engine.step_io import NO_COUNTS, StepCounts, StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import AgreedError, UserError, count
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.balance.balancing import Balancing
from titan_tree.run.build import (
    build_balancing,
    build_dataset,
    build_loss,
    build_profiler,
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
from titan_tree.run.config import Config
from titan_tree.run.folder import RunFolder, describe_data, introduction, summary
from titan_tree.run.inputs import SynchronizedInput, next_input, synchronized_inputs
from titan_tree.run.metrics import Loggers, step_values, validation_values
from titan_tree.run.metrics.loggers import LOGGERS
from titan_tree.run.model_setup import build_parallel_model, check_memory, describe_architecture
from titan_tree.run.optimizer_step import OptimizerStep
from titan_tree.run.rank_facts import check_ranks
from titan_tree.run.stopping import StopController

T = TypeVar("T")
logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 200  # tokens of the sample that a run logs at its start
COUNTED_BYTES = 256e6  # data files up to this size are read once before training, to log their sizes


def in_background(function: Callable[[], T]) -> Future[T]:
    """Starts a function in a thread."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(function)
    thread.shutdown(wait=False)
    return future


def _leave_process_group() -> None:
    if dist.is_initialized():  # the script may have left it
        dist.destroy_process_group()


class Trainer:
    """Trains the model that ``config`` describes, starting from the newest checkpoint if there is one.

    The constructor joins the process group that torchrun describes, and ``close`` leaves it. Every rank makes
    the same calls. A process has one open trainer: the constructor closes an earlier one, even if that one
    failed.

    Raises:
        UserError: the configuration, the data and the checkpoints do not fit together.
    """

    _newest: ClassVar[ExitStack] = ExitStack()  # ``_open`` of the newest trainer
    _open: ExitStack  # what ``close`` releases

    # The process.
    config: Config
    mesh: DeviceMesh
    device: torch.device

    # The model and its steps.
    model: TreeModel
    optimizers: Optimizers
    lr_schedulers: titan.LRSchedulersContainer
    tree_step: TreeStep
    router_bias: RouterBias | None
    balancing: Balancing | None  # None on one rank

    # The data.
    tokenizer: TreeTokenizer | None
    dataset: TreeDataset
    _data_state: Future[dict[str, object]] | None  # see ``data_state``; None without checkpoints
    validation_inputs: list[StepInput]  # kept in host memory; empty without validation files
    data_sizes: DataSizes | None  # None: not counted

    # Progress and outputs.
    folder: RunFolder
    num_steps: int  # number of steps of the whole run; ``train`` ends as soon as they are done
    progress: Progress
    checkpoints: Checkpoints
    stopping: StopController
    optimizer_step: OptimizerStep  # counts the good and the bad steps of this process
    counts: StepCounts  # the sum over its good steps
    rollout_values: Mapping[str, float]  # metrics of this step's rollouts; empty unless rl/ samples them
    loggers: Loggers | None  # None except on rank 0

    def __init__(self, config: Config) -> None:
        if not isinstance(config, Config):
            got = type(config).__name__
            raise UserError(f"Trainer: expected a Config, got {got}; pass what load_config returns")
        refuse_in_worker()
        Trainer._newest.close()
        self._open = Trainer._newest = ExitStack()
        self.config = config
        if (launch := Launch.of()) and launch.num_ranks > 1:
            record_collectives(Path(config.folder))
        self.mesh, self.device = init_distributed(config.parallel.timeout_s)
        self._open.callback(_leave_process_group)
        check_ranks(config)
        self.folder = RunFolder(config)
        self._open.callback(self.folder.close)
        if config.training.deterministic:
            before = torch.are_deterministic_algorithms_enabled()
            self._open.callback(torch.use_deterministic_algorithms, before)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
            torch.use_deterministic_algorithms(True)

        # Mistakes in these tables are reported before weights are read.
        loss = build_loss(config.loss)
        optimizer_class(config.optimizer)  # imports its package
        for name in config.metrics.loggers:
            LOGGERS[name]  # imports its package

        check_memory(config, self.mesh, self.device)
        self.model = build_parallel_model(
            config.model, config.training, config.parallel, self.mesh, config.lora
        )
        self.optimizers = build_optimizers(config.optimizer, self.model)
        self.router_bias = build_router_bias(config.router_bias, self.model)
        self.tree_step = build_tree_step(config, self.model, loss, self.device)
        self.balancing = build_balancing(config, self.model, loss, self.mesh, self.device)

        self.tokenizer = build_tokenizer(config.data, config.model.hf_path)
        self.open_data()
        self.progress, self.counts = Progress(), NO_COUNTS
        self.rollout_values = {}
        self.checkpoints = Checkpoints(
            config.checkpoint,
            Path(config.folder) / config.checkpoint.folder,
            model=self.model,
            optimizers=self.optimizers,
            progress=self.progress,
            architecture=describe_architecture(config, self.model, self.mesh),
            run_config=config,
        )
        self._open.callback(self.checkpoints.close)
        self.checkpoints.resume()
        self.num_steps, done = self.start_data(), self.progress.step
        self.lr_schedulers = build_lr_schedulers(config.lr_scheduler, self.optimizers, self.num_steps, done)
        self.stopping = StopController(config, self.model, self.checkpoints, self.progress, self.num_steps)
        if self.balancing and "balance" in self.progress.data:
            self.balancing.load_state_dict(self.progress.data["balance"])
        self._data_state = in_background(self.data_state) if config.checkpoint.interval else None
        self.loggers = self.folder.open_loggers(self.progress.step, self.num_steps)
        if self.loggers:
            self._open.callback(self.loggers.close)
        self.optimizer_step = OptimizerStep(
            tree_step=self.tree_step,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers.schedulers,
            router_bias=self.router_bias,
            balancing=self.balancing,
            max_grad_norm=config.optimizer.max_grad_norm,
            seed=config.training.seed,
            # A run in which no step trains also ends with an error.
            max_bad_steps=min(config.training.max_bad_steps, self.num_steps),
        )

    def open_data(self) -> None:
        """Opens the training and validation data, and counts them unless that takes long."""
        config, is_balanced = self.config, self.balancing is not None
        reader = build_reader(config.data, self.tokenizer, self.model, config.loss)
        epochs = config.training.epochs
        self.dataset = build_dataset(reader, config, epochs, self.mesh, is_balanced=is_balanced)
        held_out = build_validation(config, self.tokenizer, self.model, self.mesh)
        self.validation_inputs = list(map(self.tree_step.preparer(), held_out)) if held_out else []
        is_counted = epochs is not None or reader.files.num_bytes() < COUNTED_BYTES
        self.data_sizes = reader.files.sizes() if is_counted else None

    def start_data(self) -> int:
        """Moves the data to the position in ``progress``. Returns the number of steps of the whole run."""
        if self.progress.step:
            restore_position(self.dataset, self.progress.data, self.config.checkpoint.allow_changes)
        return num_steps(self.config, self.dataset, self.data_sizes, self.progress.step)

    def data_state(self) -> dict[str, object]:
        """Returns what a checkpoint stores of the data besides the position. Runs once, in a thread."""
        return self.dataset.state_dict()

    def train(self) -> None:
        """Runs the remaining steps, then writes the last checkpoint, the export and a summary.

        Raises:
            Interrupted: a signal ended the run, after a checkpoint of the steps trained so far.
            UserError: a step was refused, or a checkpoint could not be written.
        """
        config, done, ranks = self.config, self.progress.step, dist.get_world_size()
        logger.info(introduction(config, self.model, ranks, self.device, self.num_steps, done))
        if self.data_sizes:
            logger.info(describe_data(self.data_sizes, config.data.global_batch_groups))
            if config.data.files and self.data_sizes.groups < config.data.global_batch_groups:
                logger.warning(
                    "data.global_batch_groups: %d, but the data have only %s, so each step repeats "
                    "groups; set it to at most %d",
                    config.data.global_batch_groups,
                    count(self.data_sizes.groups, "group"),
                    self.data_sizes.groups,
                )
        if self.loggers and not done:
            self.log_sample()
        inputs = self.inputs()  # the first ones are made while the model compiles
        if self.num_steps > done and config.training.compile:
            self.compile()
        with self.stopping.signals:
            profiler_context = build_profiler(config.profiler, config.folder, self.progress.step)
            with self.loggers or nullcontext(), profiler_context as profiler:
                while self.progress.step < self.num_steps:
                    with self.stopping.guard_step():
                        self.train_step(inputs)
                    profiler.step()
                set_timeout(start_timeout(config.parallel.timeout_s))  # rank 0 alone writes the export
                self.checkpoints.close()  # before the loggers, which may fail to close
            self.finish()

    def finish(self) -> None:
        """Logs a summary of a complete run and writes its export.

        Raises:
            AgreedError: most of the run's steps were bad.
        """
        self._log_summary()
        export_results(self.model, self.config, self.folder.run, self.tokenizer)
        self.optimizer_step.check_learned()

    def log_sample(self) -> None:
        """Logs the first sample of the run as it is trained."""
        path = self.dataset.reader.paths(self.dataset.first_group())[0]
        text = render_sample(path, self.tokenizer, SAMPLE_TOKENS).plain
        logger.info("first sample: %s", text)
        if self.loggers:
            self.loggers.sample(text)

    def compile(self) -> None:
        """Compiles the graphs of a run before its first step, so that no later step waits for them."""
        started = time.perf_counter()
        cache = keep_compiled(Path(self.config.folder) / "compiled")
        logger.info("compiling into %s; a later start reads it from there", cache)
        warm_up(self.config, self.tree_step)
        logger.info("compiled in %.0f s", time.perf_counter() - started)

    def close(self) -> None:
        """Closes loggers, unlocks the run's folders and leaves the process group."""
        self._open.close()

    def inputs(self) -> Iterator[SynchronizedInput]:
        """Starts to make the inputs of the remaining steps, and returns an iterator over them.

        It yields (input, position, counts of all ranks), and raises what ends the run early. The position is
        the state of the dataset after the step. The dataset runs ahead of training, so a checkpoint stores
        this position instead of the dataset's.
        """
        done = self.progress.step
        loader = build_step_loader(
            self.config, self.tree_step, self.dataset, self.num_steps - done, self.balancing, done
        )
        return synchronized_inputs(iter(loader), self.stopping)

    def train_step(self, inputs: Iterator[SynchronizedInput]) -> None:
        """Runs one optimizer step on the next of ``inputs``, and logs it if it is due."""
        started = time.perf_counter()
        step = self.progress.step + 1
        step_input, position, total = next_input(inputs, step, self.num_steps)
        report = self.optimizer_step.run(step, step_input, total, epoch=position["epoch"], started=started)
        data_state = self._data_state.result() if self._data_state else {}
        self.progress.step, self.progress.data = step, data_state | position
        if self.balancing:
            self.progress.data["balance"] = self.balancing.state_dict()
        if report is not None:
            self.counts += report.result.counts

        validation = self.validate(step)
        if not self.loggers:
            return
        with self.stopping.logging():
            self.loggers.advance(step)
            if report is None:
                values = {"bad_steps": self.optimizer_step.bad_steps, **self.rollout_values}
                self.loggers.log(step, values | validation_values(validation))
            elif validation or step % self.config.metrics.log_interval == 0 or step == self.num_steps:
                report = dataclasses.replace(report, validation=validation, rollouts=self.rollout_values)
                self.loggers.log(step, step_values(report))

    def validate(self, step: int) -> dict[str, float]:
        """Scores the validation files if they are due after ``step``."""
        if not self.validation_inputs:
            return {}
        if step % self.config.validation.interval and step != self.num_steps:
            return {}
        return score_validation(self.tree_step, self.validation_inputs)

    def _log_summary(self) -> None:
        steps = self.optimizer_step
        logger.info(summary(steps.good_steps, self.counts, steps.bad_steps))
        logger.info("checkpoint: %s", self.checkpoints.newest() or "none (checkpoint.interval = 0)")
        if "csv" in self.config.metrics.loggers:
            logger.info("curves: %s/metrics.csv", self.config.folder)


def score_validation(tree_step: TreeStep, inputs: Sequence[StepInput]) -> dict[str, float]:
    """Returns the mean loss and accuracy of validation inputs. Raises AgreedError if no token counts."""
    if not (values := tree_step.evaluate(inputs)):
        raise AgreedError("validation.files: expected tokens to score, but all loss masks or weights are 0")
    return values


def restore_position(dataset: TreeDataset, state: dict[str, Any], allow_changes: bool) -> None:
    """Moves the dataset to the state in a checkpoint.

    Args:
        allow_changes: goes on, from the same position, although the data have changed.
    Raises:
        UserError: the data have changed.
    """
    try:
        dataset.load_state_dict(state)
    except UserError as error:
        if not allow_changes:
            raise
        logger.warning("changed since the checkpoint: %s", error)
        dataset.load_state_dict(dataset.state_dict() | {name: state[name] for name in dataset.position()})
