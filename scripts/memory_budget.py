"""What a training step takes of each GPU's memory: for every way to shard, of a model of any size, on a CPU.

    python scripts/memory_budget.py --model qwen3_moe --flavor 30B-A3B --ranks 4 --expert-parallel 1 4

Weights, gradients and optimizer states are counted on the meta device. What a layer keeps of a token for its
backward is measured, not derived: net allocations of one layer's forward in bf16 under each policy of
activation checkpointing, partitioned as torch.compile does, as the difference of two lengths.

What FSDP2 allocates follows its code (torch.distributed.fsdp._fully_shard), U being all parameters of a rank
when gathered, S its shards, in a layer and in the root (embedding, norm, head):

- weights 4 S, states of the optimizer, gradients after the reduction 4 S;
- gathered in bf16 the root, a layer and the next: 2 bytes each. With partitions all of it, 2 U;
- gradients that wait for the last micro-batch or partition, 4 U instead of 4 S: the reduction frees them
  layer by layer, as it makes the others;
- while a layer's gradients are reduced: in bf16, in fp32 to be sent, and those of the layer before.

The sum is of a step with several micro-batches: the first one's activations are there before any gradients.
Not counted: temporaries of a layer's backward, what ranks exchange for experts, the allocator's gaps, NCCL.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

from titan_tree.components.moe import Experts
from titan_tree.components.tree_attention import triton_kernels
from titan_tree.components.tree_attention.plan import empty_lse
from titan_tree.distributed import titan
from titan_tree.errors import UserError
from titan_tree.models.block import Rope
from titan_tree.models.decoder import Decoder
from titan_tree.models.registry import MODELS, build_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

GIB = 2**30
POLICIES = {"none": None, "selective": titan.TreeSelectiveAC, "full": titan.FullAC}
GRADIENTS = ("every", "last", "partitions")


@dataclass(frozen=True)
class Sharding:
    """Of ranks, ``expert_parallel`` neighbours share out the experts; all else FSDP2 shards over all."""

    ranks: int
    expert_parallel: int = 1

    def shards(self, model: Decoder) -> Iterator[int]:
        """Numbers in the first rank's shard of each parameter. FSDP2 splits rows, of experts each one's."""
        experts = {p for module in _experts(model) for p in module.parameters()}
        for parameter in model.parameters():
            shape, ranks = list(parameter.shape), self.ranks
            rows = 0
            if parameter in experts and self.expert_parallel > 1:
                shape[0] //= self.expert_parallel
                ranks, rows = ranks // self.expert_parallel, 1
            shape[rows] = math.ceil(shape[rows] / ranks)
            yield math.prod(shape)

    def gathered(self, module: nn.Module) -> int:
        """Parameters of ``module`` that a rank has when FSDP2 has gathered it."""
        total = sum(p.numel() for p in module.parameters())
        of_experts = sum(p.numel() for experts in _experts(module) for p in experts.parameters())
        return total - of_experts * (self.expert_parallel - 1) // self.expert_parallel


def _experts(module: nn.Module) -> list[Experts]:
    return [child for child in module.modules() if isinstance(child, Experts)]


def optimizer_bytes(shard: int, optimizer: str) -> float:
    """Of the two moments of a shard; torchao's rule for those that stay in fp32."""
    if optimizer == "adamw" or shard < 4096 or shard % 256:
        return 8 * shard
    return 2 * (shard + 4 * shard // 256)


def budget(model: Decoder, sharding: Sharding, optimizer: str, gradients: str) -> dict[str, float]:
    """Bytes of a rank but for activations and vocabulary.

    gradients: parallel.reduce_gradients, or "partitions", with which they wait as with "last".
    """
    shards = list(sharding.shards(model))
    layers = [sharding.gathered(layer) for layer in model.get_submodule("layers").children()]
    everything = sharding.gathered(model)
    root = everything - sum(layers)
    if sharding.ranks == 1:  # no FSDP2: all is cast once a step
        gathered, reduced = 2 * everything, 0
    else:
        gathered = 2 * (everything if gradients == "partitions" else root + 2 * max(layers))
        reduced = (2 + 2 * 4) * max(*layers, root)
    return {
        "weights": 4 * sum(shards),
        "states": sum(optimizer_bytes(shard, optimizer) for shard in shards),
        "gradients": 4 * (sum(shards) if gradients == "every" else everything),
        "gathered": gathered,
        "reduced": reduced,
    }


def layer_bytes(name: str, flavor: str, policy: str, num_tokens: int = 128) -> float:
    """What one layer keeps of a token, its input included: the mean over a model's kinds of layers."""
    config = MODELS[name].flavors[flavor]
    period = getattr(config, "full_attention_interval", 1)
    with torch.device("meta"):
        model = build_model(name, flavor, "triton", num_hidden_layers=period, vocab_size=256).bfloat16()
    if wrapper := POLICIES[policy]:
        wrapper(wrapper.Config(preserve_rng_state=False)).apply(model)
    for layer in model.blocks:
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    _net_allocations(model, num_tokens)  # compiles
    few, many = (_net_allocations(model, count) for count in (num_tokens, 2 * num_tokens))
    return (many - few) / num_tokens / period


def _net_allocations(model: Decoder, num_tokens: int) -> int:
    """Bytes allocated and not freed by the layers' forward on one chain."""
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * num_tokens)])])
    layout = model.prepare(batch.layout)
    rope = Rope.at(layout.positions, model.config.rotary_dim, model.config.rope_theta)
    x = torch.zeros(num_tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    # A CPU cannot run the kernel, but it is all the same here what it writes.
    patched = mock.patch.multiple(
        triton_kernels, refusal=lambda *_: None, forward=lambda q, *_: (q.clone(), empty_lse(q))
    )
    gc.collect()  # what earlier calls left must not be freed in this one
    with patched, torch.profiler.profile(profile_memory=True) as run:
        for layer in model.blocks:
            x, _, _ = layer(x, rope, layout)
        gc.collect()
    events = run.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def activation_bytes(kept: float, whole: float, num_layers: int, num_tokens: int) -> float:
    """Of all layers what they keep, and of the one whose backward runs all that the forward made."""
    return num_tokens * (kept * num_layers + whole - kept)


def vocabulary_bytes(model: Decoder, num_tokens: int, policy: str) -> float:
    """See components/logprobs.py; every token predicts."""
    kept = 2 * num_tokens * model.config.vocab_size if policy == "none" else 0
    return kept + GIB + 4 * num_tokens * model.config.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_moe", choices=MODELS)
    parser.add_argument("--flavor", default="30B-A3B")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--expert-parallel", type=int, nargs="+", default=[1])
    parser.add_argument("--max-tokens", type=int, default=16_384, help="whose activations are alive at once")
    args = parser.parse_args()

    try:
        with torch.device("meta"):
            model = build_model(args.model, args.flavor)
    except UserError as error:
        parser.error(str(error))
    num_experts = model.expert_sizes.num_experts if model.expert_sizes else 1
    for name, number in (("ranks", args.ranks), ("experts", num_experts)):
        for expert_parallel in args.expert_parallel:
            if expert_parallel < 1 or number % expert_parallel:
                parser.error(
                    f"--expert-parallel: expected divisors of the number of {name}, {number}, got "
                    f"{expert_parallel}"
                )
    num_layers = model.config.num_hidden_layers
    of_experts = sum(p.numel() for experts in _experts(model) for p in experts.parameters())
    print(f"{args.model} {args.flavor}: {model.num_parameters():,} parameters, {of_experts:,} of experts;")
    print(f"GiB of each of {args.ranks} ranks")
    print()
    columns = ["weights", "states", "gradients", "gathered", "reduced", "sum"]
    print("| optimizer | experts over | gradients | " + " | ".join(columns) + " |")
    print("|---|---|---|" + "---|" * len(columns))
    for optimizer in ("adamw", "adamw8bit"):
        for expert_parallel in args.expert_parallel:
            for gradients in GRADIENTS:
                parts = budget(model, Sharding(args.ranks, expert_parallel), optimizer, gradients)
                values = [*parts.values(), sum(parts.values())]
                cells = " | ".join(f"{value / GIB:.1f}" for value in values)
                print(f"| {optimizer} | {expert_parallel} | {gradients} | {cells} |")
    print()
    print(f"of {args.max_tokens:,} tokens:")
    print()
    print("| checkpointing | kept of a token and layer, KiB | activations | vocabulary |")
    print("|---|---|---|---|")
    whole = layer_bytes(args.model, args.flavor, "none")
    for policy in POLICIES:
        kept = layer_bytes(args.model, args.flavor, policy)
        activations = activation_bytes(kept, whole, num_layers, args.max_tokens)
        vocabulary = vocabulary_bytes(model, args.max_tokens, policy)
        print(f"| {policy} | {kept / 1024:.1f} | {activations / GIB:.1f} | {vocabulary / GIB:.1f} |")


if __name__ == "__main__":
    main()
