"""Backend "hopper": Gated DeltaNet and Mamba-2's SSD on Hopper GPUs, with the costliest kernels in Gluon.

The Gluon kernels use TMA, asynchronous tensor core products and specialized warps. ``prepare.py`` prepares
all chunks at once. ``passes.py`` runs along chains and back, on chunks that ``tiles.py`` fetches.
``inputs.py`` computes the gradients of q, k, v, g and beta. ``../launch.py`` has the order of launches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from titan_tree.components.recurrence import launch
from titan_tree.components.recurrence.buffers import empty_saved
from titan_tree.components.recurrence.hopper.inputs import input_gradients
from titan_tree.components.recurrence.hopper.passes import outputs, state_gradients, states
from titan_tree.components.recurrence.hopper.prepare import make_scores
from titan_tree.components.rings import is_hopper

__all__ = ["backward", "empty_saved", "forward", "is_automatic", "refusal"]

PASSES = launch.Passes(outputs, make_scores, states, state_gradients, input_gradients)
forward = partial(launch.forward, PASSES)  # see RecurrenceBackend
backward = partial(launch.backward, PASSES)


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a Hopper GPU."""
    return is_hopper(device)


def refusal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """See ``RecurrenceBackend.refusal``."""
    if g.ndim == 3:
        return "expected g [N, G], got a decay per channel of the keys; use 'triton'"
    is_bf16 = q.dtype == k.dtype == v.dtype == torch.bfloat16
    if is_hopper(q.device) and is_bf16 and {q.shape[-1], v.shape[-1]} <= {64, 128}:
        return None
    return (
        "needs a GPU of compute capability 9.0, q, k and v in bfloat16, and head dims K and V of 64 or 128; "
        f"got {q.device}, {q.dtype}, {k.dtype}, {v.dtype}, {q.shape[-1]} and {v.shape[-1]}; use 'triton'"
    )
