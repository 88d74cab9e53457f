"""Times recurrences and their convolution on token trees, in milliseconds, beside those for sequences.

python -m benchmarks recurrence                                   # TreeGDN on a GPU, all trees
python -m benchmarks recurrence --tree chain agent --heads 16 64  # as in Qwen3.5's larger models
python -m benchmarks recurrence --rule ssd                        # TreeSSD; --rule kda: TreeKDA

The measured core of a layer has no projections: it goes from q, k, v, the decays and beta to the output,
through the module, autograd and the operator. All contenders take turns in one process on random data in
bfloat16. Times are medians of replays of a CUDA graph, which leave out the host. What the host computes once
per batch for all layers is timed apart ("plan_host_ms"). "kept" is the memory that a forward pass keeps for
its backward pass, besides inputs and output.

Peers: "per path" is training without trees. It computes every leaf path on its own with the same kernels.
Where flash-linear-attention (FLA) is installed, its kernels run on one chain of as many tokens, and on the
tree level by level: all nodes of one depth at once, from their parents' last states. The time of the levels
includes the host, because FLA reads their lengths from the GPU. For SSD, FLA's kernel is "simple GLA", which
needs a copy of the keys for each value head. Where mamba_ssm is installed, its kernel runs on one chain, too;
it also multiplies x and A by dt. On Hopper FLA refuses to run its backward pass with versions of Triton that
compile wrong gradients. This benchmark runs it there to measure its time only.

"x chain" is the time per token of a chain, which --tree measures first, over that of the tree. "x FLA" is
the time of FLA's chain over that of the tree. The picture has the time of each contender on each tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timers import Contender, add_rounds, benchmark, plan_ms, replay_ms, time_ms
from benchmarks.trees import SHAPES, VOCABULARY, path_sample, random_tree
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.components.recurrence import TreeGDN, TreeKDA, TreeSSD, prepare_conv, tree_causal_conv1d
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.chunks import make_chains, make_chunks
from titan_tree.tree.gateway import predecessors
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

try:
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    FLA = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda, "ssd": chunk_simple_gla}
    FLA_NOTE = ""
    if chunk_o.IS_NVIDIA_HOPPER and not chunk_o.TRITON_ABOVE_3_7_1:
        chunk_o.TRITON_ABOVE_3_7_1 = True  # otherwise FLA refuses, see above
        FLA_NOTE = "its gradients are wrong with this Triton"
except ImportError:
    FLA = {}

try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError:
    mamba_chunk_scan_combined = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = {"gdn": TreeGDN, "kda": TreeKDA, "ssd": TreeSSD}
TITLES = {"gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention", "ssd": "Mamba-2's SSD"}
KEYS = ("rule", "heads", "head_dim", "tree", "tokens", "what")
RATIOS = ("x chain", "x FLA")
QUICK = (
    "--tree", "chain", "bushy", "--tokens", "64", "--rounds", "1", "--heads", "1", "2",
    "--head-dim", "16", "16",
)  # fmt: skip
COLUMNS = (
    "tree", "tokens", "nodes", "por", "what", "forward_ms", "forward_backward_ms", "x chain", "x FLA",
    "kept_mib", "plan_host_ms", "note",
)  # fmt: skip
DEVICE = default_device()
MAX_FLAT_TOKENS = 2**17  # tokens of "per path" in one call
WIDTH = 4  # of the convolution
Run = Callable[..., Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--rule", choices=RULES, default="gdn")
    add("--tree", nargs="+", choices=SHAPES, default=["chain", "agent", "agent-fine", "bushy"])
    add("--tokens", type=int, help="distinct tokens (default: depends on the shape)")
    for name, usual, ssd in (("--heads", "32 32", "8 64"), ("--head-dim", "128 128", "128 64")):
        text = f"(default: {usual}; for ssd {ssd})"
        add(name, type=int, nargs=2, metavar=("KEY", "VALUE"), help=text)


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per tree and contender."""
    is_ssd = args.rule == "ssd"
    args.heads = args.heads or ([8, 64] if is_ssd else [32, 32])
    args.head_dim = args.head_dim or ([128, 64] if is_ssd else [128, 128])
    rows = []
    chain = None  # milliseconds per token
    for shape in args.tree:
        tree = random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)
        measured = measure(shape, tree, args)
        times = {row["what"]: float(str(row["forward_backward_ms"])) for row in measured}
        if shape == "chain":
            chain = times["tree"] / len(tree)
        for row in measured:
            is_tree = row["what"] == "tree"
            fla = times.get("FLA, one chain")
            row["x chain"] = round(chain * len(tree) / times["tree"], 3) if is_tree and chain else None
            row["x FLA"] = round(fla / times["tree"], 3) if is_tree and fla else None
        rows += measured
        print(f"{shape}: done", flush=True)
    return rows


