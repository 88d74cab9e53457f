"""Token trees of given shape and size with random tokens, for timings.

| shape      | stands for                                                                  | tokens  | nodes |
|------------|-----------------------------------------------------------------------------|---------|-------|
| chain      | one sample: nothing is shared, and a tree must cost what a sequence costs   | 32,768  | 1     |
| group      | 16 answers to one prompt, a quarter of the tokens                           | 32,768  | 17    |
| agent      | rollouts of 12 turns of about 400 tokens that leave earlier ones at a turn  | 32,727  | 76    |
| agent-fine | 24 turns of about 40 tokens                                                 | 32,208  | 764   |
| agent-long | 24 turns of about 500 tokens, a prompt of 6,000                             | 135,719 | 278   |
| bushy      | 16 turns of about 40 tokens, hardly a prompt: few pairs are visible         | 29,497  | 795   |

``long_rollouts`` makes trees larger than memory: as many rollouts as it takes, up to a given length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import numpy as np

from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# Of each shape the number of tokens for which the table above holds.
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
    """A tree of ``num_tokens`` distinct tokens. Every token but the first counts in the loss.

    Rollouts have a sample per turn: a path ends at each node. Larger trees have more of them; in trees too
    small for several, turns are shorter.
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
    """A prompt of ``prompt`` tokens, or a few more, and answers of equal lengths."""
    answer = max(1, (num_tokens - max(1, prompt)) // answers)
    return [(-1, num_tokens - answers * answer), *[(0, answer)] * answers]


def rollouts(seed: int, num_tokens: int, prompt: int, turns: int, median: float, late: float = 1.0) -> Nodes:
    """Rollouts of about ``turns`` turns, each leaving an earlier one at a random turn; the last is cut.

    Turns are log-normal, of mean 1.38 ``median``. ``late`` > 1: rollouts leave late and so share more.
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
    """Rollouts of about 40 turns. The first has ``longest`` tokens, an eighth of them prompt; none has more.

    Each leaf ends a path. The first rollouts of a larger tree are those of a smaller one.
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
    """Nodes of ``length`` tokens; each branches off 1 or 2 nodes back with probability ``branching``.

    Whatever the length, a token sees about (1 - 1.5 * branching) / 2 of all tokens.
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
    """Named trees of one size: ever longer nodes, and ever larger prompts. Every leaf ends a path."""
    for length in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        nodes = even_nodes(0, num_tokens, length, branching=0.5)
        yield f"nodes of {length}", with_tokens(nodes, leaves(nodes), vocab_size)
    for percent in (1, 3, 7, 15, 30, 60, 90):
        nodes = prompt_and_answers(num_tokens, num_tokens * percent // 100)
        yield f"prompt of {percent}%", with_tokens(nodes, leaves(nodes), vocab_size)


def leaves(nodes: Nodes) -> list[int]:
    return sorted(set(range(len(nodes))) - {parent for parent, _ in nodes})


def with_tokens(nodes: Nodes, ends: Sequence[int], vocab_size: int, seed: int = 0) -> TokenTree:
    """The tree of ``nodes`` with random tokens and paths that end at the nodes ``ends``.

    Node i starts with token i, so that siblings differ, as far as the vocabulary allows.
    """
    rng = np.random.default_rng(seed)
    prefixes: list[np.ndarray] = []  # tokens from the root to the end of each node
    for i, (parent, length) in enumerate(nodes):
        tokens = rng.integers(vocab_size, size=length, dtype=np.int32)
        tokens[0] = i % vocab_size
        prefixes.append(tokens if parent < 0 else np.concatenate([prefixes[parent], tokens]))
    return TokenTree.from_paths([TokenPath(prefixes[i]) for i in ends])
