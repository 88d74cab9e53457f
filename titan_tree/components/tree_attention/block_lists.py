"""Block lists of a batch: which blocks of queries and keys meet, for the kernels of "triton" and "hopper".

Key k is visible to query q iff ``k <= c < end[k]`` with ``c = key_index[q]`` and ``end``, the exclusive end
of the key's subtree in DFS order. This costs one int32 per key. Two facts make it cheap for blocks as well:

- The queries that see at least one key of a block form one contiguous range. Within it, the queries that see
  all keys of the block also form one range. So a pass that keeps a block of keys needs four integers per
  block.
- A pass that keeps a block of queries reads a list of the key blocks that the queries see.

A sliding window counts tokens of a path, so the queries that see a key are no range any more. A layer with a
window has lists of its own for both passes (``WindowLists``).

They are made by tensor operations on the layout's device. The host never waits for the device, since all
shapes depend on N and M alone. The largest tensor lists key groups: N * M / 4096 int32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

# Granularity. A kernel's own tiles may be smaller, if they divide these.
QUERIES = 128  # queries per query block: there is one list per query block
KEYS = 128  # keys per key block: the unit of ranges and of the list of key blocks
KEY_GROUP = 32  # keys per key group: the unit of the finer list
TILE = 64  # queries per tile: the unit of jobs
DECODING_ROWS = 16  # queries per query block of ``DecodingLists``

# A key block's range of queries is cut into jobs. A job has at most 1 / JOBS of the tiles of all ranges.
# Otherwise the multiprocessors that get the trunk, which all queries see, would finish last. With 8 key
# heads, a job is at most 1/8 of the average work of one of 132 multiprocessors. Jobs of fewer than
# SHORTEST_JOB tiles would save less time than the sum over their parts costs.
JOBS = 128
SHORTEST_JOB = 8


class BlockLists(NamedTuple):
    """Int32 tensors. nq = ceil(N / QUERIES), nk = ceil(M / KEYS), ng = ceil(M / KEY_GROUP), nj = nk + JOBS.

    They are not stacked into one tensor: torch.compile takes sizes that are equal by chance for the same
    size. If nq or nk equaled the constant number of tensors in one batch, the graph would be recompiled for
    batches in which they differ.
    """

    # Key blocks and, finer, key groups that each query block sees.
    key_blocks: Tensor  # [nq, nk]: partly visible, then fully visible, then unused
    n_partial: Tensor  # [nq]: how many are partly visible
    n_visible: Tensor  # [nq]: how many are visible
    # [nq, ng + 3]: on the diagonal, partly visible, 0 to 3 padding groups past M, fully visible, unused
    key_groups: Tensor
    n_diagonal: Tensor  # [nq]: how many groups reach the block's first query or lie past it: at least one
    n_masked: Tensor  # [nq]: how many groups are not fully visible
    n_key_groups: Tensor  # [nq]: how many groups to read: a multiple of 4
    query_order: Tensor  # [nq]: query blocks, most work first
    # The range of queries that sees each key block.
    first: Tensor  # [nk]: queries first .. last - 1 see some key of the block
    first_full: Tensor  # [nk]: queries first_full .. end_full - 1 see all keys of the block
    end_full: Tensor  # [nk]
    last: Tensor  # [nk]
    range_order: Tensor  # [nk]: key blocks, most work first
    # Ranges cut into jobs. Tile i is queries i * TILE .. (i + 1) * TILE - 1.
    job_stop: Tensor  # [nk]: number of jobs of the key blocks range_order[:i + 1]
    job_block: Tensor  # [nj]: the key block of each job, in ascending order
    job_begin: Tensor  # [nj]: the job's tiles are job_begin .. job_end - 1; -1 past the last job
    job_end: Tensor  # [nj]
    job_part: Tensor  # [nj]: place of its sums among the parts of all cut ranges; -1 for an uncut range
    job_order: Tensor  # [nj]: jobs, most work first


class WindowLists(NamedTuple):
    """Int32 tensors for layers with a sliding window. Backend "triton" reads them. nq, nk: ``BlockLists``.

    The lists leave out blocks whose deepest key is above the windows of all queries of the other block.
    """

    key_blocks: Tensor  # [nq, nk]: key blocks that each query block sees, ordered as in ``BlockLists``
    n_partial: Tensor  # [nq]: how many are partly visible
    n_visible: Tensor  # [nq]: how many are visible
    query_order: Tensor  # [nq]: query blocks, most work first
    query_blocks: Tensor  # [nk, nq]: query blocks that see each key block, ordered likewise
    n_partial_queries: Tensor  # [nk]
    n_visible_queries: Tensor  # [nk]
    key_order: Tensor  # [nk]: key blocks, most work first
    depth: Tensor  # [M]: the number of keys before each key on its path
    window_start: Tensor  # [N]: the depth of the first key in each query's window


class DecodingLists(NamedTuple):
    """Int32 tensors for N queries, each the newest token of its path. nq = ceil(N / DECODING_ROWS).

    Attributes: see ``BlockLists``.
    """

    key_blocks: Tensor
    n_partial: Tensor
    n_visible: Tensor
    query_order: Tensor  # [nq]: query blocks, most work first


def lists_of(tensors: Sequence[Tensor]) -> BlockLists | WindowLists:
    """Returns the block lists that consist of these tensors."""
    return BlockLists(*tensors) if len(tensors) == len(BlockLists._fields) else WindowLists(*tensors)


def table_bytes(queries: int, keys: int) -> int:
    """Returns the bytes of the two largest block lists, ``key_blocks`` and ``key_groups``."""
    return 4 * math.ceil(queries / QUERIES) * (math.ceil(keys / KEYS) + math.ceil(keys / KEY_GROUP) + 3)


def prepare(layout: TreeLayout, window: int | None = None) -> BlockLists | WindowLists:
    """Returns the block lists of a layout, on its device. All layers with one window share them.

    Args:
        window: tokens of a path that a query sees, see ``Scoring``; None: all.

    Raises:
        UserError: the layout is empty or not int32.
    """
    end, column = layout.subtree_end, layout.key_index
    if not end.dtype == column.dtype == torch.int32 or not len(column):
        raise UserError(
            "TreeAttention: expected a layout of int32 tensors with at least one query, "
            f"got {end.dtype}, {column.dtype}, {len(column)} queries"
        )
    if window is not None:
        return _window_lists(layout, window)
    query_bounds = _block_bounds(column, QUERIES, pad=column[-1:])
    lists = _key_blocks(end, *query_bounds) | _key_groups(end, *query_bounds) | _ranges_and_jobs(end, column)
    return BlockLists(**{name: x.int() for name, x in lists.items()})


def decoding_lists(end: Tensor, first: Tensor, last: Tensor) -> DecodingLists:
    """Returns the block lists of queries that move along their paths, from columns ``first`` to ``last``.

    Args:
        end: [M] int32, ``TreeLayout.subtree_end``; 0 for a key that no query sees.
        first, last: [N] int32, ascending, the first and the last key column of each query.
    """
    lowest, _ = _block_bounds(first, DECODING_ROWS, pad=first[-1:])
    _, highest = _block_bounds(last, DECODING_ROWS, pad=last[-1:])
    lists = _key_blocks(end, lowest, highest)
    lists["query_order"] = lists["n_visible"].argsort(stable=True, descending=True)
    return DecodingLists(**{name: x.int() for name, x in lists.items()})


def max_parts(n: int, m: int) -> int:
    """Returns an upper bound on the number of parts of cut ranges, for N = n queries and M = m keys.

    A part has at least half as many tiles as the largest job may have. That is at least 1 / (2 * JOBS) of the
    tiles of all ranges, and at least SHORTEST_JOB / 2 tiles.
    """
    tiles, blocks = -(-n // TILE), -(-m // KEYS)
    return min(2 * JOBS, 2 * blocks * tiles // SHORTEST_JOB) if tiles > SHORTEST_JOB else 0


def empty_lse(q: Tensor) -> Tensor:
    """Returns an uninitialized lse [H, N rounded up to QUERIES] fp32 for q [N, H, D].

    Kernels fill it with the log2 of the sum of exp2 of each row's scores, and with +inf past row N.
    """
    return q.new_empty(q.shape[1], -(-q.shape[0] // QUERIES) * QUERIES, dtype=torch.float32)


def _window_lists(layout: TreeLayout, window: int) -> WindowLists:
    end, column = layout.subtree_end, layout.key_index
    depth = layout.key_depths()
    start = depth[column] - (window - 1)
    seen, full, _ = _visibility(end, KEYS, *_block_bounds(column, QUERIES, pad=column[-1:]))
    shallowest, deepest = _block_bounds(depth, KEYS, pad=depth[-1:])
    first_start, last_start = _block_bounds(start, QUERIES, pad=start[-1:])
    seen &= deepest >= first_start[:, None]
    full &= shallowest >= last_start[:, None]
    key_blocks, n_partial, n_visible = _lists(seen, full)
    query_blocks, n_partial_queries, n_visible_queries = _lists(seen.T.contiguous(), full.T.contiguous())
    return WindowLists(
        key_blocks=key_blocks.int(),
        n_partial=n_partial.int(),
        n_visible=n_visible.int(),
        query_order=n_visible.argsort(stable=True, descending=True).int(),
        query_blocks=query_blocks.int(),
        n_partial_queries=n_partial_queries.int(),
        n_visible_queries=n_visible_queries.int(),
        key_order=n_visible_queries.argsort(stable=True, descending=True).int(),
        depth=depth.int(),
        window_start=start.int(),
    )


def _lists(seen: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    """Returns the blocks of each row, how many are partly visible and how many are visible.

    Args:
        seen: [rows, blocks] bool: which blocks are visible.
        full: likewise, which of these are fully visible.
    """
    kind = _bytes_like(seen, 2).masked_fill_(seen, 0).masked_fill_(full, 1)
    n_visible = seen.sum(1)
    return kind.argsort(dim=1, stable=True), n_visible - full.sum(1), n_visible


def _key_blocks(end: Tensor, first: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Returns the lists of key blocks. The queries of block i have key columns first[i] .. last[i]."""
    seen, full, _ = _visibility(end, KEYS, first, last)
    return dict(zip(("key_blocks", "n_partial", "n_visible"), _lists(seen, full), strict=True))


