"""The interface of TreeAttention's backends.

To add a backend, write a module with the functions of ``AttentionBackend`` and register it in
``titan_tree.registry.ATTENTION_BACKENDS``. ``reference.py`` is the shortest example.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_tree.components.tree_attention.plan import Plan, WindowPlan
from titan_tree.tree.layout import TreeLayout


class Scoring(NamedTuple):
    """Where a layer differs from softmax(q k^T / sqrt(D)) over all keys on the path."""

    window: int | None = None  # a query sees the last ``window`` tokens of its path only, itself included
    softcap: float | None = None  # c tanh(s / c) replaces each score s (Gemma 2, arXiv:2408.00118)
    # [H]: an extra score in each head's softmax, for a key without a value (gpt-oss, arXiv:2508.10925)
    sinks: Tensor | None = None


PLAIN = Scoring()


class AttentionBackend(Protocol):
    """One implementation of TreeAttention: a module, or any other object, with these functions."""

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``.

        A layout is prepared before the dtype of its queries is known. Automatic backends of one device
        therefore share their ``prepare``.
        """

    def refusal(self, q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
        """Returns the reason why this backend cannot compute tensors like these, or None if it can.

        The reason completes the sentence "backend 'name' ..." in one line: what the backend expects, what it
        got, and which backend to use instead. torch.compile traces this function, so it must not read values.
        """

    def prepare(self, layout: TreeLayout, window: int | None) -> Any:
        """Returns what ``attention`` derives from a layout, once per batch and shared by all layers.

        Args:
            window: the layers' window, see ``Scoring``.

        Raises:
            UserError: the backend does not run on the layout's device.
        """

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Tensor | None,
        layout: TreeLayout,
        plan: Any,
        scale: float,
        scoring: Scoring,
        deterministic: bool,
    ) -> Tensor:
        """Returns the output [N, H, Dv]. It is differentiable in q, k, v, context and sinks.

        Other arguments are those of ``TreeAttention.forward``.

        Args:
            plan: the result of ``prepare(layout, scoring.window)``.
            scale: factor of the scores.
            scoring: options of the layer that ``refusal`` has accepted.
            deterministic: whether equal inputs must give equal gradients, bit for bit.
        """


class KernelBackend(AttentionBackend, Protocol):
    """A backend whose kernels run inside the shared operator (``operator.py``).

    The operator handles autograd, torch.compile, activation checkpointing and gateway context. The backend
    uses ``plan.prepare`` as its ``prepare``. Its kernels get contiguous, 16-byte aligned tensors.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        end: Tensor,
        column: Tensor,
        plan: Plan | WindowPlan,
        scale: float,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output o [N, H, Dv] and lse [H, padded N], see ``plan.empty_lse``.

        Args:
            q: [N, H, D].
            k: [M, Hkv, D]; v: [M, Hkv, Dv].
            end: [M] int32, ``TreeLayout.subtree_end``.
            column: [N] int32, ``TreeLayout.key_index``.
            plan: lists of blocks of queries and keys that meet: a ``Plan``, or a ``WindowPlan`` for a window.
            scale: factor of the scores.
            scoring: options that ``refusal`` has accepted, without the window, which the plan contains.
        """

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        end: Tensor,
        column: Tensor,
        plan: Plan | WindowPlan,
        scale: float,
        scoring: Scoring,
        deterministic: bool,
    ) -> list[Tensor]:
        """Returns dq, dk, dv and, with sinks, their gradient, from the gradient do [N, H, Dv] of o."""


def plain_only(q: Tensor, v: Tensor, scoring: Scoring) -> str | None:
    """Returns a reason to refuse everything but plain softmax over heads of one size, or None."""
    if given := [name for name, value in scoring._asdict().items() if value is not None]:
        return f"has no {' and '.join(given)}; use 'triton'"
    if v.shape[-1] != q.shape[-1]:
        return f"expected values as wide as queries, {q.shape[-1]}, got {v.shape[-1]}; use 'triton'"
    return None
