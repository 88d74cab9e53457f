"""Merge report: where the paths of a token tree diverge, and why.

Two samples diverge for one of six reasons:

- One of them ends.
- Their texts differ.
- Their images differ. Images are equal if all their pixels are.
- The chat template dropped a thought: one sample has the reasoning of a turn, and the other one continues
  without it. Qwen3's template does so once the user speaks again.
- The chat template added an empty think block: as above, but the thought has no text. Qwen3's template
  writes such a block for the last turn only.
- The same text became other tokens. This is called retokenization. It happens when text is decoded and
  encoded again, or when a prompt is cut inside a word. It reduces sharing without need, so it is worth
  fixing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from rich.cells import cell_len
from rich.text import Text
from rich.tree import Tree

from titan_tree.data.show import text_with_images
from titan_tree.errors import count, printable
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Decode = Callable[[list[int]], str]
ENDS = "path ends here"
RETOKENIZED = "same text, other tokens"
DROPPED_THOUGHT = "the template dropped a thought"
EMPTY_BLOCK = "the template added an empty think block"
OTHER_TEXT = "other text"
OTHER_IMAGE = "another image"
OTHER_TOKENS = "other tokens"  # the reason if the text is unknown
CONTEXT = 24  # tokens that are compared and shown around a branch point
SHOWN = 50  # of these, at most so many characters are shown
LEAST_SHOWN = 8  # and at least so many, in a narrow terminal
THOUGHT_BEGINS = re.compile(r"\s*<think>")
OPEN_THOUGHT = re.compile(r"<think>\s*$")
# Without <think>, as in the history of DeepSeek-V3.1, there is no thought.
THOUGHT = re.compile(r"\s*(?:<think>(.*?))?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Child:
    """One continuation after a branch point."""

    node: int
    token: int  # id of its first token
    text: str  # its beginning, along its heaviest path
    n_paths: int
    n_tokens: int  # distinct tokens in its subtree
    reason: str  # why it diverges from its heavier siblings; "" for the heaviest child


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A point where paths of a tree diverge after ``depth`` shared tokens."""

    node: int  # the node that ends here, or -1 if the paths do not share their first token
    depth: int  # tokens that the paths share before this point
    n_paths: int
    n_ending: int  # paths that end here while others continue
    before: str  # the end of the shared text
    children: tuple[Child, ...]  # heaviest first

    @property
    def reasons(self) -> list[str]:
        """Returns why paths diverge here, each reason once."""
        reasons = [ENDS] if self.n_ending else []
        return reasons + sorted({child.reason for child in self.children if child.reason})


def branch_points(tree: TokenTree, decode: Decode | None = None) -> list[BranchPoint]:
    """Returns the branch points of a tree in depth-first order.

    Args:
        tree: the tree to report on.
        decode: token ids -> text. Without it, ids are shown as text, and retokenization and what the
            template did to thoughts are not found.
    """
    return list(_branch_points(tree, decode))


def _branch_points(tree: TokenTree, decode: Decode | None) -> Iterator[BranchPoint]:
    ending = np.bincount(tree.path_node, minlength=len(tree.node_parent))
    text = text_with_images(tree, decode or _ids)
    children: list[list[int]] = [[] for _ in range(len(tree.node_parent) + 1)]  # [-1]: the roots
    for node, parent in enumerate(tree.node_parent.tolist()):
        children[parent].append(node)
    for node in range(-1, len(tree.node_parent)):
        nodes = children[node]
        is_branch = len(nodes) > 1 or (len(nodes) == 1 and node >= 0 and ending[node] > 0)
        if not is_branch:
            continue
        before = _tokens_before(tree, int(tree.node_offsets[node + 1]) if node >= 0 else 0)
        yield BranchPoint(
            node=node,
            depth=int(tree.node_depth[node] + tree.node_length[node]) if node >= 0 else 0,
            n_paths=int(tree.node_paths[node]) if node >= 0 else len(tree.paths),
            n_ending=int(ending[node]) if node >= 0 else 0,
            before=text(before),
            children=tuple(_children(tree, nodes, before, decode, text)),
        )


