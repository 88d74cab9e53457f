"""TreeAttention's backends and their peers on token trees, forward and backward, in useful TFLOP/s.

    python scripts/benchmark_attention.py --tree chain group agent agent-fine agent-long bushy
    python scripts/benchmark_attention.py --tree agent --tokens 65536 --context between --context-tokens 32768
    python scripts/benchmark_attention.py --sweep --csv sweep.csv     # for plot_attention.py

Useful operations are those of visible pairs: 4 * D * heads * pairs forward, 2.5 times that backward, so what
a kernel computes and masks away earns nothing. Times are medians over rounds in one process, in which the
contenders take turns, on random data. The plan, made once per batch for all layers, is timed apart: the GPU's
time, and how long the host is busy. "roof" is the share of the rate of an 8192^3 matmul in the same rounds.

Peers: on a chain SDPA with cuDNN's causal kernel; everywhere "per path", which is flat training: every path
that is no other's prefix computed on its own by causal variable-length attention, FlashAttention-4's where
installed, else torch's. Its useful pairs are the tree's. Needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from trees import SHAPES, random_tree, sweep

from titan_tree.components.tree_attention import TreeAttention, flash
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.token_tree import TokenTree

VOCABULARY = 151_936
MATMUL = 8192
MAX_FLAT_TOKENS = 2**18  # of "per path" in one call: 15 GB with 32 heads of 128, gradients included
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, object]


@dataclass
class Contender:
    """What is timed on ``n`` queries and ``m`` keys, whose time stands for ``scale`` times as much work."""

    attend: Attention
    n: int
    m: int
    plan_ms: tuple[float, float] | None = None  # GPU, host
    scale: float = 1.0
    note: str = ""
    times: list[tuple[float, float]] = field(default_factory=list)  # forward, backward; ms

    def median_ms(self) -> tuple[float, float]:
        forward, backward = (self.scale * median(ms) for ms in zip(*self.times, strict=True))
        return forward, backward


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the kernels need a CUDA GPU")
    torch._dynamo.config.recompile_limit = 64  # FlexAttention compiles for some properties of each shape
    torch._functorch.config.donated_buffer = False  # the backward is timed over and over on one graph
    warnings.filterwarnings("ignore", module="cutlass")  # FlashAttention-4's own, at every compilation
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"bfloat16, {args.heads[0]} query and {args.heads[1]} key heads, head dim {args.head_dim}")
    for name, tree in trees(args):
        rows = benchmark(name, tree, args)
        print_rows(rows)
        if args.csv:
            write_csv(args.csv, rows)


def trees(args: argparse.Namespace) -> Iterator[tuple[str, TokenTree]]:
    if args.sweep:
        yield from sweep(args.tokens or 32_768, VOCABULARY)
    else:
        for shape in args.tree:
            yield shape, random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)


def benchmark(name: str, tree: TokenTree, args: argparse.Namespace) -> list[Row]:
    layout = TreeBatch.from_trees([tree]).layout
    if args.context:
        layout = with_context(layout, args.context, args.context_tokens)
    pairs = int(layout.positions.sum(dtype=torch.int64)) + len(layout.positions)
    contenders = {}
    for backend in args.backends:
        deterministic = args.deterministic and backend in ("hopper", "triton")
        label = f"{backend}, deterministic" if deterministic else backend
        try:
            contenders[label] = backend_contender(backend, deterministic, layout.to("cuda"), args)
        except UserError as error:
            print(f"{label} left out: {error}")
    if not args.context:
        contenders |= peers(tree, args.head_dim)

    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = []
    for _ in range(args.rounds):
        matmul_ms.append(time_ms(partial(torch.mm, a, b)))
        for contender in contenders.values():
            contender.times.append(measure(contender, args))

    roof = 2 * MATMUL**3 / median(matmul_ms) / 1e9
    flops = 4 * args.head_dim * args.heads[0] * pairs
    flex = contenders.get("flex")
    rows = []
    for label, contender in contenders.items():
        forward, backward = contender.median_ms()
        forward_tflops, backward_tflops = flops / forward / 1e9, 2.5 * flops / backward / 1e9
        gpu_ms, host_ms = contender.plan_ms or (None, None)
        rows.append({
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "heads": "/".join(map(str, args.heads)),
            "head_dim": args.head_dim,
            "tree": name,
            "tokens": len(layout.key_index),
            "context": f"{args.context} {args.context_tokens}" if args.context else "",
            "nodes": tree.stats.n_nodes,
            "node_length": round(len(tree) / tree.stats.n_nodes, 1),
            "por": round(tree.stats.por, 4),
            "density": round(2 * pairs / len(tree) / (len(tree) + 1), 4),
            "attention": label,
            "forward_ms": round(forward, 4),
            "backward_ms": round(backward, 4),
            "forward_tflops": round(forward_tflops, 1),
            "backward_tflops": round(backward_tflops, 1),
            "forward_x_flex": round(flex.median_ms()[0] / forward, 3) if flex else None,
            "backward_x_flex": round(flex.median_ms()[1] / backward, 3) if flex else None,
            "forward_roof": round(forward_tflops / roof, 3),
            "backward_roof": round(backward_tflops / roof, 3),
            "plan_gpu_ms": gpu_ms,
            "plan_host_ms": host_ms,
            "note": contender.note,
        })  # fmt: skip
    return rows


def with_context(layout: TreeLayout, where: str, num_context: int) -> TreeLayout:
    """The layout with ``num_context`` keys that are no queries, and whose ancestors are none either.

    front: the first ones in DFS order. between: those of least depth, so that subtrees cut at several nodes
    stand between what is left of the trunk.
    """
    columns = layout.key_index if where == "front" else layout.positions.argsort(stable=True).int()
    queries = columns[num_context:].sort().values
    return TreeLayout(layout.positions[queries.long()], layout.subtree_end, queries)


def backend_contender(
    backend: str, deterministic: bool, layout: TreeLayout, args: argparse.Namespace
) -> Contender:
    """Raises UserError where the backend cannot run here."""
    attention = TreeAttention(backend, deterministic)
    prepared = attention.prepare(layout)
    n, m = len(layout.key_index), len(layout.subtree_end)
    contender = Contender(partial(attention, layout=prepared), n, m)
    with torch.no_grad():
        contender.attend(*random_inputs(1, contender, args)[:3])  # compiles, or refuses
    contender.plan_ms = plan_ms(partial(attention.prepare, layout))
    return contender


def peers(tree: TokenTree, head_dim: int) -> dict[str, Contender]:
    contenders = {}
    if tree.stats.n_nodes == 1:
        contenders["cuDNN causal"] = Contender(cudnn_causal, len(tree), len(tree))
    is_leaf = tree.node_offsets[1:] == tree.node_subtree_end
    lengths = np.diff(tree.path_offsets)[is_leaf[tree.path_node]]
    np.random.default_rng(0).shuffle(lengths)
    few = lengths[: max(1, int((lengths.cumsum() <= MAX_FLAT_TOKENS).sum()))]
    total, measured = (int((x * (x + 1) // 2).sum()) for x in (lengths, few))
    note = f"{len(lengths)} paths, {lengths.sum():,} tokens"
    if len(few) < len(lengths):
        note += f"; timed on {len(few)} of them, x {total / measured:.2f}"
    library = "FA4" if head_dim in (64, 128) and flash.available(torch.device("cuda")) else "torch"
    n = int(few.sum())
    attend = per_path(few, library)
    contenders[f"per path, {library}"] = Contender(attend, n, n, scale=total / measured, note=note)
    return contenders


def cudnn_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def per_path(lengths: np.ndarray, library: str) -> Attention:
    """Causal attention within sequences of these lengths, one after another."""
    offsets = torch.from_numpy(np.append(0, lengths.cumsum())).int().cuda()
    longest = int(lengths.max())
    if library == "FA4":
        from flash_attn.cute import flash_attn_varlen_func

        return lambda q, k, v: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True,
        )[0]  # fmt: skip
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
    return lambda q, k, v: varlen.varlen_attn(
        q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **gqa
    )


def measure(contender: Contender, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a forward, and of a backward alone."""
    *inputs, do = random_inputs(2, contender, args)
    with torch.no_grad():
        forward = time_ms(lambda: contender.attend(*inputs))
    out = contender.attend(*(x.requires_grad_() for x in inputs))
    return forward, time_ms(lambda: torch.autograd.grad(out, inputs, do, retain_graph=True))


