r"""Equal schedules for ranks that communicate inside forward and backward passes.

Ranks may communicate only in passes that all of them run, so a rank with fewer passes runs dummy batches.
Without partitions, equally many micro-batches are enough.

*Lockstep* also makes partitions equal. Expert-parallel ranks exchange tokens in every pass. The
sequence follows from the shape of each micro-batch's tree of partitions. The ranks therefore overlay their
trees of partitions: root on root, and children in order of decreasing subtree size. Each rank runs the union
of these trees. Where it has no partition of its own, it runs a dummy batch.

    rank 0     rank 1     both run
      a          c        (a, c)
     / \          \        /    \
    b   b'         d     (b, d)  (b', dummy)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from titan_tree.tree.batch import ALL_TOKENS, TokenShard, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Lineage = tuple[int, ...]  # of a partition: the child indices on the way from the root to it


def equal_schedule(
    micro_batches: Sequence[Sequence[TreeBatch]],
    lockstep: dist.ProcessGroup | None,
    *,
    min_micro_batches: int = 0,
    token_shard: TokenShard = ALL_TOKENS,
) -> list[list[TreeBatch]]:
    """Returns this rank's micro-batches with the dummy batches that other ranks' communication needs.

    Args:
        micro_batches: the micro-batches of this rank, each with its partitions in the plan's order.
        lockstep: the ranks that run trees of partitions of the same shape. They exchange shapes on the host,
            without the device. None: partitions stay as they are.
        min_micro_batches: the minimum number to return; more if a rank in lockstep has more.
        token_shard: the tokens of each forward pass that this rank computes.
    Returns:
        Micro-batches of dummies come last. In lockstep, partitions are in depth-first order, parents first,
        with ``TreeBatch.parent`` updated.
    """
    if lockstep is None:
        num_missing = min_micro_batches - len(micro_batches)
        return [*map(list, micro_batches), *([dummy_batch(token_shard)] for _ in range(num_missing))]
    batches_by_lineage = [dict(zip(lineages(batches), batches, strict=True)) for batches in micro_batches]
    shapes_by_rank: list[list[list[Lineage]]] = [[]] * lockstep.size()
    dist.all_gather_object(shapes_by_rank, [list(tree) for tree in batches_by_lineage], group=lockstep)
    schedule = []
    for i in range(max(min_micro_batches, *map(len, shapes_by_rank))):
        shapes = [trees[i] for trees in shapes_by_rank if i < len(trees)]
        # Parents come before their children.
        union = sorted({(0,), *(lineage for shape in shapes for lineage in shape)})
        number = {lineage: n for n, lineage in enumerate(union)}
        batch_at = batches_by_lineage[i] if i < len(batches_by_lineage) else {}
        schedule.append(
            [
                dataclasses.replace(
                    batch_at[lineage] if lineage in batch_at else dummy_batch(token_shard),
                    parent=number.get(lineage[:-1], -1),
                )
                for lineage in union
            ]
        )
    return schedule


def lineages(batches: Sequence[TreeBatch]) -> list[Lineage]:
    """Returns each partition's lineage; siblings are ordered by the number of partitions below them."""
    size = [1] * len(batches)
    for i in range(len(batches) - 1, -1, -1):  # parents come before their children
        if (parent := batches[i].parent) >= 0:
            size[parent] += size[i]
    children: dict[int, list[int]] = {}
    for i, batch in enumerate(batches):
        children.setdefault(batch.parent, []).append(i)
    child_index: dict[int, int] = {}
    for siblings in children.values():
        siblings.sort(key=lambda i: -size[i])
        child_index |= {i: n for n, i in enumerate(siblings)}
    result: list[Lineage] = []
    for i, batch in enumerate(batches):
        parent_lineage = result[batch.parent] if batch.parent >= 0 else ()
        result.append((*parent_lineage, child_index[i]))
    return result


def dummy_batch(token_shard: TokenShard = ALL_TOKENS) -> TreeBatch:
    """Returns a rank's shard of a batch of two tokens per rank. None of its edges counts for a path.

    Its loss is 0, and it reads no gateway.
    """
    tree = TokenTree.from_paths([TokenPath(np.zeros(2 * token_shard.num_ranks, np.int32))])
    batch = TreeBatch.from_trees([tree])
    layout = dataclasses.replace(batch.layout, num_paths=torch.zeros(len(batch)))
    return token_shard.of(dataclasses.replace(batch, n_logical=0, is_dummy=True, layout=layout))
