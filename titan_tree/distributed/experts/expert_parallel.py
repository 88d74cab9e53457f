"""Expert parallelism (GShard, arXiv:2006.16668): each rank holds some of the experts of every layer.

``shard_experts`` keeps only the rank's own experts and makes the layers exchange tokens (exchange.py).
``fully_shard_experts`` then applies FSDP2 to them, if several ranks hold the same experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_tree.components.moe.layer import Experts
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder


def shard_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Shards the experts of every layer over the "ep" groups of ``mesh``, in place.

    Each of P ranks keeps E / P consecutive experts, as DTensors, and computes them for the tokens of its
    whole group.

    Args:
        model: a model on any device, also on "meta".
        mesh: ``Meshes.experts``.
    """
    group = mesh.get_group("ep")
    for experts in experts_of(model):
        for name, weight in list(experts.named_parameters()):
            shard = distribute_tensor(weight.data, mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(shard, weight.requires_grad))
        experts.dispatcher = ShardedExperts(group)
    assert model.experts is not None
    model.experts.group = group


def check_experts(model: Decoder, num_ranks: int, sharing: int) -> None:
    """Raises UserError if ``num_ranks`` ranks cannot hold the experts of a layer together.

    Args:
        sharing: number of ranks that hold the same experts, over which FSDP2 shards them.
    """
    if num_ranks == 1:
        return
    where = "parallel.expert_parallel: expected"
    if not (layers := experts_of(model)):
        raise UserError(f"{where} 1, because the model has no experts, got {num_ranks}")
    if (num_experts := len(layers[0].gate_up_proj)) % num_ranks:
        raise UserError(f"{where} a divisor of the number of experts, {num_experts}, got {num_ranks}")
    for weight in layers[0].parameters():
        if weight.shape[1] % sharing:
            raise UserError(
                f"{where} a larger number, got {num_ranks}: {sharing} ranks shard each expert, so {sharing} "
                f"must divide the {weight.shape[1]} rows of its weights"
            )


def experts_of(model: nn.Module) -> list[Experts]:
    """Returns the experts of each layer that has some."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def fully_shard_experts(
    block: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """Applies FSDP2 over ``mesh`` to the experts of a block. Call it before FSDP2 is applied to the block.

    On a mesh of one rank there is nothing to shard. FSDP2 would only copy the weights in each forward and
    backward pass, so it is not applied; ``gradient_sync.cast_weights`` casts these weights once per step.

    Returns:
        The parameters that FSDP2 must ignore in the block and in the model.
    """
    ignored: set[nn.Parameter] = set()
    for experts in experts_of(block):
        if mesh.size() == 1:
            ignored.update(experts.parameters())
            block.register_forward_pre_hook(_TakeLocal(experts))
            continue
        # Shards the rows of each expert: a rank may have fewer experts than the mesh has ranks.
        fully_shard(
            experts,
            mesh=mesh,
            mp_policy=precision,
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
    """Sets ``Experts.local`` before a block runs, so that no graph sees a DTensor."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    @torch._dynamo.disable
    def __call__(self, *_: Any) -> None:
        # Activation checkpointing recomputes a block without calling this hook. The weights of the last call
        # must then require gradients, even if that call was in a forward pass without gradients.
        with torch.enable_grad():
            parameters = self.experts.named_parameters()
            self.experts.local = {name: cast(DTensor, weight).to_local() for name, weight in parameters}
