"""Times TreeAttention's backends and their peers on token trees, forward and backward, in useful TFLOP/s.

python -m benchmarks attention                          # on a GPU, all trees
python -m benchmarks attention --tree chain agent bushy # enough for --against
python -m benchmarks attention --sweep --backends hopper flash flex --rounds 1
python -m benchmarks attention --tree chain agent bushy --backends triton flex --cases gpt-oss DeepSeek-V3
python -m benchmarks attention --tree agent --tokens 65536 --context between --context-tokens 32768

Useful operations are those of visible pairs of a query and a key: 2 (D + Dv) per head forward, and
2 (3 D + 2 Dv) backward, where D and Dv are the head dims of keys and of values. Work on masked pairs does
not count. All contenders take turns in one process on random data in bfloat16; the table has medians. A
backend makes its plan once per batch for all layers, so the plan is timed apart, on the GPU and on the host.
"roof" is the share of the speed of an 8192^3 matrix product in the same rounds. "x_flex" is the speed of a
backend over that of FlexAttention with the same mask.

Peers: SDPA with cuDNN's causal kernel on a chain; and "per path", which is training without trees. It
computes every leaf path on its own by causal variable-length attention. The attention is FlashAttention-4's
if it is installed, else torch's. Its useful pairs are those of the tree.

--cases measures one attention layer of known models instead, with their windows, soft caps, sinks and head
dims. Peers are left out. The picture has speed against the length of nodes and against POR with --sweep,
else for each tree.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from benchmarks.timers import Contender, add_rounds, benchmark, plan_ms, time_ms
from benchmarks.trees import SHAPES, VOCABULARY, path_sample, random_tree, sweep
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.components.backends import ATTENTION_BACKENDS
from titan_tree.components.tree_attention import Scoring, TreeAttention
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.token_tree import TokenTree

try:
    from flash_attn.cute import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("heads", "head_dim", "case", "tree", "tokens", "context", "attention")
RATIOS = ("forward_x_flex", "backward_x_flex")
QUICK = (
    "--tree", "chain", "bushy", "--tokens", "64", "--rounds", "1", "--heads", "2", "1", "--head-dim", "16",
)  # fmt: skip
COLUMNS = (
    "tree", "tokens", "nodes", "por", "density", "context", "case", "attention", "forward_tflops",
    "backward_tflops", "forward_x_flex", "backward_x_flex", "forward_roof", "backward_roof", "plan_gpu_ms",
    "plan_host_ms", "note",
)  # fmt: skip
DEVICE = default_device()
MATMUL = 8192 if DEVICE.type == "cuda" else 256
MAX_FLAT_TOKENS = 2**18  # tokens of "per path" in one call: 15 GB with 32 heads of 128 dims and gradients
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    backends = [name for name in ATTENTION_BACKENDS if (name == "reference") == (DEVICE.type == "cpu")]
    add("--tree", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--sweep", action="store_true", help="instead: growing nodes, then growing prompts")
    add("--tokens", type=int, help="distinct tokens (default: depends on the shape)")
    add("--context", choices=["front", "between"], help="place of keys that are not queries")
    add("--context-tokens", type=int, default=8192, help="of --tokens (default: %(default)s)")
    add("--backends", nargs="+", choices=list(ATTENTION_BACKENDS), default=backends)
    add("--deterministic", action="store_true", help="for hopper and triton")
    add("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KEY"))
    add("--head-dim", type=int, default=128)
    add("--cases", nargs="+", choices=CASES, help="layers of these models, instead of --heads, --head-dim")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per tree, case and contender."""
    torch._dynamo.config.recompile_limit = 64  # FlexAttention compiles for some properties of each shape
    torch._functorch.config.donated_buffer = False  # the backward pass is timed repeatedly on one graph
    warnings.filterwarnings("ignore", module="cutlass")  # FlashAttention-4 warns at every compilation
    cases = {"": Case(tuple(args.heads), (args.head_dim, args.head_dim))}
    if args.cases:
        cases = {name: CASES[name] for name in args.cases}
    rows = []
    for tree_name, tree in trees(args):
        for name, case in cases.items():
            rows += measure(tree_name, tree, name, case, args)
            print(f"{tree_name}, {name}: done" if name else f"{tree_name}: done", flush=True)
    return rows


