"""Planner: memory and time of a run under one configuration after another, on the same sample of the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch

from titan_tree import build
from titan_tree.cli.plan.activations import LayerMemory
from titan_tree.cli.plan.hardware import PEAK_FLOPS, Gpu
from titan_tree.cli.plan.memory import RANDOM_ROUTER, Load, MemoryPlan, Parts
from titan_tree.cli.plan.timing import Seconds, Timing, add, total
from titan_tree.cli.plan.workload import Sample, Step, sample_steps
from titan_tree.config import Config
from titan_tree.distributed.parallelize import check_parallel
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder

Settings = Mapping[str, Any]  # values by key of the configuration, such as "data.max_tokens"

MARGIN = 0.05  # of a GPU's memory, for gaps in the allocator and what is not computed
CHECKPOINTS = ("none", "selective", "full")  # each needs less memory than the one before


class Tokens(NamedTuple):
    """Tokens of a step, on all GPUs (docs/performance.md defines the terms)."""

    logical: float
    distinct: float
    executed: float

    @property
    def por(self) -> float:
        """The potential overlap ratio."""
        return 1 - self.distinct / self.logical


@dataclass(frozen=True)
class Estimate:
    """What a configuration needs.

    Attributes:
        steps: the sampled steps.
        load: of the fullest GPU.
        moment: when memory is largest.
        memory: bytes on the fullest GPU at that moment, by part; with experts that ranks exchange tokens for,
            if the router is balanced.
        random_router: the sum of memory with a random router; that of ``memory`` without an exchange.
        seconds: of a step, by part; the mean of ``steps``, with a balanced router.
    """

    config: Config
    gpus: int
    gpu: Gpu
    steps: list[Step]
    load: Load
    moment: str
    memory: Parts
    random_router: float
    seconds: Seconds

    @property
    def bytes(self) -> float:
        """The memory to provide: that with a random router."""
        return max(sum(self.memory.values()), self.random_router)

    @property
    def fits(self) -> bool:
        return self.bytes <= (1 - MARGIN) * self.gpu.memory

    @property
    def is_refused(self) -> bool:
        """Whether training would refuse to partition the trees."""
        needs_last = self.gpus > 1 and self.load.is_partitioned
        return needs_last and self.config.parallel.reduce_gradients == "every"

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        flops = sum(rank.flops for step in self.steps for rank in step) / len(self.steps)
        return flops / total(self.seconds) / self.gpus / PEAK_FLOPS

    @property
    def tokens(self) -> Tokens:
        """The mean tokens of a step."""
        ranks = [rank for step in self.steps for rank in step]
        sums = (
            sum(rank.logical_tokens for rank in ranks),
            sum(rank.distinct_tokens for rank in ranks),
            sum(each.tokens for rank in ranks for each in rank.passes),
        )
        return Tokens(*(number / len(self.steps) for number in sums))


class Planner:
    """Estimates what a run needs, for a configuration and changes of it.

    Args:
        config: of the run.
        gpus: their number.
        gpu: their kind.
        num_groups: groups to sample from the data; None: those of one step.
    Raises:
        UserError: the configuration, the data and the number of GPUs do not fit together.
    """

    def __init__(self, config: Config, gpus: int, gpu: Gpu, num_groups: int | None = None) -> None:
        self.config, self.gpus, self.gpu = config, gpus, gpu
        with torch.device("meta"):
            model = build.build_model_without_weights(config.model)
        if not isinstance(model, Decoder):
            raise UserError(f"model: titan-tree plan knows titan_tree's own models only, got {model.family}")
        if config.lora.is_on:
            raise UserError(
                "lora: titan-tree plan does not cover LoRA; append lora.rank=0 lora.adapter=null for what a "
                "run that trains all weights needs, which is more"
            )
        self.model = model
        self.model.compute_dtype = getattr(torch, config.training.dtype)
        check_parallel(self.model, gpus, expert_parallel=config.parallel.expert_parallel)
        _check_supported(config)
        tokenizer = build.build_tokenizer(config.data, config.model.hf_path)
        reader = build.build_reader(config.data, tokenizer, self.model)
        batch = config.data.global_batch_groups
        self.sample = Sample(reader, num_groups or batch)
        self.num_steps = math.ceil(len(self.sample.taken) / batch)
        self._steps: dict[tuple[Any, ...], list[Step]] = {}
        self._layers: dict[bool, LayerMemory] = {}

    @cached_property
    def estimate(self) -> Estimate:
        """What the configuration itself needs."""
        return self.of(self.config)

    def of(self, config: Config) -> Estimate:
        """Returns what a change of the configuration needs.

        Raises:
            UserError: a tree is too large, or the loss or the router loss does not fit the model.
        """
        steps = self.steps(config)
        load = Load.of(steps)
        exchanges = config.parallel.expert_parallel > 1
        if exchanges not in self._layers:
            ranks, dtype = config.parallel.expert_parallel, self.model.compute_dtype
            assert dtype is not None
            self._layers[exchanges] = LayerMemory(self.model, dtype, ranks)
        memory = MemoryPlan(self.model, config, self.gpus, self._layers[exchanges])
        moment, parts = memory.peak(load)
        _, random_parts = memory.peak(load, RANDOM_ROUTER)
        timing = Timing(self.model, config, self.gpus, self.gpu)
        sums = add([timing.step(step) for step in steps])
        seconds = {name: value / len(steps) for name, value in sums.items()}
        return Estimate(
            config, self.gpus, self.gpu, steps, load, moment, parts, sum(random_parts.values()), seconds
        )

    def steps(self, config: Config) -> list[Step]:
        """Returns the sampled steps under a change of the configuration."""
        key = config.data.max_tokens, *dataclasses.astuple(config.partition)
        if key not in self._steps:
            loss = build.build_loss(config.loss)
            step = build.build_tree_step(config, self.model, loss, torch.device("cpu"))
            steps = sample_steps(config, self.sample, step.preparer(), self.gpus, self.num_steps)
            self._steps[key] = steps
        return self._steps[key]

    def best_parallel(self) -> Settings:
        """Returns the settings of [parallel] with the fastest step that fits, or with the least memory.

        Among those within 1 % of the fastest, it chooses the first: "last" before "every", resharding before
        none, and the fewest ranks that shard experts.
        """
        estimates = [(settings, self.of(changed(self.config, settings))) for settings in self._parallel()]
        valid = [(settings, each) for settings, each in estimates if not each.is_refused]
        fitting = [(settings, each) for settings, each in valid if each.fits]
        if not fitting:
            return min(valid, key=lambda pair: pair[1].bytes)[0]
        fastest = min(total(each.seconds) for _, each in fitting)
        return next(settings for settings, each in fitting if total(each.seconds) <= 1.01 * fastest)

    def _parallel(self) -> Iterator[Settings]:
        """Yields the settings of [parallel] that are possible. A new key is a new factor of the product."""
        degrees = range(1, self.gpus + 1) if self.model.experts else (1,)
        for degree, reduce, reshard in product(degrees, ("last", "every"), (True, False)):
            try:
                check_parallel(self.model, self.gpus, expert_parallel=degree)
            except UserError:
                continue
            yield {
                "parallel.expert_parallel": degree,
                "parallel.reduce_gradients": reduce,
                "parallel.reshard_after_forward": reshard,
            }

    def savings(self) -> Iterator[tuple[Settings, Estimate]]:
        """Yields changes that need less memory than the configuration, and at last all of them together."""
        changes: list[Settings] = []
        for settings in self._changes():
            try:
                estimate = self.of(changed(self.config, settings))
            except UserError:  # trees may not be partitioned
                continue
            if estimate.is_refused:
                settings = {**settings, "parallel.reduce_gradients": "last"}
                estimate = self.of(changed(self.config, settings))
            if estimate.bytes < self.estimate.bytes:
                changes.append(settings)
                yield settings, estimate
        if len(changes) > 1:
            together = {key: value for settings in changes for key, value in settings.items()}
            yield together, self.of(changed(self.config, together))

    def _changes(self) -> Iterator[Settings]:
        config = self.config
        if self.gpus > 1:
            best = self.best_parallel()
            yield {key: value for key, value in best.items() if value != value_of(config, key)}
        for policy in CHECKPOINTS[CHECKPOINTS.index(config.training.activation_checkpoint) + 1 :]:
            yield {"training.activation_checkpoint": policy}
        if self.estimate.load.is_partitioned:
            yield {"partition.activations": "recompute"}
        if config.data.max_tokens > 1:
            yield {"data.max_tokens": config.data.max_tokens // 2}
        yield {"optimizer.name": "adamw8bit"}


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a key such as "data.max_tokens"."""
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def changed(config: Config, settings: Settings) -> Config:
    """Returns the configuration with other values for some keys."""
    for key, value in settings.items():
        table, _, name = key.partition(".")
        config = dataclasses.replace(
            config, **{table: dataclasses.replace(getattr(config, table), **{name: value})}
        )
    return config


def _check_supported(config: Config) -> None:
    """Raises UserError if the configuration uses a setting that the estimate does not know."""
    for key in ("replicate", "sequence_parallel"):
        if (value := getattr(config.parallel, key)) != 1:
            raise UserError(
                f"parallel.{key}: expected 1, because titan-tree plan does not cover this setting, got "
                f"{value}; append parallel.{key}=1"
            )
