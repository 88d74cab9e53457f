"""Recurrences on token trees: Gated DeltaNet, KDA and Mamba-2, and the causal convolution in front of them.

For each head, with t - 1 the token before t on its path and a_t = exp(g_t):

    S_t = Diag(a_t) S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t

The tensors choose the rule:

    g [N, G] and beta       Gated DeltaNet (arXiv:2412.06464): one decay per head
    g [N, G, K] and beta    Kimi Delta Attention (arXiv:2510.26692): a decay per channel of the keys
    g [N, G], beta None     Mamba-2's SSD (arXiv:2405.21060): S_t = a_t S_{t-1} + k_t v_t^T, no delta rule

All children of a node start from the state at the node's end. In the backward pass, the gradients that the
children send to this state add up. A partition takes its first states from a gateway, and exports the states
that later partitions start from.

Read the files in this order. ``titan_tree/tree`` explains chunks (tokens that are computed at once) and
chains (runs of chunks).

    __init__.py      the modules TreeGDN, TreeKDA and TreeSSD
    operator.py      the operator that autograd and torch.compile see
    reference.py     the rules and the convolution in plain PyTorch, to which everything else is compared
    buffers.py       tensors that one kernel writes and another one reads
    launch.py        the order of all launches
    triton_kernels/  the rules for any GPU
    hopper/          the same, with the most expensive kernels in Gluon for Hopper GPUs
    conv.py          the convolution: index and operator;  conv_kernels.py: its kernels

A backend requested by name is used or refused, never replaced by another one.
"""

from __future__ import annotations

from torch import Tensor, nn

from titan_tree.components.backends import AUTO, RECURRENCE_BACKENDS, RecurrenceBackend
from titan_tree.components.recurrence import operator
from titan_tree.components.recurrence.conv import prepare as prepare_conv
from titan_tree.components.recurrence.conv import tree_causal_conv1d
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

__all__ = [
    "RecurrenceBackend", "TreeGDN", "TreeKDA", "TreeRecurrence", "TreeSSD", "prepare_conv",
    "tree_causal_conv1d",
]  # fmt: skip


class TreeRecurrence(nn.Module):
    """What the modules of all rules share. They have no parameters, and their gradients are deterministic.

    Args:
        backend: a name from ``RECURRENCE_BACKENDS``, or "auto".
            "hopper": kernels for Hopper GPUs, partly in Gluon. bfloat16, head dims 64 and 128.
            "triton": kernels for any GPU. bfloat16 or float32, head dims 16, 32, 64 and 128.
            "reference": plain PyTorch; any device, float dtype and head dim.
            "auto": the first of hopper, triton (on GPUs) and reference (elsewhere) that supports the tensors.

    Raises:
        UserError: the backend is unknown.
    """

    gates: str  # the shapes of g and beta, as error messages show them
    gate_dims = 2  # the number of dims of g

    def __init__(self, backend: str = AUTO) -> None:
        super().__init__()
        RECURRENCE_BACKENDS.load(backend)
        self.backend = backend

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, layout: TreeLayout,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        rule, (n, heads, _) = type(self).__name__, v.shape
        gates_fit = g.shape == (n, heads, *k.shape[2:])[: self.gate_dims]
        gates_fit &= beta is None or beta.shape == (n, heads)
        if q.shape != k.shape or k.shape[0] != n or heads % k.shape[1] or not gates_fit:
            shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, g, beta) if x is not None)
            raise UserError(
                f"{rule}: expected q, k [N, H, K], v [N, G, V], H dividing G, and {self.gates}, got {shapes}"
            )
        if layout.chunks is None or layout.chains is None or layout.key_index.shape[0] != n:
            raise UserError(
                f"{rule}: expected a layout of {n} tokens with chunks and chains, as TreeBatch makes it"
            )
        name = RECURRENCE_BACKENDS.resolve(self.backend, q.device, q, k, v, g, beta)
        o, exported = operator.tree_recurrence(
            name, q, k, v, g, beta, states=states, chunks=layout.chunks, chains=layout.chains
        )
        return o, None if layout.state_exports is None else exported

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


class TreeGDN(TreeRecurrence):
    """The gated delta rule on a forest, with queries and keys normalized to length 1."""

    gates = "g, beta [N, G]"

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
            beta: [N, G], in 0 .. 2.
            layout: layout of N tokens, with chunks and chains.
            states: [R, G, K, V] fp32, the states that ``layout.predecessor`` names; None: no partition.

        Returns:
            o [N, G, V] in v's dtype; for a partition also the states [S, G, K, V] after the tokens
            ``layout.state_exports``, otherwise None.

        Raises:
            UserError: shapes do not fit, the layout has no chunks, or the backend refuses the tensors.
        """
        return self._run(q, k, v, g, beta, layout, states)


class TreeKDA(TreeGDN):
    """Kimi Delta Attention on a forest: the gated delta rule with a decay per channel of the keys.

    In ``forward``, g is [N, G, K] fp32, the natural logarithm of each channel's decay: 0 or less.
    """

    gates = "g [N, G, K], beta [N, G]"
    gate_dims = 3


class TreeSSD(TreeRecurrence):
    """Mamba-2's state space duality (SSD) on a forest: decayed sums of k v^T, without the delta rule."""

    gates = "g [N, G]"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, layout: TreeLayout, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the rule for N tokens. In the words of Mamba-2, H is the number of groups.

        Args:
            q: [N, H, K], Mamba-2's C. It is neither normalized nor scaled.
            k: [N, H, K], Mamba-2's B. It is not normalized.
            v: [N, G, V], Mamba-2's dt * x.
            g: [N, G] fp32, Mamba-2's dt * A: 0 or less.

        The other arguments, the results and the errors are those of ``TreeGDN.forward``.
        """
        return self._run(q, k, v, g, None, layout, states)