def trees(args: argparse.Namespace) -> Iterator[tuple[str, TokenTree]]:
    """Yields the names and trees that the arguments ask for."""
    if args.sweep:
        yield from sweep(args.tokens or 32_768, VOCABULARY)
    else:
        for shape in args.tree:
            yield shape, random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)


def measure(
    tree_name: str, tree: TokenTree, case_name: str, case: Case, args: argparse.Namespace
) -> list[Row]:
    """Returns one row per contender for one tree and case."""
    layout = TreeBatch.from_trees([tree]).layout
    if args.context:
        layout = with_context(layout, args.context, args.context_tokens)
    visible = (layout.positions + 1).clamp(max=case.scoring.window or len(layout.subtree_end))
    pairs = int(visible.sum(dtype=torch.int64))
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul = Contender("matmul", lambda: [{"ms": time_ms(partial(torch.mm, a, b))}])
    contenders, plans = [], {}  # plans: milliseconds of the GPU and of the host
    for backend in args.backends:
        deterministic = args.deterministic and backend in ("hopper", "triton")
        label = f"{backend}, deterministic" if deterministic else backend
        try:
            contender, plan = backend_contender(label, backend, deterministic, layout.to(DEVICE), case)
        except UserError as error:
            print(f"{label} skipped: {error}")
        else:
            contenders.append(contender)
            plans[label] = plan
    if not (args.context or args.cases):
        contenders += peers(tree, case)
    flex = next((each for each in contenders if each.name == "flex"), None)

    def row(contender: Contender) -> Row:
        roof = 2 * MATMUL**3 / matmul.median("ms") / 1e9
        dim, dim_v = case.dims
        row: Row = {
            "heads": "/".join(map(str, case.heads)),
            "head_dim": dim if dim == dim_v else f"{dim}/{dim_v}",
            "tree": tree_name,
            "tokens": len(layout.key_index),
            "context": f"{args.context} {args.context_tokens}" if args.context else "",
            "nodes": tree.stats.n_nodes,
            "node_length": round(len(tree) / tree.stats.n_nodes, 1),
            "por": round(tree.stats.por, 4),
            "density": round(2 * pairs / len(tree) / (len(tree) + 1), 4),
            "case": case_name,
            "attention": contender.name,
        }
        for way, dims in (("forward", dim + dim_v), ("backward", 3 * dim + 2 * dim_v)):
            ms = contender.median(way)
            tflops = 2 * case.heads[0] * dims * pairs / ms / 1e9
            x_flex = flex.median(way) / ms if flex and contender.name in plans else None
            row[f"{way}_ms"] = round(ms, 4)
            row[f"{way}_tflops"] = round(tflops, 1)
            row[f"{way}_x_flex"] = x_flex and round(x_flex, 3)
            row[f"{way}_roof"] = round(tflops / roof, 3)
        row["plan_gpu_ms"], row["plan_host_ms"] = plans.get(contender.name, (None, None))
        return row | {"note": contender.note}

    return benchmark(contenders, args.rounds, row, beside=[matmul])


