"""Times a layer of experts beside transformers' and torchtitan's layers, and sharded over all GPUs.

python -m benchmarks experts                                                    # on a GPU
torchrun --nproc-per-node 2 -m benchmarks experts                 # experts sharded over 2 GPUs

The layer has a router, experts and their weighted sum; by default in the shape of Qwen3-30B-A3B. Every GPU
has its own tokens. All contenders have the same weights, are compiled, run in bf16, and take turns in one
process. Only the first one is sharded and communicates. The others compute all experts on each GPU.

With "random" routing, the router has random weights and uses experts unevenly. With "balanced" routing, all
experts are chosen equally often, by random tokens. With "skewed", the first expert is chosen 8 times as often
as the mean. Milliseconds are medians on the slowest GPU; TFLOP/s are
those of one GPU. "exposed_ms" is the time of a forward and backward pass in which a GPU only communicates.
"peak_share" refers to the
GPU's dense bf16 peak. "difference" is the relative difference of outputs to the first row's; it includes
tokens that rounding sends to other experts. "x transformers" is the time of transformers' layer over that of
this one.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps import process_group
from benchmarks.timers import Contender, add_rounds, benchmark, synchronize, time_ms
from titan_tree.cli.bench.record import Row, device_name
from titan_tree.components.moe.layer import Experts, MoE
from titan_tree.distributed import titan
from titan_tree.distributed.experts.sharded_experts import ShardedExperts

KEYS = ("gpus", "experts", "hidden", "tokens", "routing", "what")
RATIOS = ("x transformers",)
QUICK = (
    "--tokens", "33", "--hidden", "32", "--intermediate", "16", "--experts", "8", "--top-k", "3",
    "--rounds", "1", "--repeat", "1", "--no-compile",
)  # fmt: skip
PACKAGES = ("transformers", "torchtitan")
COLUMNS = (
    "what", "routing", "forward_ms", "forward_backward_ms", "tflops", "peak_share", "x transformers",
    "exposed_ms", "difference",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--tokens", type=int, default=32_768, help="tokens per GPU")
    add("--hidden", type=int, default=2048)
    add("--intermediate", type=int, default=768, help="hidden size of one expert")
    add("--experts", type=int, default=128)
    add("--top-k", type=int, default=8)
    add("--routing", nargs="+", default=["random", "balanced"], choices=["random", "balanced", "skewed"])
    add("--repeat", type=int, default=10, help="calls per measurement")
    add("--no-compile", action="store_true", help="run all layers in eager mode")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per routing and layer."""
    with process_group() as (mesh, device):
        setting: Row = {
            "gpus": mesh.size(),
            "experts": f"{args.top_k} of {args.experts}",
            "hidden": f"{args.hidden} x {args.intermediate}",
            "tokens": args.tokens,
        }
        layers = make_layers(args, device)
        rows = [setting | row for routing in args.routing for row in measure(args, layers, routing, device)]
        return rows if dist.get_rank() == 0 else []


def make_layers(args: argparse.Namespace, device: torch.device) -> dict[str, nn.Module]:
    """Returns all contenders with the same weights on every rank. The first one is sharded."""
    torch.manual_seed(0)
    made = {"titan_tree": ours, "transformers": transformers_layer, "torchtitan": torchtitan_layer}
    whole = {name: make(args).to(device, torch.bfloat16) for name, make in made.items()}
    share_weights(whole["titan_tree"], whole["transformers"], whole["torchtitan"])
    return {
        f"titan_tree, sharded over {dist.get_world_size()}": shard(cast(MoE, whole["titan_tree"])),
        **whole,
    }


def ours(args: argparse.Namespace) -> nn.Module:
    """Returns titan_tree's layer."""
    return MoE(args.hidden, args.intermediate, args.experts, args.top_k, norm_topk_prob=True)


def transformers_layer(args: argparse.Namespace) -> nn.Module:
    """Returns transformers' layer with grouped matrix products."""
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config: Any = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    return Qwen3MoeSparseMoeBlock(config)


def torchtitan_layer(args: argparse.Namespace) -> nn.Module:
    """Returns torchtitan's layer."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    experts = GroupedExperts.Config(dim=args.hidden, hidden_dim=args.intermediate, num_experts=args.experts)
    dispatcher = LocalTokenDispatcher.Config(num_experts=args.experts, top_k=args.top_k)
    router = TokenChoiceTopKRouter.Config(
        num_experts=args.experts,
        gate=Linear.Config(in_features=args.hidden, out_features=args.experts),
        top_k=args.top_k,
        score_func="softmax",
        route_norm=True,
    )
    config = MoE.Config(
        num_experts=args.experts,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=router,
        load_balance_coeff=None,
    )
    return config.build()


@torch.no_grad()
def share_weights(titan_tree: Any, transformers: Any, torchtitan: Any) -> None:
    """Draws random weights for titan_tree's layer and copies them into the other two."""
    for parameter in titan_tree.parameters():
        parameter.normal_(0, 0.02)
    gate_up, down = titan_tree.experts.gate_up_proj, titan_tree.experts.down_proj
    gate, up = gate_up.chunk(2, dim=1)
    transformers.gate.weight.copy_(titan_tree.gate.weight)
    transformers.experts.gate_up_proj.copy_(gate_up)
    transformers.experts.down_proj.copy_(down)
    torchtitan.router.gate.weight.copy_(titan_tree.gate.weight)
    experts = torchtitan.routed_experts.inner_experts
    for parameter, value in ((experts.w1_EFD, gate), (experts.w3_EFD, up), (experts.w2_EDF, down)):
        parameter.copy_(value)


