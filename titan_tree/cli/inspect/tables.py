"""What titan-tree inspect prints: sizes of trees, reports and samples."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from titan_tree.cli.data_arguments import data_config, named_model, progress_bar
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.data_files import Group, holds_conversations
from titan_tree.data.divergence import render_picture, render_report
from titan_tree.data.packing import UngroupedLines, leaf_trees, merged_trees
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.data.show import render_sample
from titan_tree.errors import UserError, printable, warnings_hidden
from titan_tree.tree.paths import ModelLimits
from titan_tree.tree.token_tree import TokenTree, TreeStats

if TYPE_CHECKING:  # inspect imports torch for --model only
    from titan_tree.tree.costs import ModelCosts

NamedTree = tuple[str, TokenTree]

# In this order, if the terminal is too narrow for all columns.
HIDDEN_FIRST = ("fan-out", "depth", "nodes", "POR samples", "N_flat")
LEGEND = {
    "N_flat": "tokens of all paths; N_leaf: of one path per leaf; N_tree: distinct",
    "POR": "potential overlap ratio, 1 - N_tree / N_leaf; POR samples: 1 - N_tree / N_flat",
    "bound": "largest speed-up over one row per leaf path, N_leaf / N_tree",
    "op bound": "the same by operations of the model, those of attention included",
    "depth": "nodes on the deepest path",
    "fan-out": "mean children of a branching node",
    "longest": "tokens of the longest path",
}
IMAGE_COUNTS = ("path_images", "images", "image_tokens")
BLANK_TOKENS = 8  # of an empty think block, at most
UNFINISHED = {  # endings of answers, and what is trained of them
    "cut off": "trained without an end",
    "filtered": "not trained unless their weight is 1",
}
PROBLEMS = 20  # of a file, shown at once
FILE_WIDTH = 160  # columns if the output is not a terminal


def show(args: argparse.Namespace) -> None:
    """Prints what the arguments ask for. Raises UserError for malformed input."""
    costs = None if args.model is None else named_model(args.model).costs()
    config = data_config(args)
    try:
        _show(args, config, costs)
    except UserError:
        found, good = _problems(config)
        kinds = {re.sub(r"\d+", "", str(error)) for error in found}
        if len(found) < 2 or (len(kinds) == 1 and not good):  # one mistake, perhaps in the arguments
            raise
        for error in found[:PROBLEMS]:
            print(error, file=sys.stderr)
        shown = "" if len(found) <= PROBLEMS else f"; the first {PROBLEMS} are above"
        raise UserError(f"{', '.join(args.files)}: {len(found):,} problems{shown}") from None


def _problems(config: DataConfig) -> tuple[list[UserError], int]:
    """Returns what is wrong with the rows of the files, and the number of groups that can be read.

    There are no problems of rows if the files cannot be read for another reason.
    """
    with warnings_hidden():  # shown before
        try:
            return SampleReader(config, _tokenizer(config)).problems()
        except UserError:
            return [], 0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves a closed pipe to ``cli.call``; rich would end the process."""
        raise


