"""Times TreeAttention's backends and their peers on token trees, forward and backward, in useful TFLOP/s.

    python scripts/benchmark/attention.py --tree chain group agent agent-fine agent-long bushy
    python scripts/benchmark/attention.py --tree agent --tokens 65536 --context between --context-tokens 32768
    python scripts/benchmark/attention.py --sweep --csv sweep.csv      # see plots.py
    python scripts/benchmark/attention.py --tokens 256 --rounds 1      # on a CPU: shows that it runs

Useful operations are those of visible pairs of a query and a key: 4 * D * heads * pairs forward, and 2.5
times that backward. Work on masked pairs does not count. All contenders take turns in one process on random
data in bfloat16; the table has medians. A backend makes its plan once per batch for all layers, so the plan
is timed apart, on the GPU and on the host. "roof" is the share of the speed of an 8192^3 matrix product in
the same rounds.

Peers: SDPA with cuDNN's causal kernel on a chain; and "per path", which is flat training. It computes every
path on its own by causal variable-length attention, and omits paths that are prefixes of other paths. The
attention is FlashAttention-4's if it is installed, else torch's. Its useful pairs are those of the tree.
"""

from __future__ import annotations

import argparse
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from common import (
    VOCABULARY,
    Contender,
    Row,
    append_csv,
    argument_parser,
    default_device,
    environment,
    print_table,
    run_rounds,
    time_ms,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from titan_tree import TokenTree, TreeAttention, TreeBatch
from titan_tree.bench.trees import SHAPES, flat_sample, random_tree, sweep
from titan_tree.errors import UserError
from titan_tree.registry import ATTENTION_BACKENDS
from titan_tree.tree.layout import TreeLayout

try:
    from flash_attn.cute import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

DEVICE = default_device()
MATMUL = 8192 if DEVICE.type == "cuda" else 256
MAX_FLAT_TOKENS = 2**18  # tokens of "per path" in one call: 15 GB with 32 heads of 128 dims and gradients
TREE_COLUMNS = ["tree", "tokens", "context", "nodes", "node_length", "por", "density", "heads", "head_dim"]
COLUMNS = [
    "attention", "forward_tflops", "backward_tflops", "forward_x_flex", "backward_x_flex", "forward_roof",
    "backward_roof", "plan_gpu_ms", "plan_host_ms", "note",
]  # fmt: skip
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    args = parse_args()
    torch._dynamo.config.recompile_limit = 64  # FlexAttention compiles for some properties of each shape
    torch._functorch.config.donated_buffer = False  # the backward pass is timed repeatedly on one graph
    warnings.filterwarnings("ignore", module="cutlass")  # FlashAttention-4 warns at every compilation
    setting = environment(DEVICE) | {"heads": "/".join(map(str, args.heads)), "head_dim": args.head_dim}
    for name, tree in trees(args):
        rows = [setting | row for row in benchmark(name, tree, args)]
        print(", ".join(f"{key} {rows[0][key]}" for key in TREE_COLUMNS if rows[0][key] != ""))
        print_table(rows, COLUMNS)
        append_csv(args.csv, rows)


def trees(args: argparse.Namespace) -> Iterator[tuple[str, TokenTree]]:
    """Yields the names and trees that the arguments ask for."""
    if args.sweep:
        yield from sweep(args.tokens or 32_768, VOCABULARY)
    else:
        for shape in args.tree:
            yield shape, random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)