def measure(shape: str, tree: TokenTree, args: argparse.Namespace) -> list[Row]:
    """Returns one row per contender for one tree."""
    layout = TreeBatch.from_trees([tree]).layout.to(DEVICE)
    rule = partial(rule_inputs, args=args)
    own, convolution = partial(rule, len(tree)), partial(convolution_inputs, len(tree), args)
    contenders = [contender("tree", rule_on(layout, args.rule), own)]
    if shape != "chain":
        contenders.append(per_path(tree, rule, args.rule))
    if DEVICE.type == "cuda":
        contenders += libraries(tree, own, args.rule)
    contenders.append(contender("tree convolution", convolution_on(layout), convolution))
    if shape == "chain":
        contenders.append(contender("conv1d and silu", plain_convolution, convolution))
    (partition,) = one_pass(tree).partitions
    _, host_ms = plan_ms(
        lambda: make_chains(make_chunks(predecessors(tree, partition), np.empty(0, np.int64)))
    )

    def row(each: Contender) -> Row:
        return {
            "rule": args.rule,
            "heads": "/".join(map(str, args.heads)),
            "head_dim": "/".join(map(str, dict.fromkeys(args.head_dim))),
            "tree": shape,
            "tokens": len(tree),
            "nodes": tree.stats.n_nodes,
            "por": round(tree.stats.por, 4),
            "what": each.name,
            "forward_ms": round(each.median("forward"), 3),
            "forward_backward_ms": round(each.median("both"), 3),
            "kept_mib": round(each.median("kept") / 2**20),
            "plan_host_ms": round(host_ms, 2),
            "note": each.note,
        }

    return benchmark(contenders, args.rounds, row)


def rule_on(layout: TreeLayout, rule: str) -> Run:
    """Returns a recurrence on a tree."""
    module = RULES[rule]()
    return lambda *inputs: module(*inputs, layout)[0]


