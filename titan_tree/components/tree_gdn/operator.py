"""The operator tree_gdn: all that autograd, torch.compile and activation checkpointing need to know.

It computes with the kernels, or on a CPU as reference.py does, but fp32 in Triton's interpreter if it is on.
Saved for the backward are the inputs and ``Saved``: of each chunk the inverse T and some numbers per token,
and the states where chains branch. The states at all other chunks are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_tree.components.tree_gdn import kernels_backward, kernels_forward, reference
from titan_tree.components.tree_gdn.buffers import Saved, empty_saved
from titan_tree.errors import UserError
from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import Chunks
from titan_tree.tree.layout import TreeLayout


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None, chunks: Chunks,
    chains: Chains, kernels: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and the states after ``chunks.exported``, of which there may be none. See ``TreeGDN.forward``.

    kernels: else as reference.py does.
    """
    if kernels:
        check(q, k, v)
    o, exported, *_ = tree_gdn(q, k, v, g, beta, states, [*chunks, *chains], kernels)
    return o, exported


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The limits of the kernels, each with its own message."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        raise UserError(
            "TreeGDN: backend 'triton': expected q, k and v in bfloat16 or all in float32, got "
            f"{', '.join(sorted(map(str, dtypes)))}; use 'reference' for other dtypes"
        )
    if not {q.shape[-1], v.shape[-1]} <= {16, 32, 64, 128}:
        raise UserError(
            "TreeGDN: backend 'triton': expected head dims K and V of 16, 32, 64 or 128, "
            f"got {q.shape[-1]} and {v.shape[-1]}; use 'reference'"
        )


@torch.library.custom_op("titan_tree::tree_gdn", mutates_args=())
def tree_gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None,
    metadata: Sequence[Tensor], kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o [N, G, V], the exported states [X, G, K, V] and those of ``Saved``. metadata: Chunks and Chains."""
    chunks, chains = _split(metadata)
    if not kernels:
        o, exported = _reference(q, k, v, g, beta, states, chunks)
        return o, exported, *_saved(q, v, chains, kernels)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    with torch.cuda.device_of(q):
        o, exported, saved = kernels_forward.forward(q, k, v, g, beta, states, chunks, chains)
    return o, exported, *saved


@torch.library.custom_op("titan_tree::tree_gdn_backward", mutates_args=())
def tree_gdn_backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor | None, saved: Sequence[Tensor], metadata: Sequence[Tensor], kernels: bool,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv, dg, dbeta and, where there are states, theirs, in the dtypes of the inputs."""
    chunks, chains = _split(metadata)
    if not kernels:
        return _reference_backward(do, dexported, q, k, v, g, beta, states, chunks)
    do, q, k, v, g, beta = (x.contiguous() for x in (do, q, k, v, g, beta))
    with torch.cuda.device_of(q):
        *gradients, dstates = kernels_backward.backward(
            do, dexported, q, k, v, g, beta, Saved(*saved), chunks, chains
        )
    return gradients if states is None else [*gradients, dstates.to(states.dtype)]


def _split(metadata: Sequence[Tensor]) -> tuple[Chunks, Chains]:
    count = len(Chunks._fields)
    return Chunks(*metadata[:count]), Chains(*metadata[count:])


def _saved(q: Tensor, v: Tensor, chains: Chains, kernels: bool) -> Saved:
    """Room for what the forward leaves, of which the reference makes no use."""
    saved = empty_saved(q, v, chains)
    return saved if kernels else Saved(*(x.new_empty(0) for x in saved))


def _zero_exports(q: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
    """[X, G, K, V]"""
    shape = chunks.exported.shape[0], v.shape[1], q.shape[2], v.shape[2]
    return v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))


@tree_gdn.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None,
    metadata: Sequence[Tensor], kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    chunks, chains = _split(metadata)
    return v.new_empty(v.shape), _zero_exports(q, v, chunks), *_saved(q, v, chains, kernels)


@tree_gdn_backward.register_fake
def _(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor | None, saved: Sequence[Tensor], metadata: Sequence[Tensor], kernels: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta, states) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, metadata, ctx.kernels = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # of what is saved, zeros of its size
    ctx.save_for_backward(*tensors, *output[2:], *metadata)


def _autograd(ctx: Any, do: Tensor | None, dexported: Tensor | None, *_: None) -> tuple[Any, ...]:
    # Once: checkpointing recomputes at each access.
    q, k, v, g, beta, states, *rest = ctx.saved_tensors
    count = len(Saved._fields)
    saved, metadata = rest[:count], rest[count:]
    do = torch.zeros_like(v) if do is None else do
    dexported = _zero_exports(q, v, _split(metadata)[0]) if dexported is None else dexported
    gradients = tree_gdn_backward(do, dexported, q, k, v, g, beta, states, saved, metadata, ctx.kernels)
    return *gradients, *([None] if states is None else []), [None] * len(metadata), None


tree_gdn.register_autograd(_autograd, setup_context=_setup_context)


# Where there are no kernels.


def _reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    exports = chunks.exported if len(chunks.exported) else None
    start = chunks.start  # the rest of a layout is not read
    layout = TreeLayout(start, start, start, chunks=chunks, state_exports=exports)
    o, exported = reference.gated_delta_rule(q, k, v, g, beta, layout, states)
    return o.contiguous(), _zero_exports(q, v, chunks) if exported is None else exported


def _reference_backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor | None, chunks: Chunks,
) -> list[Tensor]:  # fmt: skip
    # Operators run with autograd's dispatch keys off, which enable_grad alone does not turn on again.
    recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with recording, torch.enable_grad():
        inputs = q, k, v, g, beta = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        if states is not None:
            states = states.detach().requires_grad_()
            inputs = [*inputs, states]
        o, exported = _reference(q, k, v, g, beta, states, chunks)
        # The states of no export come from no input.
        outputs, upstream = ([o, exported], [do, dexported]) if len(exported) else ([o], [do])
        gradients = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [x.contiguous() for x in gradients]
