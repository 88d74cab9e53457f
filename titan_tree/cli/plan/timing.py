"""The expected time of a step, part by part: operations divided by the rates of tree/costs.py.

Kernels of one GPU run one after another. FSDP2 gathers weights and sums gradients beside them; only the rest
that no kernel hides counts. The exchanges of tokens for experts and for heads hide behind nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from titan_tree.balance.assignment import idle_share
from titan_tree.cli.plan.hardware import GPUS, Gpu, bandwidth
from titan_tree.cli.plan.sharding import Sharding, exchanged, ranks_of_token
from titan_tree.cli.plan.workload import Pass, Step
from titan_tree.config import Config
from titan_tree.models.block import Block
from titan_tree.models.decoder import Decoder
from titan_tree.models.gated_delta_net import GatedDeltaNet
from titan_tree.run.build import build_loss
from titan_tree.tree import costs as rates
from titan_tree.tree.costs import attention_seconds

Seconds = dict[str, float]  # by part of a step


@dataclass(frozen=True)
class Forwards:
    """How often a pass runs each part forward: more than once if the backward pass recomputes it."""

    matrices: float
    attention: float
    others: float
    logits: float
    exchanges: float  # of a layer, there and back: two in a forward pass and two in a backward pass

    @classmethod
    def of(cls, activation_checkpoint: str) -> Forwards:
        """Returns what the policy of activation checkpointing recomputes.

        "selective" keeps every second matrix product, attention and what ranks have exchanged.
        """
        return {
            "none": Forwards(1, 1, 1, 1, 4),
            "selective": Forwards(1.5, 1, 2, 2, 4),
            "full": Forwards(2, 2, 2, 2, 6),
        }[activation_checkpoint]

    def repeated(self, logits: int = 0) -> Forwards:
        """Returns the same if all layers run forward once more, and the vocabulary ``logits`` times."""
        return Forwards(
            matrices=self.matrices + 1,
            attention=self.attention + 1,
            others=self.others + 1,
            logits=self.logits + logits,
            exchanges=self.exchanges + 2,
        )


class Timing:
    """Computes the time of steps.

    Args:
        model: on the meta device.
        config: of the run.
        gpus: their number.
        gpu: their kind.
    """

    def __init__(self, model: Decoder, config: Config, gpus: int, gpu: Gpu) -> None:
        self.model, self.config, self.gpus, self.gpu = model, config, gpus, gpu
        self.sharding = Sharding.of(gpus, config.parallel)
        self.item = 4 if config.training.dtype == "float32" else 2
        self.costs = model.costs()
        self.forwards = Forwards.of(config.training.activation_checkpoint)
        self.loss = build_loss(config.loss)
        self.slower = GPUS["h200"].bandwidth / gpu.bandwidth  # of kernels that only read and write

    def step(self, step: Step, imbalance: float = 1.0) -> Seconds:
        """Returns the seconds of a step, by part.

        Args:
            imbalance: token copies of the busiest rank, relative to the mean.
        """
        owners = self._owners(step, imbalance)
        if self._run_freely(step):
            kernels = max(map(add, owners), key=total)
        else:
            kernels = add([max(row, key=total) for row in zip_longest(*owners, fillvalue={})])
        is_partitioned = _is_partitioned(step)
        gathers = 1 if is_partitioned else max(len(owner.micro_batches) for owner in step)
        return kernels | {
            "FSDP2, not hidden": self._fsdp(total(kernels), gathers),
            "optimizer, casts": self._optimizer(gathers),
        }

    def idle_share(self, step: Step) -> float:
        """Returns the share of the GPUs' time in which they wait for others, see balance/assignment.py."""
        rows = zip_longest(*self._owners(step), fillvalue={})
        work = np.array([[total(seconds) for seconds in row] for row in rows]).T
        return idle_share(work.sum(1, keepdims=True) if self._run_freely(step) else work)

    def _owners(self, step: Step, imbalance: float = 1.0) -> list[list[Seconds]]:
        """Returns the seconds of each micro-batch of each owner."""
        return [[self._micro_batch(m, imbalance) for m in owner.micro_batches] for owner in step]

    def _run_freely(self, step: Step) -> bool:
        """Returns whether no owner waits before the end of the step."""
        return _is_partitioned(step) and self.sharding.expert_parallel == 1

    def _micro_batch(self, passes: Sequence[Pass], imbalance: float) -> Seconds:
        # engine/step_run.py; a micro-batch that is measured and also scored counts once
        is_scored_first = self.loss.measurement is not None or (
            self.loss.spec.needs_whole_paths and len(passes) > 1
        )
        seconds = add([self.of_pass(each, imbalance, is_scored_first) for each in passes])
        layer_passes = len(self.model.layers) * len(passes)
        if len(passes) > 1:
            seconds["partitions"] = rates.PARTITION_SECONDS * layer_passes
        waits = rates.LAUNCH_SECONDS * layer_passes - total(seconds)
        return seconds | {"waiting for the host": max(0.0, waits)}

    def of_pass(self, each: Pass, imbalance: float = 1.0, is_scored_first: bool = False) -> Seconds:
        """Returns the seconds of one forward and backward pass on a GPU, without communication of FSDP2.

        Args:
            imbalance: see ``step``.
            is_scored_first: whether a forward pass computes the log-probs before.
        """
        model, costs, forwards = self.model, self.costs, self.forwards
        if each.is_suspended and self.config.partition.activations == "recompute":
            forwards = forwards.repeated()
        if is_scored_first:
            forwards = forwards.repeated(logits=1)
        own, ranks = self.sharding.own(each.tokens), self.sharding.sequence_parallel
        active = model.experts.active_parameters if model.experts else 0
        delta_nets = [layer.mixer for layer in model.blocks if isinstance(layer.mixer, GatedDeltaNet)]
        delta_net = sum(mixer.flops(1, 0) for mixer in delta_nets)
        projections = own * (costs.flops_per_token - 6 * active - delta_net)
        logits = each.edges * model.config.vocab_size
        seconds: Seconds = {
            "projections": _passes(forwards.matrices) * projections / rates.MATRIX_FLOPS,
            "attention": attention_seconds(
                each.pairs * costs.flops_per_pair / 3 / ranks, each.pairs / each.tokens, forwards.attention
            ),
            "vocabulary": _passes(forwards.logits)
            * (
                each.edges * costs.flops_per_edge / rates.MATRIX_FLOPS
                + rates.VOCABULARY_BYTES * logits / self.gpu.bandwidth
            ),
            "norms, RoPE, SwiGLU": _passes(forwards.others)
            * (rates.ELEMENTWISE_SECONDS * self.slower * own * len(model.layers)),
        }
        if delta_nets:
            values = each.tokens * sum(mixer.config.value_dim for mixer in delta_nets) / ranks
            chunks = each.serial_chunks * len(delta_nets)
            seconds["DeltaNet"] = _passes(forwards.others) * (
                rates.DELTA_NET_SECONDS * values + rates.SERIAL_CHUNK_SECONDS * chunks
            )
        if active:
            flops = 6 * active * own * (imbalance if self.sharding.expert_parallel > 1 else 1)
            seconds["experts"] = _passes(forwards.others) * flops / rates.EXPERT_FLOPS
            seconds["exchange for experts"] = self._exchange(own, imbalance, forwards.exchanges)
        if ranks > 1:
            seconds["exchange for heads"] = self._exchange_heads(own, forwards.exchanges / 2)
        return seconds

    def _exchange(self, tokens: int, imbalance: float, exchanges: float) -> float:
        """Returns the seconds of the exchanges of token copies in all layers."""
        assert self.model.experts is not None
        ranks, sizes = self.sharding.expert_parallel, self.model.experts.sizes
        rows = tokens * ranks_of_token(sizes, ranks) * imbalance * (ranks - 1) / ranks
        size = rows * self.model.config.hidden_size * self.item
        return exchanges * sizes.num_layers * size / bandwidth(rates.ALL_TO_ALL, ranks)

    def _exchange_heads(self, tokens: int, passes: float) -> float:
        """Returns the seconds of the exchanges around all mixers, each with one copy that sorts the numbers.

        Args:
            tokens: of this GPU.
            passes: forward and backward passes.
        """
        ranks = self.sharding.sequence_parallel
        tensors = [[*sent, out] for sent, out in (exchanged(b.mixer, ranks) for b in self.model.blocks)]
        size = self.item * tokens * sum(map(sum, tensors))
        sent = size * (ranks - 1) / ranks / bandwidth(rates.ALL_TO_ALL, ranks)
        calls = rates.ALL_TO_ALL_SECONDS * sum(map(len, tensors))
        return passes * (sent + calls + 2 * size / self.gpu.bandwidth)

    def _fsdp(self, compute: float, micro_batches: int) -> float:
        """Returns the seconds in which FSDP2 communicates and no kernel runs.

        A layer's communication hides behind the kernels of a layer. That of the root, embedding and head,
        hides behind nothing: it is the first and the last of a step.

        Args:
            compute: seconds of all kernels of the step.
            micro_batches: how often weights are gathered.
        """
        if self.gpus == 1:
            return 0.0
        parallel, number = self.config.parallel, len(self.model.layers)
        layers, everything = sum(map(self._moved, self.model.blocks)), self._moved(self.model)
        ranks, blocks = self.sharding.ranks, sum(sum(self.sharding.shards(b)) for b in self.model.blocks)
        gather = self.item * layers / number / bandwidth(rates.ALL_GATHER, ranks)
        reduce = 4 * layers / number / bandwidth(rates.REDUCE_SCATTER, ranks)
        reduce += self._over_replicas(blocks) / number
        sums = micro_batches if parallel.reduce_gradients == "every" else 1
        forward = compute / micro_batches / number / (self.forwards.matrices + 2)
        backward = compute / micro_batches / number - forward
        again = gather if parallel.reshard_after_forward else 0.0
        per_layer = (
            micro_batches * max(0.0, gather - forward)
            + sums * max(0.0, again + reduce - backward)
            + (micro_batches - sums) * max(0.0, again - backward)
        )
        root = everything - layers
        at_root = micro_batches * self.item * root / bandwidth(rates.ALL_GATHER, ranks)
        at_root += sums * 4 * root / bandwidth(rates.REDUCE_SCATTER, ranks)
        at_root += sums * self._over_replicas(sum(self.sharding.shards(self.model)) - blocks)
        return number * per_layer + at_root

    def _over_replicas(self, parameters: int) -> float:
        """Returns the seconds in which replicas sum gradients of ``parameters``, a GPU's shards, in fp32.

        A ring sends each number twice, to all but one of the replicas.
        """
        replicas = self.sharding.replicate
        return 2 * 4 * parameters * (replicas - 1) / replicas / bandwidth(rates.REDUCE_SCATTER, self.gpus)

    def _moved(self, module: Decoder | Block) -> int:
        """Returns how many parameters a rank receives when it gathers a module."""
        return self.sharding.gathered(module) - sum(self.sharding.shards(module))

    def _optimizer(self, micro_batches: int) -> float:
        """Returns the seconds of the optimizer, and of casting weights to the dtype of the computation."""
        own = sum(self.sharding.shards(self.model))
        casts = (4 + self.item) * own * (1 if self.gpus == 1 else micro_batches) / self.gpu.bandwidth
        if self.config.optimizer.name == "adamw8bit":
            return casts + rates.ADAM_8BIT_SECONDS * own * self.slower
        return casts + rates.ADAM_BYTES * own / self.gpu.bandwidth


def _is_partitioned(step: Step) -> bool:
    return any(len(passes) > 1 for owner in step for passes in owner.micro_batches)


def _passes(forwards: float) -> float:
    """Returns the time of forward and backward passes, relative to one of each: a backward pass takes two."""
    return (forwards + 2) / 3


def add(parts: Iterable[Seconds]) -> Seconds:
    """Returns the sums of all parts."""
    sums: Seconds = {}
    for seconds in parts:
        for name, value in seconds.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def total(seconds: Seconds) -> float:
    """Returns the sum over all parts."""
    return sum(seconds.values())
