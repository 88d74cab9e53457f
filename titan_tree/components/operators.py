"""``as_operator`` registers a function as an operator of torch, which torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("titan_tree", "FRAGMENT")


def as_operator(function: Callable[..., Any]) -> Any:
    """Registers a function as the operator titan_tree::NAME and returns the operator.

    The operator is not differentiable: a ``torch.autograd.Function`` calls it, once differentiable.
    ``torch.library.custom_op`` costs the host more, which matters where each layer calls it in each pass.
    In every call, it looks for aliases and unpacks all tensors once more, and its autograd takes several
    times as long as an ``autograd.Function``.
    """
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.titan_tree, name).default
