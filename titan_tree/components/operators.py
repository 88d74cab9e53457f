"""``as_operator`` registers a function as an operator of torch, which torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("titan_tree", "FRAGMENT")


def as_operator(function: Callable[..., Any], overwrites: Sequence[str] = ()) -> Any:
    """Registers a function as the operator titan_tree::NAME and returns the operator.

    ``overwrites`` names the arguments that it writes to.

    The operator is not differentiable: a ``torch.autograd.Function`` calls it, once differentiable.
    ``torch.library.custom_op`` costs the host more, which matters where each layer calls it in each pass.
    In every call, it looks for aliases and unpacks all tensors once more, and its autograd takes several
    times as long as an ``autograd.Function``.
    """
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=overwrites))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.titan_tree, name).default
