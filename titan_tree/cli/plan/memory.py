"""The memory of a step on the fullest GPU, part by part, when it is largest.

FSDP2's allocations follow its code (torch.distributed.fsdp._fully_shard). Layers are units of FSDP2, and so
are the tower and the root: embedding, norm and head. The estimate covers memory from torch's allocator, and
the CUDA context and NCCL outside of it.
"""

from __future__ import annotations

import copy
import math
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor, nn

from titan_tree.cli.plan.device import GIB
from titan_tree.cli.plan.layer_trace import LayerTrace
from titan_tree.cli.plan.tower_trace import chunk_bytes
from titan_tree.cli.plan.workload import StepSizes, is_partitioned
from titan_tree.components.logprobs import BLOCK_ELEMENTS
from titan_tree.components.tree_attention.block_lists import table_bytes
from titan_tree.distributed.experts.expert_parallel import experts_of
from titan_tree.distributed.parallelize import gathered_size, shard_sizes
from titan_tree.distributed.sequence_parallel import AllToAllExchange
from titan_tree.distributed.settings import OPTIMIZERS
from titan_tree.models.block import Attention
from titan_tree.models.decoder import Decoder
from titan_tree.models.gated_delta_net import GatedDeltaNet
from titan_tree.models.layers import MLP
from titan_tree.models.tree_model import is_trained
from titan_tree.models.vision import chunks
from titan_tree.run.config import Config
from titan_tree.tree.batch import TokenShard
from titan_tree.tree.costs import row_bytes

Parts = dict[str, float]  # bytes by name

# Outside of torch's allocator. The sizes are usual ones, not measured here.
PROGRAM = 0.6 * GIB  # Python and its packages
CONTEXT = 0.6 * GIB  # CUDA's context, kernels, and the workspace of cuBLAS
NCCL = 1.5 * GIB  # buffers of the communicators
# Token copies of the busiest rank, relative to the mean: Qwen3-30B-A3B with random weights, experts over 4
# ranks. A balanced router sends equal numbers to all ranks.
RANDOM_ROUTER = 1.22


