"""Turns one plain model into one that trains on any number of ranks.

The model does not know where it runs. A single rank has nothing to shard and runs without FSDP2; everything
else is the same on a laptop, on one GPU and on many.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_tree.distributed import titan
from titan_tree.distributed.compiling import compile_modules
from titan_tree.distributed.experts.expert_parallel import (
    check_experts,
    experts_of,
    fully_shard_experts,
    shard_experts,
)
from titan_tree.distributed.mesh import Meshes, OneRank, check_sizes
from titan_tree.distributed.sequence_parallel import check_heads, shard_sequence
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.tree_model import Execution, TreeModel
from titan_tree.models.weights import WeightShard, WeightShards

ActivationCheckpoint = Literal["none", "selective", "full"]


def parallelize(
    model: TreeModel,
    mesh: DeviceMesh | OneRank,
    *,
    dtype: torch.dtype = torch.bfloat16,
    unsharded: Collection[nn.Parameter] = (),
    activation_checkpoint: ActivationCheckpoint = "none",
    compile: bool = False,
    replicate: int = 1,
    sequence_parallel: int = 1,
    expert_parallel: int = 1,
) -> TreeModel:
    """Applies all kinds of parallelism, checkpointing and torch.compile to a model, in place.

    The order matters:

    1. Sequence and expert parallelism change modules and parameters, so they come first. LoRA does, too: call
       ``add_lora`` before this function.
    2. Checkpointing wraps each block before compile. The compiler then sees what is recomputed and can fuse
       across it.
    3. Compile comes before FSDP2, whose hooks then run around each block, outside its graph.

    Weights keep their dtype. Gradients are summed over ranks, not averaged, because the loss is already
    divided by the normalizer of the global batch.

    Args:
        model: a model on any device, also on "meta".
        mesh: one-dimensional, of all ranks. ``OneRank()`` needs no process group.
        dtype: the dtype of the computation. FSDP2 casts the weights that it gathers. Weights that are not
            sharded by FSDP2 are cast once per step (``gradient_sync.cast_weights``): all weights of a single
            rank, and experts that only one rank holds. FSDP2 would compute the same numbers, but copy weights
            once and gradients twice (2 % of a step, docs/performance.md).
        unsharded: frozen weights that every rank holds whole, because ``ao.store_as_nf4`` will quantize them.
        activation_checkpoint: "none" stores all activations of a block for its backward pass, "selective"
            only the outputs of expensive operators, "full" only the input of the block.
        compile: compiles each block and the last norm. Blocks of a kind share their graphs, and one graph
            serves all batch sizes except 0 and 1.
        replicate: number of replicas of the weights. FSDP2 shards each over the other ranks and sums
            gradients over replicas (HSDP).
        sequence_parallel: number of adjacent ranks that share the tokens of each tree.
        expert_parallel: number of adjacent ranks over which the experts of each layer are sharded.
    Returns:
        ``model``.
    Raises:
        UserError: sequence_parallel or expert_parallel does not suit the model or the number of ranks.
    """
    check_parallel(model, mesh.size(), replicate, sequence_parallel, expert_parallel)
    meshes = Meshes.of(mesh, replicate, sequence_parallel, expert_parallel)
    sequence_group = None if meshes.sequence is None else meshes.sequence.get_group("sequence")
    model.execution = Execution(dtype, activation_checkpoint != "none", sequence_group, compile)
    if sequence_group is not None:
        assert isinstance(model, Decoder)
        shard_sequence(model, sequence_group)
    if meshes.experts is not None:
        assert isinstance(model, Decoder)
        shard_experts(model, meshes.experts)
    if activation_checkpoint != "none":
        _checkpoint_activations(model, activation_checkpoint)
    if compile:
        compile_modules(model, (*_blocks(model), model.last_norm))
    if mesh.size() > 1:
        _fully_shard(model, meshes, dtype, unsharded)
    return model


def check_parallel(
    model: TreeModel, num_ranks: int, replicate: int = 1, sequence_parallel: int = 1, expert_parallel: int = 1
) -> None:
    """Raises UserError if ``num_ranks`` ranks cannot share the model in this way."""
    check_sizes(num_ranks, replicate, sequence_parallel, expert_parallel)
    if isinstance(model, Decoder):
        check_heads(model, sequence_parallel)
        check_experts(model, expert_parallel, num_ranks // replicate // expert_parallel)
        return
    for key, size in (("sequence_parallel", sequence_parallel), ("expert_parallel", expert_parallel)):
        if size > 1:
            raise UserError(
                f"parallel.{key}: expected 1 for a model of transformers, got {size}; set it to 1, or set "
                'model.implementation to "native"'
            )


def weight_shards(model: nn.Module) -> WeightShards:
    """Returns this rank's shard of every weight, by the names of ``state_dict``.

    Args:
        model: plain, or sharded by ``parallelize``.
    """
    return {name: _weight_shard(weight) for name, weight in model.state_dict().items()}


def _weight_shard(weight: Tensor) -> WeightShard:
    if not isinstance(weight, DTensor):
        return WeightShard.whole(weight)
    # Any other placement could hold elements that are not a box.
    assert all(type(placement) in (Shard, Replicate) for placement in weight.placements), weight.placements
    shape, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local = weight.to_local().detach()
    assert local.shape == shape, (local.shape, shape)
    return WeightShard(local, start, tuple(weight.shape))


def _blocks(model: TreeModel) -> Iterable[nn.Module]:
    return model.get_submodule("layers").children()


def _checkpoint_activations(model: TreeModel, mode: ActivationCheckpoint) -> None:
    # torch.compile warns about operators that change their inputs. Blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    policy = titan.FullAC if mode == "full" else titan.TreeSelectiveAC
    # No operator in a block draws random numbers.
    policy(policy.Config(preserve_rng_state=False)).apply(model)


def _fully_shard(
    model: TreeModel,
    meshes: Meshes,
    dtype: torch.dtype,
    unsharded: Collection[nn.Parameter],
) -> None:
    """Applies FSDP2 to each block, the tower and the rest, except for the weights ``unsharded``."""
    assert isinstance(meshes.fsdp, DeviceMesh)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,  # rotary tables keep the precision that the model chose
    )
    ignored = set(unsharded)
    for block in _blocks(model):
        if (experts := meshes.experts) is not None:
            sharing = experts[tuple(name for name in experts.mesh_dim_names or () if name != "ep")]
            ignored |= fully_shard_experts(block, sharing, precision)
        fully_shard(
            block,
            mesh=meshes.fsdp,
            mp_policy=precision,
            ignored_params=ignored,
        )
    if model.visual is not None:
        # One unit, because ranks run it for different numbers of images.
        fully_shard(model.visual, mesh=meshes.fsdp, mp_policy=precision)
    fully_shard(model, mesh=meshes.fsdp, mp_policy=precision, ignored_params=ignored)
    register_fsdp_forward_method(model, "encode")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum. FSDP2 would otherwise multiply by 1 within the reduction, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def shard_sizes(model: nn.Module, num_ranks: int, expert_parallel: int = 1) -> Iterator[int]:
    """Yields the size of the first rank's shard of each parameter, as ``parallelize`` would shard it.

    FSDP2 shards the first dimension: rows of a matrix. Experts that are distributed over ranks are sharded
    along the second one, which holds the rows of each expert.

    Args:
        num_ranks: number of ranks of a replica.
        expert_parallel: number of ranks over which the experts of each layer are sharded.
    """
    experts = {p for module in experts_of(model) for p in module.parameters()}
    for parameter in model.parameters():
        shape, ranks, dim = list(parameter.shape), num_ranks, 0
        if parameter in experts and expert_parallel > 1:
            shape[0] //= expert_parallel
            ranks, dim = ranks // expert_parallel, 1
        shape[dim] = math.ceil(shape[dim] / ranks)
        yield math.prod(shape)


def gathered_size(module: nn.Module, expert_parallel: int = 1) -> int:
    """Returns how many parameters of ``module`` a rank holds after FSDP2 has gathered it."""
    in_experts = sum(p.numel() for experts in experts_of(module) for p in experts.parameters())
    return sum(p.numel() for p in module.parameters()) - in_experts + in_experts // expert_parallel
