"""Times TreeGDN and its convolution on token trees, in milliseconds, beside implementations for sequences.

titan-tree bench recurrence                                   # on a GPU, all trees
titan-tree bench recurrence --tree chain agent --heads 16 64  # as in Qwen3.5's larger models

The measured core of a Gated DeltaNet layer has no projections: it goes from q, k, v, the decays and beta to
the output, through the module, autograd and the operator. All contenders take turns in one process on
random data in bfloat16; the table has medians. What the host computes once per batch for all layers is
timed apart ("plan_host_ms"). "kept" is the memory that a forward pass keeps for its backward pass, besides
inputs and output.

Peers: "per path" is training without trees. It computes every leaf path on its own with the same kernels.
Where flash-linear-attention (FLA) is installed, its kernels run on one chain of as many tokens, and on the
tree level by level: all nodes of one depth at once, from their parents' last states. On Hopper FLA refuses
to run its backward pass with versions of Triton that compile wrong gradients. This benchmark runs it there
to measure its time only.

"x chain" is the time per token of a chain, which --tree measures first, over that of the tree. "x FLA" is
the time of FLA's chain over that of the tree. The picture has the time of each contender on each tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.bench.record import (
    VOCABULARY,
    Contender,
    Row,
    add_rounds,
    autograd_ms,
    default_device,
    run_rounds,
    time_ms,
    wall_s,
)
from titan_tree.bench.trees import SHAPES, flat_sample, random_tree
from titan_tree.components.recurrence import TreeGDN, prepare_conv, tree_causal_conv1d
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

    FLA_NOTE = ""
    if chunk_o.IS_NVIDIA_HOPPER and not chunk_o.TRITON_ABOVE_3_7_1:
        chunk_o.TRITON_ABOVE_3_7_1 = True  # otherwise FLA refuses, see above
        FLA_NOTE = "its gradients are wrong with this Triton"
except ImportError:
    chunk_gated_delta_rule = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("heads", "head_dim", "tree", "tokens", "what")
RATIOS = ("x chain", "x FLA")
QUICK = (
    "--tree", "chain", "bushy", "--tokens", "64", "--rounds", "1", "--heads", "1", "2", "--head-dim", "16",
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
    add("--tree", nargs="+", choices=SHAPES, default=["chain", "agent", "agent-fine", "bushy"])
    add("--tokens", type=int, help="distinct tokens (default: depends on the shape)")
    add("--heads", type=int, nargs=2, default=[32, 32], metavar=("KEY", "VALUE"))
    add("--head-dim", type=int, default=128)


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per tree and contender."""
    rows = []
    chain = None  # milliseconds per token
    for shape in args.tree:
        tree = random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)
        measured = benchmark(shape, tree, args)
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