def time_ms(function: Callable[[], object]) -> float:
    function()  # compiles
    return triton.testing.do_bench(function, warmup=20, rep=100, return_mode="median")


def plan_ms(prepare: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the GPU, and of the host. The GPU is kept busy until all work is enqueued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # cycles: 50 ms
        began = time.perf_counter()
        start.record()
        prepare()
        end.record()
        host = 1e3 * (time.perf_counter() - began)
        end.synchronize()
        times.append((start.elapsed_time(end), host))
    gpu, host = (round(median(ms), 3) for ms in zip(*times[2:], strict=True))
    return gpu, host


def random_inputs(seed: int, contender: Contender, args: argparse.Namespace) -> list[Tensor]:
    """q, k, v, do."""
    generator = torch.Generator("cuda").manual_seed(seed)
    (heads, heads_k), n, m = args.heads, contender.n, contender.m
    return [
        torch.randn(size, h, args.head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size, h in ((n, heads), (m, heads_k), (m, heads_k), (n, heads))
    ]


def print_rows(rows: Sequence[Row]) -> None:
    first = rows[0]
    context = f", context {first['context']}" if first["context"] else ""
    print(
        f"\n{first['tree']}: {first['tokens']:,} tokens{context}, {first['nodes']:,} nodes of "
        f"{first['node_length']} tokens, POR {first['por']:.1%}, {first['density']:.1%} of causal pairs"
    )
    print(f"{'forward, backward:':24}{'TFLOP/s':>15}{'x flex':>16}{'of roof':>16}{'plan ms: GPU, host':>22}")
    for row in rows:
        cells = f"{row['attention']:24}{row['forward_tflops']:>7.0f}{row['backward_tflops']:>8.0f}"
        cells += "".join(
            f"{'' if row[key] is None else format(row[key], spec):>{width}}"
            for key, spec, width in (
                ("forward_x_flex", ".2f", 8),
                ("backward_x_flex", ".2f", 8),
                ("forward_roof", ".0%", 8),
                ("backward_roof", ".0%", 8),
                ("plan_gpu_ms", ".2f", 11),
                ("plan_host_ms", ".2f", 11),
            )
        )
        print(f"{cells}  {row['note']}".rstrip(), flush=True)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append ``rows``."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    backends = ["hopper", "triton", "flash", "flex"]
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true", help="instead: longer and longer nodes and prompts")
    parser.add_argument("--tokens", type=int, help="distinct tokens (default: that of each shape)")
    parser.add_argument(
        "--context", choices=["front", "between"], help="where keys that are no queries stand"
    )
    parser.add_argument("--context-tokens", type=int, default=8192, help="of --tokens (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", choices=backends, default=backends)
    parser.add_argument("--deterministic", action="store_true", help="of hopper and triton")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
