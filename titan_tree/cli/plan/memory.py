"""The memory of a step on one GPU, part by part, when it is largest.

FSDP2's allocations follow its code (torch.distributed.fsdp._fully_shard). Layers are units of FSDP2, and so
is the root: embedding, norm and head. Computed is what torch's allocator gives out, and what lies outside.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from titan_tree.cli.plan.activations import LayerMemory
from titan_tree.cli.plan.hardware import GIB
from titan_tree.cli.plan.sharding import Sharding, exchanged, ranks_of_token
from titan_tree.cli.plan.workload import OwnerStep, Step
from titan_tree.components.logprobs import BLOCK_ELEMENTS
from titan_tree.components.tree_attention.plan import KEYS, PIECE, QUERIES
from titan_tree.config import Config
from titan_tree.distributed.experts.expert_parallel import experts_of
from titan_tree.distributed.sequence_parallel import AllToAllExchange
from titan_tree.models.block import Mixer
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import MLP
from titan_tree.tree.costs import row_bytes
from titan_tree.tree.token_shards import TokenShard

Parts = dict[str, float]  # bytes by name

# Outside of torch's allocator. The sizes are usual ones, not measured here.
CONTEXT = 0.6 * GIB  # CUDA's context, kernels, and the workspace of cuBLAS
NCCL = 1.5 * GIB  # buffers of the communicators
# The busiest rank's share of the token copies, relative to the mean: Qwen3-30B-A3B with random weights,
# experts over 4 ranks. Ranks get equal shares if the router is balanced.
RANDOM_ROUTER = 1.22
CACHE_BYTES = {"keys": 3.0, "states": 2.0}  # of rows with their fp32 gradients, relative to the rows alone


def optimizer_bytes(shard: int, optimizer: str) -> float:
    """Returns the bytes of both moments of a shard. 8-bit AdamW keeps those of some shards in fp32."""
    if optimizer != "adamw8bit" or shard < 4096 or shard % 256:
        return 8 * shard
    return 2 * (shard + 4 * shard // 256)


@dataclass(frozen=True)
class Load:
    """The sizes that decide the memory of the fullest GPU: each is the largest of all steps and GPUs."""

    chain_tokens: int  # own tokens whose activations are live at once
    tokens: int  # own ones of one forward pass
    edges: int  # of one forward pass
    passes: int  # of one GPU in one step
    table_bytes: int  # of attention's plan, which covers the tokens of all ranks that share a tree
    cached_keys: int  # rows of the gateway cache
    cached_states: int
    is_partitioned: bool

    @classmethod
    def of(cls, steps: Iterable[Step], sharding: Sharding) -> Load:
        owners: list[OwnerStep] = [owner for step in steps for owner in step]
        passes = [each for owner in owners for each in owner.passes]
        return cls(
            chain_tokens=sharding.own(max(owner.chain_tokens for owner in owners)),
            tokens=sharding.own(max(each.tokens for each in passes)),
            edges=max(each.edges for each in passes),
            passes=max(len(owner.passes) for owner in owners),
            table_bytes=max(plan_bytes(each.tokens, each.keys) for each in passes),
            cached_keys=max(owner.cache.keys for owner in owners),
            cached_states=max(owner.cache.states for owner in owners),
            is_partitioned=any(len(batches) > 1 for owner in owners for batches in owner.micro_batches),
        )


def plan_bytes(queries: int, keys: int) -> int:
    """Returns the bytes of the two large tables of attention's plan, in int32."""
    blocks = math.ceil(queries / QUERIES)
    return 4 * blocks * (math.ceil(keys / KEYS) + math.ceil(keys / PIECE) + 3)


