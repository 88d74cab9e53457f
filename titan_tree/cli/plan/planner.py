"""Planner: memory and time of a run under one configuration after another, on the same sample of the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch

from titan_tree.cli.plan.activations import LayerMemory
from titan_tree.cli.plan.hardware import Gpu
from titan_tree.cli.plan.memory import RANDOM_ROUTER, Load, MemoryPlan, Parts
from titan_tree.cli.plan.sharding import Sharding
from titan_tree.cli.plan.timing import Seconds, Timing, add, total
from titan_tree.cli.plan.workload import Sample, Step, sample_steps
from titan_tree.config import Config
from titan_tree.distributed.parallelize import check_parallel
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.run import build
from titan_tree.run.model_setup import build_model_without_weights
from titan_tree.tree.costs import NODE_GPUS, PEAK_FLOPS

Settings = Mapping[str, Any]  # values by key of the configuration, such as "data.max_tokens"

IDLE_SHARE = 0.05  # of the GPUs' time, above which they should share tokens
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
        idle_share: the share of the GPUs' time in which they wait for others; the mean of ``steps``.
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
    idle_share: float

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
        flops = sum(owner.flops for step in self.steps for owner in step) / len(self.steps)
        return flops / total(self.seconds) / self.gpus / PEAK_FLOPS

    @property
    def tokens(self) -> Tokens:
        """The mean tokens of a step."""
        owners = [owner for step in self.steps for owner in step]
        sums = (
            sum(owner.logical_tokens for owner in owners),
            sum(owner.distinct_tokens for owner in owners),
            sum(each.tokens for owner in owners for each in owner.passes),
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
            model = build_model_without_weights(config.model)
        if not isinstance(model, Decoder):
            raise UserError(f"model: titan-tree plan knows titan_tree's own models only, got {model.family}")
        if config.lora.is_on:
            raise UserError(
                "lora: titan-tree plan does not cover LoRA; append lora.rank=0 lora.adapter=null for what a "
                "run that trains all weights needs, which is more"
            )
        self.model = model
        self.model.compute_dtype = getattr(torch, config.training.dtype)
        self._check(config)
        tokenizer = build.build_tokenizer(config.data, config.model.hf_path)
        reader = build.build_reader(config.data, tokenizer, self.model)
        batch = config.data.global_batch_groups
        self.sample = Sample(reader, num_groups or batch)
        self.num_steps = math.ceil(len(self.sample.taken) / batch)
        self._steps: dict[tuple[Any, ...], list[Step]] = {}
        self._layers: dict[tuple[Any, ...], LayerMemory] = {}

    @cached_property
    def estimate(self) -> Estimate:
        """What the configuration itself needs."""
        return self.of(self.config)

    def of(self, config: Config) -> Estimate:
        """Returns what a change of the configuration needs.

        Raises:
            UserError: a tree is too large, or the loss or the router loss does not fit the model.
        """
        steps, sharding = self.steps(config), Sharding.of(self.gpus, config.parallel)
        load = Load.of(steps, sharding)
        memory = MemoryPlan(self.model, config, self.gpus, self._layer_memory(sharding))
        moment, parts = memory.peak(load)
        _, random_parts = memory.peak(load, RANDOM_ROUTER)
        timing = Timing(self.model, config, self.gpus, self.gpu)
        sums = add([timing.step(step) for step in steps])
        return Estimate(
            config,
            self.gpus,
            self.gpu,
            steps,
            load,
            moment,
            parts,
            random_router=sum(random_parts.values()),
            seconds={name: value / len(steps) for name, value in sums.items()},
            idle_share=sum(map(timing.idle_share, steps)) / len(steps),
        )

    def _layer_memory(self, sharding: Sharding) -> LayerMemory:
        """Returns what layers keep. Numbers of ranks that give the same bytes per token share a trace."""
        ranks = sharding.sequence_parallel
        mixers = [block.mixer for block in self.model.blocks]
        fewest = min(mixer.num_heads[name] for mixer in mixers for name in mixer.copied_heads)
        key = sharding.expert_parallel > 1, ranks if ranks > fewest else min(ranks, 2)
        if key not in self._layers:
            assert self.model.compute_dtype is not None
            self._layers[key] = LayerMemory(self.model, self.model.compute_dtype, sharding)
        return self._layers[key]

    def steps(self, config: Config) -> list[Step]:
        """Returns the sampled steps under a change of the configuration."""
        parallel = config.parallel
        owners = parallel.sequence_parallel, parallel.expert_parallel > 1
        key = config.data.max_tokens, *dataclasses.astuple(config.partition), *owners
        if key not in self._steps:
            loss = build.build_loss(config.loss)
            preparer = build.build_tree_step(config, self.model, loss, torch.device("cpu")).preparer()
            costs = self.model.costs().tree_costs()
            self._steps[key] = sample_steps(config, self.sample, preparer, costs, self.gpus, self.num_steps)
        return self._steps[key]

    def best_parallel(self) -> Settings:
        """Returns the settings of [parallel] with the fastest step that fits, or with the least memory.

        Among those within 1 % of the fastest, it chooses the first: the fewest replicas, ranks that share
        tokens, and ranks that shard experts; "last" before "every", and resharding before none. More ranks
        than configured share tokens only if nothing fits otherwise, or if GPUs wait for others.
        """
        best = self._best({1, self.config.parallel.sequence_parallel})
        estimate = self.of(changed(self.config, best))
        if estimate.fits and estimate.idle_share <= IDLE_SHARE:
            return best
        return self._best({self.config.parallel.sequence_parallel, *range(1, min(self.gpus, NODE_GPUS) + 1)})

    def _best(self, sequence_parallel: Set[int]) -> Settings:
        """Returns the best settings with one of these numbers of ranks that share tokens."""
        settings = self._parallel(sequence_parallel)
        estimates = [(each, self.of(changed(self.config, each))) for each in settings]
        valid = [(settings, each) for settings, each in estimates if not each.is_refused]
        fitting = [(settings, each) for settings, each in valid if each.fits]
        if not fitting:
            return min(valid, key=lambda pair: pair[1].bytes)[0]
        fastest = min(total(each.seconds) for _, each in fitting)
        return next(settings for settings, each in fitting if total(each.seconds) <= 1.01 * fastest)

    def _parallel(self, sequence_parallel: Set[int]) -> Iterator[Settings]:
        """Yields the settings of [parallel] that are possible. A new key is a new factor of the product."""
        keys = (
            "replicate",
            "sequence_parallel",
            "expert_parallel",
            "reduce_gradients",
            "reshard_after_forward",
        )
        replicas = sorted({1, max(self.gpus // NODE_GPUS, 1), self.config.parallel.replicate})
        degrees = range(1, self.gpus + 1) if self.model.experts else (1,)
        for values in product(replicas, sorted(sequence_parallel), degrees, ("last", "every"), (True, False)):
            settings = dict(zip((f"parallel.{key}" for key in keys), values, strict=True))
            try:
                self._check(changed(self.config, settings))
            except UserError:
                continue
            yield settings

    def _check(self, config: Config) -> None:
        """Raises UserError if the model or [partition] does not suit the settings of [parallel]."""
        parallel = config.parallel
        sharing = parallel.sequence_parallel, parallel.expert_parallel
        check_parallel(self.model, self.gpus, parallel.replicate, *sharing)
        if max(sharing) > 1:
            build.build_activations(config.partition, torch.device("cpu")).check_lockstep()

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
