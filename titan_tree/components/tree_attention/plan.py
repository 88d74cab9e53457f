"""Plan: which blocks of queries and keys meet, for our attention kernels.

Key k is visible to query q iff ``k <= c < end[k]`` with ``c = key_index[q]``: one int32 per key. Two facts
make blocks cheap (``end`` is the exclusive end of the key's subtree, DFS order):

- a block of keys is seen by *one contiguous range* of queries, and seen in full by a contiguous part of
  it, so a key-stationary pass needs four integers per key block;
- a query-stationary pass reads a list of visible key blocks.

Everything is made of tensor operations on the layout's device, without host synchronisation: shapes depend
on N and M alone. Largest is the list of pieces, N * M / 4096 int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

# Granularity. A kernel's tiles may be smaller, dividing these.
QUERIES = 128  # of a query block, the unit of lists
KEYS = 128  # of a key block, the unit of ranges and of the block list
PIECE = 32  # keys of a piece, the unit of the piece list
TILE = 64  # queries of a tile, the unit of jobs

# A key block's range is cut into jobs of at most 1 / JOBS of all its tiles, so that no multiprocessor is
# left with the trunk's blocks: with 8 key heads a job is at most 1/8 of what one of 132 multiprocessors does
# in all. Shorter than SHORTEST_JOB tiles is not worth the sum over parts.
JOBS = 128
SHORTEST_JOB = 8


class Plan(NamedTuple):
    """nq = ceil(N / QUERIES), nk = ceil(M / KEYS), np = ceil(M / PIECE), nj = nk + JOBS; all int32.

    One tensor per column: a dimension of constant size would be taken for nq or nk by torch.compile
    where it happens to equal them, and recompiled where it does not.
    """

    # Key blocks and, finer, key pieces visible to each query block.
    key_blocks: Tensor  # [nq, nk]: partly visible, then fully, then unused
    n_partial: Tensor  # [nq]: how many of them are partly visible
    n_visible: Tensor  # [nq]: how many are visible at all
    pieces: Tensor  # [nq, np + 3]: on the diagonal, partly visible, 0-3 past M, fully visible, unused
    n_diagonal: Tensor  # [nq]: how many pieces reach the block's first query or go past it: one or more
    n_masked: Tensor  # [nq]: how many are not fully visible
    n_pieces: Tensor  # [nq]: how many are to be read: a multiple of 4
    query_order: Tensor  # [nq]: query blocks, most work first
    # Queries that see each key block.
    first: Tensor  # [nk]: queries first .. last - 1 see something of a key block,
    first_full: Tensor  # [nk]: and first_full .. end_full - 1 all of it
    end_full: Tensor  # [nk]
    last: Tensor  # [nk]
    range_order: Tensor  # [nk]: key blocks, most work first
    # Ranges cut into jobs. Tile i is queries i * TILE .. i * TILE + TILE - 1.
    job_stop: Tensor  # [nk]: jobs of range_order[:i + 1], before they are sorted
    job_block: Tensor  # [nj]: key block of each job, most work first
    job_begin: Tensor  # [nj]: its tiles are job_begin .. job_end - 1; -1 past the last job
    job_end: Tensor  # [nj]
    job_part: Tensor  # [nj]: its place among the parts of all cut ranges, -1 of an uncut range


def prepare(layout: TreeLayout) -> Plan:
    """The plan of a layout; on its device, shared by all layers and by recomputation.

    Raises UserError for a layout that is empty or not int32.
    """
    end, column = layout.subtree_end, layout.key_index
    if not end.dtype == column.dtype == torch.int32 or not len(column):
        raise UserError(
            "TreeAttention: expected a layout of int32 tensors of one query or more, "
            f"got {end.dtype}, {column.dtype}, {len(column)} queries"
        )
    query_bounds = _block_bounds(column, QUERIES, pad=column[-1:])
    columns = *_key_blocks(end, *query_bounds), *_pieces(end, *query_bounds), *_ranges_and_jobs(end, column)
    return Plan(*(x.int() for x in columns))


def max_parts(n: int, m: int) -> int:
    """Upper bound of the parts of cut ranges: each is half of 1 / JOBS of all tiles, or of SHORTEST_JOB."""
    tiles, blocks = -(-n // TILE), -(-m // KEYS)
    return min(2 * JOBS, 2 * blocks * tiles // SHORTEST_JOB) if tiles > SHORTEST_JOB else 0


def _key_blocks(end: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """key_blocks, n_partial, n_visible, for query blocks of columns first .. last."""
    seen, full, _ = _visibility(end, KEYS, first, last)
    kind = _bytes_like(seen, 2).masked_fill_(seen, 0).masked_fill_(full, 1)
    n_visible = seen.sum(1)
    return kind.argsort(dim=1, stable=True), n_visible - full.sum(1), n_visible


def _pieces(end: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """pieces, n_diagonal, n_masked, n_pieces, query_order, for query blocks of columns first .. last."""
    seen, full, diagonal = _visibility(end, PIECE, first, last)
    n_seen = seen.sum(1)
    padding = -n_seen % 4
    kind = _bytes_like(seen, 4).masked_fill_(seen, 1).masked_fill_(diagonal, 0).masked_fill_(full, 3)
    is_padding = torch.arange(3, device=end.device) < padding[:, None]
    kind = torch.cat([kind, _bytes_like(is_padding, 4).masked_fill_(is_padding, 2)], dim=1)
    n_pieces = n_seen + padding
    by_work = n_pieces.argsort(stable=True, descending=True)
    return kind.argsort(dim=1, stable=True), diagonal.sum(1), n_pieces - full.sum(1), n_pieces, by_work


def _visibility(end: Tensor, size: int, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[nq, M / size] bool of runs of ``size`` keys: visible, visible in full, and visible on the diagonal.

    The diagonal's runs reach the block's first query or go past it: there is one at least, and in all others
    k <= q needs no test.
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


def _ranges_and_jobs(end: Tensor, column: Tensor) -> tuple[Tensor, ...]:
    """The columns from ``first`` on."""
    lowest, highest = _block_bounds(end, KEYS, pad=end.new_zeros(1))
    first_k = torch.arange(0, len(end), KEYS, device=end.device, dtype=torch.int32)
    bounds = torch.stack([first_k, first_k + KEYS - 1, lowest, highest])
    first, first_full, end_full, last = (row.int() for row in torch.searchsorted(column, bounds))
    first_full = torch.minimum(first_full, last)
    end_full = torch.maximum(first_full, end_full)
    first_tile = first // TILE
    work = torch.where(first < last, (last + TILE - 1) // TILE - first_tile, 0)
    work, order = work.sort(stable=True, descending=True)
    return first, first_full, end_full, last, order, *_jobs(work, order, first_tile)


def _jobs(work: Tensor, order: Tensor, first_tile: Tensor) -> tuple[Tensor, ...]:
    """The columns job_*: key blocks ``order`` with ``work`` tiles each, descending, cut into jobs."""
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
    by_work = torch.where(used, end - begin, -1).argsort(stable=True, descending=True)
    begin, end = (torch.where(used, first_tile[block] + x, -1) for x in (begin, end))
    # The cut ranges are those of most work, so their jobs are the first ones.
    columns = block, begin, end, torch.where(of > 1, job, -1)
    return stop, *(x[by_work] for x in columns)


def _block_bounds(values: Tensor, block: int, pad: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each run of ``block`` values, the last run filled up with ``pad``."""
    missing = -len(values) % block
    blocks = torch.cat([values, pad.expand(missing)]).view(-1, block)
    return blocks.amin(1), blocks.amax(1)
