"""TreeAttention: attention on a token tree, one module over several backends.

Read the files in this order:

    __init__.py      the module TreeAttention
    operator.py      the operator that autograd and torch.compile see
    block_lists.py   which blocks of queries and keys meet
    context.py       keys and values that a partition gets from its ancestors
    reference.py     the definition in plain PyTorch
    flex.py          FlexAttention;  flash.py: FlexAttention on the kernels of FlashAttention-4
    triton_kernels/  kernels for any GPU
    hopper/          kernels for Hopper GPUs, in Gluon

A backend requested by name is used or refused, never replaced by another one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import Tensor, nn

from titan_tree.components.backends import ATTENTION_BACKENDS, AUTO, PLAIN, AttentionBackend, Scoring
from titan_tree.components.tree_attention import operator  # noqa: F401  # registers the operator
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

__all__ = ["AttentionBackend", "Scoring", "TreeAttention"]

logger = logging.getLogger(__name__)


class TreeAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v over the keys on the path to each query.

    Query i sees key j iff ``j <= layout.key_index[i] < layout.subtree_end[j]``. The module has no parameters.

    Args:
        backend: a name from ``ATTENTION_BACKENDS``, or "auto".
            "hopper": kernels for Hopper GPUs, in Gluon. 16-bit dtypes, head dim 64, 128 or 256.
            "triton": kernels for any GPU. 16-bit dtypes and float32, head dims up to 256 that 8 divides.
            "flash": FlexAttention on FlashAttention-4's kernels; needs a Hopper GPU and flash-attn-4.
            "flex": compiled FlexAttention, on any GPU.
            "reference": plain PyTorch with a dense [N, M] mask, on all devices; small trees only.
            "auto": the first of hopper, triton (on GPUs) and reference (elsewhere) that supports the tensors.
        deterministic: whether equal inputs must give equal gradients, bit for bit.
            ``torch.use_deterministic_algorithms`` also turns this on. Triton's gradients are always
            deterministic. The option makes hopper's backward pass 13 % slower; flash and flex refuse it.

    Raises:
        UserError: the backend is unknown.
    """

    def __init__(self, backend: str = AUTO, deterministic: bool = False) -> None:
        super().__init__()
        ATTENTION_BACKENDS.load(backend)
        self.backend = backend
        self.deterministic = deterministic
        self._logged = False

    def prepare(self, layout: TreeLayout, windows: Collection[int | None] = (None,)) -> TreeLayout:
        """Returns the layout with what this backend needs. Call it once per batch, before the first layer.

        All layers and the recomputation in the backward pass share it.

        Args:
            windows: the sliding windows of the layers, see ``Scoring``; None stands for layers without one.
                Each is prepared for itself.

        Raises:
            UserError: the backend does not run on the layout's device.
        """
        names = [self.backend]
        if self.backend == AUTO:
            names = ATTENTION_BACKENDS.automatic(layout.positions.device)
            if not self._logged and not torch.compiler.is_compiling():
                logger.info("TreeAttention: backend 'auto' uses %s", ", or else ".join(names))
                self._logged = True
        with torch.no_grad():
            backend = ATTENTION_BACKENDS[names[0]]
            return layout.with_prepared({window: backend.prepare(layout, window) for window in windows})

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TreeLayout,
        context: Tensor | None = None,
        scale: float | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """Computes attention for N queries on M keys.

        Args:
            q: [N, Hq, D].
            k: [M, Hkv, D] with Hkv a divisor of Hq (grouped-query attention). With ``context`` only the
                partition's own tokens: [N, Hkv, D].
            v: like k, but its heads may have another size Dv.
            layout: layout of N queries and M keys, from ``prepare``. Otherwise every call prepares
                it again. The layout's tensors must not change after ``prepare``.
            context: [R, 2, Hkv, D], keys and values of a partition's ancestors (the gateway cache).
                ``layout.key_source`` says which row of context, or which own token, each of the M keys is.
                "hopper" and "triton" keep no copy of these keys and values for the backward pass.
            scale: factor of the scores instead of 1 / sqrt(D).
            scoring: a sliding window, a soft cap or sinks. "hopper" and "flash" have none of them.

        Returns:
            [N, Hq, Dv] in q's dtype.

        Raises:
            UserError: shapes or dtypes do not fit, the backend refuses the tensors, or the layout was
                prepared for another backend or other windows.
        """
        _check(q, k, v, layout, context)
        _check_scoring(q, scoring)
        deterministic = self.deterministic or torch.are_deterministic_algorithms_enabled()
        name = ATTENTION_BACKENDS.resolve(self.backend, q.device, q, v, scoring, deterministic)
        if layout.prepared_attention is None:
            layout = self.prepare(layout, [scoring.window])
        prepared = layout.prepared_attention
        assert prepared is not None
        if scoring.window not in prepared:
            raise UserError(
                f"TreeAttention: window {scoring.window}: the layout was prepared for {list(prepared)}; "
                f"call prepare(layout, windows=[{scoring.window}])"
            )
        return ATTENTION_BACKENDS[name].attention(
            q,
            k,
            v,
            context,
            layout,
            prepared[scoring.window],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            scoring=scoring,
            deterministic=deterministic,
        )

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}, deterministic={self.deterministic}"


def _check(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, context: Tensor | None) -> None:
    n, m = layout.key_index.shape[0], layout.subtree_end.shape[0]
    if context is not None:
        fits = context.ndim == 4 and context.shape[1:] == (2, *k.shape[1:]) == (2, *v.shape[1:])
        if layout.key_source is None or not fits:
            raise UserError(
                "TreeAttention: context: expected [R, 2, Hkv, D] with k and v of [N, Hkv, D] and a layout "
                f"that has key_source, got {list(context.shape)} with {list(k.shape)} and {list(v.shape)}"
            )
        m = n
    fits = q.ndim == k.ndim == v.ndim == 3 and len(q) == n and len(k) == m and k.shape[:2] == v.shape[:2]
    if not fits or q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise UserError(
            f"TreeAttention: expected q [{n}, H, D], k [{m}, Hkv, D] and v [{m}, Hkv, Dv] with "
            f"Hkv dividing H, got {shapes}"
        )
    dtypes = [x.dtype for x in (q, k, v, context) if x is not None]
    if len(set(dtypes)) > 1:
        raise UserError(
            f"TreeAttention: expected q, k, v and context of one dtype, got {', '.join(map(str, dtypes))}"
        )


def _check_scoring(q: Tensor, scoring: Scoring) -> None:
    window, cap, sinks = scoring
    if window is not None and window < 1:
        raise UserError(f"TreeAttention: window: expected at least 1 token, got {window}")
    if cap is not None and cap <= 0:
        raise UserError(f"TreeAttention: softcap: expected a number above 0, got {cap}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise UserError(
            f"TreeAttention: sinks: expected one for each of {q.shape[1]} heads, got {list(sinks.shape)}"
        )
