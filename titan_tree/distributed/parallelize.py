"""From one plain model to one that trains on any number of ranks: float8, checkpointing, compile, FSDP2.

The model does not know where it runs. One rank alone has nothing to shard and goes without FSDP2; all else
is the same on a laptop, one GPU and N GPUs.
"""

from __future__ import annotations

import os
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_tree.components.moe import Experts
from titan_tree.distributed import ao, titan
from titan_tree.distributed.exchange import Exchange
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder

ActivationCheckpoint = Literal["none", "selective", "full"]


def init_distributed() -> tuple[DeviceMesh, torch.device]:
    """Join the process group that torchrun describes, or form one of a single process.

    Tensors on a GPU travel over NCCL, host numbers over gloo: agreeing on counts never waits for the GPU.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # else forwards of ever new sizes leave gaps in the memory
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)), device


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.bfloat16,
    float8: ao.Float8 = "none",
    activation_checkpoint: ActivationCheckpoint = "none",
    compile: bool = False,
    reshard_after_forward: bool = True,
    expert_parallel: int = 1,
) -> Decoder:
    """Apply float8, activation checkpointing, torch.compile and FSDP2 to ``model.layers``, in place; also on
    meta.

    The order matters. Float8 comes first, as it replaces modules. Checkpointing wraps a block before compile,
    which so sees what is recomputed and fuses across it. Compile comes before FSDP, whose hooks then stay
    outside of the graphs, around each block. One graph serves all blocks and all batch sizes (dynamic), and
    a graph break is an error (fullgraph).

    Weights and gradients stay fp32; ``dtype`` is that of the computation. FSDP2 casts what it gathers, a
    rank alone casts once a step (``cast_weights``): the same numbers, but FSDP2 would also copy weights once
    and gradients twice (2 % of a step, docs/performance.md). Gradients are summed over ranks, not averaged:
    the loss is already divided by the normalizer of the global batch.

    expert_parallel: neighbouring ranks that share out the experts of each layer, see ``shard_experts``.
    Raises UserError where the model or the number of ranks does not allow that.
    """
    if float8 != "none":
        ao.float8_linears(model, float8, mesh.device_type)
    expert_mesh = shard_experts(model, mesh, expert_parallel) if expert_parallel > 1 else None
    if activation_checkpoint != "none":
        policy = titan.FullAC if activation_checkpoint == "full" else titan.TreeSelectiveAC
        # Nothing in a block draws random numbers.
        policy(policy.Config(preserve_rng_state=False)).apply(model)
    blocks = list(model.get_submodule("layers").children())
    if compile:
        # A graph for each kind of size that Inductor tells apart (docs/design.md), fewer than this.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        if "states" in model.cache_streams:
            # Sizes of a layout's many small tables are equal by chance, which must not bind a graph.
            torch.fx.experimental._config.use_duck_shape = False
        if expert_mesh is not None:
            # By sizes, which differ from rank to rank; exchanges must run in the same order on all.
            torch._inductor.config.reorder_for_peak_memory = False
        for module in (*blocks, model.get_submodule("norm")):
            module.compile(fullgraph=True, dynamic=True)
    model.compute_dtype = dtype
    model.recompute_logits = activation_checkpoint != "none"
    if mesh.size() == 1:
        return model
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary tables and the like keep the precision the model gave them
    )
    for block in blocks:
        if expert_mesh is not None:
            _fully_shard_experts(block, expert_mesh["efsdp"], precision, reshard_after_forward)
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum: no scaling pass, and gloo has none
    return model


def shard_experts(model: Decoder, mesh: DeviceMesh, num_ranks: int) -> DeviceMesh:
    """Leave each rank E / ``num_ranks`` experts of every layer, as DTensors; returns the mesh of all ranks.

    That is "efsdp" x "ep": neighbours, the ranks of an "ep" group, hold all experts of a layer together, each
    computes its own for the tokens of all, and "efsdp" groups shard what their ranks have in common.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    where = f"parallel.expert_parallel: got {num_ranks}, expected"
    if not layers:
        raise UserError(f"{where} 1, since the model has no experts")
    for name, number in (("ranks (torchrun)", mesh.size()), ("experts", len(layers[0].gate_up_proj))):
        if number % num_ranks:
            raise UserError(f"{where} a divisor of the number of {name}, {number}")
    sharing = mesh.size() // num_ranks
    for weight in layers[0].parameters():
        if weight.shape[1] % sharing:
            raise UserError(
                f"{where} the {sharing} ranks that share an expert to divide its {weight.shape[1]} rows; "
                "raise it"
            )
    expert_mesh = init_device_mesh(mesh.device_type, (sharing, num_ranks), mesh_dim_names=("efsdp", "ep"))
    group = expert_mesh.get_group("ep")
    for experts in layers:
        for name, weight in list(experts.named_parameters()):
            own = distribute_tensor(weight.data, expert_mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(own, weight.requires_grad))
        experts.dispatcher = Exchange(group)
    assert model.experts is not None
    model.experts.group = group
    return expert_mesh


def _fully_shard_experts(
    block: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    """FSDP2 for the experts of a block over ``mesh``, even of one rank: casts and sums are the same then."""
    for experts in block.modules():
        if isinstance(experts, Experts):
            # Rows of each expert: a rank may have fewer experts than the mesh has ranks.
            fully_shard(
                experts,
                mesh=mesh,
                mp_policy=precision,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=lambda _: Shard(1),
            )
            # Nobody calls this module, and its hooks would break the block's graph: they go around the block.
            state = fully_shard.state(experts)  # type: ignore[attr-defined]
            block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
            block.register_forward_pre_hook(_TakeLocal(experts))
            block.register_forward_hook(state._post_forward)


class _TakeLocal:
    """Before a block's forward, sets ``Experts.local_weights``, so that no DTensor gets into a graph."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    @torch._dynamo.disable
    def __call__(self, *_: Any) -> None:
        weights = self.experts.gate_up_proj, self.experts.down_proj
        with torch.enable_grad():  # a checkpointed block may run again after a forward without gradients
            gate_up, down = (cast(DTensor, weight).to_local() for weight in weights)
        self.experts.local_weights = gate_up, down
