"""Planner: memory and time of a run under one configuration after another, on the same sample of the data."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Set
from functools import cached_property, reduce
from itertools import product

import torch

from titan_tree.cli.plan.layer_trace import LayerTrace
from titan_tree.cli.plan.memory import RANDOM_ROUTER, Memory
from titan_tree.cli.plan.timing import Gpu, Timing, add, total
from titan_tree.cli.plan.workload import Step, sample_steps, take_sample
from titan_tree.distributed.parallelize import check_parallel
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.tree_model import Execution
from titan_tree.run import build
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_model_without_weights
from titan_tree.tree.costs import NODE_GPUS, PEAK_FLOPS

Settings = Mapping[str, str | int | bool]  # values by key of the configuration, such as "data.max_tokens"

PARALLEL = (
    "parallel.replicate",
    "parallel.sequence_parallel",
    "parallel.expert_parallel",
    "parallel.reduce_gradients",
    "parallel.reshard_after_forward",
)
IDLE_SHARE = 0.05  # of the GPUs' time, above which they should share tokens
OPTIMIZER_SHARE = 0.03  # of a step's time, above which a step should have more tokens
MARGIN = 0.05  # of a GPU's memory, for gaps in the allocator and what is not computed
CHECKPOINTS = ("none", "selective", "full")  # each needs less memory than the one before


class Estimate:
    """What a run needs in sampled steps. Times are means over the steps, with a balanced router.

    Attributes:
        sizes: the sizes of the fullest GPU.
        moment: when memory is largest.
        memory: bytes on the fullest GPU at that moment, by part, with a balanced router.
        random_router: sum of memory with a random router; that of ``memory`` without expert parallelism.
        seconds: seconds of a step, by part.
        idle_share: share of the GPUs' time in which they wait for others.
        counts: the sums over all steps and GPUs.
    """

    def __init__(self, planner: Planner, config: Config, steps: list[Step]) -> None:
        self.config, self.gpus, self.gpu, self.steps = config, planner.gpus, planner.gpu, steps
        self.sizes = Memory(planner.model, config, self.gpus, planner.layers, steps)
        self.moment, self.memory = self.sizes.peak()
        self.random_router = sum(self.sizes.peak(RANDOM_ROUTER)[1].values())
        timing = Timing(planner.model, config, self.gpus, self.gpu)
        self.seconds = {k: v / len(steps) for k, v in add([timing.step(step) for step in steps]).items()}
        self.idle_share = sum(map(timing.idle_share, steps)) / len(steps)
        self.counts = reduce(operator.add, (owner.counts for step in steps for owner in step))

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
        needs_last = self.gpus > 1 and self.sizes.is_partitioned
        return needs_last and self.config.parallel.reduce_gradients == "every"

    @property
    def optimizer_tokens(self) -> float:
        """Executed tokens of a step in which the optimizer takes ``OPTIMIZER_SHARE`` of the time.

        The time of the other parts is proportional to the tokens.
        """
        optimizer = self.seconds["optimizer"]
        others = (total(self.seconds) - optimizer) / self.counts.executed_tokens * len(self.steps)
        return (1 / OPTIMIZER_SHARE - 1) * optimizer / others

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.counts.flops / len(self.steps) / total(self.seconds) / self.gpus / PEAK_FLOPS


class Planner:
    """Estimates what a run needs, for a configuration and changes of it.

    Args:
        config: configuration of the run.
        gpus: number of GPUs.
        gpu: kind of the GPUs.
        num_groups: number of groups to sample from the data; None: those of one step.
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
        self.model.execution = Execution(getattr(torch, config.training.dtype))
        self.layers = LayerTrace(model)
        self._check(config)
        tokenizer = build.build_tokenizer(config.data, config.model.hf_path)
        self.reader = build.build_reader(config.data, tokenizer, self.model, config.loss)
        batch = config.data.global_batch_groups
        self.groups = take_sample(self.reader, num_groups or batch)
        self.num_steps = math.ceil(self.groups / batch)
        self._steps: dict[tuple[object, ...], list[Step]] = {}

    @cached_property
    def estimate(self) -> Estimate:
        """What the configuration itself needs."""
        return self.of({})

    def of(self, settings: Settings) -> Estimate:
        """Returns what the configuration needs with other values for some keys.

        Raises:
            UserError: a tree is too large, or the loss or the router loss does not fit the model.
        """
        config = changed(self.config, settings)
        return Estimate(self, config, self.steps(config))

    def steps(self, config: Config) -> list[Step]:
        """Returns the sampled steps under a change of the configuration."""
        owners = config.parallel.sequence_parallel, config.parallel.expert_parallel > 1
        key = config.data.max_tokens, *dataclasses.astuple(config.partition), *owners
        if key not in self._steps:
            loss = build.build_loss(config.loss)
            preparer = build.build_tree_step(config, self.model, loss, torch.device("cpu")).preparer()
            costs = self.model.costs().tree_costs()
            self._steps[key] = sample_steps(config, self.reader, preparer, costs, self.gpus, self.num_steps)
        return self._steps[key]

    def best_parallel(self) -> Settings:
        """Returns the settings of [parallel] with the fastest step that fits, or with the least memory.

        Among those within 1 % of the fastest, it chooses the first: the fewest replicas, ranks that share
        tokens, and ranks that shard experts; "last" before "every", and resharding before none. More ranks
        than configured share tokens only if nothing fits otherwise, or if GPUs wait for others.
        """
        configured = self.config.parallel.sequence_parallel
        for degrees in ({1, configured}, {configured, *range(1, min(self.gpus, NODE_GPUS) + 1)}):
            pairs = [(settings, self.of(settings)) for settings in self.parallel_settings(degrees)]
            pairs = [(settings, estimate) for settings, estimate in pairs if not estimate.is_refused]
            best, needs = min(pairs, key=lambda pair: pair[1].bytes)
            if fitting := [pair for pair in pairs if pair[1].fits]:
                limit = 1.01 * min(total(estimate.seconds) for _, estimate in fitting)
                best, needs = next(pair for pair in fitting if total(pair[1].seconds) <= limit)
            if needs.fits and needs.idle_share <= IDLE_SHARE:
                break
        return best

    def parallel_settings(self, sequence_parallel: Set[int]) -> Iterator[Settings]:
        """Yields the settings of [parallel] that are possible. A new key is a new factor of the product."""
        replicas = sorted({1, max(self.gpus // NODE_GPUS, 1), self.config.parallel.replicate})
        degrees = range(1, self.gpus + 1) if self.model.experts else (1,)
        for values in product(replicas, sorted(sequence_parallel), degrees, ("last", "every"), (True, False)):
            settings: Settings = dict(zip(PARALLEL, values, strict=True))
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
        together: list[Settings] = []
        for settings in self._changes():
            try:
                estimate = self.of(settings)
                if estimate.is_refused:
                    settings = {**settings, "parallel.reduce_gradients": "last"}
                    estimate = self.of(settings)
            except UserError:  # trees may not be partitioned
                continue
            if estimate.bytes < self.estimate.bytes:
                together.append(settings)
                yield settings, estimate
        if len(together) > 1:
            settings = {key: value for change in together for key, value in change.items()}
            yield settings, self.of(settings)

    def _changes(self) -> Iterator[Settings]:
        config = self.config
        if self.gpus > 1:
            best = self.best_parallel()
            yield {key: value for key, value in best.items() if value != operator.attrgetter(key)(config)}
        for policy in CHECKPOINTS[CHECKPOINTS.index(config.training.activation_checkpoint) + 1 :]:
            yield {"training.activation_checkpoint": policy}
        if self.estimate.sizes.is_partitioned:
            yield {"partition.activations": "recompute"}
        if config.data.max_tokens > 1:
            yield {"data.max_tokens": config.data.max_tokens // 2}
        yield {"optimizer.name": "adamw8bit"}

    def notes(self) -> list[str]:
        """Returns what the numbers leave out, and what training will refuse."""
        config, training = self.config, self.config.training
        notes = {
            f"activations are those of torch {torch.__version__.partition('+')[0]}": True,
            "trees are partitioned, so training will refuse parallel.reduce_gradients = every": (
                self.estimate.is_refused
            ),
            "samples share nothing, so trees save nothing; titan-tree inspect FILE says why": (
                config.data.layout == "tree" and self.estimate.counts.por_samples <= 0
            ),
            "the sample is smaller than its steps, so groups repeat; raise --groups": (
                self.groups % config.data.global_batch_groups > 0
            ),
            "training.compile = false needs more memory and time than computed": not training.compile,
            "the rates are those of bf16; float32 is several times slower": training.dtype == "float32",
            f"beyond {NODE_GPUS} GPUs, 50 GB/s per GPU are assumed, not measured": self.gpus > NODE_GPUS,
            "the time of this optimizer is that of adamw": (
                config.optimizer.name not in ("adamw", "adamw8bit")
            ),
        }
        return [note for note, applies in notes.items() if applies]


def changed(config: Config, settings: Settings) -> Config:
    """Returns the configuration with other values for some keys."""
    for key, value in settings.items():
        table, _, name = key.partition(".")
        changed_table = dataclasses.replace(getattr(config, table), **{name: value})
        config = dataclasses.replace(config, **{table: changed_table})
    return config
