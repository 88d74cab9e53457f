"""The choice of a backend for TreeAttention and TreeGDN.

A backend is a module, or any other object, with the functions of ``tree_attention.backend.AttentionBackend``
or ``tree_gdn.backend.GdnBackend``. This file relies on two of them: ``is_automatic(device)`` says whether
"auto" may choose the backend on a device; ``refusal(*inputs)`` returns the reason why it cannot compute the
inputs, or None.
"""

from __future__ import annotations

from typing import Any

import torch

from titan_tree.errors import UserError
from titan_tree.registry import Registry, unknown_name

AUTO = "auto"


def import_backends(component: str, registry: Registry[Any], name: str) -> None:
    """Imports the backends that ``resolve`` may return for ``name``: torch.compile cannot trace an import.

    Raises:
        UserError: ``name`` is neither "auto" nor a registered backend.
    """
    if name != AUTO and name not in registry:
        raise unknown_name(f"{component} backend", name, [AUTO, *registry])
    for candidate in registry if name == AUTO else [name]:
        registry[candidate]


def automatic_backends(registry: Registry[Any], device: torch.device) -> list[str]:
    """Returns the backends that "auto" tries for tensors on ``device``, in the order of registration."""
    return [name for name in registry if registry[name].is_automatic(device)]


def resolve(component: str, registry: Registry[Any], name: str, device: torch.device, *inputs: Any) -> str:
    """Returns the backend that computes ``inputs``: ``name``, or for "auto" the first that does not refuse.

    Raises:
        UserError: the backend called ``name`` refuses the inputs, or for "auto" all automatic ones do.
    """
    reasons = []
    for candidate in automatic_backends(registry, device) if name == AUTO else [name]:
        reason = registry[candidate].refusal(*inputs)
        if reason is None:
            return candidate
        reasons.append(f"backend {candidate!r} {reason}")
    raise UserError(f"{component}: {'; '.join(reasons) or f'no automatic backend for {device}'}")
