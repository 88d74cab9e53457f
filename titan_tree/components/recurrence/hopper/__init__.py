"""Backend "hopper": all rules on Hopper GPUs, with the costliest kernels in Gluon.

The Gluon kernels use TMA, asynchronous tensor core products and specialized warps. ``prepare.py`` prepares
all chunks at once. ``passes.py`` runs along chains and back, on chunks that ``tiles.py`` fetches.
``inputs.py`` computes the gradients of q, k, v, g and beta. ``../launch.py`` has the order of launches.
``kda.py`` replaces two kernels of backend "triton" for a decay per channel of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_tree.components.recurrence import launch, triton_kernels
from titan_tree.components.recurrence.buffers import Saved, empty_saved
from titan_tree.components.recurrence.hopper import kda
from titan_tree.components.recurrence.hopper.inputs import input_gradients
from titan_tree.components.recurrence.hopper.passes import outputs, state_gradients, states
from titan_tree.components.recurrence.hopper.prepare import make_scores
from titan_tree.components.rings import is_hopper

__all__ = ["backward", "empty_saved", "forward", "is_automatic", "refusal"]

PASSES = launch.Passes(outputs, make_scores, states, state_gradients, input_gradients)


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *others: Any) -> tuple[Tensor, Tensor, Saved]:
    """See ``RecurrenceBackend.forward``."""
    if g.ndim == 3:
        return triton_kernels.forward(q, k, v, g, *others, prepare=kda.prepare)
    return launch.forward(PASSES, q, k, v, g, *others)


def backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *others: Any
) -> list[Tensor]:
    """See ``RecurrenceBackend.backward``."""
    inputs = do, dexported, q, k, v, g, *others
    if g.ndim == 3:
        return triton_kernels.backward(*inputs, prepare=kda.prepare, kda_inputs=kda.input_gradients)
    return launch.backward(PASSES, *inputs)


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a Hopper GPU."""
    return is_hopper(device)


def refusal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """See ``RecurrenceBackend.refusal``."""
    is_bf16 = q.dtype == k.dtype == v.dtype == torch.bfloat16
    if is_hopper(q.device) and is_bf16 and {q.shape[-1], v.shape[-1]} <= {64, 128}:
        return None
    return (
        "needs a GPU of compute capability 9.0, q, k and v in bfloat16, and head dims K and V of 64 or 128; "
        f"got {q.device}, {q.dtype}, {k.dtype}, {v.dtype}, {q.shape[-1]} and {v.shape[-1]}"
    )
