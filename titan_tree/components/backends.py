"""Backends of attention and of recurrences, and the choice among them.

A backend that is requested by name is used or refused, never replaced by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from titan_tree.config.registry import Registry
from titan_tree.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch

    from titan_tree.components.recurrence.operator import RecurrenceBackend
    from titan_tree.components.tree_attention.operator import AttentionBackend


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
        component: the class that uses the backends, as error messages name it.
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
        raise UserError(f"{self.component}: {'; '.join(reasons) or f'no automatic backend for {device}'}")


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

RECURRENCE_BACKENDS: BackendRegistry[RecurrenceBackend] = BackendRegistry(
    "recurrence",
    "recurrence backend",
    {
        "hopper": "titan_tree.components.recurrence.hopper",
        "triton": "titan_tree.components.recurrence.triton_kernels",
        "reference": "titan_tree.components.recurrence.reference",
    },
)
