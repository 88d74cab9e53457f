"""Backend "triton": Gated DeltaNet and Mamba-2's SSD in plain Triton, for any GPU, in bfloat16 and float32.

Read ``forward_kernels.py``, then ``backward_kernels.py``, then ``launch.py``, which orders the launches.
Without a GPU, Triton's interpreter runs the kernels if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor

from titan_tree.components.recurrence.buffers import empty_saved
from titan_tree.components.recurrence.triton_kernels import launch
from titan_tree.components.recurrence.triton_kernels.backward_kernels import input_gradients, state_gradients
from titan_tree.components.recurrence.triton_kernels.forward_kernels import make_states, outputs

__all__ = ["backward", "empty_saved", "forward", "is_automatic", "refusal"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

PASSES = launch.Passes(outputs, partial(make_states, leave=False), state_gradients, input_gradients)
forward = partial(launch.forward, PASSES)  # see RecurrenceBackend
backward = partial(launch.backward, PASSES)


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a GPU."""
    return device.type == "cuda"


def refusal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """See ``RecurrenceBackend.refusal``."""
    if q.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {q.device}; use 'reference', or set TRITON_INTERPRET=1 to debug"
    if g.ndim == 3:
        return "expected g [N, G], got a decay per channel of the keys; use 'reference'"
    dtypes = {q.dtype, k.dtype, v.dtype}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        return (
            "expected q, k and v all in bfloat16 or all in float32, got "
            f"{', '.join(sorted(map(str, dtypes)))}; use 'reference' for other dtypes"
        )
    if not {q.shape[-1], v.shape[-1]} <= {16, 32, 64, 128}:
        return (
            "expected head dims K and V of 16, 32, 64 or 128, "
            f"got {q.shape[-1]} and {v.shape[-1]}; use 'reference'"
        )
    return None
