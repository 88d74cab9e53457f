"""Backend "triton": all rules in plain Triton, for any GPU, in bfloat16 and float32.

Read ``forward_kernels.py``, then ``backward_kernels.py``. ``../launch.py`` has the order of launches.
``kda_forward.py`` and ``kda_backward.py`` are the kernels for a decay per channel of the keys.
Without a GPU, Triton's interpreter runs the kernels if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titan_tree.components.recurrence import launch
from titan_tree.components.recurrence.buffers import Saved, empty_saved
from titan_tree.components.recurrence.triton_kernels import kda_backward, kda_forward
from titan_tree.components.recurrence.triton_kernels.backward_kernels import input_gradients, state_gradients
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    make_scores,
    make_states,
    outputs,
)
from titan_tree.tree.chunks import Chains, Chunks

__all__ = ["backward", "empty_saved", "forward", "is_automatic", "refusal"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

PASSES = launch.Passes(outputs, make_scores, make_states, state_gradients, input_gradients)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None, chunks: Chunks,
    chains: Chains, *, prepare: Callable = kda_forward.prepare,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """See ``RecurrenceBackend.forward``. prepare: replaces ``kda_forward.prepare``."""
    passes = PASSES if g.ndim == 2 else PASSES._replace(outputs=partial(kda_forward.outputs, prepare))
    return launch.forward(passes, q, k, v, g, beta, states, chunks, chains)


def backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
    states: Tensor | None, saved: Saved, chunks: Chunks, chains: Chains,
    *, prepare: Callable = kda_forward.prepare, kda_inputs: Callable = kda_backward.input_gradients,
) -> list[Tensor]:  # fmt: skip
    """See ``RecurrenceBackend.backward``. prepare, kda_inputs: replace functions of KDA."""
    passes = PASSES
    if g.ndim == 3:
        assert beta is not None
        prepared = prepare(q, k, v, g, beta, chunks)
        passes = launch.Passes(
            PASSES.outputs,
            partial(kda_forward.scores, prepared),
            partial(kda_forward.make_states, prepared),
            partial(kda_backward.state_gradients, prepared),
            partial(kda_inputs, prepared),
        )
    return launch.backward(passes, do, dexported, q, k, v, g, beta, states, saved, chunks, chains)


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a GPU."""
    return device.type == "cuda"


def refusal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """See ``RecurrenceBackend.refusal``."""
    if q.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {q.device} (TRITON_INTERPRET=1 emulates one)"
    dtypes = {q.dtype, k.dtype, v.dtype}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        return (
            "expected q, k and v all in bfloat16 or all in float32, got "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    if not {q.shape[-1], v.shape[-1]} <= {16, 32, 64, 128}:
        return f"expected head dims K and V of 16, 32, 64 or 128, got {q.shape[-1]} and {v.shape[-1]}"
    return None
