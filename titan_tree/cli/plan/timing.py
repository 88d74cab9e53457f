"""The expected time of a step, part by part: operations or bytes, divided by the rates of tree/costs.py.

Kernels of one GPU run one after another. FSDP2 gathers weights and sums gradients beside them; only the rest
that no kernel hides counts. The exchanges of tokens for experts and for heads hide behind nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from torch import nn

from titan_tree.cli.plan.memory import GIB, exchanged, ranks_of_token
from titan_tree.cli.plan.workload import Run, Step, is_partitioned
from titan_tree.distributed.parallelize import gathered_size, shard_sizes
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.gated_delta_net import GatedDeltaNet
from titan_tree.run.balance.assignment import idle_share
from titan_tree.run.build import build_loss
from titan_tree.run.config import Config
from titan_tree.tree import costs as rates

Seconds = dict[str, float]  # by part of a step


class Gpu(NamedTuple):
    """A GPU of the Hopper generation: all of them multiply at the same rate, but their memory differs."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second that kernels reach on the GPU's memory


# The bandwidths are 83 % of what the vendor states, 4.8 and 3.35 TB/s.
GPUS = {"h200": Gpu("H200", 139 * GIB, 4.0e12), "h100": Gpu("H100", 79 * GIB, 2.8e12)}


