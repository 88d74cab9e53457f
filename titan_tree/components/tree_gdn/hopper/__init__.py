"""The gated delta rule on Hopper GPUs, in Gluon: TMA, asynchronous tensor cores, specialised warps.

``passes``: along chains and back. ``inputs``: the gradients of q, k, v, g and beta. What is the same on all
chunks and little work is Triton's here, too: kernels_forward.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_tree.components.rings import is_hopper
from titan_tree.components.tree_gdn.hopper.inputs import input_gradients
from titan_tree.components.tree_gdn.hopper.passes import outputs, state_gradients, states

__all__ = ["input_gradients", "outputs", "state_gradients", "states", "supports"]


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether these kernels take q and v: a Hopper GPU, bfloat16, heads of 64 or 128 dims."""
    return is_hopper(q.device) and q.dtype == torch.bfloat16 and {q.shape[-1], v.shape[-1]} <= {64, 128}
