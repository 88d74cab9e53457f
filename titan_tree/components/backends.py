"""Backends of attention and of recurrences: their interfaces, their registries, and the choice among them.

To add a backend, write a module with the functions of ``AttentionBackend`` or ``RecurrenceBackend``, and
register it below. The files reference.py are the shortest examples. A backend that is requested by name is
used or refused, never replaced by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from titan_tree.config.registry import Registry
from titan_tree.errors import UserError, unknown_name

if TYPE_CHECKING:  # names are checked without torch
    import torch
    from torch import Tensor

    from titan_tree.components.recurrence.buffers import Saved
    from titan_tree.components.tree_attention.block_lists import BlockLists, WindowLists
    from titan_tree.tree.chunks import Chains, Chunks
    from titan_tree.tree.layout import TreeLayout


class Backend(Protocol):
    """What backends of attention and of recurrences have in common. A backend is a module or an object."""

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``."""
        ...

    @property
    def refusal(self) -> Callable[..., str | None]:
        """The function of the inputs that returns why the backend cannot compute them, or None if it can."""
        ...


B = TypeVar("B", bound=Backend)

AUTO = "auto"


class BackendRegistry(Registry[B]):
    """A registry of backends, and the choice among them.

    Args:
        component: what uses the backends, as error messages name it.
        kind, entries: see ``Registry``.
    """

    def __init__(self, component: str, kind: str, entries: Mapping[str, B | str]) -> None:
        super().__init__(kind, entries, interface=("is_automatic", "refusal"))
        self.component = component

    def load(self, name: str) -> None:
        """Imports the backends that ``resolve`` may return for ``name``, because torch.compile cannot do it.

        Raises:
            UserError: ``name`` is neither "auto" nor a registered backend.
        """
        if name != AUTO and name not in self:
            raise unknown_name(f"{self.component} backend", name, [AUTO, *self])
        for candidate in self if name == AUTO else [name]:
            self[candidate]

    def automatic(self, device: torch.device) -> list[str]:
        """Returns the backends that "auto" tries for tensors on ``device``, in the order of registration."""
        return [name for name in self if self[name].is_automatic(device)]

    def resolve(self, name: str, device: torch.device, *inputs: object) -> str:
        """Returns the backend that computes ``inputs``: ``name``, or for "auto" the first without a refusal.

        Raises:
            UserError: the backend called ``name`` refuses the inputs, or for "auto" all automatic ones do.
        """
        reasons = []
        for candidate in self.automatic(device) if name == AUTO else [name]:
            reason = self[candidate].refusal(*inputs)
            if reason is None:
                return candidate
            reasons.append(f"backend {candidate!r} {reason}")
        hint = "" if name == AUTO else "; use 'auto', which chooses one that works here"
        raise UserError(
            f"{self.component}: {'; '.join(reasons) or f'no automatic backend for {device}'}{hint}"
        )


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

        The reason completes the sentence "backend 'name' ..." in one line: what the backend expects, and
        what it got. torch.compile traces this function, so it must not read values.
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
        prepared: Any,
        scale: float,
        scoring: Scoring,
        deterministic: bool,
    ) -> Tensor:
        """Returns the output [N, H, Dv]. It is differentiable in q, k, v, context and sinks.

        Other arguments are those of ``TreeAttention.forward``.

        Args:
            prepared: the result of ``prepare(layout, scoring.window)``.
            scale: factor of the scores.
            scoring: options of the layer that ``refusal`` has accepted.
            deterministic: whether equal inputs must give equal gradients, bit for bit.
        """


class KernelBackend(AttentionBackend, Protocol):
    """A backend whose kernels run inside the shared operator ``titan_tree::tree_attention``.

    The operator handles autograd, torch.compile, activation checkpointing and gateway context. The backend
    uses ``block_lists.prepare`` as its ``prepare``. Its kernels get contiguous, 16-byte aligned tensors.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        end: Tensor,
        column: Tensor,
        lists: BlockLists | WindowLists,
        scale: float,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output o [N, H, Dv] and lse [H, padded N], see ``block_lists.empty_lse``.

        Args:
            q: [N, H, D].
            k: [M, Hkv, D]; v: [M, Hkv, Dv].
            end: [M] int32, ``TreeLayout.subtree_end``.
            column: [N] int32, ``TreeLayout.key_index``.
            lists: blocks of queries and keys that meet; with a window, ``WindowLists``.
            scale: factor of the scores.
            scoring: options that ``refusal`` has accepted, without the window, which the lists contain.
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
        lists: BlockLists | WindowLists,
        scale: float,
        scoring: Scoring,
        deterministic: bool,
    ) -> list[Tensor]:
        """Returns dq, dk, dv and, with sinks, their gradient, from the gradient do [N, H, Dv] of o."""


ATTENTION_BACKENDS: BackendRegistry[AttentionBackend] = BackendRegistry(
    "TreeAttention",
    "attention backend",
    {
        "hopper": "titan_tree.components.tree_attention.hopper",
        "triton": "titan_tree.components.tree_attention.triton_kernels",
        "flash": "titan_tree.components.tree_attention.flash",
        "flex": "titan_tree.components.tree_attention.flex",
        "reference": "titan_tree.components.tree_attention.reference",
    },
)


class RecurrenceBackend(Protocol):
    """One implementation of recurrences: a module, or any other object, with these functions.

    Sizes: N tokens, H key heads, G value heads, K and V head dims, R states from a gateway, X exported
    states. The rule follows from g and beta, see ``recurrence/__init__.py``.
    """

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``."""

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
        """Returns the reason why this backend cannot compute tensors like these, or None if it can.

        The reason completes the sentence "backend 'name' ..." in one line: what the backend expects, and
        what it got. torch.compile traces this function, so it must not read values.
        """

    def empty_saved(self, q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chains: Chains) -> Saved:
        """Returns uninitialized tensors like those that ``forward`` saves; they may be empty."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        states: Tensor | None,
        chunks: Chunks,
        chains: Chains,
    ) -> tuple[Tensor, Tensor, Saved]:
        """Returns o [N, G, V], the exported states [X, G, K, V], and what ``backward`` needs. X may be 0.

        Tensors are those of the recurrence's rule, of any strides. Exported states are those at the ends of
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
        beta: Tensor | None,
        states: Tensor | None,
        saved: Saved,
        chunks: Chunks,
        chains: Chains,
    ) -> list[Tensor]:
        """Returns the gradients of the inputs that are not None: contiguous, in their dtypes."""


RECURRENCE_BACKENDS: BackendRegistry[RecurrenceBackend] = BackendRegistry(
    "recurrence",
    "recurrence backend",
    {
        "hopper": "titan_tree.components.recurrence.hopper",
        "triton": "titan_tree.components.recurrence.triton_kernels",
        "reference": "titan_tree.components.recurrence.reference",
    },
)