def _show(args: argparse.Namespace, config: DataConfig, costs: ModelCosts | None) -> None:
    """Prints what the arguments ask for. Raises UserError for malformed input."""
    tokenizer = None
    if config.tokenizer is not None or holds_conversations(next(SampleReader(config).files.groups())):
        tokenizer = _tokenizer(config)
    decodes = args.show is not None or args.report is not None
    vocab_size = tokenizer.vocab_size if tokenizer is not None and decodes else None
    reader = SampleReader(config, tokenizer, ModelLimits(vocab_size=vocab_size))
    # Console() has the width of the terminal, or of the variable COLUMNS.
    console = _Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH)
    if args.show is not None:
        _print_sample(console, args, reader, tokenizer)
    elif args.report is not None:
        _print_report(console, args, _trees(reader), tokenizer)
    elif args.json:
        sizes = [TreeSizes.of(name, tree, costs) for name, tree in _trees(reader)]
        trees = [{"id": tree.name, **tree.as_json()} for tree in sizes]
        unfinished = {name.replace(" ", "_"): reader.endings[name] for name in UNFINISHED}
        print(json.dumps({"trees": trees, "all": TreeSizes.total(sizes).as_json(), "answers": unfinished}))
        return
    else:
        ungrouped, boilerplate = UngroupedLines(), TrainedBoilerplate(tokenizer)
        named = _trees(reader, ungrouped)
        sizes = [TreeSizes.of(name, boilerplate.counted(tree), costs) for name, tree in named]
        _print_table(console, sizes, args.limit)
        boilerplate.print(console)
        if any(reader.endings[name] for name in UNFINISHED):
            counts = [f"{reader.endings[name]:,} {name} ({done})" for name, done in UNFINISHED.items()]
            console.print(f"answers: {', '.join(counts)}", highlight=False)
        if reader.rejected:
            are = "sample is a rejected answer" if reader.rejected == 1 else "samples are rejected answers"
            line = f'{reader.rejected:,} {are}: train with a loss of preferences, such as loss.name = "dpo"'
            console.print(line, style="yellow", highlight=False)
        for what, found in (
            ("left out of sessions", reader.files.skipped),
            ("fields that are not read", reader.fields.counts),
        ):
            if found:
                counts = [f"{number:,} x {kind}" for kind, number in found.most_common()]
                console.print(f"{what}: {printable(', '.join(counts))}", highlight=False, markup=False)
        if (advice := ungrouped.advice()) is not None:
            console.print(advice, style="yellow", highlight=False)
    if tokenizer is not None and config.tokenizer is None:
        console.print(
            "these tokens are bytes; use --tokenizer FOLDER to see those of your model", style="yellow"
        )


@dataclass(frozen=True)
class TreeSizes:
    """The sizes of a tree, or of all trees together.

    Attributes:
        name: the name of the tree; of all trees, how many there are.
        stats: the numbers of tokens, paths and nodes.
        leaf_flops: operations of training one row per leaf path; 0 without --model.
        tree_flops: operations of training the tree; 0 without --model.
        path_images: images on all paths.
        images: distinct images of each tree.
        image_tokens: tokens of these.
    """

    name: str
    stats: TreeStats
    leaf_flops: int = 0
    tree_flops: int = 0
    path_images: int = 0
    images: int = 0
    image_tokens: int = 0

    @classmethod
    def of(cls, name: str, tree: TokenTree, costs: ModelCosts | None) -> TreeSizes:
        """Returns the sizes of a tree, and its operations in the model that has these costs."""
        on_paths = sum(len(path.images) for path in tree.paths)
        images = on_paths, len(tree.images), sum(map(len, tree.images))
        if costs is None:
            return cls(name, tree.stats, 0, 0, *images)
        rows = leaf_trees(tree.paths)  # what data.layout = "leaf" trains
        leaf_flops, tree_flops = (costs.training_flops_of_trees(trees) for trees in (rows, [tree]))
        return cls(name, tree.stats, leaf_flops, tree_flops, *images)

    @classmethod
    def total(cls, sizes: Sequence[TreeSizes]) -> TreeSizes:
        """Returns the sizes of all trees."""
        return cls(
            f"all {len(sizes):,}",
            TreeStats.total([tree.stats for tree in sizes]),
            *(
                sum(getattr(tree, name) for tree in sizes)
                for name in ("leaf_flops", "tree_flops", *IMAGE_COUNTS)
            ),
        )

    @property
    def operation_bound(self) -> float | None:
        """The largest speed-up over one row per leaf path, by operations; None without --model."""
        return self.leaf_flops / self.tree_flops if self.tree_flops else None

    def as_json(self) -> dict[str, object]:
        """Returns all numbers, without the bound by operations if --model is missing, or images if none."""
        numbers: dict[str, object] = asdict(self.stats)
        for name in ("por", "por_samples", "bound", "branching"):
            numbers[name] = getattr(self.stats, name)
        if self.operation_bound is not None:
            numbers["operation_bound"] = self.operation_bound
        if self.images:
            numbers |= {name: getattr(self, name) for name in IMAGE_COUNTS}
        return numbers

    def cells(self) -> dict[str, str]:
        """Returns the text of each column of the table."""
        stats, bound = self.stats, self.operation_bound
        return {
            "paths": f"{stats.n_paths:,}",
            "N_flat": f"{stats.n_flat:,}",
            "N_leaf": f"{stats.n_leaf:,}",
            "N_tree": f"{stats.n_tree:,}",
            "POR": f"{stats.por:.3f}",
            "POR samples": f"{stats.por_samples:.3f}",
            "bound": f"{stats.bound:.2f}x",
            **({} if bound is None else {"op bound": f"{bound:.2f}x"}),
            "nodes": f"{stats.n_nodes:,}",
            "depth": f"{stats.max_depth}",
            "fan-out": f"{stats.branching:.2f}",
            "longest": f"{stats.longest_path:,}",
        }


