"""How the GPUs of a run share parameters, tokens and heads (docs/parallelism.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from titan_tree.config import ParallelConfig
from titan_tree.distributed.experts.expert_parallel import experts_of
from titan_tree.models.attention import Attention
from titan_tree.models.block import Mixer
from titan_tree.models.gated_delta_net import GatedDeltaNet
from titan_tree.tree.paths import ExpertSizes


@dataclass(frozen=True)
class Sharding:
    """The numbers of GPUs that share something.

    FSDP2 shards parameters over the ranks of a replica, and experts first over ``expert_parallel`` of them.
    ``sequence_parallel`` ranks are an *owner*: they run the same trees, and each has an equal share of the
    tokens and of the heads.
    """

    gpus: int
    expert_parallel: int = 1
    sequence_parallel: int = 1
    replicate: int = 1

    @classmethod
    def of(cls, gpus: int, parallel: ParallelConfig) -> Sharding:
        """Returns how ``gpus`` GPUs share the work with the settings of [parallel]."""
        return cls(gpus, parallel.expert_parallel, parallel.sequence_parallel, parallel.replicate)

    @property
    def ranks(self) -> int:
        """Ranks of a replica, which hold all weights together."""
        return self.gpus // self.replicate

    @property
    def owners(self) -> int:
        """Groups of ranks that run different trees."""
        return self.gpus // self.sequence_parallel

    def own(self, tokens: int) -> int:
        """Returns how many of an owner's tokens its first rank computes."""
        return math.ceil(tokens / self.sequence_parallel)

    def shards(self, model: nn.Module) -> Iterator[int]:
        """Yields the size of the first rank's shard of each parameter.

        FSDP2 shards the first dimension: rows of a matrix. Experts that are distributed over ranks are
        sharded along the second one, which holds the rows of each expert.
        """
        experts = {p for module in experts_of(model) for p in module.parameters()}
        for parameter in model.parameters():
            shape, ranks, dim = list(parameter.shape), self.ranks, 0
            if parameter in experts and self.expert_parallel > 1:
                shape[0] //= self.expert_parallel
                ranks, dim = ranks // self.expert_parallel, 1
            shape[dim] = math.ceil(shape[dim] / ranks)
            yield math.prod(shape)

    def gathered(self, module: nn.Module) -> int:
        """Returns how many parameters of ``module`` a rank holds after FSDP2 has gathered it."""
        total = sum(p.numel() for p in module.parameters())
        in_experts = sum(p.numel() for experts in experts_of(module) for p in experts.parameters())
        return total - in_experts * (self.expert_parallel - 1) // self.expert_parallel


def ranks_of_token(sizes: ExpertSizes, num_ranks: int) -> float:
    """Returns the mean number of ranks that hold at least one of a token's experts, if they are random.

    These are P (1 - C(E - E/P, k) / C(E, k)) for E experts, k of them for a token, and P ranks.
    """
    _, top_k, num_experts = sizes
    nowhere = math.comb(num_experts - num_experts // num_ranks, top_k) / math.comb(num_experts, top_k)
    return num_ranks * (1 - nowhere)


def exchanged(mixer: Mixer, num_ranks: int) -> tuple[list[int], int]:
    """Returns how many numbers per token ``num_ranks`` ranks exchange in a forward pass of a layer.

    These are the sizes of each tensor that is exchanged for heads, with the copies of heads if there are
    fewer than ranks, and the size of the output, which returns.
    """
    if isinstance(mixer, Attention):
        config = mixer.config
        queries = config.num_attention_heads * config.head_dim
        keys = max(config.num_key_value_heads, num_ranks) * config.head_dim
        return [queries, keys, keys], queries
    assert isinstance(mixer, GatedDeltaNet)
    sizes = mixer.config
    keys = max(sizes.linear_num_key_heads, num_ranks) * sizes.linear_key_head_dim
    return [keys, keys, sizes.value_dim, 2 * sizes.linear_num_value_heads], sizes.value_dim
