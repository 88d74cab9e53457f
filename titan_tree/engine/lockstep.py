"""Lockstep: one schedule of forwards and backwards for ranks that must not differ in it.

Ranks that share out experts exchange tokens in every forward and every backward, so all of them run the same
sequence. What fixes the sequence is the shape of the tree of partitions of each micro-batch. So the ranks lay
their trees over one another, root on root, of every partition's children the one with the largest subtree
first, and each runs the union: its own partitions where it has some, elsewhere dummies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Place = tuple[int, ...]  # in a tree: which child of its parent, after that one's place


def in_lockstep(
    micro_batches: Sequence[Sequence[TreeBatch]], least: int, group: dist.ProcessGroup
) -> list[list[TreeBatch]]:
    """This rank's micro-batches, ``least`` at least, and their partitions, filled up with dummies so that all
    ranks of ``group`` have trees of the same shape. Collective, host to host."""
    own = [dict(zip(places(batches), batches, strict=True)) for batches in micro_batches]
    every: list[list[list[Place]]] = [[]] * group.size()
    dist.all_gather_object(every, [list(tree) for tree in own], group=group)
    schedule = []
    for i in range(max(least, *map(len, every))):
        of_ranks = [trees[i] for trees in every if i < len(trees)]
        union = sorted({(0,), *(place for tree in of_ranks for place in tree)})  # parents first, depth first
        number = {place: n for n, place in enumerate(union)}
        mine = own[i] if i < len(own) else {}
        schedule.append(
            [
                dataclasses.replace(mine.get(place) or dummy(), parent=number.get(place[:-1], -1))
                for place in union
            ]
        )
    return schedule


def places(batches: Sequence[TreeBatch]) -> list[Place]:
    """Where each batch of a plan hangs, siblings with larger subtrees first, in forwards."""
    size = [1] * len(batches)
    for i in range(len(batches) - 1, -1, -1):  # parents stand before their children
        if (parent := batches[i].parent) >= 0:
            size[parent] += size[i]
    children: dict[int, list[int]] = {}
    for i, batch in enumerate(batches):
        children.setdefault(batch.parent, []).append(i)
    rank: dict[int, int] = {}
    for siblings in children.values():
        siblings.sort(key=lambda i: -size[i])
        rank |= {i: n for n, i in enumerate(siblings)}
    found: list[Place] = []
    for i, batch in enumerate(batches):
        above = found[batch.parent] if batch.parent >= 0 else ()
        found.append((*above, rank[i]))
    return found


def dummy() -> TreeBatch:
    """One edge of no path, and no partition of anything: its loss is 0, and nothing hangs from it."""
    tree = TokenTree.from_paths([TokenPath(np.zeros(2, np.int32))])
    batch = TreeBatch.from_trees([tree])
    layout = dataclasses.replace(batch.layout, num_paths=torch.zeros(len(batch)))
    return dataclasses.replace(batch, n_logical=0, layout=layout)
