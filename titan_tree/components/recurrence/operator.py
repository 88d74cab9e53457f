"""The operator titan_tree::recurrence, which runs the backends of recurrences.

Autograd, torch.compile and activation checkpointing see this operator and nothing below it. The backward pass
reads the inputs and ``Saved`` (``buffers.py``): numbers per token, the inverse T of each chunk, and the
states where chains branch. Backends recompute the states at all other chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_tree.components.backends import RECURRENCE_BACKENDS
from titan_tree.components.operators import as_operator
from titan_tree.components.recurrence.buffers import Saved
from titan_tree.tree.chunks import Chains, Chunks


def tree_recurrence(
    backend: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None,
    chunks: Chunks, chains: Chains,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o and the states after ``chunks.exported``, if any; differentiable. See ``TreeGDN.forward``."""
    return _Recurrence.apply(backend, q, k, v, g, beta, states, *chunks, *chains)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: str, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        o, exported, *saved = recurrence(*tensors[:6], tensors[6:], backend)
        ctx.backend = backend
        ctx.set_materialize_grads(False)  # ``backward`` makes zeros like these itself
        ctx.save_for_backward(*tensors[:6], *saved, *tensors[6:])
        return o, exported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dexported: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read saved_tensors once: with activation checkpointing, every access recomputes the forward pass.
        q, k, v, g, beta, states, *rest = ctx.saved_tensors
        count = len(Saved._fields)
        saved, metadata = rest[:count], rest[count:]
        do = torch.zeros_like(v) if do is None else do
        dexported = _zero_exports(q, v, metadata) if dexported is None else dexported
        inputs = q, k, v, g, beta, states
        gradients = iter(recurrence_backward(do, dexported, *inputs, saved, metadata, ctx.backend))
        return None, *(None if x is None else next(gradients) for x in inputs), *[None] * len(metadata)


@as_operator
def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None,
    metadata: Sequence[Tensor], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o [N, G, V], the exported states [X, G, K, V], and ``Saved``. metadata: Chunks and Chains."""
    with torch.cuda.device_of(q):
        o, exported, saved = RECURRENCE_BACKENDS[backend].forward(q, k, v, g, beta, states, *_split(metadata))
    return o, exported, *saved


@as_operator
def recurrence_backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
    states: Tensor | None, saved: Sequence[Tensor], metadata: Sequence[Tensor], backend: str,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of the inputs that are not None, in their dtypes."""
    inputs = do, dexported, q, k, v, g, beta, states, Saved(*saved)
    with torch.cuda.device_of(q):
        return RECURRENCE_BACKENDS[backend].backward(*inputs, *_split(metadata))


def _split(metadata: Sequence[Tensor]) -> tuple[Chunks, Chains]:
    count = len(Chunks._fields)
    return Chunks(*metadata[:count]), Chains(*metadata[count:])


def _zero_exports(q: Tensor, v: Tensor, metadata: Sequence[Tensor]) -> Tensor:
    """Returns zeros like the exported states [X, G, K, V], in fp32, or wider if v is."""
    shape = _split(metadata)[0].exported.shape[0], v.shape[1], q.shape[2], v.shape[2]
    return v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))


@torch.library.register_fake("titan_tree::recurrence")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None,
    metadata: Sequence[Tensor], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    saved = RECURRENCE_BACKENDS[backend].empty_saved(q, v, g, beta, _split(metadata)[1])
    return v.new_empty(v.shape), _zero_exports(q, v, metadata), *saved


@torch.library.register_fake("titan_tree::recurrence_backward")
def _(do: Tensor, dexported: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:6] if x is not None]
