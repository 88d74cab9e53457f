"""Which part of each weight this rank holds."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_tree.models.weights import WeightShard, WeightShards


def weight_shards(model: nn.Module) -> WeightShards:
    """Returns this rank's shard of every weight, by the names of ``state_dict``.

    Args:
        model: plain, or sharded by ``parallelize``.
    """
    return {name: _shard(weight) for name, weight in model.state_dict().items()}


def _shard(weight: Tensor) -> WeightShard:
    if not isinstance(weight, DTensor):
        return WeightShard.whole(weight)
    # Any other placement could hold elements that are not a box.
    assert all(type(placement) in (Shard, Replicate) for placement in weight.placements), weight.placements
    shape, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local = weight.to_local().detach()
    assert local.shape == shape, (local.shape, shape)
    return WeightShard(local, start, tuple(weight.shape))
