"""Gated DeltaNet on token trees: the gated delta rule and the causal convolution in front of it.

For each head, with t - 1 the token before t on its path (Yang et al., arXiv:2412.06464):

    S_t = exp(g_t) S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t

All children of a node start from the state at the node's end. In the backward pass, the gradients that the
children send to this state add up. A partition takes its first states from a gateway, and exports the states
that later partitions start from.

Read the files in this order. ``titan_tree/tree`` explains chunks (tokens that are computed at once) and
chains (runs of chunks).

    __init__.py      the module TreeGDN
    operator.py      the interface of a backend, and the operator that autograd and torch.compile see
    reference.py     the rule and the convolution in plain PyTorch, to which everything else is compared
    buffers.py       tensors that one kernel writes and another one reads
    triton_kernels/  the rule for any GPU
    hopper/          the same, with the most expensive kernels in Gluon for Hopper GPUs
    conv.py          the convolution: plan and operator;  conv_kernels.py: its kernels

A backend requested by name is used or refused, never replaced by another one.
"""

from __future__ import annotations

from torch import Tensor, nn

from titan_tree.components.tree_gdn import operator
from titan_tree.components.tree_gdn.conv import prepare as prepare_conv
from titan_tree.components.tree_gdn.conv import tree_causal_conv1d
from titan_tree.components.tree_gdn.operator import GdnBackend
from titan_tree.errors import UserError
from titan_tree.registry import AUTO, GDN_BACKENDS
from titan_tree.tree.chunks import Chains, Chunks
from titan_tree.tree.layout import TreeLayout

__all__ = ["GdnBackend", "TreeGDN", "prepare_conv", "tree_causal_conv1d"]


class TreeGDN(nn.Module):
    """The gated delta rule on a forest, with queries and keys normalized to length 1.

    The module has no parameters. Its gradients are deterministic.

    Args:
        backend: a name from ``registry.GDN_BACKENDS``, or "auto".
            "hopper": kernels for Hopper GPUs, partly in Gluon. bfloat16, head dims 64 and 128.
            "triton": kernels for any GPU. bfloat16 or float32, head dims 16, 32, 64 and 128.
            "reference": plain PyTorch; any device, float dtype and head dim.
            "auto": the first of hopper, triton (on GPUs) and reference (elsewhere) that supports the tensors.

    Raises:
        UserError: the backend is unknown.
    """

    def __init__(self, backend: str = AUTO) -> None:
        super().__init__()
        GDN_BACKENDS.load(backend)
        self.backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: TreeLayout,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the rule for N tokens, in fp32 or wider.

        Args:
            q: [N, H, K]. It is normalized and then scaled by K ** -0.5 here.
            k: [N, H, K]. It is normalized here.
            v: [N, G, V] with G a multiple of H: value head i uses key head i // (G / H).
            g: [N, G] fp32, the natural logarithm of each token's decay: 0 or less.
            beta: [N, G], in 0 .. 1.
            layout: layout of N tokens, with chunks and chains.
            states: [R, G, K, V] fp32, the states that ``layout.predecessor`` names; None: no partition.

        Returns:
            o [N, G, V] in v's dtype; for a partition also the states [S, G, K, V] after the tokens
            ``layout.state_exports``, otherwise None.

        Raises:
            UserError: shapes do not fit, the layout has no chunks, or the backend refuses the tensors.
        """
        chunks, chains = _check(q, k, v, g, beta, layout)
        name = GDN_BACKENDS.resolve(self.backend, q.device, q, k, v)
        o, exported = operator.gated_delta_rule(
            name, q, k, v, g, beta, states=states, chunks=chunks, chains=chains
        )
        return o, None if layout.state_exports is None else exported

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TreeLayout
) -> tuple[Chunks, Chains]:
    n, heads, _ = v.shape
    gates_fit = g.shape == (n, heads) == beta.shape
    if q.shape != k.shape or k.shape[0] != n or heads % k.shape[1] or not gates_fit:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, g, beta))
        raise UserError(
            f"TreeGDN: expected q, k [N, H, K], v [N, G, V], H dividing G, and g, beta [N, G], got {shapes}"
        )
    if layout.chunks is None or layout.chains is None or layout.key_index.shape[0] != n:
        raise UserError(
            f"TreeGDN: expected a layout of {n} tokens with chunks and chains, as TreeBatch makes it"
        )
    return layout.chunks, layout.chains
