"""Times windows, soft caps, sinks and head dims of known models: TreeAttention's kernels and FlexAttention.

    python scripts/benchmark/attention_options.py --csv options.csv
    python scripts/benchmark/attention_options.py --tree agent --cases gpt-oss DeepSeek-V3
    python scripts/benchmark/attention_options.py --tokens 64 --rounds 1      # on a CPU: shows that it runs

A case is one attention layer of a model. All backends compute the same mask, in turn, in one process, on
random data in bfloat16; the table has medians. Useful operations are those of visible pairs of a query and a
key within its window: 2 (D + Dv) per head forward, and 2 (3 D + 2 Dv) backward. "plain" is a layer without
options, to compare with.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
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

from titan_tree import TreeAttention, TreeBatch
from titan_tree.bench.trees import SHAPES, random_tree
from titan_tree.components.tree_attention import Scoring
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

DEVICE = default_device()
BACKENDS = ["triton", "flex"] if DEVICE.type == "cuda" else ["reference"]
COLUMNS = [
    "case", "attention", "forward_ms", "backward_ms", "forward_tflops", "backward_tflops", "forward_x_flex",
    "backward_x_flex",
]  # fmt: skip


class Case(NamedTuple):
    """One attention layer."""

    heads: tuple[int, int]  # of queries, and of keys and values
    dims: tuple[int, int]  # of queries and keys, and of values
    scoring: Scoring = Scoring()


CASES = {
    "plain": Case((32, 8), (128, 128)),
    "gpt-oss": Case((64, 8), (64, 64), Scoring(window=128, sinks=torch.zeros(64))),
    "gpt-oss without window": Case((64, 8), (64, 64), Scoring(sinks=torch.zeros(64))),
    "Mistral": Case((32, 8), (128, 128), Scoring(window=4096)),
    "Gemma 2": Case((16, 8), (256, 256), Scoring(window=4096, softcap=50.0)),
    "Gemma 3": Case((16, 8), (256, 256), Scoring(window=1024)),
    "DeepSeek-V3": Case((16, 16), (192, 128)),  # 16 of its 128 heads
    "Phi-3": Case((32, 32), (96, 96), Scoring(window=2047)),
}


def main() -> None:
    args = parse_args()
    torch._dynamo.config.recompile_limit = 64  # FlexAttention compiles for some properties of each shape
    torch._functorch.config.donated_buffer = False  # the backward pass is timed repeatedly on one graph
    setting = environment(DEVICE)
    for shape in args.tree:
        tree = random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)
        layout = TreeBatch.from_trees([tree]).layout.to(DEVICE)
        rows = []
        for name in args.cases:
            case = {"tree": shape, "tokens": len(tree), "case": name}
            rows += [setting | case | row for row in benchmark(CASES[name], layout, args)]
            print(f"{name}: done", flush=True)
        print(f"tree {shape}, {len(tree):,} tokens")
        print_table(rows, COLUMNS)
        append_csv(args.csv, rows)


def benchmark(case: Case, layout: TreeLayout, args: argparse.Namespace) -> list[Row]:
    """Returns one row per backend that computes the case."""
    contenders = []
    for backend in args.backends:
        try:
            contenders.append(contender(backend, case, layout))
        except UserError as error:
            print(f"{backend} skipped: {error}")
    run_rounds(contenders, args.rounds)
    visible = (layout.positions + 1).clamp(max=case.scoring.window or len(layout.positions))
    work = 2 * case.heads[0] * int(visible.sum(dtype=torch.int64))
    dim, dim_v = case.dims
    flex = next((each for each in contenders if each.name == "flex"), None)
    rows: list[Row] = []
    for each in contenders:
        row: Row = {"attention": each.name}
        for way, dims in (("forward", dim + dim_v), ("backward", 3 * dim + 2 * dim_v)):
            ms = each.median(way)
            row[f"{way}_ms"] = round(ms, 4)
            row[f"{way}_tflops"] = round(work * dims / ms / 1e9, 1)
            row[f"{way}_x_flex"] = round(flex.median(way) / ms, 3) if flex else None
        rows.append(row)
    return rows


def contender(backend: str, case: Case, layout: TreeLayout) -> Contender:
    """Returns a contender that measures milliseconds of a forward pass, and of a backward pass alone.

    Raises:
        UserError: the backend cannot compute the case.
    """
    window, _, sinks = case.scoring
    attention = TreeAttention(backend)
    layout = attention.prepare(layout, [window])
    *inputs, do = random_inputs(case, len(layout.key_index))
    sinks = None if sinks is None else sinks.to(DEVICE).requires_grad_()
    attend = partial(attention, *inputs, layout, scoring=case.scoring._replace(sinks=sinks))
    leaves = [*(x.requires_grad_() for x in inputs), *([] if sinks is None else [sinks])]
    attend()  # compiles, or raises UserError

    def measure() -> list[dict[str, float]]:
        with torch.no_grad():
            forward = time_ms(attend)
        out = attend()
        backward = time_ms(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))
        return [{"forward": forward, "backward": backward}]

    return Contender(backend, measure)


def random_inputs(case: Case, n: int) -> list[Tensor]:
    """Returns q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv], and the output's gradient [n, Hq, Dv]."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    (heads, heads_k), (dim, dim_v) = case.heads, case.dims
    shapes = (heads, dim), (heads_k, dim), (heads_k, dim_v), (heads, dim_v)
    return [
        torch.randn(n, *shape, device=DEVICE, dtype=torch.bfloat16, generator=generator) for shape in shapes
    ]


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=["chain", "agent", "bushy"])
    parser.add_argument("--tokens", type=int, help="distinct tokens (default: depends on the shape)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
