"""Code shared by the passes that keep a block of queries: work items, and the key groups that they read.

The forward pass and ``query_pass`` keep a query block and read its list of key groups, 32 keys each
(``block_lists.py``). In each step, the producer fills one stage of a ring with several groups, which may come
from anywhere. So every tensor core product has its full size, and yet keys are skipped in units of 32: long
paths with short branches waste little.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from titan_tree.components.tree_attention.block_lists import KEY_GROUP as KEY_GROUP_SIZE

KEY_GROUP = gl.constexpr(KEY_GROUP_SIZE)

# 1. Work items. The grid is persistent. An item is a query block and a head. Program p of P takes items p,
#    2P - 1 - p, 2P + p, ... (snake order), which balances the load if items become lighter over many rounds.
#    Items are sorted by key head, and within a key head the heaviest come first. So only a few keys and
#    values are in use at a time, and L2 holds them. If there are few items, all heads are sorted together.

FEW_ITEMS = 8000  # 61 rounds of a whole GPU: from here on, sorting each key head alone balances within 4 %


class GroupLists(NamedTuple):
    """Tensors of ``BlockLists``, and the number of work items."""

    key_groups: gl.tensor
    n_diagonal: gl.tensor
    n_masked: gl.tensor
    n_key_groups: gl.tensor
    query_order: gl.tensor
    stride: gl.tensor
    n_blocks: gl.tensor
    n_items: gl.tensor
    heads: gl.tensor  # query heads whose items are sorted together


def heads_together(n_blocks: int, heads: int, heads_k: int) -> int:
    """Returns ``GroupLists.heads``: the query heads of one key head, or all if there are few items."""
    return heads if n_blocks * heads < FEW_ITEMS else heads // heads_k


@gluon.jit
def count_rounds(n_items):
    """How many work items this program takes."""
    width, program = gl.num_programs(0), gl.program_id(0)
    rounds = n_items // width
    place = gl.where(rounds % 2 == 0, program, width - 1 - program)
    return rounds + gl.where(place < n_items % width, 1, 0)


@gluon.jit
def work_item(lists, turn, G: gl.constexpr):
    """The query block, head and key head of this program's work item number ``turn``."""
    width, program = gl.num_programs(0), gl.program_id(0)
    item = turn * width + gl.where(turn % 2 == 0, program, width - 1 - program)
    size = lists.n_blocks * lists.heads
    head = item // size * lists.heads + item % lists.heads
    return gl.load(lists.query_order + item % size // lists.heads), head, head // G


@gluon.jit
def count_steps(lists, block, GROUPS: gl.constexpr):
    """How many steps a query block takes: with groups on the diagonal, with a mask, and in all."""
    n_diagonal = (gl.load(lists.n_diagonal + block) + GROUPS - 1) // GROUPS
    n_masked = (gl.load(lists.n_masked + block) + GROUPS - 1) // GROUPS
    return n_diagonal, n_masked, gl.load(lists.n_key_groups + block) // GROUPS


# 2. Key groups.


@gluon.jit
def load_key_groups(
    group_rows, stage_rows, column, list_ptr, barrier, stage,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Fills a stage with the list's next groups: by one copy if they are neighbors, else by one each."""
    first = gl.load(list_ptr)
    neighbors = True
    for j in gl.static_range(1, GROUPS):
        neighbors &= gl.load(list_ptr + j) == first + j
    if neighbors:
        tma.async_copy_global_to_shared(stage_rows, [first * KEY_GROUP, column], barrier, stage)
    else:
        for j in gl.static_range(GROUPS):
            row = gl.load(list_ptr + j) * KEY_GROUP
            tma.async_copy_global_to_shared(
                group_rows, [row, column], barrier, stage.slice(j * KEY_GROUP, KEY_GROUP, 0)
            )


@gluon.jit
def load_ends(end_row, list_ptr, barrier, stage, GROUPS: gl.constexpr):
    """Fetches ``end`` of the keys in the list's next groups."""
    for j in gl.static_range(GROUPS):
        row = gl.load(list_ptr + j) * KEY_GROUP
        tma.async_copy_global_to_shared(end_row, [row], barrier, stage.slice(j * KEY_GROUP, KEY_GROUP, 0))


@gluon.jit
def visible(
    column, end, list_ptr, i,
    DIAGONAL: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Which keys of step i each query sees.

    Off the diagonal, all keys come before all queries, so that k <= q needs no test.
    """
    mask = gl.expand_dims(column, 1) < gl.expand_dims(end, 0)
    if DIAGONAL:
        j = gl.arange(0, BLOCK_K, COLUMNS)
        group = gl.load(list_ptr + i * (BLOCK_K // KEY_GROUP) + j // KEY_GROUP)
        mask &= gl.expand_dims(column, 1) >= gl.expand_dims(group * KEY_GROUP + j % KEY_GROUP, 0)
    return mask