def with_context(layout: TreeLayout, where: str, num_context: int) -> TreeLayout:
    """Returns the layout with ``num_context`` keys that are not queries, like ancestors in other partitions.

    Args:
        layout: the layout of a tree whose tokens are all queries.
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
    label: str, backend: str, deterministic: bool, layout: TreeLayout, case: Case
) -> tuple[Contender, tuple[float | None, float]]:
    """Returns a backend of TreeAttention and the milliseconds of its plan.

    Raises:
        UserError: the backend cannot compute the case here.
    """
    attention = TreeAttention(backend, deterministic)
    window, _, sinks = case.scoring
    prepare = partial(attention.prepare, layout, [window])
    scoring, options = case.scoring, []
    if sinks is not None:
        options = [sinks.to(DEVICE).requires_grad_()]
        scoring = scoring._replace(sinks=options[0])
    attend = partial(attention, layout=prepare(), scoring=scoring)
    n, m = len(layout.key_index), len(layout.subtree_end)
    with torch.no_grad():
        attend(*random_inputs(1, n, m, case)[:3])  # compiles, or raises UserError
    return attention_contender(label, attend, n, m, case, options), plan_ms(prepare)


def peers(tree: TokenTree, case: Case) -> Iterator[Contender]:
    """Yields the peers of the backends."""
    n = len(tree)
    if tree.stats.n_nodes == 1 and DEVICE.type == "cuda":
        yield attention_contender("cuDNN causal", cudnn_causal, n, n, case)
    sample = path_sample(tree, MAX_FLAT_TOKENS, work=lambda length: length * (length + 1) // 2)
    hopper_or_later = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    flash = flash_attn_varlen_func is not None and hopper_or_later and case.dims[0] in (64, 128)
    library = "FA4" if flash else "torch"
    attend, n = per_path(sample.lengths, library), int(sample.lengths.sum())
    contender = attention_contender(f"per path, {library}", attend, n, n, case)
    contender.scale, contender.note = sample.scale, sample.note
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
    varlen_attn: Any = varlen.varlen_attn
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return lambda q, k, v: varlen_attn(
        q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **gqa
    )


def attention_contender(
    label: str, attend: Attention, n: int, m: int, case: Case, options: Sequence[Tensor] = ()
) -> Contender:
    """Returns a contender that measures milliseconds of a forward pass, and of a backward pass alone.

    Args:
        options: further tensors that get gradients.
    """

    def measure() -> list[dict[str, float]]:
        q, k, v, do = random_inputs(2, n, m, case)
        with torch.no_grad():
            forward = time_ms(lambda: attend(q, k, v))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(q, k, v)
        backward = time_ms(lambda: torch.autograd.grad(out, [*inputs, *options], do, retain_graph=True))
        return [{"forward": forward, "backward": backward}]

    return Contender(label, measure)


def random_inputs(seed: int, n: int, m: int, case: Case) -> list[Tensor]:
    """Returns q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv], and the output's gradient [n, Hq, Dv]."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    (heads, heads_k), (dim, dim_v) = case.heads, case.dims
    shapes = (n, heads, dim), (m, heads_k, dim), (m, heads_k, dim_v), (n, heads, dim_v)
    return [torch.randn(s, device=DEVICE, dtype=torch.bfloat16, generator=generator) for s in shapes]


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the speed of attention against node length and POR, or on each tree."""
    lengths = [row for row in rows if row["tree"].startswith("nodes of")]
    prompts = [row for row in rows if row["tree"].startswith("prompt of")]
    columns = [(prompts, "por", "POR: 16 answers to one prompt of growing length", "linear")]
    if lengths:
        columns.insert(0, (lengths, "node_length", "tokens per node", "log"))
    if not prompts:
        columns = [(list(rows), "tree", "tree", "linear")]
    figure.set_size_inches(max(8, 5 * len(columns)), 7)
    axes = figure.subplots(2, len(columns), sharey="row", squeeze=False)
    for panels, (chosen, x, label, scale) in zip(axes.T, columns, strict=True):
        is_sweep = x != "tree"
        for panel, direction in zip(panels, ("forward", "backward"), strict=True):
            lines: dict[str, list[tuple[float | str, float]]] = {}
            for row in chosen:
                name = ", ".join(filter(None, (row["attention"], row.get("case"))))
                value = float(row[x]) if is_sweep else row[x]
                lines.setdefault(name, []).append((value, float(row[f"{direction}_tflops"])))
            for name, points in lines.items():
                style = "o-" if is_sweep else "o"
                panel.plot(*zip(*points, strict=True), style, markersize=3 if is_sweep else 5, label=name)
            if is_sweep:
                panel.set_xscale(scale)
            panel.set(xlabel=label, ylabel=f"{direction}, useful TFLOP/s")
            panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylim(bottom=0)
    axes[0, 0].legend(fontsize=8)
    first = rows[0]
    sizes = f"{int(first['tokens']):,} tokens, {first['heads']} heads, head dim {first['head_dim']}"
    of = f" of {sizes}" if prompts else ""
    figure.suptitle(f"Attention on trees{of}, bf16, {first['device']}, torch {first['torch']}")
