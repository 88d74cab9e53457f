"""Expert parallelism (GShard, arXiv:2006.16668): each rank holds some of the experts of every layer.

``shard_experts`` keeps only the rank's own experts and makes the layers exchange tokens (exchange.py).
``fully_shard_experts`` then applies FSDP2 to them, if several ranks hold the same experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_tree.components.moe import Experts
from titan_tree.distributed.sharded_experts import ShardedExperts
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder


def shard_experts(model: Decoder, mesh: DeviceMesh, num_ranks: int) -> DeviceMesh:
    """Shards the experts of every layer over groups of ``num_ranks`` adjacent ranks, in place.

    Each rank keeps E / ``num_ranks`` consecutive experts, as DTensors, and computes them for the tokens of
    its whole group.

    Args:
        model: on any device, also on "meta".
        mesh: one-dimensional, of all ranks.
        num_ranks: > 1.
    Returns:
        The mesh of all ranks as "efsdp" x "ep". The ranks of an "ep" group hold all experts together. The
        ranks of an "efsdp" group hold the same experts, which FSDP2 shards over them.
    Raises:
        UserError: the model has no experts, ``num_ranks`` does not divide the number of ranks or of experts,
            or the size of an "efsdp" group does not divide the rows of an expert.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    where = f"parallel.expert_parallel: got {num_ranks}, expected"
    if not layers:
        raise UserError(f"{where} 1, because the model has no experts")
    for name, number in (("ranks (torchrun)", mesh.size()), ("experts", len(layers[0].gate_up_proj))):
        if number % num_ranks:
            raise UserError(f"{where} a divisor of the number of {name}, {number}")
    sharing = mesh.size() // num_ranks
    for weight in layers[0].parameters():
        if weight.shape[1] % sharing:
            raise UserError(
                f"{where} a larger number: {sharing} ranks shard each expert, so {sharing} must divide the "
                f"{weight.shape[1]} rows of its weights"
            )
    expert_mesh = init_device_mesh(mesh.device_type, (sharing, num_ranks), mesh_dim_names=("efsdp", "ep"))
    group = expert_mesh.get_group("ep")
    for experts in layers:
        for name, weight in list(experts.named_parameters()):
            own = distribute_tensor(weight.data, expert_mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(own, weight.requires_grad))
        experts.dispatcher = ShardedExperts(group)
    assert model.experts is not None
    model.experts.group = group
    return expert_mesh


def fully_shard_experts(
    block: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard_after_forward: bool
) -> set[nn.Parameter]:
    """Applies FSDP2 over ``mesh`` to the experts of a block. Call it before FSDP2 is applied to the block.

    On a mesh of one rank there is nothing to shard. FSDP2 would only copy the weights in each forward and
    backward pass, so it is not applied; ``gradient_sync.cast_weights`` casts these weights once per step.

    Returns:
        The parameters that FSDP2 must ignore in the block and in the model.
    """
    ignored: set[nn.Parameter] = set()
    for experts in block.modules():
        if not isinstance(experts, Experts):
            continue
        if mesh.size() == 1:
            ignored.update(experts.parameters())
            block.register_forward_pre_hook(_TakeLocal(experts))
            continue
        # Shards the rows of each expert: a rank may have fewer experts than the mesh has ranks.
        fully_shard(
            experts,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda _: Shard(1),
        )
        # ``experts`` is never called as a module, and FSDP2's hooks would break the graph of the block.
        # They therefore run around the block.
        state = fully_shard.state(experts)  # type: ignore[attr-defined]
        block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
        block.register_forward_pre_hook(_TakeLocal(experts))
        block.register_forward_hook(state._post_forward)
    return ignored


class _TakeLocal:
    """Sets ``Experts.local_weights`` before a block runs, so that no graph sees a DTensor."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    @torch._dynamo.disable
    def __call__(self, *_: Any) -> None:
        weights = self.experts.gate_up_proj, self.experts.down_proj
        # Activation checkpointing recomputes a block without calling this hook. The weights of the last call
        # must then require gradients, even if that call was in a forward pass without gradients.
        with torch.enable_grad():
            gate_up, down = (cast(DTensor, weight).to_local() for weight in weights)
        self.experts.local_weights = gate_up, down
