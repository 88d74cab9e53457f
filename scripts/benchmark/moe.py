"""Times a layer of experts, in milliseconds and TFLOP/s, beside transformers' and torchtitan's layers.

    python scripts/benchmark/moe.py --csv moe.csv

The layer has a router, experts and their weighted sum; by default in the shape of Qwen3-30B-A3B. All
layers have the same random weights, so they spread tokens over experts in the same, uneven way. Each
layer is compiled and runs in bf16. All contenders take turns in one process; the table has medians.
"peak_share" refers to the GPU's dense bf16 peak. "difference" is the relative difference of outputs to
titan_tree's; it includes tokens that rounding sends to other experts.

Needs a GPU: PyTorch's grouped matrix products run on GPUs only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import transformers
from common import (
    Contender,
    Row,
    append_csv,
    argument_parser,
    autograd_ms,
    environment,
    print_table,
    run_rounds,
    time_ms,
)
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe import MoE as TorchtitanMoE
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from titan_tree.components.moe import MoE
from titan_tree.distributed import titan

COLUMNS = ["what", "forward_ms", "forward_backward_ms", "tflops", "peak_share", "difference"]


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: benchmark/moe.py needs a CUDA GPU: grouped matrix products run on GPUs only")
    setting = environment(torch.device("cuda"), "transformers") | {
        "experts": f"{args.top_k} of {args.experts}",
        "hidden": f"{args.hidden} x {args.intermediate}",
        "tokens": args.tokens,
    }
    rows = [setting | row for row in benchmark(args)]
    print_table(rows, COLUMNS)
    append_csv(args.csv, rows)


def benchmark(args: argparse.Namespace) -> list[Row]:
    """Returns one row per implementation."""
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

    def measure(name: str) -> list[dict[str, float]]:
        with torch.no_grad():
            forward = time_ms(runs[name])
        return [{"forward": forward, "both": autograd_ms(runs[name], [x, *layers[name].parameters()], dy)}]

    contenders = [Contender(name, partial(measure, name)) for name in runs]
    run_rounds(contenders, args.rounds)
    flops = 3 * 2 * args.tokens * args.top_k * 3 * args.hidden * args.intermediate
    rows: list[Row] = []
    for contender in contenders:
        got = runs[contender.name]().detach().float()
        tflops = flops / contender.median("both") / 1e9
        rows.append({
            "what": contender.name,
            "forward_ms": round(contender.median("forward"), 3),
            "forward_backward_ms": round(contender.median("both"), 3),
            "tflops": round(tflops, 1),
            "peak_share": round(1e12 * tflops / titan.peak_flops(torch.cuda.get_device_name()), 3),
            "difference": f"{((got - want).norm() / want.norm()).item():.1e}",
        })  # fmt: skip
    return rows


def ours(args: argparse.Namespace) -> MoE:
    """Returns titan_tree's layer."""
    return MoE(args.hidden, args.intermediate, args.experts, args.top_k, norm_topk_prob=True)


def transformers_layer(args: argparse.Namespace) -> nn.Module:
    """Returns transformers' layer with grouped matrix products."""
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
    """Returns torchtitan's layer."""
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


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the sizes of the layer and of its input."""
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens per GPU")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768, help="hidden size of one expert")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_sizes(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
