"""Token trees of given shape and size with random tokens, for timings.

| shape      | stands for                                                                       |
|------------|----------------------------------------------------------------------------------|
| chain      | one sample: nothing is shared, and a tree must cost what a sequence costs        |
| group      | 16 answers to one prompt that is as long as 5 of them                            |
| agent      | rollouts whose turns drop earlier thoughts, nodes of about 400 tokens            |
| agent-fine | the same with nodes of about 40 tokens                                           |
"""

from __future__ import annotations

import numpy as np

from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree

SHAPES = ("chain", "group", "agent", "agent-fine")


def random_tree(shape: str, num_tokens: int, vocab_size: int, seed: int = 0) -> TokenTree:
    """A tree of ``num_tokens`` distinct tokens, or a few less where random siblings begin alike.

    Every token but the first counts in the loss.
    """
    random = np.random.default_rng(seed)
    if shape == "chain":
        lengths = [num_tokens]
        paths = [[0]]
    elif shape == "group":
        answer = max(1, num_tokens // 21)
        lengths = [num_tokens - 16 * answer] + [answer] * 16
        paths = [[0, 1 + i] for i in range(16)]
    elif shape == "agent":
        lengths, paths = _rollouts(random, num_tokens, num_turns=12, node=400)
    elif shape == "agent-fine":
        lengths, paths = _rollouts(random, num_tokens, num_turns=24, node=40)
    else:
        raise ValueError(f"unknown shape {shape!r}: expected one of {', '.join(SHAPES)}")
    nodes = [random.integers(vocab_size, size=n) for n in lengths]
    return TokenTree.from_paths([TokenPath(np.concatenate([nodes[n] for n in path])) for path in paths])


def _rollouts(
    random: np.random.Generator, num_tokens: int, num_turns: int, node: int
) -> tuple[list[int], list[list[int]]]:
    """Node lengths, and paths as lists of nodes.

    A rollout is a prompt and ``num_turns`` turns, and every turn is a sample: the context so far and the
    model's thought, which later turns no longer see. Each rollout leaves one before it at some turn. Lengths
    are log-normal around ``node`` (less in a tree too small for several rollouts); the last one is cut.
    """
    lengths, room = [num_tokens // 12], num_tokens - num_tokens // 12
    median = 0.73 * min(node, num_tokens / (4 * num_turns))  # of a mean of 1 at sigma 0.8
    paths: list[list[int]] = []
    contexts: list[list[int]] = []

    def new_node() -> int:
        nonlocal room
        lengths.append(min(room, 1 + int(random.lognormal(np.log(median), 0.8))))
        room -= lengths[-1]
        return len(lengths) - 1

    while room > 0:
        earlier = contexts[random.integers(len(contexts))] if contexts else [0]
        context = earlier[: random.integers(len(earlier)) + 1]
        while len(context) <= num_turns and room > 0:
            context = [*context, new_node()]
            paths.append([*context, new_node()] if room > 0 else context)
        contexts.append(context)
    return lengths, paths