def benchmark(name: str, tree: TokenTree, args: argparse.Namespace) -> list[Row]:
    """Returns one row per contender for one tree."""
    layout = TreeBatch.from_trees([tree]).layout
    if args.context:
        layout = with_context(layout, args.context, args.context_tokens)
    pairs = int(layout.positions.sum(dtype=torch.int64)) + len(layout.positions)
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul = Contender("matmul", lambda: [{"ms": time_ms(partial(torch.mm, a, b))}])
    contenders, plans = [], {}  # plans: milliseconds of the GPU and of the host
    for backend in args.backends:
        deterministic = args.deterministic and backend in ("hopper", "triton")
        label = f"{backend}, deterministic" if deterministic else backend
        try:
            contender, plan = backend_contender(label, backend, deterministic, layout.to(DEVICE), args)
        except UserError as error:
            print(f"{label} skipped: {error}")
        else:
            contenders.append(contender)
            plans[label] = plan
    if not args.context:
        contenders += peers(tree, args)
    run_rounds([matmul, *contenders], args.rounds)

    roof = 2 * MATMUL**3 / matmul.median("ms") / 1e9
    flops = 4 * args.head_dim * args.heads[0] * pairs
    flex = next((each for each in contenders if each.name == "flex"), None)
    rows = []
    for contender in contenders:
        forward, backward = contender.median("forward"), contender.median("backward")
        gpu_ms, host_ms = plans.get(contender.name, (None, None))
        forward_tflops, backward_tflops = flops / forward / 1e9, 2.5 * flops / backward / 1e9
        rows.append({
            "tree": name,
            "tokens": len(layout.key_index),
            "context": f"{args.context} {args.context_tokens}" if args.context else "",
            "nodes": tree.stats.n_nodes,
            "node_length": round(len(tree) / tree.stats.n_nodes, 1),
            "por": round(tree.stats.por, 4),
            "density": round(2 * pairs / len(tree) / (len(tree) + 1), 4),
            "attention": contender.name,
            "forward_ms": round(forward, 4),
            "backward_ms": round(backward, 4),
            "forward_tflops": round(forward_tflops, 1),
            "backward_tflops": round(backward_tflops, 1),
            "forward_x_flex": round(flex.median("forward") / forward, 3) if flex else None,
            "backward_x_flex": round(flex.median("backward") / backward, 3) if flex else None,
            "forward_roof": round(forward_tflops / roof, 3),
            "backward_roof": round(backward_tflops / roof, 3),
            "plan_gpu_ms": gpu_ms,
            "plan_host_ms": host_ms,
            "note": contender.note,
        })  # fmt: skip
    return rows


def with_context(layout: TreeLayout, where: str, num_context: int) -> TreeLayout:
    """Returns the layout with ``num_context`` keys that are not queries, like ancestors in other partitions.

    Args:
        layout: of a tree whose tokens are all queries.
        where: "front" takes the first tokens in DFS order. "between" takes the tokens of least depth, so that
            queries of several subtrees are separated by context.
        num_context: number of keys without a query. All their ancestors are such keys too.
    """
    columns = layout.key_index if where == "front" else layout.positions.argsort(stable=True).int()
    queries = columns[num_context:].sort().values
    return TreeLayout(
        positions=layout.positions[queries.long()], subtree_end=layout.subtree_end, key_index=queries
    )


def backend_contender(
    label: str, backend: str, deterministic: bool, layout: TreeLayout, args: argparse.Namespace
) -> tuple[Contender, tuple[float | None, float]]:
    """Returns a backend of TreeAttention and the milliseconds of its plan.

    Raises:
        UserError: the backend cannot run here.
    """
    attention = TreeAttention(backend, deterministic)
    attend = partial(attention, layout=attention.prepare(layout))
    n, m = len(layout.key_index), len(layout.subtree_end)
    with torch.no_grad():
        attend(*random_inputs(1, n, m, args)[:3])  # compiles, or raises UserError
    return attention_contender(label, attend, n, m, args), plan_ms(partial(attention.prepare, layout))


