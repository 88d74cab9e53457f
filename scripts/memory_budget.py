"""Computes the memory that a training step needs on each GPU, for any model and sharding, on a CPU.

    python scripts/memory_budget.py --model qwen3_moe --flavor 30B-A3B --ranks 4 --expert-parallel 1 4

Weights, gradients and optimizer states are counted on the meta device. The memory that a layer keeps per
token for its backward pass is measured, for each policy of activation checkpointing. The layer's forward pass
runs in bf16 on two sequences of different lengths. The difference between its net allocations is divided by
the difference between the lengths. The layer's graph is partitioned as torch.compile partitions it.

What FSDP2 allocates follows its code (torch.distributed.fsdp._fully_shard). U is the number of parameters
of a rank when all are gathered, S the number in its shards. Layers are units of FSDP2, and so is the root:
embedding, norm and head.

- Weights take 4 S bytes, gradients after their reduction 4 S, optimizer states depend on the optimizer.
- Gathered weights take 2 bytes per parameter: of the root, a layer and the next one. With partitions of
  trees they take 2 U, because everything stays gathered. Weights that FSDP2 leaves out are cast once per
  step and count as gathered: all of a single rank, and experts if each is on one rank only.
- Gradients that accumulate until the last micro-batch or partition take 4 U instead of 4 S. The reduction
  frees them layer by layer.
- While a layer's gradients are reduced, they exist in bf16 and in fp32. The fp32 gradients of the layer
  reduced before it still exist, too. This is 2 + 2 * 4 bytes per parameter of a layer.

The sum is for a step with several micro-batches, whose later forward passes start when gradients exist
already. It omits temporary tensors of a layer's backward pass, tokens exchanged for experts, gaps in the
allocator, and NCCL.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from titan_tree import TokenPath, TokenTree, TreeBatch, UserError, build_model
from titan_tree.components.moe import Experts
from titan_tree.components.tree_attention import operator, plan
from titan_tree.distributed import titan
from titan_tree.models.block import LayerOutput
from titan_tree.models.decoder import Decoder
from titan_tree.registry import ATTENTION_BACKENDS, MODELS

GIB = 2**30
POLICIES = {"none": None, "selective": titan.TreeSelectiveAC, "full": titan.FullAC}
GRADIENTS = ("every", "last", "partitions")

# An attention backend that allocates what the kernels write, and computes nothing. It runs on a CPU.
SIZES = "memory_budget"
SIZES_BACKEND = SimpleNamespace(
    is_automatic=lambda device: False,
    refusal=lambda q, deterministic: None,
    prepare=plan.prepare,
    attention=partial(operator.attention, SIZES),
    forward=lambda q, *_: (torch.empty_like(q), plan.empty_lse(q)),
)


@dataclass(frozen=True)
class Sharding:
    """How a model is distributed: FSDP2 over all ranks, experts first over ``expert_parallel`` neighbors."""

    ranks: int
    expert_parallel: int = 1

    def shards(self, model: Decoder) -> Iterator[int]:
        """Yields the size of the first rank's shard of each parameter.

        FSDP2 shards the first dimension: rows of a matrix. Experts that are distributed over ranks are
        sharded along the second one, which holds the rows of each expert.
        """
        experts = {p for module in _experts(model) for p in module.parameters()}
        for parameter in model.parameters():
            shape, ranks, dim = list(parameter.shape), self.ranks, 0
            if parameter in experts and self.expert_parallel > 1:
                shape[0] //= self.expert_parallel
                ranks, dim = ranks // self.expert_parallel, 1
            shape[dim] = math.ceil(shape[dim] / ranks)
            yield math.prod(shape)

    def held(self, module: nn.Module) -> int:
        """Returns how many parameters of ``module`` a rank holds if FSDP2 has gathered it."""
        total = sum(p.numel() for p in module.parameters())
        return total - _num_in_experts(module) + _num_in_experts(module) // self.expert_parallel

    def cast_once(self, module: nn.Module) -> int:
        """Returns how many parameters of ``module`` are cast once per step, because FSDP2 leaves them out."""
        if self.ranks == 1:
            return self.held(module)
        return _num_in_experts(module) // self.ranks if self.expert_parallel == self.ranks else 0


def _experts(module: nn.Module) -> list[Experts]:
    return [child for child in module.modules() if isinstance(child, Experts)]


def _num_in_experts(module: nn.Module) -> int:
    return sum(p.numel() for experts in _experts(module) for p in experts.parameters())


def optimizer_bytes(shard: int, optimizer: str) -> float:
    """Returns the bytes of both moments of a shard. torchao keeps those of some shards in fp32."""
    if optimizer == "adamw" or shard < 4096 or shard % 256:
        return 8 * shard
    return 2 * (shard + 4 * shard // 256)


def budget(model: Decoder, sharding: Sharding, optimizer: str, gradients: str) -> dict[str, float]:
    """Returns the bytes on one rank, without activations and vocabulary.

    Args:
        model: on the meta device.
        sharding: how it is distributed.
        optimizer: see ``optimizer_bytes``.
        gradients: the value of parallel.reduce_gradients, or "partitions" for steps that cut trees.
    """
    shards = list(sharding.shards(model))
    layers = [
        sharding.held(layer) - sharding.cast_once(layer) for layer in model.get_submodule("layers").children()
    ]
    everything, once = sharding.held(model), sharding.cast_once(model)
    root = everything - once - sum(layers)
    gathered = everything - once if gradients == "partitions" else root + 2 * max(layers)
    reduced = (2 + 2 * 4) * max(*layers, root)
    return {
        "weights": 4 * sum(shards),
        "states": sum(optimizer_bytes(shard, optimizer) for shard in shards),
        "gradients": 4 * (sum(shards) if gradients == "every" else everything),
        "gathered": 2 * (once + gathered),
        "reduced": reduced,
    }


def layer_bytes(name: str, flavor: str, policy: str, num_tokens: int = 128) -> float:
    """Returns the bytes that a layer keeps per token, its input included: the mean over the model's layers.

    Args:
        name: of the model.
        flavor: its size.
        policy: of activation checkpointing.
        num_tokens: one of the two lengths to measure; the other is twice this.
    """
    config = MODELS[name].flavors[flavor]
    period = getattr(config, "full_attention_interval", 1)  # layers until their kinds repeat
    with torch.device("meta"):
        ATTENTION_BACKENDS.register(SIZES, SIZES_BACKEND)
        model = build_model(name, flavor, SIZES, num_hidden_layers=period, vocab_size=256).bfloat16()
    if wrapper := POLICIES[policy]:
        wrapper(wrapper.Config(preserve_rng_state=False)).apply(model)
    for layer in model.blocks:
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    few, many = (_net_allocations(model, count) for count in (num_tokens, 2 * num_tokens))
    return (many - few) / num_tokens / period


def _net_allocations(model: Decoder, num_tokens: int) -> int:
    """Returns the bytes that the layers' forward passes on one chain allocate and do not free."""
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * num_tokens)])])
    layout = model.prepare(batch.layout)
    rope = model.make_rope(layout.positions)
    x = torch.zeros(num_tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def forward(hidden: Tensor) -> LayerOutput:
        for layer in model.blocks:
            output = layer(hidden, rope, layout)
            hidden = output.hidden
        return output  # also holds the experts of each token, as in a model

    forward(x)  # compiles
    gc.collect()  # what earlier calls left must not be freed while this one is measured
    with torch.profiler.profile(profile_memory=True) as run:
        output = forward(x)
        gc.collect()
    del output
    events = run.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def activation_bytes(kept: float, everything: float, num_layers: int, num_tokens: int) -> float:
    """Returns the peak bytes of activations.

    The peak is ``kept`` per token of every layer, and ``everything`` of the layer whose backward pass runs.
    """
    return num_tokens * (kept * num_layers + everything - kept)


def vocabulary_bytes(model: Decoder, num_tokens: int, policy: str) -> float:
    """Returns the bytes of components/logprobs.py, if every token predicts another one."""
    kept = 2 * num_tokens * model.config.vocab_size if policy == "none" else 0
    return kept + GIB + 4 * num_tokens * model.config.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_moe", choices=list(MODELS))
    parser.add_argument("--flavor", default="30B-A3B")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--expert-parallel", type=int, nargs="+", default=[1])
    parser.add_argument("--max-tokens", type=int, default=16_384, help="tokens with live activations")
    args = parser.parse_args()

    try:
        with torch.device("meta"):
            model = build_model(args.model, args.flavor)
    except UserError as error:
        parser.error(str(error))
    num_experts = model.experts.sizes.num_experts if model.experts else 1
    for name, number in (("ranks", args.ranks), ("experts", num_experts)):
        for expert_parallel in args.expert_parallel:
            if expert_parallel < 1 or number % expert_parallel:
                parser.error(
                    f"--expert-parallel: expected divisors of the number of {name}, {number}, got "
                    f"{expert_parallel}"
                )
    in_experts = _num_in_experts(model)
    print(f"{args.model} {args.flavor}: {model.num_parameters():,} parameters, {in_experts:,} in experts.")
    print(f"GiB on each of {args.ranks} ranks:\n")
    print_sharded(model, args)
    print(f"\nGiB for {args.max_tokens:,} tokens:\n")
    print_activations(model, args)


def print_sharded(model: Decoder, args: argparse.Namespace) -> None:
    """Prints what does not depend on the number of tokens, as Markdown."""
    columns = ["weights", "states", "gradients", "gathered", "reduced", "sum"]
    print("| optimizer | expert_parallel | gradients reduced | " + " | ".join(columns) + " |")
    print("|---|---|---|" + "---|" * len(columns))
    for optimizer in ("adamw", "adamw8bit"):  # those whose states `optimizer_bytes` knows
        for expert_parallel in args.expert_parallel:
            for gradients in GRADIENTS:
                parts = budget(model, Sharding(args.ranks, expert_parallel), optimizer, gradients)
                values = [*parts.values(), sum(parts.values())]
                cells = " | ".join(f"{value / GIB:.1f}" for value in values)
                print(f"| {optimizer} | {expert_parallel} | {gradients} | {cells} |")


def print_activations(model: Decoder, args: argparse.Namespace) -> None:
    """Prints what grows with the number of tokens, as Markdown."""
    print("| checkpointing | KiB kept per token and layer | activations | vocabulary |")
    print("|---|---|---|---|")
    everything = layer_bytes(args.model, args.flavor, "none")
    for policy in POLICIES:
        kept = layer_bytes(args.model, args.flavor, policy)
        activations = activation_bytes(kept, everything, model.config.num_hidden_layers, args.max_tokens)
        vocabulary = vocabulary_bytes(model, args.max_tokens, policy)
        print(
            f"| {policy} | {kept / 1024:.1f} | {activations / GIB:.1f} | {vocabulary / GIB:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