def _children(
    tree: TokenTree,
    nodes: list[int],
    before: np.ndarray,
    decode: Decode | None,
    text: Callable[[slice | np.ndarray], str],
) -> Iterator[Child]:
    """Yields the children at a branch point, heaviest first, which is their order in the tree."""
    siblings: list[tuple[int, list[int]]] = []  # heavier siblings: node, and how it begins
    for node in nodes:
        start, end = int(tree.node_offsets[node]), int(tree.node_subtree_end[node])
        shown = slice(start, start + min(CONTEXT, _heavy_length(tree, node)))
        ahead = tree.tokens[shown].tolist()
        if not siblings:
            reason = ""
        elif tree.image_row is not None and tree.image_row[start] >= 0:
            reason = OTHER_IMAGE
        elif decode is None:
            reason = OTHER_TOKENS
        elif any(_same_text(ahead, tokens, decode) for _, tokens in siblings):
            reason = RETOKENIZED
        else:
            pairs = [(node, other) for other, _ in siblings]
            shared = tree.tokens[before].tolist()
            thoughts = set[str]().union(*(_thoughts_left_out(tree, pair, shared, decode) for pair in pairs))
            reason = DROPPED_THOUGHT if any(thoughts) else EMPTY_BLOCK if thoughts else OTHER_TEXT
        siblings.append((node, ahead))
        yield Child(node, ahead[0], text(shown), int(tree.node_paths[node]), end - start, reason)


def _heavy_length(tree: TokenTree, node: int) -> int:
    """Counts the tokens from ``node`` on along first children, which are contiguous in the tree."""
    first = node
    while node + 1 < len(tree.node_parent) and tree.node_parent[node + 1] == node:
        node += 1
    return int(tree.node_offsets[node + 1] - tree.node_offsets[first])


def _tokens_before(tree: TokenTree, end: int) -> np.ndarray:
    """Returns the indices of the last tokens of the path that ends before index ``end`` of the tree."""
    before: list[int] = []
    token = end - 1
    while token >= 0 and len(before) < CONTEXT:
        before.append(token)
        token = int(tree.predecessor[token])
    return np.array(before[::-1], int)


def _same_text(a: list[int], b: list[int], decode: Decode) -> bool:
    """Returns whether two continuations begin with the same text.

    They must agree on at least as many characters as the longer of their first tokens has.
    """
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(decode(a), decode(b), strict=False))
    shared = sum(1 for _ in equal)
    return shared >= max(len(decode(a[:1])), len(decode(b[:1])), 1)


def _thoughts_left_out(
    tree: TokenTree, siblings: tuple[int, int], before: list[int], decode: Decode
) -> set[str]:
    """Returns the thoughts of turns that paths through the other sibling repeat without the thought.

    The thought of an empty think block is "".

    Args:
        siblings: two nodes with the same parent.
        before: the last tokens that they share.
    """
    open_thought = OPEN_THOUGHT.search(decode(before))
    shared = open_thought[0] if open_thought else ""

    def begins_with_thought(node: int) -> bool:
        start = int(tree.node_offsets[node])
        return (
            THOUGHT_BEGINS.match(shared + decode(tree.tokens[start : start + CONTEXT].tolist())) is not None
        )

    return {
        thought
        for node, other in (siblings, siblings[::-1])
        if begins_with_thought(node)
        for thought in _repeated_without(tree, node, other, shared, decode)
    }


def _repeated_without(tree: TokenTree, node: int, other: int, shared: str, decode: Decode) -> set[str]:
    """Returns the thoughts of paths through ``node`` whose rest is how some path through ``other`` begins.

    The turn must be history in all paths through ``other``: if the loss counts it, the model wrote it without
    a thought, and the texts differ for that reason.
    """
    depth = int(tree.node_depth[node])
    history = _paths_through(tree, other)
    if any(path.loss_mask[depth] for path in history):
        return set()
    turns = set()  # thought, and text from its end to the next thought, which may be left out as well
    for path in _paths_through(tree, node):
        thought, rest = _split_thought(shared + decode(path.tokens[depth:].tolist()))
        turn = rest.partition("<think>")[0]
        if thought is not None and turn.strip():
            turns.add((thought, turn))
    longest = max((len(turn.encode()) for _, turn in turns), default=0)
    ahead = slice(depth, depth + longest + CONTEXT)  # enough tokens, because each has a byte or more
    repeated = set()
    for path in history:
        shown, rest = _split_thought(shared + decode(path.tokens[ahead].tolist()))
        if not shown:
            repeated |= {thought for thought, turn in turns if rest.startswith(turn)}
    return repeated