def shard(layer: MoE) -> MoE:
    """Returns a layer with this rank's experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    experts = layer.experts
    num_experts, hidden, intermediate = experts.down_proj.shape
    layer.experts = Experts(num_experts // num_ranks, hidden, intermediate)  # do not copy all experts
    sharded = copy.deepcopy(layer)
    layer.experts = experts
    sharded.experts.dispatcher = ShardedExperts(cast(dist.ProcessGroup, dist.group.WORLD))
    for mine, every in zip(sharded.experts.parameters(), experts.parameters(), strict=True):
        mine.data = every.detach().chunk(num_ranks)[rank].clone()
    return sharded


def measure(
    args: argparse.Namespace, layers: dict[str, nn.Module], routing: str, device: torch.device
) -> list[Row]:
    """Returns one row per layer."""
    torch.manual_seed(1 + dist.get_rank())
    x, dy = (torch.randn(args.tokens, args.hidden, device=device).bfloat16() for _ in range(2))
    route(x, layers, routing, args)
    x.requires_grad_()
    num_paths = torch.ones(args.tokens, device=device)
    runs: dict[str, Callable[[], Tensor]] = {}
    for name, layer in layers.items():
        compiled = torch.compile(layer, disable=args.no_compile, fullgraph=isinstance(layer, MoE))
        runs[name] = partial(forward, compiled, x, num_paths if isinstance(layer, MoE) else None)

    def step(name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(runs[name](), [x, *layers[name].parameters()], dy)

    outputs = {name: run().detach().float() for name, run in runs.items()}

    def times(name: str) -> list[dict[str, float]]:
        with torch.no_grad():
            forward_ms = time_ms(runs[name], args.repeat)
        return [{"forward": forward_ms, "both": time_ms(partial(step, name), args.repeat)}]

    contenders = {name: Contender(name, partial(times, name)) for name in layers}
    flops = 3 * 2 * args.tokens * args.top_k * 3 * args.hidden * args.intermediate
    first, want = next(iter(outputs.items()))
    peak = titan.peak_flops(device_name(device)) if device.type == "cuda" else 0.0

    def row(contender: Contender) -> Row:
        got, both = outputs[contender.name], slowest(contender.median("both"))
        is_sharded = contender.name == first
        tflops = flops / both / 1e9
        exposed = slowest(exposed_ms(partial(step, first), args.repeat)) if is_sharded else 0.0
        return {
            "what": contender.name,
            "routing": routing,
            "forward_ms": round(slowest(contender.median("forward")), 3),
            "forward_backward_ms": round(both, 3),
            "tflops": round(tflops, 1),
            "peak_share": round(1e12 * tflops / peak, 3) if peak else None,
            "x transformers": round(slowest(contenders["transformers"].median("both")) / both, 3),
            "exposed_ms": round(exposed, 3),
            "difference": f"{((got - want).norm() / want.norm()).item():.1e}",
        }

    return benchmark(list(contenders.values()), args.rounds, row)


def forward(layer: Callable[..., tuple[Tensor, ...]], x: Tensor, num_paths: Tensor | None) -> Tensor:
    """Returns the output [N, d] of a layer: titan_tree's need numbers of paths, the others a batch."""
    return layer(x[None])[0] if num_paths is None else layer(x, num_paths)[0]


@torch.no_grad()
def route(x: Tensor, layers: dict[str, nn.Module], routing: str, args: argparse.Namespace) -> None:
    """Sets the weights of all routers, and x for balanced and skewed routing, in place.

    With balanced routing, the first E features of x are the logits.
    """
    gates: list[Any] = [getattr(layer, "router", layer).gate for layer in layers.values()]
    generator = torch.Generator(x.device).manual_seed(0)
    weight = torch.randn(args.experts, args.hidden, device=x.device, generator=generator) * 0.02
    if routing == "balanced":
        weight = torch.eye(args.experts, args.hidden, device=x.device)
        chosen = balanced_experts(args.tokens, args.experts, args.top_k).to(x.device)
        x[:, : args.experts] = torch.rand(args.tokens, args.experts, device=x.device)
        x[:, : args.experts] += 4 * torch.zeros_like(x[:, : args.experts]).scatter(1, chosen, 1)
    if routing == "skewed":
        x[:, 0] = 1.0  # a feature that all tokens have, which favors one expert
        weight[0] = 0.0
        logits = x.float() @ weight.t()
        least = logits[:, 1:].topk(args.top_k).values[:, -1]  # what the first expert must exceed
        weight[0, 0] = least.quantile(min(1.0, 8 * args.top_k / args.experts))
    for gate in gates:
        gate.weight.copy_(weight)


def balanced_experts(
    num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator | None = None
) -> Tensor:
    """Returns experts [N, k] that are chosen equally often, by random tokens."""
    per_order = num_experts // top_k  # tokens that together choose each expert once
    orders = torch.rand(-(-num_tokens // per_order), num_experts, generator=generator).argsort(1)
    return orders[:, : per_order * top_k].reshape(-1, top_k)[:num_tokens]


def exposed_ms(function: Callable[[], object], repeat: int) -> float:
    """Returns the milliseconds of a call in which the GPU runs NCCL's kernels and no others."""
    if not torch.cuda.is_available():
        return 0.0
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(repeat):
            function()
        synchronize()
    kernels = [event for event in run.events() or [] if event.device_type == DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name.lower()) for e in kernels]
    busy = covered([(start, end) for start, end, _ in spans])
    computing = covered([(start, end) for start, end, is_nccl in spans if not is_nccl])
    return (busy - computing) / 1e3 / repeat


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def slowest(value: float) -> float:
    """Returns the maximum of a number over ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()
