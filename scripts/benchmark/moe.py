"""A layer of experts, in milliseconds and TFLOP/s, beside transformers' and torchtitan's.

    python scripts/benchmark_moe.py --csv moe.csv

Router, experts and their weighted sum: by default the shape of Qwen3-30B-A3B. Random weights, so tokens
spread over experts unevenly, and the same for all. Forward, and forward and backward; medians over rounds in
one process in which the contenders take turns; bf16, each layer compiled. The peak is the GPU's, dense, in
bf16. "difference" is that of outputs, with tokens that rounding sends to other experts.

Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
from benchmark_attention import Row, time_ms, write_csv
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe import MoE as TorchtitanMoE
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from titan_tree.components.moe import MoE
from titan_tree.distributed import titan


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the grouped products need a CUDA GPU")
    torch.manual_seed(0)
    made = {"titan_tree": ours, "transformers": transformers_layer, "torchtitan": torchtitan_layer}
    layers = {name: make(args).to("cuda", torch.bfloat16) for name, make in made.items()}
    share_weights(**layers)
    num_paths = torch.ones(args.tokens, device="cuda")
    x, dy = (torch.randn(args.tokens, args.hidden, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()
    runs: dict[str, Callable[[], Tensor]] = {
        "titan_tree": partial(lambda layer: layer(x, num_paths)[0], torch.compile(layers["titan_tree"])),
        "transformers": partial(lambda layer: layer(x[None])[0], torch.compile(layers["transformers"])),
        "torchtitan": partial(lambda layer: layer(x[None])[0], torch.compile(layers["torchtitan"])),
    }
    want = runs["titan_tree"]().detach().float()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            inputs = [x, *layers[name].parameters()]
            with torch.no_grad():
                forward = time_ms(run)
            times[name].append((forward, time_ms(partial(both, run, inputs, dy))))
    flops = 2 * args.tokens * args.top_k * 3 * args.hidden * args.intermediate
    rows: list[Row] = []
    for name, pairs in times.items():
        forward, whole = (median(ms) for ms in zip(*pairs, strict=True))
        got = runs[name]().detach().float()
        tflops = 3 * flops / whole / 1e9
        rows.append({
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "experts": f"{args.top_k} of {args.experts}",
            "hidden": f"{args.hidden} x {args.intermediate}",
            "tokens": args.tokens,
            "what": name,
            "forward_ms": round(forward, 3),
            "forward_backward_ms": round(whole, 3),
            "tflops": round(tflops, 1),
            "peak_share": round(1e12 * tflops / titan.peak_flops(torch.cuda.get_device_name()), 3),
            "difference": f"{((got - want).norm() / want.norm()).item():.1e}",
        })  # fmt: skip
        print("  ".join(f"{key} {value}" for key, value in list(rows[-1].items())[4:]), flush=True)
    if args.csv:
        write_csv(args.csv, rows)


def ours(args: argparse.Namespace) -> MoE:
    return MoE(args.hidden, args.intermediate, args.experts, args.top_k, norm_topk_prob=True)


def transformers_layer(args: argparse.Namespace) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    return Qwen3MoeSparseMoeBlock(config)


def torchtitan_layer(args: argparse.Namespace) -> nn.Module:
    experts = GroupedExperts.Config(dim=args.hidden, hidden_dim=args.intermediate, num_experts=args.experts)
    dispatcher = LocalTokenDispatcher.Config(num_experts=args.experts, top_k=args.top_k)
    router = TokenChoiceTopKRouter.Config(
        num_experts=args.experts,
        gate=Linear.Config(in_features=args.hidden, out_features=args.experts),
        top_k=args.top_k,
        score_func="softmax",
        route_norm=True,
    )
    config = TorchtitanMoE.Config(
        num_experts=args.experts,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=router,
        load_balance_coeff=None,
    )
    return config.build()


@torch.no_grad()
def share_weights(titan_tree: MoE, transformers: nn.Module, torchtitan: nn.Module) -> None:
    """One set of random weights for all."""
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


def both(run: Callable[[], Tensor], inputs: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(run(), inputs, dy)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768, help="of an expert")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
