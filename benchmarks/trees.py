"""Token trees with random tokens and a given shape and size, for benchmarks.

| shape      | models                                                                     | tokens  | nodes |
|------------|----------------------------------------------------------------------------|---------|-------|
| chain      | one sample: nothing is shared, so it should cost what a sequence costs     | 32,768  | 1     |
| group      | 16 answers to one prompt; the prompt has a quarter of the tokens           | 32,768  | 17    |
| agent      | rollouts of 12 turns of about 400 tokens; they branch off earlier rollouts | 32,727  | 76    |
| agent-fine | the same with 24 turns of about 40 tokens                                  | 32,208  | 764   |
| agent-long | the same with 24 turns of about 500 tokens and a prompt of 6,000           | 135,719 | 278   |
| bushy      | the same with 16 turns of about 40 tokens and a tiny prompt                | 29,497  | 795   |

``long_rollouts`` generates trees that are larger than memory. ``sweep`` varies one property at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

VOCABULARY = 151_936  # token ids in random trees: the vocabulary size of Qwen3
# The default number of tokens of each shape; the table above gives the nodes for it.
SHAPES = {
    "chain": 32_768,
    "group": 32_768,
    "agent": 32_727,
    "agent-fine": 32_208,
    "agent-long": 135_719,
    "bushy": 29_497,
}
Nodes = list[tuple[int, int]]  # (parent, length); parents come first, the root's is -1


def random_tree(shape: str, num_tokens: int, vocab_size: int, seed: int = 0) -> TokenTree:
    """Returns a tree of ``num_tokens`` distinct tokens. Every token but the first counts in the loss.

    Every turn of a rollout is a sample, so a path ends at each node. Larger trees have more rollouts. A tree
    that is too small for several rollouts gets shorter turns.
    """
    if shape == "chain":
        nodes: Nodes = [(-1, num_tokens)]
    elif shape == "group":
        nodes = prompt_and_answers(num_tokens, num_tokens // 4)
    elif shape == "agent":
        nodes = rollouts(1 + seed, num_tokens, num_tokens * 3000 // 32_727, turns=12, median=300, late=1.5)
    elif shape == "agent-fine":
        nodes = rollouts(2 + seed, num_tokens, num_tokens * 2000 // 32_208, turns=24, median=28)
    elif shape == "agent-long":
        nodes = rollouts(3 + seed, num_tokens, num_tokens * 6000 // 135_719, turns=24, median=380, late=1.5)
    elif shape == "bushy":
        nodes = rollouts(4 + seed, num_tokens, num_tokens * 64 // 29_497, turns=16, median=28)
    else:
        raise ValueError(f"unknown shape {shape!r}: expected one of {', '.join(SHAPES)}")
    ends = range(len(nodes)) if shape != "group" else range(1, len(nodes))
    return with_tokens(nodes, ends, vocab_size, seed)


def prompt_and_answers(num_tokens: int, prompt: int, answers: int = 16) -> Nodes:
    """Returns one prompt and ``answers`` answers of equal length. The prompt takes the remainder."""
    answer = max(1, (num_tokens - max(1, prompt)) // answers)
    return [(-1, num_tokens - answers * answer), *[(0, answer)] * answers]


def rollouts(seed: int, num_tokens: int, prompt: int, turns: int, median: float, late: float = 1.0) -> Nodes:
    """Returns rollouts of about ``turns`` turns. Each branches off an earlier rollout at a random turn.

    The lengths of turns are log-normal with mean 1.38 ``median``; the last rollout is cut at ``num_tokens``.
    With ``late`` > 1 rollouts branch off later and share more.
    """
    rng = random.Random(seed)
    median = min(median, num_tokens / (4 * turns))
    nodes = [(-1, max(1, prompt))]
    room = num_tokens - nodes[0][1]
    paths: list[list[int]] = []
    while room > 0:
        path, goal = [0], turns + 1
        if paths:
            earlier = rng.choice(paths)
            path = earlier[: 1 + int((len(earlier) - 1) * rng.random() ** (1 / late))]
            goal += rng.randint(-turns // 3, turns // 3)
        while len(path) < goal and room > 0:
            length = min(room, max(1, int(rng.lognormvariate(math.log(median), 0.8))))
            nodes.append((path[-1], length))
            path.append(len(nodes) - 1)
            room -= length
        paths.append(path)
    return nodes


def long_rollouts(num_tokens: int, longest: int, vocab_size: int, seed: int = 0) -> TokenTree:
    """Returns a tree of rollouts of about 40 turns, as many as ``num_tokens`` distinct tokens take.

    The first rollout has ``longest`` tokens, an eighth of them in the prompt; no rollout is longer. A path
    ends at each leaf. A larger tree begins with the rollouts of a smaller one.
    """
    rng = random.Random(seed)
    nodes: Nodes = [(-1, longest // 8)]
    depth = [nodes[0][1]]  # tokens of the path to each node's end
    room = num_tokens - depth[0]
    paths: list[list[int]] = []
    while room > 0:
        path, goal = [0], longest
        if paths:
            earlier = rng.choice(paths)
            path = earlier[: 1 + int((len(earlier) - 1) * rng.random() ** 0.33)]
            goal = int(longest * rng.uniform(0.5, 1.0))
        while depth[path[-1]] < goal and room > 0:
            length = max(1, int(longest / 64 * rng.lognormvariate(0, 0.8)))
            length = min(length, room, goal - depth[path[-1]])
            nodes.append((path[-1], length))
            depth.append(depth[path[-1]] + length)
            path.append(len(nodes) - 1)
            room -= length
        paths.append(path)
    return with_tokens(nodes, leaves(nodes), vocab_size, seed)


def even_nodes(seed: int, num_tokens: int, length: int, branching: float) -> Nodes:
    """Returns nodes of ``length`` tokens. Each branches off 1 or 2 nodes back with probability ``branching``.

    For every length, a token sees about (1 - 1.5 * branching) / 2 of all tokens.
    """
    rng = random.Random(seed)
    nodes: Nodes = []
    path: list[int] = []
    for i in range(num_tokens // length):
        if rng.random() < branching:
            path = path[: max(1, len(path) - rng.randint(1, 2))]
        nodes.append((path[-1] if path else -1, length))
        path.append(i)
    return nodes


def sweep(num_tokens: int, vocab_size: int) -> Iterator[tuple[str, TokenTree]]:
    """Yields named trees of one size: first with growing nodes, then with growing prompts.

    A path ends at each leaf.
    """
    for length in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        nodes = even_nodes(0, num_tokens, length, branching=0.5)
        yield f"nodes of {length}", with_tokens(nodes, leaves(nodes), vocab_size)
    for percent in (1, 3, 7, 15, 30, 60, 90):
        nodes = prompt_and_answers(num_tokens, num_tokens * percent // 100)
        yield f"prompt of {percent}%", with_tokens(nodes, leaves(nodes), vocab_size)


def leaves(nodes: Nodes) -> list[int]:
    """Returns the nodes without children."""
    return sorted(set(range(len(nodes))) - {parent for parent, _ in nodes})


class PathSample(NamedTuple):
    """Some of the paths that flat training computes, to measure them instead of all.

    Attributes:
        lengths: their tokens.
        scale: the work of all paths over theirs.
        note: how many paths there are, for tables.
    """

    lengths: np.ndarray
    scale: float
    note: str


def path_sample(
    tree: TokenTree, max_tokens: int, work: Callable[[np.ndarray], np.ndarray] = lambda length: length
) -> PathSample:
    """Returns a random sample of a tree's paths. Paths that are prefixes of other paths are left out.

    Args:
        tree: the tree.
        max_tokens: the most tokens of the sample, which has at least one path.
        work: the work of paths, from their lengths.
    """
    is_leaf = tree.node_offsets[1:] == tree.node_subtree_end
    lengths = np.diff(tree.path_offsets)[is_leaf[tree.path_node]]
    np.random.default_rng(0).shuffle(lengths)
    sample = lengths[: max(1, int((lengths.cumsum() <= max_tokens).sum()))]
    scale = float(work(lengths).sum() / work(sample).sum())
    note = f"{len(lengths)} paths, {lengths.sum():,} tokens"
    if len(sample) < len(lengths):
        note += f"; timed on {len(sample)} of them, x {scale:.2f}"
    return PathSample(sample, scale, note)


def with_tokens(nodes: Nodes, ends: Sequence[int], vocab_size: int, seed: int = 0) -> TokenTree:
    """Returns the tree of ``nodes`` with random tokens, whose paths end at the nodes ``ends``."""
    prefixes = node_prefixes(nodes, vocab_size, seed)
    return TokenTree.from_paths([TokenPath(prefixes[i]) for i in ends])


def random_paths(nodes: Nodes, vocab_size: int, seed: int = 0) -> list[TokenPath]:
    """Returns one path per leaf of ``nodes``, with random tokens. Every token counts in the loss."""
    prefixes = node_prefixes(nodes, vocab_size, seed)
    return [TokenPath(prefixes[i]) for i in leaves(nodes)]


def node_prefixes(nodes: Nodes, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Returns random tokens from the root to the end of each node.

    Node i starts with token i modulo ``vocab_size``, so that siblings differ.
    """
    rng = np.random.default_rng(seed)
    prefixes: list[np.ndarray] = []
    for i, (parent, length) in enumerate(nodes):
        tokens = rng.integers(vocab_size, size=length, dtype=np.int32)
        tokens[0] = i % vocab_size
        prefixes.append(tokens if parent < 0 else np.concatenate([prefixes[parent], tokens]))
    return prefixes
