"""TreeGDN and its convolution on token trees, in milliseconds, beside what there is for sequences.

    python scripts/benchmark_gdn.py --csv gdn.csv
    python scripts/benchmark_gdn.py --tree agent --heads 16 64

The core of a Gated DeltaNet layer, without its projections: from q, k, v, the decays and beta to the output,
through the module, autograd and the operator. Times are medians over rounds in one process, in which the
contenders take turns, on random data. What the host makes once per batch for all layers is timed apart. With
them, the memory that a forward keeps for its backward besides inputs and output.

Peers: "per path", which is flat training: every path that is no other's prefix, each on its own, by our
kernels. Where flash-linear-attention is installed: its kernels on one chain of as many tokens, and on the
tree level by level, the nodes of a depth at once, from their parents' last states. On Hopper it refuses to
run backward with versions of Triton that compile it to wrong gradients: here it runs, for its time alone.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
import triton
from benchmark_attention import Row, time_ms, write_csv
from torch import Tensor
from trees import SHAPES, random_tree

from titan_tree.components.tree_gdn import TreeGDN, prepare_conv, tree_causal_conv1d
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.chains import make_chains
from titan_tree.tree.chunks import make_chunks
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
        chunk_o.TRITON_ABOVE_3_7_1 = True  # else it refuses, see above
        FLA_NOTE = "its gradients are wrong with this Triton"
except ImportError:
    chunk_gated_delta_rule = None

VOCABULARY = 151_936
MAX_FLAT_TOKENS = 2**17  # of "per path" in one call
WIDTH = 4  # of the convolution


@dataclass
class Contender:
    """What is timed on ``n`` tokens, whose time stands for ``scale`` times as much work."""

    run: Callable[..., Tensor]
    n: int
    scale: float = 1.0
    note: str = ""
    times: list[tuple[float, float]] = field(default_factory=list)  # forward, forward and backward; ms
    kept: int = 0  # bytes from forward to backward, besides inputs and output


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the kernels need a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"bfloat16, {args.heads[0]} key and {args.heads[1]} value heads of {args.head_dim} dims")
    for shape in args.tree:
        tree = random_tree(shape, args.tokens or SHAPES[shape], VOCABULARY)
        rows = benchmark(shape, tree, args)
        print_rows(rows)
        if args.csv:
            write_csv(args.csv, rows)


def benchmark(shape: str, tree: TokenTree, args: argparse.Namespace) -> list[Row]:
    layout = TreeBatch.from_trees([tree]).layout.to("cuda")
    contenders = {"tree": Contender(rule_on(layout), len(tree)), **peers(shape, tree)}
    convolutions = {"tree convolution": Contender(convolution_on(layout), len(tree))}
    if shape == "chain":
        convolutions["conv1d and silu"] = Contender(plain_convolution, len(tree))
    for _ in range(args.rounds):
        for group, inputs in ((contenders, rule_inputs), (convolutions, convolution_inputs)):
            for contender in group.values():
                contender.times.append(measure(contender, inputs(contender.n, args)))
    host_ms = median(plan_ms(tree) for _ in range(7))
    rows = []
    for name, contender in (contenders | convolutions).items():
        forward, both = (contender.scale * median(ms) for ms in zip(*contender.times, strict=True))
        rows.append({
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "heads": "/".join(map(str, args.heads)),
            "head_dim": args.head_dim,
            "tree": shape,
            "tokens": len(tree),
            "nodes": tree.stats.n_nodes,
            "por": round(tree.stats.por, 4),
            "what": name,
            "forward_ms": round(forward, 3),
            "forward_backward_ms": round(both, 3),
            "kept_mib": round(contender.kept * contender.scale / 2**20),
            "plan_host_ms": round(host_ms, 2),
            "note": contender.note,
        })  # fmt: skip
    return rows


def plan_ms(tree: TokenTree) -> float:
    """Milliseconds of the host for what the rule alone needs of a batch."""
    (partition,) = one_pass(tree).partitions
    started = time.perf_counter()
    make_chains(make_chunks(predecessors(tree, partition), np.empty(0, np.int64)))
    return 1e3 * (time.perf_counter() - started)


def rule_on(layout: TreeLayout) -> Callable[..., Tensor]:
    gdn = TreeGDN()
    return lambda *inputs: gdn(*inputs, layout)[0]


def convolution_on(layout: TreeLayout) -> Callable[..., Tensor]:
    plan = prepare_conv(layout, WIDTH)
    return lambda x, weight: tree_causal_conv1d(x, weight, layout, plan=plan)[0]


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """As sequences have it, in torch."""
    padded = F.conv1d(x.t()[None], weight[:, None], padding=WIDTH - 1, groups=len(weight))
    return F.silu(padded[0, :, : len(x)]).t()


def peers(shape: str, tree: TokenTree) -> dict[str, Contender]:
    contenders = {"per path": per_path(tree)} if shape != "chain" else {}
    if chunk_gated_delta_rule is not None:
        contenders["FLA, one chain"] = Contender(fla_chain, len(tree), note=FLA_NOTE)
        if shape != "chain":
            contenders["FLA, level by level"] = Contender(level_by_level(tree), len(tree), note=FLA_NOTE)
    return contenders


def per_path(tree: TokenTree) -> Contender:
    is_leaf = tree.node_offsets[1:] == tree.node_subtree_end
    lengths = np.diff(tree.path_offsets)[is_leaf[tree.path_node]]
    np.random.default_rng(0).shuffle(lengths)
    few = lengths[: max(1, int((lengths.cumsum() <= MAX_FLAT_TOKENS).sum()))]
    paths = [TokenTree.from_paths([TokenPath(np.zeros(length, np.int32))]) for length in few]
    note = f"{len(lengths)} paths, {lengths.sum():,} tokens"
    if len(few) < len(lengths):
        note += f"; timed on {len(few)} of them"
    layout = TreeBatch.from_trees(paths).layout.to("cuda")
    return Contender(rule_on(layout), int(few.sum()), scale=float(lengths.sum() / few.sum()), note=note)


def fla_chain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    inputs = (x[None] for x in (q, k, v, g, beta))
    return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0][0]


def level_by_level(tree: TokenTree) -> Callable[..., Tensor]:
    depth = np.zeros(len(tree.node_parent), int)
    for node, parent in enumerate(tree.node_parent):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    levels = []
    place = np.zeros_like(depth)  # of a node on its level
    for level in range(depth.max() + 1):
        nodes = np.flatnonzero(depth == level)
        place[nodes] = np.arange(len(nodes))
        ranges = [np.arange(tree.node_offsets[node], tree.node_offsets[node + 1]) for node in nodes]
        offsets = np.cumsum([0, *map(len, ranges)])
        columns = np.concatenate(ranges), offsets, place[tree.node_parent[nodes]]
        levels.append([torch.from_numpy(x).long().cuda() for x in columns])
    back = torch.cat([tokens for tokens, _, _ in levels]).argsort()

    def run(*inputs: Tensor) -> Tensor:
        outputs, states = [], None
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


def measure(contender: Contender, inputs: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of a forward, and of one with its backward; notes what stays between them."""
    with torch.no_grad():
        forward = time_ms(partial(contender.run, *inputs))
    for x in inputs:
        x.requires_grad_()
    before = torch.cuda.memory_allocated()
    out = contender.run(*inputs)
    contender.kept = torch.cuda.memory_allocated() - before - out.nbytes
    do = torch.randn_like(out)
    del out

    def both() -> None:
        torch.autograd.grad(contender.run(*inputs), inputs, do)

    return forward, time_ms(both)