def _key_groups(end: Tensor, first: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Returns the lists of key groups, and query_order. ``first``, ``last``: see ``_key_blocks``."""
    seen, full, diagonal = _visibility(end, KEY_GROUP, first, last)
    n_seen = seen.sum(1)
    padding = -n_seen % 4
    kind = _bytes_like(seen, 4).masked_fill_(seen, 1).masked_fill_(diagonal, 0).masked_fill_(full, 3)
    is_padding = torch.arange(3, device=end.device) < padding[:, None]
    kind = torch.cat([kind, _bytes_like(is_padding, 4).masked_fill_(is_padding, 2)], dim=1)
    n_key_groups = n_seen + padding
    return {
        "key_groups": kind.argsort(dim=1, stable=True),
        "n_diagonal": diagonal.sum(1),
        "n_masked": n_key_groups - full.sum(1),
        "n_key_groups": n_key_groups,
        "query_order": n_key_groups.argsort(stable=True, descending=True),
    }


def _visibility(end: Tensor, size: int, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which runs of ``size`` keys are visible, fully visible, and visible on the diagonal.

    Each result is [nq, M / size] bool. Runs on the diagonal reach the block's first query or lie past it.
    There is at least one. In all other runs k <= q holds without a test.
    """
    lowest, highest = _block_bounds(end, size, pad=end.new_zeros(1))
    first_k = torch.arange(0, len(end), size, device=end.device)
    reaches = first_k <= last[:, None]
    seen = reaches & (highest > first[:, None])
    past = first_k + size - 1 >= first[:, None]
    full = seen & ~past & (lowest > last[:, None])
    return seen, full, seen & past


def _bytes_like(mask: Tensor, value: int) -> Tensor:
    return torch.full_like(mask, value, dtype=torch.uint8)


def _ranges_and_jobs(end: Tensor, column: Tensor) -> dict[str, Tensor]:
    """Returns the ranges of queries that see each key block, and their jobs."""
    lowest, highest = _block_bounds(end, KEYS, pad=end.new_zeros(1))
    first_k = torch.arange(0, len(end), KEYS, device=end.device, dtype=torch.int32)
    bounds = torch.stack([first_k, first_k + KEYS - 1, lowest, highest])
    first, first_full, end_full, last = (row.int() for row in torch.searchsorted(column, bounds))
    first_full = torch.minimum(first_full, last)
    end_full = torch.maximum(first_full, end_full)
    first_tile = first // TILE
    work = torch.where(first < last, (last + TILE - 1) // TILE - first_tile, 0)
    work, order = work.sort(stable=True, descending=True)
    ranges = {"first": first, "first_full": first_full, "end_full": end_full, "last": last}
    return ranges | {"range_order": order} | _jobs(work, order, first_tile)


def _jobs(work: Tensor, order: Tensor, first_tile: Tensor) -> dict[str, Tensor]:
    """Cuts the ranges of queries into jobs and returns the lists job_*.

    Args:
        work: [nk] number of tiles of each range, in descending order.
        order: [nk] key block of each range.
        first_tile: [nk] first tile of each key block's range, by number of the key block.
    """
    limit = (work.sum() / JOBS).clamp(min=SHORTEST_JOB)
    parts = (work / limit).ceil().long().clamp(min=1)
    stop = parts.cumsum(0)
    job = torch.arange(len(work) + JOBS, device=work.device)
    rank = torch.searchsorted(stop, job, right=True)
    used = rank < len(work)
    rank = rank.clamp(max=len(work) - 1)
    part, of = job - (stop - parts)[rank], parts[rank]
    block = order[rank]
    begin, end = work[rank] * part // of, work[rank] * (part + 1) // of
    by_block = torch.where(used, block, len(work)).argsort(stable=True)
    by_work = torch.where(used, end - begin, -1)[by_block].argsort(stable=True, descending=True)
    begin, end = (torch.where(used, first_tile[block] + x, -1) for x in (begin, end))
    # Only the ranges with the most work are cut. Their jobs therefore have the lowest numbers, and the number
    # of such a job is also the number of its part.
    return {
        "job_stop": stop,
        "job_block": block[by_block],
        "job_begin": begin[by_block],
        "job_end": end[by_block],
        "job_part": torch.where(of > 1, job, -1)[by_block],
        "job_order": by_work,
    }


def _block_bounds(values: Tensor, block: int, pad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the minimum and maximum of each run of ``block`` values. ``pad`` fills up the last run."""
    missing = -len(values) % block
    blocks = torch.cat([values, pad.expand(missing)]).view(-1, block)
    return blocks.amin(1), blocks.amax(1)