class MemoryPlan:
    """The memory of the fullest GPU in some steps of a run.

    The attributes ``chain_tokens`` to ``table_bytes`` are the largest of all steps and GPUs.

    Args:
        model: the model, on the meta device.
        config: configuration of the run.
        gpus: number of GPUs.
        layers: what the layers of ``model`` keep.
        steps: the sizes of the steps.
        on_cpu: whether each rank is a process on a CPU, and has no GPU.
    """

    def __init__(
        self,
        model: Decoder,
        config: Config,
        gpus: int,
        layers: LayerTrace,
        steps: list[StepSizes],
        on_cpu: bool = False,
    ) -> None:
        self.on_cpu = on_cpu
        self.model, self.config, self.gpus, self.layers = model, config, gpus, layers
        owners = [owner for step in steps for owner in step]
        passes = [each for owner in owners for each in owner.passes]
        ranks = config.parallel.sequence_parallel
        self.is_partitioned = any(map(is_partitioned, steps))
        self.chain_tokens = -(-max(owner.chain_tokens for owner in owners) // ranks)  # live at once
        self.tokens = -(-max(each.tokens for each in passes) // ranks)  # of a forward pass
        self.edges = max(each.edges for each in passes)  # of a forward pass
        self.passes = max(len(owner.passes) for owner in owners)  # forward passes of a step
        self.cached_keys = max(each.cache.keys for each in passes)
        self.cached_states = max(each.cache.states for each in passes)
        self.table_bytes = max(table_bytes(each.tokens, each.keys) for each in passes)  # block lists
        self.mask_size = max(each.tokens * each.keys for each in passes)  # of the reference's dense mask
        self.item = 4 if config.training.dtype == "float32" else 2  # bytes of a number in the computation
        replica, expert_parallel = gpus // config.parallel.replicate, config.parallel.expert_parallel
        self.shards = list(shard_sizes(model, replica, expert_parallel))
        self.layer_sizes = [gathered_size(layer, expert_parallel) for layer in model.blocks]
        self.size = gathered_size(model, expert_parallel)
        self.trained_shards = list(compress(self.shards, (p.requires_grad for p in model.parameters())))
        tower: Any = model.visual
        self.tower_size = 0 if tower is None else gathered_size(tower)
        self.trains_tower = tower is not None and is_trained(tower)
        self.pixels = max(sum(map(math.prod, each.images)) for each in passes)  # of a micro-batch
        together = [chunk for each in passes for chunk in chunks(each.images, math.prod)]
        largest = max(together, key=lambda chunk: sum(map(math.prod, chunk)), default=None)
        self.chunk_bytes = (
            chunk_bytes(tower, largest, getattr(torch, config.training.dtype)) if largest else 0
        )

    def peak(self, imbalance: float = 1.0) -> tuple[str, Parts]:
        """Returns when memory is largest, and its parts. See ``moments``."""
        return max(self.moments(imbalance).items(), key=lambda moment: sum(moment[1].values()))

    def moments(self, imbalance: float = 1.0) -> dict[str, Parts]:
        """Returns the parts of memory at each moment at which it may be largest.

        Args:
            imbalance: token copies that arrive at the busiest rank for its experts, relative to the mean.
        """
        fixed, gradients, parallel = self._fixed(), float(4 * sum(self.trained_shards)), self.config.parallel
        # The last backward pass is that of a trained tower.
        sums_later = (self.passes > 1 or self.trains_tower) and parallel.reduce_gradients == "last"
        if self.gpus == 1 or self.is_partitioned or sums_later:
            gradients = 4.0 * (self.size - self.tower_size * (not self.trains_tower))  # not sharded
        layer, root = max(self.layer_sizes), self.size - self.tower_size - sum(self.layer_sizes)
        before = fixed | {
            "gradients": gradients if self.passes > 1 else 0.0,  # of earlier forward and backward passes
            "activations": self._activations(imbalance),
        }
        after = fixed | {"gradients": gradients}
        backward = self._summed(layer) | self._backward(imbalance)
        image = {"images in the tower": float(self.chunk_bytes)}
        if self.trains_tower:
            image |= {"gradients": gradients} | self._summed(self.tower_size)
        return {
            "the loss": before | {"log-probs": self._logprobs()},
            "the backward pass of the last layer": before | backward,
            "the backward pass of the first layer": after | backward,
            "the end of the backward pass": after | self._summed(root),
            "images in the tower": before | {"activations": 0.0} | image,
        }

    def _fixed(self) -> Parts:
        """Returns the parts that do not change during a step."""
        state_bytes = OPTIMIZERS[self.config.optimizer.name].state_bytes
        parts = {
            "weights": 4.0 * sum(self.shards),
            "optimizer states": sum(map(state_bytes, self.trained_shards)),
            "weights for computation": self.item * self.cast_weights(),
        }
        if self.pixels:
            tower: Any = self.model.visual
            width = self.model.config.hidden_size * (1 + len(getattr(tower, "deepstack_merger_list", ())))
            # Text layers read the features of a trained tower in fp32, and sum their gradients in fp32.
            item = self.item + self.trains_tower * (8 if self.item == 2 else 4)
            parts["features of images"] = float(item * width * self.pixels // tower.patch**2)
            parts["pixels of images"] = 3.0 * self.pixels
        if self.on_cpu:
            # SDPA makes numbers of the mask.
            parts |= {"attention mask": (1.0 + self.item) * self.mask_size, "program": PROGRAM}
        else:
            parts |= {
                "attention block lists": float(self.table_bytes),
                "CUDA and NCCL": CONTEXT + (NCCL if self.gpus > 1 else 0),
            }
        if self.is_partitioned:
            like = torch.empty(0, dtype=getattr(torch, self.config.training.dtype), device="meta")
            share = TokenShard(num_ranks=self.config.parallel.sequence_parallel)
            rows: list[Tensor] = []
            for mixer in (copy.copy(block.mixer) for block in self.model.blocks):
                mixer.exchange = AllToAllExchange("", share) if share.num_ranks > 1 else None
                rows += mixer.empty_rows(like)
            # Rows of keys have fp32 gradients, two times as large as the rows; states are in fp32 themselves.
            sizes = row_bytes(self.model.cache_streams, rows)
            keys, states = self.cached_keys * sizes["keys"], self.cached_states * sizes["states"]
            parts["gateway cache"] = 3.0 * keys + 2.0 * states
        return parts

    def cast_weights(self) -> int:
        """Returns the number of parameters of a rank in the dtype of the computation."""
        if self.gpus == 1 or self.is_partitioned or self.config.parallel.reduce_gradients == "last":
            return self.size  # without FSDP2, all weights are cast once a step
        layers, in_experts = self.layer_sizes, 0
        if self.config.parallel.expert_parallel == self.gpus:  # FSDP2 ignores experts of a single rank
            sizes = [
                sum(p.numel() for experts in experts_of(block) for p in experts.parameters()) // self.gpus
                for block in self.model.layers
            ]
            in_experts = sum(sizes)
            layers = [layer - size for layer, size in zip(layers, sizes, strict=True)]
        root = self.size - self.tower_size - sum(self.layer_sizes)
        return root + in_experts + max(2 * max(layers), self.tower_size)

    def _summed(self, parameters: int) -> Parts:
        """Returns the gradients that ranks are summing.

        They exist in the dtype of the computation and in fp32, beside those of the layer before, in fp32.
        """
        size = (self.item + 4) * parameters + 4 * max(self.layer_sizes)
        return {"gradients being summed": float(size if self.gpus > 1 else 0)}

    def _arriving(self, tokens: int, imbalance: float) -> tuple[float, float]:
        """Returns how many rows arrive, and the copies of the busiest rank; 0 without expert parallelism."""
        ranks = self.config.parallel.expert_parallel
        if self.model.experts is None or ranks == 1:
            return 0.0, 0.0
        return tokens * (ranks - 1.0), tokens * self.model.experts.sizes.top_k * imbalance

    def _activations(self, imbalance: float) -> float:
        kept = self.layers.kept(self.config.training.activation_checkpoint, self.config.parallel)
        running, chain = (kept.of(n, *self._arriving(n, imbalance)) for n in (self.tokens, self.chain_tokens))
        partition = self.config.partition
        if partition.activations in ("offload", "recompute"):
            return running
        if partition.activations == "auto" and partition.device_gb is not None:
            return min(chain, max(running, 1e9 * partition.device_gb))
        return chain

    def _backward(self, imbalance: float) -> Parts:
        """Returns what the backward pass of one layer needs besides what its forward pass kept."""
        rows, copies = self._arriving(self.tokens, imbalance)
        recomputed = self.layers.recomputed(self.config.training.activation_checkpoint, self.config.parallel)
        # The gradients of an MLP: its gate, its other half and its product. Those of experts on other ranks
        # are among the rows of the exchange.
        mlps = [block.mlp for block in self.model.blocks]
        hidden = 3 * max((mlp.down_proj.in_features for mlp in mlps if isinstance(mlp, MLP)), default=0)
        parts = {
            "backward pass of a layer": recomputed.of(self.tokens, rows, copies),
            "gradients in a layer": float(self.item * self.tokens * max(hidden, self.head_exchange())),
        }
        if rows:
            assert self.model.experts is not None
            experts, width = experts_of(self.model)[0], self.model.config.hidden_size
            # The sums of rows that return, and those of all ranks that arrive. Then for each copy, the
            # gradient of its output, and of its hidden units that of each product, the gate and the
            # up-projection, and the product.
            numbers = (2 * rows + self.tokens) * width + copies * (width + 4 * experts.down_proj.shape[2])
            parts["rows of the exchange"] = self.item * numbers
        return parts

    def head_exchange(self) -> int:
        """Returns the numbers per token that the exchange of a layer's heads needs in its backward pass."""
        if (ranks := self.config.parallel.sequence_parallel) == 1:
            return 0
        # Tensors arrive one after another; each is sorted from one buffer into another.
        sizes = [exchanged(block.mixer, ranks)[0] for block in self.model.blocks]
        return max(a + b for tensors in sizes for a, b in zip(accumulate(tensors), tensors, strict=True))

    def _logprobs(self) -> float:
        logits = self.edges * self.model.config.vocab_size
        keeps = self.config.training.activation_checkpoint == "none" and not self.config.loss.entropy
        # A block has logits in fp32, and probabilities and gradients in the dtype of the computation.
        block = (4 + 2 * self.item) * min(logits, BLOCK_ELEMENTS)
        return self.item * logits * keeps + block + 4.0 * self.edges * self.model.config.hidden_size


def exchanged(mixer: nn.Module, num_ranks: int) -> tuple[list[int], int]:
    """Returns how many numbers per token ``num_ranks`` ranks exchange in a forward pass of a layer.

    These are the sizes of each tensor that is exchanged for heads, with the copies of heads if there are
    fewer than ranks, and the size of the output, which returns.
    """
    if isinstance(mixer, Attention):
        heads = mixer.config
        queries = heads.num_attention_heads * heads.head_dim
        keys = max(heads.num_key_value_heads, num_ranks) * heads.head_dim
        return [queries, keys, keys], queries
    assert isinstance(mixer, GatedDeltaNet)
    sizes = mixer.config
    keys = max(sizes.linear_num_key_heads, num_ranks) * sizes.linear_key_head_dim
    return [keys, keys, sizes.value_dim, 2 * sizes.linear_num_value_heads], sizes.value_dim