def _split_thought(text: str) -> tuple[str | None, str]:
    """Returns the thought at the beginning of a text, or None if there is none, and the text after it."""
    thought = THOUGHT.match(text)
    return ((thought[1] or "").strip(), text[thought.end() :]) if thought else (None, text.lstrip())


def _paths_through(tree: TokenTree, node: int) -> list[TokenPath]:
    depth = tree.node_depth[node]
    longer = np.flatnonzero(np.diff(tree.path_offsets) > depth)
    tokens = tree.path_index[tree.path_offsets[longer] + depth]
    return [tree.paths[p] for p in longer[tokens == tree.node_offsets[node]]]


def _ids(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def render_report(tree: TokenTree, decode: Decode | None = None, width: int = 160) -> Text:
    """Renders the branch points of a tree: the text before each, its children, and why they diverge.

    Args:
        tree: the tree to report on.
        decode: see ``branch_points``.
        width: columns of the terminal. Quoted texts are shortened until the lines fit.
    """
    points = branch_points(tree, decode)
    tally = Counter(reason for point in points for reason in point.reasons)
    out = Text(f"{count(len(tree.paths), 'path')}, {count(len(points), 'branch point')}\n")
    for reason, number in tally.most_common():
        out.append(f"{number:8,} x {reason}\n")
    for point in points:
        heading = f"{count(point.depth, 'token')} deep, {count(point.n_paths, 'path')}  "
        out.append(f"\n{heading}", style="bold")
        out.append(f"{_quoted(point.before, last=True, room=width - len(heading))}\n", style="dim")
        if point.n_ending:
            out.append(f"{count(point.n_ending, 'path'):>11} ending here\n", style="yellow")
        for child in point.children:
            size = f"{count(child.n_paths, 'path'):>11}, {count(child.n_tokens, 'token'):>13}  "
            ids = f"  token {child.token}" if RETOKENIZED in point.reasons else ""
            reason = f"  {child.reason}" if child.reason else ""
            room = width - len(size) - len(ids) - len(reason)
            out.append(size).append(_quoted(child.text, room=room), style="cyan").append(ids, style="dim")
            style = "bold red" if child.reason == RETOKENIZED else "yellow"
            out.append(f"{reason}\n", style=style)
    return out


def render_picture(tree: TokenTree, decode: Decode | None = None) -> Tree:
    """Renders the nodes of a tree as an indented drawing, with their sizes and how their texts begin."""
    ending = np.bincount(tree.path_node, minlength=len(tree.node_parent)).tolist()
    picture = Tree(f"{count(len(tree), 'token')}, {count(len(tree.paths), 'path')}")
    drawn: list[Tree] = []
    text = text_with_images(tree, decode or _ids)
    for node, parent in enumerate(tree.node_parent.tolist()):
        start, end = tree.node_offsets[node : node + 2].tolist()
        label = Text(f"{count(end - start, 'token')}, {count(int(tree.node_paths[node]), 'path')}  ")
        label.append(_quoted(text(slice(start, min(start + CONTEXT, end)))), style="cyan")
        if ending[node]:
            label.append(f"  {count(ending[node], 'path')} ending here", style="yellow")
        drawn.append((drawn[parent] if parent >= 0 else picture).add(label))
    return picture


def _quoted(text: str, last: bool = False, room: int = SHOWN + 2) -> str:
    """Quotes the first or last SHOWN characters of a text on one line, or fewer if the room is small.

    Args:
        room: columns of the quoted text. At least LEAST_SHOWN characters are quoted nevertheless.
    """
    shown = min(len(text), SHOWN)
    while True:
        quoted = printable(
            json.dumps(text[len(text) - shown :] if last else text[:shown], ensure_ascii=False)
        )
        if cell_len(quoted) <= room or shown <= LEAST_SHOWN:
            return quoted
        shown -= 1
