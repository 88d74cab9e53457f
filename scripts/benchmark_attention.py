"""TreeAttention's backends on token trees, forward and backward, in useful TFLOP/s.

    python scripts/benchmark_attention.py --tokens 32768 --tree chain group agent agent-fine

Useful operations are those of visible pairs: 4 * D * heads * pairs forward, 2.5 times that backward, so what
a kernel computes and masks away earns nothing. Times are medians over alternating rounds in one process, on
random data; the plan (made once per batch, for all layers) is timed apart. The peer on a chain is SDPA with
cuDNN's causal kernel. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from trees import SHAPES, random_tree

from titan_tree.components.tree_attention import TreeAttention
from titan_tree.data.batch import TreeBatch

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the kernels need a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"bfloat16, {args.heads[0]} query and {args.heads[1]} key heads, head dim {args.head_dim}")
    print(
        f"{'tree':12}{'tokens':>8}{'nodes':>7}  {'attention':18}{'forward':>8}{'backward':>9}{'plan ms':>9}"
    )
    for shape in args.tree:
        tree = random_tree(shape, args.tokens, 151_936)
        layout = TreeBatch.from_trees([tree]).layout.to("cuda")
        pairs = int((layout.subtree_end - layout.key_index).sum(dtype=torch.int64))
        flops = 4 * args.head_dim * args.heads[0] * pairs

        contenders: dict[str, Attention] = {}
        plan_ms = {}
        for name in args.backends:
            attention = TreeAttention(name)
            plan_ms[name] = time_ms(partial(attention.prepare, layout))
            contenders[name] = partial(attention, layout=attention.prepare(layout))
        if shape == "chain":
            contenders["cuDNN causal"] = causal

        q, do = (random_rows(len(tree), args.heads[0], args.head_dim) for _ in range(2))
        k, v = (random_rows(len(tree), args.heads[1], args.head_dim) for _ in range(2))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, attend in contenders.items():
                times[name].append(measure(attend, q, k, v, do))
        for name, rounds in times.items():
            forward, backward = (median(ms) for ms in zip(*rounds, strict=True))
            print(
                f"{shape:12}{len(tree):>8,}{tree.stats.n_nodes:>7,}  {name:18}"
                f"{flops / forward / 1e9:>8.0f}{2.5 * flops / backward / 1e9:>9.0f}"
                + (f"{plan_ms[name]:>9.2f}" if name in plan_ms else ""),
                flush=True,
            )


def measure(attend: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[float, float]:
    """Milliseconds of the forward, and of the backward: both together less the forward."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        forward = time_ms(lambda: attend(q, k, v))
    both = time_ms(lambda: torch.autograd.grad(attend(*inputs), inputs, do))
    return forward, both - forward


def time_ms(function: Callable[[], object]) -> float:
    function()  # compiles
    return triton.testing.do_bench(function, warmup=20, rep=100, return_mode="median")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def random_rows(n: int, heads: int, dim: int) -> Tensor:
    return torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768, help="distinct tokens (default: %(default)s)")
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--backends", nargs="+", choices=["triton", "flex"], default=["triton", "flex"])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
