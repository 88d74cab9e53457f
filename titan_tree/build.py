"""From configuration to components: the one place that knows both."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_tree.components.moe import RouterBias, RouterLoss
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config import (
    DataConfig,
    LossConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    ProfilerConfig,
    RouterBiasConfig,
    RouterLossConfig,
    TrainingConfig,
)
from titan_tree.data.dataset import TreeDataset
from titan_tree.distributed import titan
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.activations import Activations
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import load_router_biases, model_from_config, read_weights
from titan_tree.models.registry import build_model


def build_parallel_model(
    model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, mesh: DeviceMesh
) -> Decoder:
    """The model with fp32 weights, sharded over ``mesh``.

    Weights, a snapshot's or random ones, go tensor by tensor to every rank's shards, so no rank ever holds
    the model. Every rank draws all of a random tensor from a seed of its own: the same for any ranks.
    """
    with torch.device("meta"):
        if not model.hf_path:
            assert model.flavor is not None
            built = build_model(model.name, model.flavor, model.attention, model.gdn, **model.overrides)
        elif model.overrides:
            raise UserError("model.overrides: a snapshot's configuration stands; overrides are for flavors")
        else:
            built = model_from_config(model.hf_path, model.attention, model.gdn)
    parallelize(
        built,
        mesh,
        dtype=getattr(torch, training.dtype),
        float8=training.float8,
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
        reshard_after_forward=parallel.reshard_after_forward,
        expert_parallel=parallel.expert_parallel,
    )
    built.to_empty(device=mesh.device_type)
    parameters = built.state_dict()
    weights = (
        read_weights(model.hf_path, built) if model.hf_path else random_weights(built, mesh, training.seed)
    )
    for name, tensor in weights:
        parameter = parameters[name]
        value = tensor.to(mesh.device_type, torch.float32)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
    if model.hf_path:
        load_router_biases(built, model.hf_path)
    return built


def random_weights(model: Decoder, mesh: DeviceMesh, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, random values) of every parameter of ``model``, which may be sharded, one at a time."""
    for name, parameter in model.state_dict().items():
        generator = torch.Generator(mesh.device_type).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        value = torch.empty(parameter.shape, device=mesh.device_type)
        model.init_parameter(name, value, generator)
        yield name, value


def build_optimizers(config: OptimizerConfig, model: Decoder) -> titan.OptimizersContainer:
    """AdamW, without weight decay on vectors: weights of norms, and DeltaNet's decays.

    Experts are a group of their own: what one fused kernel updates must be sharded alike.
    """
    vectors = "|".join(re.escape(name) for name, p in model.named_parameters() if p.ndim == 1)
    options = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    decays = {f"^({vectors})$": 0.0}
    if model.experts is not None:
        decays[r"\.experts\."] = config.weight_decay
    decays[".*"] = config.weight_decay
    groups = [
        titan.ParamGroupConfig(
            pattern=pattern,
            optimizer_name={"adamw": "AdamW", "adamw8bit": "AdamW8bit"}[config.name],
            optimizer_kwargs=options | {"weight_decay": decay},
        )
        for pattern, decay in decays.items()
    ]
    implementation = "fused" if config.name == "adamw" else "for-loop"
    return titan.Optimizers(
        titan.Optimizers.Config(param_groups=groups, implementation=implementation), model_parts=[model]
    )


def build_lr_schedulers(
    config: LRSchedulerConfig, optimizers: titan.OptimizersContainer, steps: int
) -> titan.LRSchedulersContainer:
    return titan.LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps, decay_type=config.decay_type, min_lr_factor=config.min_lr_factor
    ).build(optimizers=optimizers, training_steps=steps)


def build_loss(config: LossConfig) -> TreeLoss:
    return TreeLoss(config.name, config.reduction, config.entropy, **config.options)


def build_router_loss(config: RouterLossConfig) -> RouterLoss:
    return RouterLoss(config.balance, config.z, config.scope)


def build_router_bias(config: RouterBiasConfig, model: Decoder) -> RouterBias | None:
    """None: biases, if the model has some, stay as they are. Else adds them where there are none."""
    if config.rate is None:
        return None
    if model.experts is None:
        raise UserError(
            "router_bias.rate: expected a model with experts, such as qwen3_moe; this one has none, so "
            "remove the key"
        )
    model.experts.add_router_biases()
    return RouterBias(config.rate, config.counts)


def build_partitioner(config: PartitionConfig, max_tokens: int) -> TreePartitioner | None:
    """None: every micro-batch is one forward."""
    if config.strategy == "none":
        return None
    return TreePartitioner(config.strategy, max_tokens, config.max_chain_tokens)


def build_activations(config: PartitionConfig, device: torch.device) -> Activations:
    device_bytes, host_bytes = (
        None if gigabytes is None else 1e9 * gigabytes for gigabytes in (config.device_gb, config.host_gb)
    )
    return Activations(device, config.activations, device_bytes, host_bytes)


def build_dataset(
    config: DataConfig,
    tokenizer: TreeTokenizer | None,
    model: Decoder,
    mesh: DeviceMesh,
    allow_larger: bool = False,
) -> TreeDataset:
    if config.replay != "off" and model.experts is None:
        raise UserError(f"data.replay: expected 'off' for a model without experts, got {config.replay!r}")
    return TreeDataset(
        config.files,
        tokenizer,
        merge=config.merge,
        layout=config.layout,
        advantage=config.advantage,
        replay=config.replay,
        global_batch_groups=config.global_batch_groups,
        max_tokens=config.max_tokens,
        allow_larger=allow_larger,
        max_positions=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        experts=model.experts.sizes if model.experts else None,
        shuffle_buffer=config.shuffle_buffer,
        seed=config.seed,
        rank=mesh.get_rank(),
        world_size=mesh.size(),
        sample_options=config.sample,
    )


def build_tokenizer(config: DataConfig, hf_path: str | None) -> TreeTokenizer | None:
    """None where neither is there: files of token ids need no tokenizer, the reader refuses any others."""
    name = config.tokenizer or tokenizer_folder(hf_path)
    return None if name is None else TreeTokenizer.load(name, config.template)


def tokenizer_folder(hf_path: str | None) -> str | None:
    """The snapshot, if it brings a tokenizer."""
    return hf_path if hf_path and (Path(hf_path) / "tokenizer.json").is_file() else None


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
