"""What a run needs: the memory of its fullest GPU in steps from a sample of the data."""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any

import torch

from titan_tree.cli.plan.device import CPU, device_memory
from titan_tree.cli.plan.layer_trace import LayerTrace
from titan_tree.cli.plan.memory import RANDOM_ROUTER, MemoryPlan
from titan_tree.cli.plan.workload import StepSizes, sample_steps, take_sample
from titan_tree.data.sample_reader import SampleReader
from titan_tree.distributed.parallelize import check_parallel
from titan_tree.engine.step_io import StepCounts
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.tree_model import Execution
from titan_tree.run import build
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_model_without_weights

MARGIN = 0.05  # of a GPU's memory, for gaps in the allocator and what is not computed
TOKENS = ("logical_tokens", "leaf_tokens", "distinct_tokens", "executed_tokens")


def estimate(config: Config, gpus: int, gpu: str, num_groups: int | None = None) -> dict[str, Any]:
    """Returns what a run needs, as JSON. Tokens are means over the sampled steps, and sizes are bytes.

    Args:
        config: configuration of the run.
        gpus: number of GPUs.
        gpu: kind of the GPUs, see ``device_memory``.
        num_groups: number of groups to sample from the data; None: those of one step.
    Raises:
        UserError: the configuration, the data and the number of GPUs do not fit together.
    """
    name, available = device_memory(gpu)
    model = build_planned_model(config, gpus)
    reader = build.build_reader(config.data, build.build_tokenizer(config.data, config.model.hf_path), model)
    groups = take_sample(reader, num_groups or config.data.global_batch_groups)
    steps = planned_steps(config, model, reader, gpus, math.ceil(groups / config.data.global_batch_groups))
    plan = MemoryPlan(model, config, gpus, LayerTrace(model), steps, on_cpu=gpu == CPU)
    moment, memory = plan.peak()
    random_router = sum(plan.peak(RANDOM_ROUTER)[1].values())
    owners = [owner for step in steps for owner in step]
    counts = reduce(operator.add, (owner.counts for owner in owners))
    fits = max(sum(memory.values()), random_router) <= (1 - MARGIN) * available
    return {
        "model": model.config.title,
        "parameters": model.num_parameters(),
        "gpus": gpus,
        "gpu": name,
        "groups": groups,
        "steps": len(steps),
        **{tokens: getattr(counts, tokens) / len(steps) for tokens in TOKENS},
        "por": counts.por,
        "por_samples": counts.por_samples,
        "micro_batches": max(len(owner.micro_batches) for owner in owners),
        "forward_passes": plan.passes,
        "chain_tokens": plan.chain_tokens,
        "memory": memory,
        "memory_moment": moment,
        "memory_sum": sum(memory.values()),
        "memory_random_router": random_router,
        "memory_of_gpu": available,
        "fits": fits,
        "notes": _notes(config, plan, counts, groups, fits),
    }


def build_planned_model(config: Config, gpus: int) -> Decoder:
    """Returns the model of a configuration on the meta device.

    Raises:
        UserError: the plan does not cover the model, or its sizes do not suit [parallel] or [partition].
    """
    with torch.device("meta"):
        model = build_model_without_weights(config.model)
    if not isinstance(model, Decoder):
        raise UserError(f"model: titan-tree plan knows titan_tree's own models only, got {model.family}")
    if config.lora.is_on:
        raise UserError(
            "lora: titan-tree plan does not cover LoRA; append lora.rank=0 lora.adapter=null for what a "
            "run that trains all weights needs, which is more"
        )
    model.execution = Execution(getattr(torch, config.training.dtype))
    parallel = config.parallel
    sharing = parallel.sequence_parallel, parallel.expert_parallel
    check_parallel(model, gpus, parallel.replicate, *sharing)
    if max(sharing) > 1:
        build.build_activations(config.partition, torch.device("cpu")).check_lockstep()
    return model


def planned_steps(
    config: Config, model: Decoder, reader: SampleReader, gpus: int, num_steps: int
) -> list[StepSizes]:
    """Returns the sizes of the first steps of a run. Raises UserError if a tree is too large."""
    loss = build.build_loss(config.loss)
    preparer = build.build_tree_step(config, model, loss, torch.device("cpu")).preparer()
    return sample_steps(config, reader, preparer, model.costs().tree_costs(), gpus, num_steps)


def _notes(config: Config, plan: MemoryPlan, counts: StepCounts, groups: int, fits: bool) -> list[str]:
    """Returns what the numbers leave out, what training will refuse, and what to do if nothing fits."""
    notes = ["--gpu h200 plans for a GPU"] if plan.on_cpu else []
    notes += [f"activations are those of torch {torch.__version__.partition('+')[0]}"]
    if plan.gpus > 1 and plan.is_partitioned and config.parallel.reduce_gradients == "every":
        notes.append("trees are partitioned, so training will refuse parallel.reduce_gradients = every")
    if config.data.layout == "tree" and counts.por_samples <= 0:
        notes.append("samples share nothing, so trees save nothing; titan-tree inspect FILE says why")
    if groups % config.data.global_batch_groups:
        notes.append("the sample is smaller than its steps, so groups repeat; raise --groups")
    if not config.training.compile and not plan.on_cpu:
        notes.append("training.compile = false needs more memory than computed")
    if not fits:
        notes.append(
            "to need less memory: more GPUs, training.activation_checkpoint=full, a smaller data.max_tokens, "
            "partition.activations=recompute, optimizer.name=adamw8bit"
        )
    return notes