class MemoryPlan:
    """Computes the memory of a step on the fullest GPU.

    Args:
        model: on the meta device.
        config: of the run.
        gpus: number of GPUs.
        layers: what the layers of ``model`` keep.
    """

    def __init__(self, model: Decoder, config: Config, gpus: int, layers: LayerMemory) -> None:
        self.model, self.config, self.gpus, self.layers = model, config, gpus, layers
        self.sharding = Sharding.of(gpus, config.parallel)
        self.item = 4 if config.training.dtype == "float32" else 2  # bytes of a number in the computation

    def peak(self, load: Load, imbalance: float = 1.0) -> tuple[str, Parts]:
        """Returns when memory is largest, and its parts.

        Args:
            load: of the fullest GPU.
            imbalance: token copies that arrive at the busiest rank, relative to the mean.
        """
        moments = {
            "the loss": self._at_loss(load, imbalance),
            "the backward pass of the last layer": self._at_start(load, imbalance),
            "the backward pass of the first layer": self._at_first_layer(load, imbalance),
            "the end of the backward pass": self._at_end(load),
        }
        name = max(moments, key=lambda moment: sum(moments[moment].values()))
        return name, moments[name]

    def rows(self, tokens: int, imbalance: float) -> float:
        """Returns how many rows arrive at the busiest rank for its experts; 0 without expert parallelism."""
        ranks = self.sharding.expert_parallel
        if self.model.experts is None or ranks == 1:
            return 0
        return tokens * ranks_of_token(self.model.experts.sizes, ranks) * imbalance

    def _fixed(self, load: Load) -> Parts:
        """Returns what does not change during a step."""
        shards = list(self.sharding.shards(self.model))
        parts = {
            "weights": 4.0 * sum(shards),
            "optimizer states": sum(optimizer_bytes(shard, self.config.optimizer.name) for shard in shards),
            "weights for computation": self.item * self._gathered(load),
            "attention plan": float(load.table_bytes),
            "CUDA and NCCL": CONTEXT + (NCCL if self.gpus > 1 else 0),
        }
        if load.is_partitioned:
            dtype = torch.float32 if self.item == 4 else torch.bfloat16
            like = torch.empty(0, dtype=dtype, device="meta")
            own = [rows for mixer in self._own_heads() for rows in mixer.empty_rows(like)]
            sizes, rows = row_bytes(self.model.cache_streams, own), (load.cached_keys, load.cached_states)
            parts["gateway cache"] = sum(
                number * sizes[name] * factor
                for number, (name, factor) in zip(rows, CACHE_BYTES.items(), strict=True)
            )
        return parts

    def _own_heads(self) -> Iterator[Mixer]:
        """Yields the mixers of the layers with the heads of a rank."""
        ranks = self.sharding.sequence_parallel
        for block in self.model.blocks:
            mixer = copy.copy(block.mixer)
            mixer.exchange = AllToAllExchange("", TokenShard(num_ranks=ranks)) if ranks > 1 else None
            yield mixer

    def _gathered(self, load: Load) -> int:
        """Returns the number of parameters of a rank in the dtype of the computation."""
        everything, layers = self.sharding.gathered(self.model), self._layers()
        keeps = load.is_partitioned or not self.config.parallel.reshard_after_forward
        if self.gpus == 1 or keeps:  # without FSDP2, all weights are cast once a step
            return everything
        in_experts = 0
        if self.sharding.expert_parallel == self.gpus:  # FSDP2 ignores experts of a single rank
            sizes = [sum(p.numel() for p in e.parameters()) for e in experts_of(self.model)]
            in_experts = sum(sizes) // self.gpus
            layers = [layer - size // self.gpus for layer, size in zip(layers, sizes, strict=True)]
        return everything - sum(self._layers()) + in_experts + 2 * max(layers)

    def _layers(self) -> list[int]:
        return [self.sharding.gathered(layer) for layer in self.model.blocks]

    def _gradients(self, load: Load) -> float:
        """Returns the bytes of gradients once a pass is done, in fp32."""
        sums_later = load.passes > 1 and self.config.parallel.reduce_gradients == "last"
        if self.gpus == 1 or load.is_partitioned or sums_later:
            return 4.0 * self.sharding.gathered(self.model)
        return 4.0 * sum(self.sharding.shards(self.model))

    def _reduced(self, parameters: int) -> float:
        """Returns the bytes of gradients that ranks are summing.

        They exist in the dtype of the computation and in fp32, beside those of the layer before, in fp32.
        """
        return 0.0 if self.gpus == 1 else (self.item + 4) * parameters + 4 * max(self._layers())

    def _activations(self, load: Load, imbalance: float) -> float:
        kept, partition = self.layers.kept(self.config.training.activation_checkpoint), self.config.partition
        running, chain = (kept.of(n, self.rows(n, imbalance)) for n in (load.tokens, load.chain_tokens))
        if partition.activations in ("offload", "recompute"):
            return running
        if partition.activations == "auto" and partition.device_gb is not None:
            return min(chain, max(running, 1e9 * partition.device_gb))
        return chain

    def _work(self, load: Load, imbalance: float) -> Parts:
        """Returns what the backward pass of one layer needs besides what its forward pass kept."""
        work = self.layers.work(self.config.training.activation_checkpoint)
        rows = self.rows(load.tokens, imbalance)
        gradients = max(self._hidden_gradients(), self._head_exchange())  # one after the other
        parts = {
            "backward pass of a layer": work.of(load.tokens, rows),
            "gradients in a layer": float(self.item * load.tokens * gradients),
        }
        if rows:
            assert self.model.experts is not None
            experts, width = experts_of(self.model)[0], self.model.config.hidden_size
            # Rows and their gradients; then for half of the copies, one copy of each row per expert, its
            # gradients before and after the experts, and the hidden units with their gradients.
            half = load.tokens * self.model.experts.sizes.top_k * imbalance / 2
            numbers = 2 * rows * width + half * 3 * (width + 2 * experts.down_proj.shape[2])
            parts["rows of the exchange"] = self.item * numbers
        return parts

    def _hidden_gradients(self) -> int:
        """Returns the numbers per token in the gradients of an MLP: its gate, its other half and its product.

        Those of experts on other ranks are among the rows of the exchange.
        """
        mlps = [block.mlp for block in self.model.blocks]
        return 3 * max((mlp.down_proj.in_features for mlp in mlps if isinstance(mlp, MLP)), default=0)

    def _head_exchange(self) -> int:
        """Returns the numbers per token that the exchange of a layer's heads needs in its backward pass."""
        if (ranks := self.sharding.sequence_parallel) == 1:
            return 0
        # Tensors arrive one after another; each is sorted from one buffer into another.
        sizes = [exchanged(block.mixer, ranks)[0] for block in self.model.blocks]
        return max(a + b for each in sizes for a, b in zip(accumulate(each), each, strict=True))

    def _at_loss(self, load: Load, imbalance: float) -> Parts:
        config, loss = self.model.config, self.config.loss
        logits = load.edges * config.vocab_size
        keeps = self.config.training.activation_checkpoint == "none" and not loss.entropy
        # A block has logits in fp32, and probabilities and gradients in the dtype of the computation.
        block = (4 + 2 * self.item) * min(logits, BLOCK_ELEMENTS)
        return self._fixed(load) | {
            "gradients": self._gradients(load) if load.passes > 1 else 0.0,
            "activations": self._activations(load, imbalance),
            "log-probs": self.item * logits * keeps + block + 4.0 * load.edges * config.hidden_size,
        }

    def _at_start(self, load: Load, imbalance: float) -> Parts:
        return (
            self._fixed(load)
            | {
                "gradients": self._gradients(load) if load.passes > 1 else 0.0,
                "gradients being summed": self._reduced(max(self._layers())),
                "activations": self._activations(load, imbalance),
            }
            | self._work(load, imbalance)
        )

    def _at_first_layer(self, load: Load, imbalance: float) -> Parts:
        reduced = self._reduced(max(self._layers()))
        parts = {"gradients": self._gradients(load), "gradients being summed": reduced}
        return self._fixed(load) | parts | self._work(load, imbalance)

    def _at_end(self, load: Load) -> Parts:
        root = self.sharding.gathered(self.model) - sum(self._layers())
        parts = {"gradients": self._gradients(load), "gradients being summed": self._reduced(root)}
        return self._fixed(load) | parts
