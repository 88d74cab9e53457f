"""Builds components from the configuration.

The model, its layers and the passes of a step take plain arguments. They never see the configuration.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.moe.routing import RouterBias
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.components.tree_loss.spec import COUNT_ONCE, LossSpec
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.data_files import DataSizes
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.loader import PREFETCH, StepLoader, Steps
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig, PartitionConfig
from titan_tree.distributed import titan
from titan_tree.distributed.collectives import all_reduce_max
from titan_tree.distributed.faults import start_timeout
from titan_tree.distributed.launch import ranks_of_machine
from titan_tree.distributed.mesh import OneRank
from titan_tree.engine.activations import Activations
from titan_tree.engine.step_io import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.balance.balancing import Balancing
from titan_tree.run.config import Config
from titan_tree.run.settings import ProfilerConfig
from titan_tree.tree.paths import ModelLimits

DEFAULT_STEPS = 1000  # steps of a run that sets neither training.steps nor training.epochs
WARM_UP_TOKENS = 16_384  # enough for the compiler to choose kernels for large batches


def build_tree_step(config: Config, model: TreeModel, loss: TreeLoss, device: torch.device) -> TreeStep:
    """Returns the TreeStep of the configuration, which partitions trees that are too large."""
    partition = config.partition
    partitioner = None
    if partition.strategy != "none":
        partitioner = TreePartitioner(partition.strategy, config.data.max_tokens, partition.max_chain_tokens)
    return TreeStep(
        model,
        loss,
        device,
        partitioner,
        activations=build_activations(partition, device),
        reduce_gradients=config.parallel.reduce_gradients,
        router_loss=config.router_loss,
    )


def build_activations(config: PartitionConfig, device: torch.device) -> Activations:
    """Returns what stores the activations of suspended partitions."""
    device_bytes, host_bytes = (
        None if gigabytes is None else 1e9 * gigabytes for gigabytes in (config.device_gb, config.host_gb)
    )
    return Activations(device, config.activations, device_bytes, host_bytes)


def build_loss(config: LossConfig) -> TreeLoss:
    """Returns the loss. Writes its reduction into ``config``, so that checkpoints store what was trained."""
    loss = TreeLoss(
        config.name,
        config.reduction,
        config.entropy,
        kl=config.kl if config.kl.coefficient else None,
        correction=config.correction if config.correction.level != "off" else None,
        whiten=config.whiten,
        sequence=config.sequence,
        **config.options,
    )
    config.reduction = loss.reduction
    return loss


def build_router_bias(config: RouterBias, model: TreeModel) -> RouterBias | None:
    """Returns the RouterBias that updates router biases, and adds biases to layers without them.

    Returns None if no rate is configured; biases of the model then stay unchanged.
    """
    if config.rate is None:
        return None
    if model.experts is None:
        raise UserError(
            "router_bias.rate: expected a model with experts, such as qwen3_moe; this one has none, so "
            "remove the key"
        )
    model.experts.add_router_biases()
    return config


def build_reader(
    config: DataConfig, tokenizer: TreeTokenizer | None, model: TreeModel, loss: LossConfig | None = None
) -> SampleReader:
    """Returns the reader of data files. It refuses what the model or the loss cannot train."""
    if config.replay != "off" and model.experts is None:
        raise UserError(f"data.replay: expected 'off' for a model without experts, got {config.replay!r}")
    experts = model.experts.sizes if model.experts else None
    limits = ModelLimits(
        model.config.max_position_embeddings, model.config.vocab_size, experts, model.image_limits
    )
    spec = LossSpec.of(loss.name) if loss is not None else None
    same_loss = loss.name if loss and spec and not spec.reads_pairs else None
    preference_loss = loss.name if loss and spec and spec.reads_preferences else None
    return SampleReader(config, tokenizer, limits, same_loss, preference_loss)


def build_dataset(
    reader: SampleReader,
    config: Config,
    epochs: int | None,
    mesh: DeviceMesh | OneRank,
    *,
    is_balanced: bool = False,
) -> TreeDataset:
    """Returns this rank's part of the data.

    Args:
        is_balanced: each rank reads groups of its own, and trees travel to the ranks that train on them.
            Otherwise, ranks that share the tokens of trees read the same groups.
    """
    readers = 1 if is_balanced else config.parallel.sequence_parallel  # ranks that read the same groups
    return TreeDataset(
        reader.config,
        reader,
        allow_larger=config.partition.strategy != "none",
        epochs=epochs,
        rank=mesh.get_rank() // readers,
        world_size=mesh.size() // readers,
        is_compared=mesh.size() > 1,
        weighs_edges=config.loss.reduction in COUNT_ONCE,
    )


def build_validation(
    config: Config, tokenizer: TreeTokenizer | None, model: TreeModel, mesh: DeviceMesh | OneRank
) -> TreeDataset | None:
    """Returns one epoch of the validation files in their own order, or None if there are none."""
    if config.validation.files is None or not config.validation.interval:
        return None
    files = config.validation.files
    data = dataclasses.replace(config.data, files=files, paths="all", weights=None, shuffle_buffer=0)
    return build_dataset(build_reader(data, tokenizer, model, config.loss), config, 1, mesh)


def num_steps(config: Config, dataset: TreeDataset, sizes: DataSizes | None, done: int) -> int:
    """Returns the optimizer steps of the whole run.

    Args:
        dataset: at the position after the steps that are done.
        sizes: of its files; None only without ``training.epochs``.
        done: steps of earlier parts of the run, which may have had another batch size or other data.

    Raises:
        UserError: the data end before their position.
    """
    left = dataset.steps_left(sizes) if sizes else None
    steps = config.training.steps or DEFAULT_STEPS
    if config.training.epochs is not None:
        assert left is not None
        steps = done + left
    return steps


def build_balancing(
    config: Config, model: TreeModel, loss: TreeLoss, mesh: DeviceMesh | OneRank, device: torch.device
) -> Balancing | None:
    """Returns what balances trees over ranks, or None if there is one rank or the configuration says no.

    The paths of a tree stay together if the loss compares them, or if experts are balanced within each
    micro-batch.
    """
    if mesh.size() == 1 or not config.parallel.balance:
        return None
    router = config.router_loss
    is_balanced_per_micro_batch = router.balance > 0 and router.scope == "micro_batch"
    return Balancing(
        model,
        device,
        config.data.max_tokens,
        sequence_parallel=config.parallel.sequence_parallel,
        expert_parallel=config.parallel.expert_parallel > 1,
        fixed=config.training.deterministic,
        splits=not loss.spec.compares_paths and not is_balanced_per_micro_batch,
    )


def build_step_loader(
    config: Config,
    tree_step: TreeStep,
    dataset: TreeDataset,
    num_steps: int,
    balancing: Balancing | None = None,
    done: int = 0,
) -> StepLoader[StepInput]:
    """Returns what makes this rank's inputs of the next steps, ahead of training.

    Collective with ``balancing``.

    Iterating over it yields (input, position). The position is that of the dataset after the step. The
    dataset itself is ahead of training, so a checkpoint must store the position.

    Args:
        dataset: at the position to start from.
        num_steps: steps to make.
        balancing: see ``build_balancing``.
        done: steps of earlier parts of the run.
    """
    steps: Steps = TreeDataset.steps
    on_gpu = tree_step.device.type == "cuda"
    workers = num_workers(config.data.workers, tree_step.device)
    timeouts = start_timeout(config.parallel.timeout_s), config.parallel.timeout_s
    if balancing:
        # Hosts may have different numbers of cores, but every worker needs one of each other rank.
        workers = -int(all_reduce_max(torch.tensor(-workers)))
        steps = balancing.sharing(done, *timeouts, PREFETCH + 2).steps
    return StepLoader(dataset, tree_step.preparer(), num_steps, workers, on_gpu, steps, *timeouts)


def warm_up(config: Config, tree_step: TreeStep) -> None:
    """Compiles the graphs of a run before its first step, see ``TreeStep.warm_up``."""
    tree_step.warm_up(
        min(config.data.max_tokens, WARM_UP_TOKENS),
        replay=config.data.replay != "off",
        evaluates=config.validation.files is not None or config.partition.device_gb is not None,
    )


def num_workers(setting: int | str, device: torch.device) -> int:
    """Returns how many processes make the inputs of this rank's steps.

    "auto" chooses a thread for training on a CPU, whose cores it would share. On a GPU it chooses up to four
    processes, and leaves a core per rank to training itself.
    """
    if setting != "auto":
        return int(setting)
    if device.type == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // ranks_of_machine() - 1, 1), 4)


def build_tokenizer(config: DataConfig, hf_path: str | None) -> TreeTokenizer | None:
    """Returns the tokenizer of the configuration, else that of the snapshot, or None if both are missing.

    Files of token ids need no tokenizer. Without one, the reader refuses conversations.
    """
    name = config.tokenizer or tokenizer_folder(hf_path)
    return None if name is None else TreeTokenizer.load(name, config.template)


def tokenizer_folder(hf_path: str | None) -> str | None:
    """Returns the snapshot's folder if it contains a tokenizer."""
    return hf_path if hf_path and os.path.lexists(Path(hf_path) / "tokenizer.json") else None


def build_profiler(config: ProfilerConfig, folder: str, step: int) -> titan.Profiler:
    return titan.Profiler(
        titan.Profiler.Config(
            enable_profiling=config.enable,
            profile_freq=config.interval,
            enable_memory_snapshot=config.memory_snapshot,
        ),
        global_step=step,
        base_folder=folder,
    )