def benchmark(shape: str, tree: TokenTree, args: argparse.Namespace) -> list[Row]:
    """Returns one row per contender for one tree."""
    layout = TreeBatch.from_trees([tree]).layout.to(DEVICE)
    rule = partial(rule_inputs, args=args)
    convolution = partial(convolution_inputs, args=args)
    contenders = [contender("tree", rule_on(layout), partial(rule, len(tree)))]
    contenders += peers(shape, tree, rule)
    contenders.append(contender("tree convolution", convolution_on(layout), partial(convolution, len(tree))))
    if shape == "chain":
        contenders.append(contender("conv1d and silu", plain_convolution, partial(convolution, len(tree))))
    run_rounds(contenders, args.rounds)
    host_ms = median(plan_ms(tree) for _ in range(7))
    return [
        {
            "heads": "/".join(map(str, args.heads)),
            "head_dim": args.head_dim,
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
        for each in contenders
    ]


def plan_ms(tree: TokenTree) -> float:
    """Returns the host's milliseconds for what the delta rule needs of a batch: chunks and chains."""
    (partition,) = one_pass(tree).partitions
    return 1e3 * wall_s(
        lambda: make_chains(make_chunks(predecessors(tree, partition), np.empty(0, np.int64)))
    )


def rule_on(layout: TreeLayout) -> Run:
    """Returns the gated delta rule on a tree."""
    gdn = TreeGDN()
    return lambda *inputs: gdn(*inputs, layout)[0]


def convolution_on(layout: TreeLayout) -> Run:
    """Returns the causal convolution with SiLU on a tree."""
    plan = prepare_conv(layout, WIDTH)
    return lambda x, weight: tree_causal_conv1d(x, weight, layout, index=plan)[0]


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Computes the causal convolution with SiLU on one sequence, in plain torch."""
    padded = F.conv1d(x.t()[None], weight[:, None], padding=WIDTH - 1, groups=len(weight))
    return F.silu(padded[0, :, : len(x)]).t()


def peers(shape: str, tree: TokenTree, inputs: Callable[[int], list[Tensor]]) -> list[Contender]:
    """Returns the peers of the delta rule on a tree."""
    contenders = []
    if shape != "chain":
        lengths, sample = flat_sample(tree, MAX_FLAT_TOKENS)
        paths = [TokenTree.from_paths([TokenPath(np.zeros(length, np.int32))]) for length in sample]
        layout = TreeBatch.from_trees(paths).layout.to(DEVICE)
        per_path = contender("per path", rule_on(layout), partial(inputs, int(sample.sum())))
        per_path.scale = float(lengths.sum() / sample.sum())
        per_path.note = f"{len(lengths)} paths, {lengths.sum():,} tokens"
        if len(sample) < len(lengths):
            per_path.note += f"; timed on {len(sample)} of them"
        contenders.append(per_path)
    if chunk_gated_delta_rule is not None and DEVICE.type == "cuda":
        own = partial(inputs, len(tree))
        contenders.append(contender("FLA, one chain", fla_chain, own, FLA_NOTE))
        if shape != "chain":
            contenders.append(contender("FLA, level by level", level_by_level(tree), own, FLA_NOTE))
    return contenders


def fla_chain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Computes the gated delta rule on one sequence by FLA."""
    inputs = (x[None] for x in (q, k, v, g, beta))
    return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0][0]


def level_by_level(tree: TokenTree) -> Run:
    """Returns the gated delta rule on a tree by FLA: one call per depth of nodes."""
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
            out, states = chunk_gated_delta_rule(
                *(x[tokens][None] for x in inputs),
                initial_state=states[parents] if level else None,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=offsets,
            )
            outputs.append(out[0])
        return torch.cat(outputs)[back]

    return run


def contender(name: str, run: Run, make_inputs: Callable[[], list[Tensor]], note: str = "") -> Contender:
    """Returns a contender that measures a forward pass ("forward") and both passes ("both") in milliseconds.

    It also measures the bytes that a forward pass keeps for its backward pass ("kept").
    """

    def measure() -> list[dict[str, float]]:
        inputs = make_inputs()
        with torch.no_grad():
            forward = time_ms(partial(run, *inputs))
        for x in inputs:
            x.requires_grad_()
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        out = run(*inputs)
        kept = max(0, torch.cuda.memory_allocated() - before - out.nbytes)
        do = torch.randn_like(out)
        del out
        return [{"forward": forward, "both": autograd_ms(partial(run, *inputs), inputs, do), "kept": kept}]

    return Contender(name, measure, note=note)


def rule_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """Returns q, k [n, H, D], v [n, G, D], g and beta [n, G]."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    (heads, values), dim = args.heads, args.head_dim
    random = partial(torch.randn, device=DEVICE, generator=generator)
    q, k, v = (random(n, h, dim, dtype=torch.bfloat16) for h in (heads, heads, values))
    return [q, k, v, F.logsigmoid(random(n, values) + 2), torch.sigmoid(random(n, values)).bfloat16()]


def convolution_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """Returns x [n, channels] and weight [channels, WIDTH]."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    channels = (2 * args.heads[0] + args.heads[1]) * args.head_dim
    random = partial(torch.randn, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    return [random(n, channels), random(channels, WIDTH)]


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the time of the gated delta rule on each tree."""
    labels = {
        "tree": "titan_tree, the tree",
        "per path": "titan_tree, every path",
        "FLA, one chain": "FLA, a chain as long",
        "FLA, level by level": "FLA, level by level",
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
        f"Gated delta rule, about {int(first['tokens']):,} tokens, {first['heads']} heads, head dim "
        f"{first['head_dim']}, bf16, {first['device']}, torch {first['torch']}"
    )
