"""What the kernels of the gated delta rule hand to each other. N tokens, G value heads, 64 tokens a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import CHUNK

Run = Callable[[int, int], None]  # a serial pass over chains first .. end - 1


class Factors(NamedTuple):
    """Numbers per token of each chunk, [chunks + 1, G, 64] fp32. s: the scale of q.

    There is room for one chunk behind the last, for who reads ahead.
    """

    total: Tensor  # the decay summed from the chunk's start, in base 2
    beta: Tensor
    read: Tensor  # -e
    write: Tensor  # d
    length: Tensor  # 1 / |k|
    query: Tensor  # s exp(G) / |q|; here and below 0 where there is no token
    q_length: Tensor  # 1 / |q|


class Saved(NamedTuple):
    """What the backward reads beside the inputs. Chunks, L slots (data/chains.py)."""

    slots: Tensor  # [L, G, V, K] fp32: the states that chains start from, and those exported
    inverse: Tensor  # [chunks, G, 64, 64]: T, in the dtype of q
    numbers: Tensor  # [7, chunks + 1, G, 64] fp32

    @property
    def factors(self) -> Factors:
        return Factors(*self.numbers.unbind())


def empty_saved(q: Tensor, v: Tensor, chains: Chains) -> Saved:
    # shape[0] and not len(), which would bind torch.compile to one size
    num_chunks, num_slots, heads = chains.slot.shape[0], chains.first_child.shape[0] - 1, v.shape[1]
    return Saved(
        slots=v.new_empty(num_slots, heads, v.shape[2], q.shape[2], dtype=torch.float32),
        inverse=q.new_empty(num_chunks, heads, CHUNK, CHUNK),
        numbers=q.new_empty(len(Factors._fields), num_chunks + 1, heads, CHUNK, dtype=torch.float32),
    )


def empty_states(saved: Saved) -> tuple[Tensor, Tensor]:
    """Room for S^T [chunks, G, V, K] and n^T [chunks, G, V, 64], or their gradients."""
    (_, heads, width, width_k), num_chunks = saved.slots.shape, len(saved.inverse)
    empty = saved.inverse.new_empty
    return empty(num_chunks, heads, width, width_k), empty(num_chunks, heads, width, CHUNK)


def precision(x: Tensor) -> str:
    """Of products of x's dtype: fp32 is computed as such. Without effect on 16-bit operands."""
    return "tf32x3" if x.is_cuda and x.dtype == torch.float32 else "ieee"


def sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Constants of most kernels."""
    (heads_k, width_k), (heads, width) = q.shape[1:], v.shape[1:]
    return {"GROUP": heads // heads_k, "G": heads, "K": width_k, "V": width, "C": CHUNK}
