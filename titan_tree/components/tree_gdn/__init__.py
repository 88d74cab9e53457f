"""Gated DeltaNet on token trees: the gated delta rule and the causal convolution before it.

    S_t = exp(g_t) S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t      (arXiv:2412.06464)

for each head, where t - 1 is the token before t *on its path*: a node starts from the state at its parent's
end, and the gradients that its children send there add up. Of a partition the first states come from a
gateway, and those that later forwards start from go into it.

chunks, chains   in data/: which tokens are read at once, from where their state comes, in which order
reference.py     both in plain torch, to which all else is compared
kernels_*.py     the rule in Triton, forward and backward, for any GPU
hopper/          what takes most of the time once more for Hopper, in Gluon
buffers.py       what the kernels hand to each other
operator.py      what autograd, torch.compile and checkpointing know of it
conv.py          the convolution: kernels and operator
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from titan_tree.components.tree_gdn import operator
from titan_tree.components.tree_gdn.conv import prepare as prepare_conv
from titan_tree.components.tree_gdn.conv import tree_causal_conv1d
from titan_tree.errors import UserError
from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import Chunks
from titan_tree.tree.layout import TreeLayout

__all__ = ["Backend", "TreeGDN", "prepare_conv", "tree_causal_conv1d"]

Backend = Literal["auto", "triton", "reference"]


class TreeGDN(nn.Module):
    """The gated delta rule of N tokens on a forest, with queries and keys normalised to length 1.

    Without parameters. H key heads, G value heads, a multiple of H: value head i uses key head i // (G / H).
    Deterministic.

    Args:
        backend: "triton": own kernels, for bf16 and fp32, heads of 16, 32, 64 or 128 dims; on Hopper, in bf16
            and for 64 and 128 dims, partly in Gluon, which rounds the same values. "reference": plain torch,
            any dtype and size. "auto": the first on a GPU, the second elsewhere.
    """

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        if backend not in get_args(Backend):
            raise UserError(
                f"TreeGDN: backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}"
            )
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
        """o [N, G, V] in v's dtype, computed in fp32 at least, from q, k [N, H, K] and v [N, G, V].

        Args:
            q: scaled by K ** -0.5 here, after normalisation.
            g: [N, G] fp32, log of the decay, <= 0.
            beta: [N, G], 0 .. 1.
            states: of a partition [R, G, K, V] fp32: the states that ``layout.predecessor`` names.
        Returns:
            o, and of a partition the states [S, G, K, V] after the tokens ``layout.state_exports``.
        """
        chunks, chains = _check(q, k, v, g, beta, layout)
        kernels = self.backend == "triton" or (self.backend == "auto" and q.is_cuda)
        o, exported = operator.gated_delta_rule(q, k, v, g, beta, states, chunks, chains, kernels)
        return o, None if layout.state_exports is None else exported


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
    if layout.chunks is None or layout.chains is None or layout.positions.shape[0] != n:
        raise UserError(f"TreeGDN: expected a layout of {n} tokens with chunks and chains (TreeBatch)")
    return layout.chunks, layout.chains