def convolution_on(layout: TreeLayout) -> Run:
    """Returns the causal convolution with SiLU on a tree."""
    plan = prepare_conv(layout, WIDTH)
    return lambda x, weight: tree_causal_conv1d(x, weight, layout, index=plan)[0]


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Computes the causal convolution with SiLU on one sequence, in plain torch."""
    padded = F.conv1d(x.t()[None], weight[:, None], padding=WIDTH - 1, groups=len(weight))
    return F.silu(padded[0, :, : len(x)]).t()


def per_path(tree: TokenTree, inputs: Callable[[int], list[Tensor]], rule: str) -> Contender:
    """Returns a recurrence that computes every path of a tree alone."""
    sample = path_sample(tree, MAX_FLAT_TOKENS)
    paths = [TokenTree.from_paths([TokenPath(np.zeros(length, np.int32))]) for length in sample.lengths]
    layout = TreeBatch.from_trees(paths).layout.to(DEVICE)
    own = partial(inputs, int(sample.lengths.sum()))
    result = contender("per path", rule_on(layout, rule), own, sample.note)
    result.scale = sample.scale
    return result


def libraries(tree: TokenTree, inputs: Callable[[], list[Tensor]], rule: str) -> Iterator[Contender]:
    """Yields the kernels of other libraries that are installed."""
    if FLA:
        yield contender("FLA, one chain", lambda *x: fla(rule, *x)[0], inputs, FLA_NOTE)
        if tree.stats.n_nodes > 1:
            note = "; ".join(filter(None, ("includes the host", FLA_NOTE)))
            yield contender("FLA, level by level", level_by_level(tree, rule), inputs, note, time_ms)
    if rule == "ssd" and mamba_chunk_scan_combined is not None:
        yield contender("mamba_ssm, one chain", mamba_chain, inputs)


def fla(rule: str, *inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Computes a recurrence on sequences by FLA: o [N, G, V] and the last states."""
    q, k, *others = inputs
    if rule == "ssd":
        q, k = (x.repeat_interleave(others[0].shape[1] // x.shape[1], 1) for x in (q, k))
        options["scale"] = 1.0
    else:
        options["use_qk_l2norm_in_kernel"] = True
    o, states = FLA[rule](*(x[None] for x in (q, k, *others)), **options)
    return o[0], states


def mamba_chain(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Computes SSD on one sequence by mamba_ssm, with dt = -g and A = -1."""
    rates = -torch.ones_like(g[0])
    x, dt, b, c = (y[None] for y in (v, -g, k, q))
    return mamba_chunk_scan_combined(x, dt, rates, b, c, chunk_size=256)[0]


def level_by_level(tree: TokenTree, rule: str) -> Run:
    """Returns a recurrence on a tree by FLA: one call per depth of nodes."""
    depth = np.zeros(len(tree.node_parent), int)
    for node, parent in enumerate(tree.node_parent):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    levels = []
    rank = np.zeros_like(depth)  # index of a node among the nodes of its depth
    for level in range(depth.max() + 1):
        nodes = np.flatnonzero(depth == level)
        rank[nodes] = np.arange(len(nodes))
        ranges = [np.arange(tree.node_offsets[node], tree.node_offsets[node + 1]) for node in nodes]
        offsets = np.cumsum([0, *map(len, ranges)])
        columns = np.concatenate(ranges), offsets, rank[tree.node_parent[nodes]]
        levels.append([torch.from_numpy(x).long().cuda() for x in columns])
    back = torch.cat([tokens for tokens, _, _ in levels]).argsort()

    def run(*inputs: Tensor) -> Tensor:
        outputs, states = [], torch.empty(0)
        for level, (tokens, offsets, parents) in enumerate(levels):
            out, states = fla(
                rule,
                *(x[tokens] for x in inputs),
                initial_state=states[parents] if level else None,
                output_final_state=True,
                cu_seqlens=offsets,
            )
            outputs.append(out)
        return torch.cat(outputs)[back]

    return run


def contender(
    name: str, run: Run, make_inputs: Callable[[], list[Tensor]], note: str = "",
    timer: Callable[[Callable[[], object]], float] = replay_ms,
) -> Contender:  # fmt: skip
    """Returns a contender that measures a forward pass ("forward") and both passes ("both") in milliseconds.

    It also measures the bytes that a forward pass keeps for its backward pass ("kept").
    """

    def measure() -> list[dict[str, float]]:
        inputs = make_inputs()
        with torch.no_grad():
            forward = timer(partial(run, *inputs))
        for x in inputs:
            x.requires_grad_()
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        out = run(*inputs)
        kept = max(0, torch.cuda.memory_allocated() - before - out.nbytes)
        do = torch.randn_like(out)
        del out
        both = timer(lambda: torch.autograd.grad(run(*inputs), inputs, do))
        return [{"forward": forward, "both": both, "kept": kept}]

    return Contender(name, measure, note=note)


def rule_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """Returns q, k [n, H, K], v [n, G, V], g [n, G] or for kda [n, G, K], and except for ssd beta [n, G]."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    (heads, values), (key, value) = args.heads, args.head_dim
    random = partial(torch.randn, device=DEVICE, generator=generator)
    sizes = (heads, key), (heads, key), (values, value)
    q, k, v = (random(n, *size, dtype=torch.bfloat16) for size in sizes)
    g = F.logsigmoid(random(n, values, *([key] if args.rule == "kda" else [])) + 2)
    beta = torch.sigmoid(random(n, values)).bfloat16()
    return [q, k, v, g] if args.rule == "ssd" else [q, k, v, g, beta]


def convolution_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """Returns x [n, channels] and weight [channels, WIDTH]."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    (heads, values), (key, value) = args.heads, args.head_dim
    channels = 2 * heads * key + values * value
    random = partial(torch.randn, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    return [random(n, channels), random(channels, WIDTH)]


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the time of the newest row's recurrence on each tree."""
    rows = [row for row in rows if row["rule"] == rows[-1]["rule"]]
    labels = {
        "tree": "titan_tree, the tree",
        "per path": "titan_tree, every path",
        "FLA, one chain": "FLA, a chain as long",
        "FLA, level by level": "FLA, level by level",
        "mamba_ssm, one chain": "mamba_ssm, a chain as long",
    }
    trees = dict.fromkeys(row["tree"] for row in sorted(rows, key=lambda row: int(row["nodes"])))
    figure.set_size_inches(4 * len(trees), 3)
    panels = figure.subplots(1, len(trees), sharey=True, squeeze=False)
    for panel, tree in zip(panels[0], trees, strict=True):
        chosen = {row["what"]: row for row in rows if row["tree"] == tree}
        for position, (what, label) in enumerate(labels.items()):
            if what in chosen:
                ms = float(chosen[what]["forward_backward_ms"])
                panel.bar_label(panel.barh(label, ms, color=f"C{position}"), [f"{ms:.2f}"], padding=3)
            else:
                panel.barh(label, 0)
        first = next(iter(chosen.values()))
        nodes = "1 node" if first["nodes"] == "1" else f"{int(first['nodes']):,} nodes"
        panel.set_title(f"{tree}: {nodes}, POR {float(first['por']):.1%}")
        panel.set(xscale="log", xlabel="forward and backward, ms", xlim=(1, 400))
    panels[0][0].invert_yaxis()
    first = rows[0]
    figure.suptitle(
        f"{TITLES[first['rule']]}, about {int(first['tokens']):,} tokens, {first['heads']} heads, head dim "
        f"{first['head_dim']}, bf16, {first['device']}, torch {first['torch']}"
    )
