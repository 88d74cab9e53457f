"""Times training steps on token trees, beside steps on rows without trees, for ratios of tokens up to 150.

The ratio is N_leaf / N_tree, the tokens of one row per leaf path over distinct tokens. The trees are
conversations: a prompt with 2 to 300 answers. The columns are those of por. At a ratio of 1, the
baseline is the same trainer with plain causal attention (cuDNN's, through scaled_dot_product_attention), so
the row shows what trees cost.

Prompt Trees (Scaled Cognition, 2025) reports such a curve: more than 70x at a ratio of about 100, and 0.97x
where nothing is shared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import layouts
from benchmarks.trees import Nodes, random_paths
from titan_tree.cli.bench.record import Row
from titan_tree.components.backends import ATTENTION_BACKENDS, Scoring
from titan_tree.tree.layout import TreeLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAY_BE_ZERO = ("chain",)
KEYS = ("model", "case", "trees", "N_leaf", "N_tree")
RATIOS = ("of operations",)
COLUMNS = layouts.COLUMNS
SHAPES = (  # prompt, answers, tokens of an answer
    (6144, 2, 2048),
    (7168, 8, 512),
    (7168, 32, 256),
    (7168, 128, 128),
    (12_288, 160, 64),
    (12_288, 300, 42),
)
QUICK = ("--flavor", "debug", "--scale", "0.01", "--shapes", "2", "--trees", "1", *layouts.QUICK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layouts.add_arguments(parser)
    add = parser.add_argument
    add("--chain", type=int, default=32_768, help="tokens of the sequence at a ratio of 1; 0: leave it out")
    add(
        "--shapes",
        type=int,
        default=len(SHAPES),
        help="measure the first ones of the six conversations (default: all)",
    )
    add("--scale", type=float, default=1.0, help="factor of all lengths (default: 1)")
    add("--trees", type=int, default=1, help="trees per step (default: %(default)s)")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per shape."""
    if args.chain:
        yield from one_sequence(args)
    yield from layouts.compare(cases(args), args)


def one_sequence(args: argparse.Namespace) -> Iterator[Row]:
    """Yields the row of a sequence without branches, beside plain causal attention."""
    length = max(2, round(args.chain * args.scale))
    chain = layouts.Case("one sequence", [random_paths([(-1, length)], layouts.vocab_size(args))])
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with ATTENTION_BACKENDS.registered("causal", Causal()), sdpa_kernel(kernels, set_priority=True):
        yield from layouts.compare([chain], args, rows_attention="causal")


def cases(args: argparse.Namespace) -> Iterator[layouts.Case]:
    """Yields the steps to time."""
    vocab_size = layouts.vocab_size(args)
    for prompt, answers, answer in SHAPES[: args.shapes]:
        prompt, answer = (max(2, round(tokens * args.scale)) for tokens in (prompt, answer))
        nodes: Nodes = [(-1, prompt), *[(0, answer)] * answers]
        groups = [random_paths(nodes, vocab_size, seed) for seed in range(args.trees)]
        yield layouts.Case(f"{answers} answers of {answer:,} to {prompt:,}", groups)


class Causal:
    """An attention backend for one sequence without branches: PyTorch's own causal attention."""

    def is_automatic(self, device: torch.device) -> bool:
        return False

    def refusal(self, q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
        return None

    def prepare(self, layout: TreeLayout, window: int | None) -> None:
        return None

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: None,
        scale: float, scoring: Scoring, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the seconds of a step, on rows and on trees, for prompts with up to 128 answers."""
    chosen = [row for row in rows if "answers" in row["case"]][:4]
    figure.set_size_inches(7, 2.6)
    axes = figure.subplots()
    for offset, column, label in (
        (-0.2, "rows s", "one packed row per leaf path"),
        (0.2, "tree s", "as a token tree"),
    ):
        seconds = [float(row[column]) for row in chosen]
        axes.barh([i + offset for i in range(len(chosen))], seconds, 0.38, label=label)
    for i, row in enumerate(chosen):
        axes.text(float(row["tree s"]) + 0.1, i + 0.2, f"{float(row['speed-up']):.1f}x as fast", va="center")
    axes.set_yticks(range(len(chosen)), [row["case"].replace(" to ", "\nto a prompt of ") for row in chosen])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"seconds of a training step; {rows[0]['model']}, {rows[0]['device']}")
    axes.legend(frameon=False)
