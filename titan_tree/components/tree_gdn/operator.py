"""The interface of TreeGDN's backends, and the operator titan_tree::tree_gdn, which runs them.

To add a backend, write a module with the functions of ``GdnBackend`` and register it in
``titan_tree.registry.GDN_BACKENDS``.

Autograd, torch.compile and activation checkpointing see this operator and nothing below it. The backward pass
reads the inputs and ``Saved`` (``buffers.py``): numbers per token, the inverse T of each chunk, and the
states where chains branch. Backends recompute the states at all other chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_tree.components.tree_gdn.buffers import Saved
from titan_tree.registry import GDN_BACKENDS
from titan_tree.tree.chunks import Chains, Chunks


class GdnBackend(Protocol):
    """One implementation of the gated delta rule: a module, or any other object, with these functions.

    Sizes: N tokens, H key heads, G value heads, K and V head dims, R states from a gateway, X exported
    states.
    """

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``."""

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Returns the reason why this backend cannot compute tensors like these, or None if it can.

        The reason completes the sentence "backend 'name' ..." in one line: what the backend expects, what it
        got, and which backend to use instead. torch.compile traces this function, so it must not read values.
        """

    def empty_saved(self, q: Tensor, v: Tensor, chains: Chains) -> Saved:
        """Returns uninitialized tensors like those that ``forward`` saves; they may be empty."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None,
        chunks: Chunks,
        chains: Chains,
    ) -> tuple[Tensor, Tensor, Saved]:
        """Returns o [N, G, V], the exported states [X, G, K, V], and what ``backward`` needs. X may be 0.

        Arguments are those of ``TreeGDN.forward``, of any strides. Exported states are those at the ends of
        the chunks ``chunks.exported``: fp32, or wider if v is.
        """

    def backward(
        self,
        do: Tensor,
        dexported: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None,
        saved: Saved,
        chunks: Chunks,
        chains: Chains,
    ) -> list[Tensor]:
        """Returns dq, dk, dv, dg, dbeta and, with states, dstates: contiguous, in their inputs' dtypes."""


def gated_delta_rule(
    backend: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None,
    chunks: Chunks, chains: Chains,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o and the states after ``chunks.exported``, if any; differentiable. See ``TreeGDN.forward``."""
    o, exported, *_ = tree_gdn(q, k, v, g, beta, states, metadata=[*chunks, *chains], backend=backend)
    return o, exported


@torch.library.custom_op("titan_tree::tree_gdn", mutates_args=())
def tree_gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None,
    metadata: Sequence[Tensor], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o [N, G, V], the exported states [X, G, K, V], and ``Saved``. metadata: Chunks and Chains."""
    with torch.cuda.device_of(q):
        o, exported, saved = GDN_BACKENDS[backend].forward(q, k, v, g, beta, states, *_split(metadata))
    return o, exported, *saved


@torch.library.custom_op("titan_tree::tree_gdn_backward", mutates_args=())
def tree_gdn_backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor | None, saved: Sequence[Tensor], metadata: Sequence[Tensor], backend: str,
) -> list[Tensor]:  # fmt: skip
    """Returns dq, dk, dv, dg, dbeta and, with states, their gradient; in the dtypes of the inputs."""
    inputs = do, dexported, q, k, v, g, beta, states, Saved(*saved)
    with torch.cuda.device_of(q):
        return GDN_BACKENDS[backend].backward(*inputs, *_split(metadata))


def _split(metadata: Sequence[Tensor]) -> tuple[Chunks, Chains]:
    count = len(Chunks._fields)
    return Chunks(*metadata[:count]), Chains(*metadata[count:])


def _zero_exports(q: Tensor, v: Tensor, metadata: Sequence[Tensor]) -> Tensor:
    """Returns zeros like the exported states [X, G, K, V], in fp32, or wider if v is."""
    shape = _split(metadata)[0].exported.shape[0], v.shape[1], q.shape[2], v.shape[2]
    return v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))


@tree_gdn.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None,
    metadata: Sequence[Tensor], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    saved = GDN_BACKENDS[backend].empty_saved(q, v, _split(metadata)[1])
    return v.new_empty(v.shape), _zero_exports(q, v, metadata), *saved


@tree_gdn_backward.register_fake
def _(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor | None, saved: Sequence[Tensor], metadata: Sequence[Tensor], backend: str,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta, states) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, metadata, ctx.backend = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # otherwise autograd makes zeros as large as all of Saved
    ctx.save_for_backward(*tensors, *output[2:], *metadata)


def _autograd(ctx: Any, do: Tensor | None, dexported: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    # Read saved_tensors once: with activation checkpointing, every access recomputes the forward pass.
    q, k, v, g, beta, states, *rest = ctx.saved_tensors
    count = len(Saved._fields)
    saved, metadata = rest[:count], rest[count:]
    do = torch.zeros_like(v) if do is None else do
    dexported = _zero_exports(q, v, metadata) if dexported is None else dexported
    inputs = do, dexported, q, k, v, g, beta, states
    gradients = tree_gdn_backward(*inputs, saved=saved, metadata=metadata, backend=ctx.backend)
    return *gradients, *([None] if states is None else []), [None] * len(metadata), None


tree_gdn.register_autograd(_autograd, setup_context=_setup_context)