def peers(tree: TokenTree, args: argparse.Namespace) -> Iterator[Contender]:
    """Yields the peers of the backends."""
    n = len(tree)
    if tree.stats.n_nodes == 1 and DEVICE.type == "cuda":
        yield attention_contender("cuDNN causal", cudnn_causal, n, n, args)
    lengths, sample = flat_sample(tree, MAX_FLAT_TOKENS)
    total, measured = (int((x * (x + 1) // 2).sum()) for x in (lengths, sample))
    note = f"{len(lengths)} paths, {lengths.sum():,} tokens"
    if len(sample) < len(lengths):
        note += f"; timed on {len(sample)} of them, x {total / measured:.2f}"
    hopper_or_later = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    flash = flash_attn_varlen_func is not None and hopper_or_later and args.head_dim in (64, 128)
    attend = per_path(sample, "FA4" if flash else "torch")
    n = int(sample.sum())
    contender = attention_contender(f"per path, {'FA4' if flash else 'torch'}", attend, n, n, args)
    contender.scale, contender.note = total / measured, note
    yield contender


def cudnn_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention over one sequence by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention over one sequence [N, H, D] by PyTorch's SDPA."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def per_path(lengths: np.ndarray, library: str) -> Attention:
    """Returns causal attention within packed sequences of these lengths."""
    if DEVICE.type == "cpu":
        sizes = lengths.tolist()
        return lambda *qkv: torch.cat([causal(*x) for x in zip(*(x.split(sizes) for x in qkv), strict=True)])
    offsets = torch.from_numpy(np.append(0, lengths.cumsum())).int().cuda()
    longest = int(lengths.max())
    if library == "FA4":
        return lambda q, k, v: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True,
        )[0]  # fmt: skip
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
    return lambda q, k, v: varlen.varlen_attn(
        q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **gqa
    )


def attention_contender(label: str, attend: Attention, n: int, m: int, args: argparse.Namespace) -> Contender:
    """Returns a contender that measures milliseconds of a forward pass, and of a backward pass alone."""

    def measure() -> list[dict[str, float]]:
        *inputs, do = random_inputs(2, n, m, args)
        with torch.no_grad():
            forward = time_ms(lambda: attend(*inputs))
        out = attend(*(x.requires_grad_() for x in inputs))
        backward = time_ms(lambda: torch.autograd.grad(out, inputs, do, retain_graph=True))
        return [{"forward": forward, "backward": backward}]

    return Contender(label, measure)


def plan_ms(prepare: Callable[[], object]) -> tuple[float | None, float]:
    """Returns milliseconds of the GPU and of the host. The GPU is kept busy until all work is enqueued."""
    times = []
    for _ in range(7):
        if DEVICE.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # cycles: 50 ms
            began = time.perf_counter()
            start.record()
            prepare()
            end.record()
            host = 1e3 * (time.perf_counter() - began)
            end.synchronize()
            times.append((start.elapsed_time(end), host))
        else:
            began = time.perf_counter()
            prepare()
            times.append((0.0, 1e3 * (time.perf_counter() - began)))
    gpu, host = (round(median(ms), 3) for ms in zip(*times[2:], strict=True))
    return (gpu if DEVICE.type == "cuda" else None), host


def random_inputs(seed: int, n: int, m: int, args: argparse.Namespace) -> list[Tensor]:
    """Returns q [n, Hq, D], k and v [m, Hkv, D], and the output's gradient [n, Hq, D]."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads, heads_k = args.heads
    return [
        torch.randn(size, h, args.head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for size, h in ((n, heads), (m, heads_k), (m, heads_k), (n, heads))
    ]


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    backends = [name for name in ATTENTION_BACKENDS if (name == "reference") == (DEVICE.type == "cpu")]
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true", help="instead: growing nodes, then growing prompts")
    parser.add_argument("--tokens", type=int, help="distinct tokens (default: depends on the shape)")
    parser.add_argument("--context", choices=["front", "between"], help="place of keys that are not queries")
    parser.add_argument("--context-tokens", type=int, default=8192, help="of --tokens (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", choices=list(ATTENTION_BACKENDS), default=backends)
    parser.add_argument("--deterministic", action="store_true", help="for hopper and triton")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--head-dim", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
