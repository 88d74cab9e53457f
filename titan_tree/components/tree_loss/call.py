"""Calls a loss function, which may be the user's own, and checks what it returns."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import fields

from torch import Tensor

from titan_tree.components.tree_loss.spec import LossFunction
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.paths import TokenPath


def call_loss(
    name: str,
    function: LossFunction,
    logprobs: Tensor,
    pairs: PathPairs,
    options: Mapping[str, float | Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the losses and the metrics of ``function``, [F] each.

    Raises:
        UserError: the function returns something else, or reads a field that the pairs do not have.
    """
    try:
        result: object = function(logprobs, pairs, **options)
    except (AttributeError, TypeError) as error:
        # A missing field is None, which no operator accepts.
        if "NoneType" not in str(error) and getattr(error, "obj", None) is not pairs:
            raise
        raise UserError(f"loss {name!r}: {_missing_field(error, pairs)}") from error
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    losses = _checked(f"loss {name!r}: expected losses", losses, logprobs)
    if not losses.is_floating_point():
        raise UserError(f"loss {name!r}: expected floating-point losses, got dtype {losses.dtype}")
    if not isinstance(metrics, dict):
        raise UserError(
            f"loss {name!r}: expected a dict of metrics beside the losses, got {type(metrics).__name__}"
        )
    checked = {
        metric: _checked(f"loss {name!r}: metric {metric!r}: expected values", values, logprobs)
        for metric, values in metrics.items()
    }
    return losses, checked


def _checked(expected: str, values: object, logprobs: Tensor) -> Tensor:
    """Returns ``values``. Raises UserError unless they are one number per log-prob, on the same device."""
    if not isinstance(values, Tensor):
        got = "None" if values is None else f"a value of type {type(values).__name__}"
    elif values.shape != logprobs.shape:
        got = f"shape {list(values.shape)}" if values.ndim else "a scalar"
    elif values.device != logprobs.device:
        got = f"a tensor on {values.device}"
    else:
        return values
    raise UserError(
        f"{expected} of shape {list(logprobs.shape)}, one number per log-prob, on "
        f"{logprobs.device}, got {got}; TreeLoss applies masks and weights and takes the mean"
    )


def _missing_field(error: Exception, pairs: PathPairs) -> str:
    """Says which fields the pairs have, and which line of the loss function failed."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    names = [field.name for field in fields(pairs)]
    of_paths = {field.name for field in fields(TokenPath)}
    missing = [name for name in names if name in of_paths and getattr(pairs, name) is None]
    known = ", ".join(name for name in names if getattr(pairs, name) is not None)
    hint = f"; the paths lack {', '.join(missing)}, so give the field to every path" if missing else ""
    return f"{error} ({line.filename}:{line.lineno}); the pairs have {known}{hint}"