def find_gpu(text: str) -> Gpu:
    """Returns the GPU with a name of ``GPUS``, or an H200 with that many GiB.

    Raises:
        UserError: ``text`` is neither a known name nor a positive number.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UserError(f"--gpu: expected {', '.join(GPUS)} or a number of GiB, got {text!r}")
    return GPUS["h200"]._replace(name=f"GPU of {size:g} GiB", memory=size * GIB)


# How often a pass runs matrix products, attention and all other kernels forward, and how many exchanges of a
# layer there are, there and back: two in a forward and two in a backward pass. By activation checkpointing:
# "selective" keeps attention, exchanges and every second matrix product.
FORWARDS = {"none": (1.0, 1, 1, 4), "selective": (1.5, 1, 2, 4), "full": (2.0, 2, 2, 6)}


class Timing:
    """Computes the time of steps, with a balanced router.

    Args:
        model: the model, on the meta device.
        config: configuration of the run.
        gpus: number of GPUs.
        gpu: kind of the GPUs.
    """

    def __init__(self, model: Decoder, config: Config, gpus: int, gpu: Gpu) -> None:
        self.model, self.config, self.gpus, self.gpu, self.costs = model, config, gpus, gpu, model.costs()
        self.item = 4 if config.training.dtype == "float32" else 2  # bytes of a number in the computation
        self.loss = build_loss(config.loss)
        self.slower = GPUS["h200"].bandwidth / gpu.bandwidth  # of kernels that only read and write

    def step(self, step: Step) -> Seconds:
        """Returns the seconds of a step, by part."""
        owners = self._owners(step)
        if self._run_freely(step):
            kernels = max(map(add, owners), key=total)
        else:
            kernels = add([max(passes, key=total) for passes in zip_longest(*owners, fillvalue={})])
        gathers = 1 if is_partitioned(step) else max(len(owner.micro_batches) for owner in step)
        hidden = self.fsdp(total(kernels), gathers)
        return kernels | {
            "FSDP2, not hidden": hidden,
            "casts of weights": self.casts(gathers),
            "optimizer": self.optimizer(),
        }

    def idle_share(self, step: Step) -> float:
        """Returns the share of the GPUs' time in which they wait for others, see balance/assignment.py."""
        rounds = zip_longest(*self._owners(step), fillvalue={})
        work = np.array([[total(seconds) for seconds in owners] for owners in rounds]).T
        return idle_share(work.sum(1, keepdims=True) if self._run_freely(step) else work)

    def _owners(self, step: Step) -> list[list[Seconds]]:
        """Returns the seconds of each micro-batch of each owner."""
        return [[self._micro_batch(runs) for runs in owner.micro_batches] for owner in step]

    def _run_freely(self, step: Step) -> bool:
        """Returns whether no owner waits before the end of the step."""
        return is_partitioned(step) and self.config.parallel.expert_parallel == 1

    def _micro_batch(self, runs: Sequence[Run]) -> Seconds:
        # engine/step_run.py; a micro-batch that is measured and also scored counts once
        scores_whole_paths = self.loss.spec.needs_whole_paths and len(runs) > 1
        is_scored_first = self.loss.measurement is not None or scores_whole_paths
        seconds = add(self.of_run(run, is_scored_first) for run in runs)
        layer_passes = len(self.model.layers) * len(runs)
        if len(runs) > 1:
            seconds["partitions"] = rates.PARTITION_SECONDS * layer_passes
        waits = rates.LAUNCH_SECONDS * layer_passes - total(seconds)
        return seconds | {"waiting for the host": max(0.0, waits)}

    def of_run(self, run: Run, is_scored_first: bool = False) -> Seconds:
        """Returns the seconds of one forward and backward pass on a GPU, without communication of FSDP2.

        Args:
            run: sizes of the pass.
            is_scored_first: whether a forward pass computes the log-probs before.
        """
        model, costs, ranks = self.model, self.costs, self.config.parallel.sequence_parallel
        is_recomputed = run.is_suspended and self.config.partition.activations == "recompute"
        repeats = is_recomputed + is_scored_first
        matrices, attention, others, exchanges = FORWARDS[self.config.training.activation_checkpoint]
        scored, exchanges = others + is_scored_first, exchanges + 2 * repeats
        matrices, attention, others = matrices + repeats, attention + repeats, others + repeats
        tokens, layers = -(-run.tokens // ranks), len(model.layers)  # tokens of this GPU
        expert_flops = 6 * model.experts.active_parameters if model.experts else 0
        delta_nets = [block.mixer for block in model.blocks if isinstance(block.mixer, GatedDeltaNet)]
        matrix_flops = costs.flops_per_token - expert_flops - sum(mixer.flops(1, 0) for mixer in delta_nets)
        attention_flops, keys = run.pairs * costs.flops_per_visible_pair / 3 / ranks, run.pairs / run.tokens
        vocabulary = run.edges * costs.flops_per_edge / rates.MATRIX_FLOPS
        vocabulary += rates.VOCABULARY_BYTES * run.edges * model.config.vocab_size / self.gpu.bandwidth
        elementwise = rates.ELEMENTWISE_SECONDS * self.slower * tokens * layers
        seconds = {
            "projections": _both(matrices) * tokens * matrix_flops / rates.MATRIX_FLOPS,
            "attention": rates.attention_seconds(attention_flops, keys, attention),
            "vocabulary": _both(scored) * vocabulary,
            "norms, RoPE, SwiGLU": _both(others) * elementwise,
        }
        if delta_nets:
            values = run.tokens * sum(mixer.config.value_dim for mixer in delta_nets) / ranks
            chunks = run.serial_chunks * len(delta_nets)
            recurrence = rates.DELTA_NET_SECONDS * values + rates.SERIAL_CHUNK_SECONDS * chunks
            seconds["DeltaNet"] = _both(others) * recurrence
        if model.experts:
            seconds["experts"] = _both(others) * tokens * expert_flops / rates.EXPERT_FLOPS
            holders, sizes = self.config.parallel.expert_parallel, model.experts.sizes
            sent = tokens * ranks_of_token(sizes, holders) * (holders - 1) / holders  # rows
            layer_bytes = self.item * sent * model.config.hidden_size
            all_to_all = bandwidth(rates.ALL_TO_ALL, holders)
            seconds["exchange for experts"] = exchanges * sizes.num_layers * layer_bytes / all_to_all
        if ranks > 1:  # exchanges around all mixers, each with one copy that sorts the numbers
            tensors = [[*sent, out] for sent, out in (exchanged(b.mixer, ranks) for b in model.blocks)]
            size = self.item * tokens * sum(map(sum, tensors))
            all_to_all = size * (ranks - 1) / ranks / bandwidth(rates.ALL_TO_ALL, ranks)
            calls = rates.ALL_TO_ALL_SECONDS * sum(map(len, tensors))
            copies = 2 * size / self.gpu.bandwidth
            seconds["exchange for heads"] = exchanges / 2 * (all_to_all + calls + copies)
        return seconds

    def fsdp(self, compute: float, micro_batches: int) -> float:
        """Returns the seconds in which FSDP2 communicates and no kernel runs.

        The communication of layers hides behind kernels. That of the root, embedding and head, hides behind
        nothing: it is the first and the last of a step.

        Args:
            compute: seconds of all kernels of the step.
            micro_batches: how often weights are gathered.
        """
        if self.gpus == 1:
            return 0.0
        parallel = self.config.parallel
        layers = np.sum([self._collectives(layer) for layer in self.model.blocks], axis=0)
        sums = micro_batches if parallel.reduce_gradients == "every" else 1
        gathers = micro_batches * (2 if parallel.reshard_after_forward else 1)
        root = (self._collectives(self.model) - layers) @ [micro_batches, sums]
        return float(root + max(0.0, layers @ [gathers, sums] - compute))

    def _collectives(self, module: nn.Module) -> np.ndarray:
        """Returns the seconds to gather a module's weights and to sum its gradients, which are in fp32.

        Replicas sum the gradients of a GPU's shards in a ring, which sends each number twice, to all but one
        of the replicas.
        """
        shards, replicas = self._shards(module), self.config.parallel.replicate
        received = gathered_size(module, self.config.parallel.expert_parallel) - shards
        ranks = self.gpus // replicas
        in_ring = 2 * shards * (replicas - 1) / replicas
        reduce = 4 * received / bandwidth(rates.REDUCE_SCATTER, ranks)
        reduce += 4 * in_ring / bandwidth(rates.REDUCE_SCATTER, self.gpus)
        return np.array([self.item * received / bandwidth(rates.ALL_GATHER, ranks), reduce])

    def _shards(self, module: nn.Module) -> int:
        """Returns the number of parameters in a GPU's shards of a module."""
        parallel = self.config.parallel
        return sum(shard_sizes(module, self.gpus // parallel.replicate, parallel.expert_parallel))

    def casts(self, micro_batches: int) -> float:
        """Returns the seconds of casting the weights of a GPU to the dtype of the computation."""
        casts = 1 if self.gpus == 1 else micro_batches
        return casts * (4 + self.item) * self._shards(self.model) / self.gpu.bandwidth

    def optimizer(self) -> float:
        """Returns the seconds of the gradient norm and the optimizer. Other optimizers count as adamw."""
        size = rates.OPTIMIZER_BYTES.get(self.config.optimizer.name, rates.OPTIMIZER_BYTES["adamw"])
        return size * self._shards(self.model) / self.gpu.bandwidth


def bandwidth(rate: float, ranks: int) -> float:
    """Returns the bytes per second of a collective over ``ranks`` adjacent GPUs."""
    return rate if ranks <= rates.NODE_GPUS else rates.NETWORK


def _both(forwards: float) -> float:
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