class TrainedBoilerplate:
    """Counts trained tokens that the chat template wrote: control tokens, and empty think blocks."""

    def __init__(self, tokenizer: TreeTokenizer | None) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.special_tokens if tokenizer else {}
        self._think, self._end_think = ids.get("<think>", -1), ids.get("</think>", -1)
        self._control = {ids[token]: token for token in tokenizer.control_tokens} if tokenizer else {}
        self._control_ids = np.array([*self._control], np.int32)
        self._counts: Counter[int] = Counter()
        self._blocks = self._empty_blocks = 0

    def counted(self, tree: TokenTree) -> TokenTree:
        """Counts the trained tokens of all paths of a tree, and returns the tree."""
        for path in tree.paths if self._tokenizer is not None else ():
            trained = path.tokens[1:][path.loss_mask[1:] > 0]  # nothing predicts the first token
            self._counts.update(trained[np.isin(trained, self._control_ids)].tolist())
            for start in np.flatnonzero(trained == self._think):
                self._blocks += 1
                self._empty_blocks += self._is_empty(trained[start + 1 : start + 1 + BLANK_TOKENS])
        return tree

    def _is_empty(self, tokens: np.ndarray) -> bool:
        """Returns whether only white space stands before ``</think>``."""
        assert self._tokenizer is not None
        ends = np.flatnonzero(tokens == self._end_think)
        return len(ends) > 0 and not self._tokenizer.decode(tokens[: ends[0]]).strip()

    def _advice(self) -> str:
        """Returns which variable of the chat template avoids empty blocks, if it has one that works here."""
        assert self._tokenizer is not None
        for name, works in (("empty_blocks", True), ("enable_thinking", self._blocks == self._empty_blocks)):
            if works and name in self._tokenizer.template_variables:
                return f"; to avoid it, set data.sample.{name} to false"
        return ""

    def print(self, console: Console) -> None:
        """Prints up to two lines."""
        if self._counts:
            counts = (f"{count:,} x {self._control[id]}" for id, count in self._counts.most_common())
            console.print(f"trained control tokens: {', '.join(counts)}", highlight=False, markup=False)
        if self._empty_blocks:
            console.print(
                f"{self._empty_blocks:,} empty think blocks are trained; some templates write them for turns "
                f"without reasoning{self._advice()}",
                style="yellow",
                highlight=False,
                markup=False,
            )


def _tokenizer(config: DataConfig) -> TreeTokenizer:
    """Returns the requested tokenizer, or the byte tokenizer."""
    if config.tokenizer is not None:
        return TreeTokenizer.load(config.tokenizer, config.template)
    return TreeTokenizer.byte_level(config.template or "chatml")


def _trees(reader: SampleReader, ungrouped: UngroupedLines | None = None) -> Iterator[NamedTree]:
    """Yields (name, tree) for each tree, and shows how much of each file has been read."""
    with progress_bar() as open_file:
        groups = reader.files.groups(open_file)
        if reader.config.merge == "group":
            for group in groups:
                tree = reader.tree(group, "first")
                if ungrouped is not None:
                    ungrouped.add(group, tree)
                yield group.id, tree
        else:
            yield from _batch_trees(groups, reader)


def _batch_trees(groups: Iterator[Group], reader: SampleReader) -> Iterator[NamedTree]:
    """Yields the trees that data.merge = "batch" makes of each global batch, without shuffling."""
    for step in count():
        batch = islice(groups, reader.config.global_batch_groups)
        paths = [path for group in batch for path in reader.paths(group)]
        if not paths:
            return
        for number, tree in enumerate(merged_trees(paths, reader.config.max_tokens, "first")):
            yield f"batch {step} tree {number}", tree