def rule_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """q, k, v, g, beta."""
    generator = torch.Generator("cuda").manual_seed(1)
    (heads, values), dim = args.heads, args.head_dim
    random = partial(torch.randn, device="cuda", generator=generator)
    q, k, v = (random(n, h, dim, dtype=torch.bfloat16) for h in (heads, heads, values))
    return [q, k, v, F.logsigmoid(random(n, values) + 2), torch.sigmoid(random(n, values)).bfloat16()]


def convolution_inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """x and weight."""
    generator = torch.Generator("cuda").manual_seed(1)
    channels = (2 * args.heads[0] + args.heads[1]) * args.head_dim
    random = partial(torch.randn, device="cuda", generator=generator, dtype=torch.bfloat16)
    return [random(n, channels), random(channels, WIDTH)]


def print_rows(rows: list[Row]) -> None:
    first = rows[0]
    print(
        f"\n{first['tree']}: {first['tokens']:,} tokens, {first['nodes']:,} nodes, POR {first['por']:.1%}; "
        f"chunks and chains take the host {first['plan_host_ms']} ms"
    )
    for row in rows:
        times = f"{row['what']:24}{row['forward_ms']:>9.3f}{row['forward_backward_ms']:>9.3f} ms"
        cells = f"{times}{row['kept_mib']:>7} MiB"
        print(f"{cells}  {row['note']}".rstrip(), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["chain", "agent", "agent-fine", "bushy"]
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--tokens", type=int, help="distinct tokens (default: that of each shape)")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 32], metavar=("KEY", "VALUE"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
