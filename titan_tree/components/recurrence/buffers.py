"""Tensors that one kernel of a recurrence writes and another one reads.

Letters: N tokens, G value heads, 64 tokens per chunk (CHUNK), L slots. A slot holds a state from which chains
start, or which is exported (``tree/chunks.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.tree.chunks import CHUNK, Chains


class Factors(NamedTuple):
    """Numbers per token of each chunk: [chunks + 1, G, 64] fp32 each.

    G_i is the decay summed from the chunk's start, s the scale of q. There is room for one chunk after the
    last, because kernels read one chunk ahead.
    """

    total: Tensor  # G_i, in base 2
    write: Tensor  # d_i = exp(G_last - G_i) / |k_i|
    query: Tensor  # s exp(G_i) / |q_i|; this and q_length are 0 past the chunk's last token
    # Without the delta rule, lengths and s count as 1, ``write`` is 0 past the chunk's last token, and the
    # numbers below do not exist.
    read: Tensor | None = None  # -e_i = -exp(G_i) / |k_i|
    length: Tensor | None = None  # 1 / |k_i|
    q_length: Tensor | None = None  # 1 / |q_i|
    beta: Tensor | None = None


class Saved(NamedTuple):
    """What the backward pass reads besides the inputs."""

    slots: Tensor  # [L, G, V, K] fp32: the states that chains start from, and the exported ones
    inverse: Tensor  # [chunks, G, 64, 64] in the dtype of q: T of each chunk; [0] without the delta rule
    # [7, chunks + 1, G, 64] fp32: ``Factors``; 3 of them without the delta rule, 0 with a decay per channel
    numbers: Tensor

    @property
    def factors(self) -> Factors:
        """Views of ``numbers``."""
        return Factors(*self.numbers.unbind())

    @property
    def has_delta(self) -> bool:
        """Whether the rule is a delta rule."""
        return len(self.inverse) > 0

    @property
    def num_chunks(self) -> int:
        return self.numbers.shape[1] - 1


def empty_saved(q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chains: Chains) -> Saved:
    """Returns an uninitialized ``Saved`` for inputs like these, see ``TreeGDN``."""
    # Sizes are read as shape[0]: len() would make torch.compile specialize on one size.
    num_chunks, num_slots, heads = chains.slot.shape[0], chains.reader_offsets.shape[0] - 1, v.shape[1]
    num_factors = 0 if g.ndim == 3 else 3 if beta is None else len(Factors._fields)
    return Saved(
        slots=v.new_empty(num_slots, heads, v.shape[2], q.shape[2], dtype=torch.float32),
        inverse=q.new_empty(0) if beta is None else q.new_empty(num_chunks, heads, CHUNK, CHUNK),
        numbers=q.new_empty(num_factors, num_chunks + 1, heads, CHUNK, dtype=torch.float32),
    )


def empty_states(saved: Saved) -> tuple[Tensor, Tensor]:
    """Returns uninitialized S^T [chunks, G, V, K] and n^T [chunks, G, V, 64], or their gradients.

    Without the delta rule, n is v, and the second tensor is empty.
    """
    (_, heads, width, width_k), num_chunks = saved.slots.shape, saved.num_chunks
    empty = saved.inverse.new_empty
    new = empty(num_chunks if saved.has_delta else 0, heads, width, CHUNK)
    return empty(num_chunks, heads, width, width_k), new


def precision(x: Tensor) -> str:
    """Returns Triton's ``input_precision`` for products of x's dtype. It has no effect on 16-bit operands."""
    return "tf32x3" if x.is_cuda and x.dtype == torch.float32 else "ieee"


def sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Returns the constants of most kernels: GROUP value heads per key head, G, K, V, C tokens per chunk."""
    (heads_k, width_k), (heads, width) = q.shape[1:], v.shape[1:]
    return {"GROUP": heads // heads_k, "G": heads, "K": width_k, "V": width, "C": CHUNK}