def _print_report(
    console: Console, args: argparse.Namespace, trees: Iterator[NamedTree], tokenizer: TreeTokenizer | None
) -> None:
    names, named = [], []  # several trees if records share an id
    for name, tree in trees:
        names.append(name)
        if name == args.report:
            named.append(tree)
    if not named:
        raise UserError(f"--report {args.report}: no tree has this name; {_similar(args.report, names)}")
    decode = tokenizer.decode if tokenizer else None
    for tree in named:
        if args.picture:
            console.print(render_picture(tree, decode))
        console.print(render_report(tree, decode, console.width))


def _print_sample(
    console: Console, args: argparse.Namespace, reader: SampleReader, tokenizer: TreeTokenizer | None
) -> None:
    """Prints the samples with the given id, or else the first sample of the tree or trajectory of this id."""
    ids, matches = [], []
    with progress_bar() as open_file:
        for group in reader.files.groups(open_file):
            ids.append(group.id)
            if f"{args.show}/".startswith(f"{group.id}/") or group.id.startswith(f"{args.show}/"):
                paths = reader.paths(group)
                ids += [path.id for path in paths]
                matches += [path for path in paths if f"{path.id}/".startswith(f"{args.show}/")]
    if not matches:
        raise UserError(f"--show {args.show}: no sample or tree has this id; {_similar(args.show, ids)}")
    named = [path for path in matches if path.id == args.show]  # several if records share an id
    for path in named or matches[:1]:
        # The terminal wraps long lines of text, so that the output has the line breaks of the sample.
        console.print(render_sample(path, tokenizer), soft_wrap=tokenizer is not None)
    if not named and len(matches) > 1:
        others = [printable(path.id) for path in matches[1 : args.limit + 1]]
        more = f", and {len(matches) - 1 - len(others):,} more" if len(matches) - 1 > len(others) else ""
        note = f"this is the first of {len(matches):,} samples; the others are {', '.join(others)}{more}"
        console.print(Text(note), style="yellow")


def _similar(name: str, names: Sequence[str]) -> str:
    """Returns the end of an error message about an unknown name: the names closest to it."""
    if close := get_close_matches(name, dict.fromkeys(names[:10_000])):
        return f"the closest are {', '.join(close)}"
    return f"the first ones are {', '.join(names[:3])}"


def _print_table(console: Console, sizes: list[TreeSizes], limit: int) -> None:
    unlimited = console.options.update(width=10_000)
    for number in range(len(HIDDEN_FIRST) + 1):
        hidden = HIDDEN_FIRST[:number]
        table = _table(sizes, limit, hidden)
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    console.print(table)
    total = TreeSizes.total(sizes)
    columns = total.cells().keys() - set(hidden)
    legend = [f"{column}: {meaning}" for column, meaning in LEGEND.items() if column in columns]
    if hidden:
        legend.append(f"hidden at this width: {', '.join(hidden)}")
    console.print("\n".join(legend), style="dim", highlight=False)
    if (stats := total.stats).n_rows:
        console.print(
            f"routed experts: recorded for {stats.n_rows:,} rows (one token in one layer); paths disagree on "
            f"{stats.n_disagreeing / stats.n_rows:.2%} of them, see data.replay",
            highlight=False,
        )
    if total.images:
        console.print(
            f"images: {total.path_images:,} on all paths, {total.images:,} distinct, of "
            f"{total.image_tokens:,} tokens; encodings saved: {total.path_images - total.images:,}",
            highlight=False,
        )
    largest = max(sizes, key=lambda tree: tree.stats.n_tree)
    console.print(
        f"largest tree: {printable(largest.name)}, {largest.stats.n_tree:,} tokens; partitioned if above "
        "data.max_tokens",
        highlight=False,
        markup=False,
    )


def _table(sizes: list[TreeSizes], limit: int, hidden: Sequence[str]) -> Table:
    """Returns one row per tree, with all columns except the hidden ones."""
    total = TreeSizes.total(sizes)
    table = Table(box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), show_footer=True)
    table.add_column("tree", footer=total.name, overflow="fold")
    for column, cell in total.cells().items():
        if column not in hidden:
            table.add_column(column, footer=cell, justify="right", no_wrap=True)
    for tree in sizes[:limit]:
        cells = [cell for column, cell in tree.cells().items() if column not in hidden]
        table.add_row(escape(printable(tree.name)), *cells)
    if len(sizes) > limit:
        table.add_row(f"... {len(sizes) - limit:,} more", style="dim")
    return table
