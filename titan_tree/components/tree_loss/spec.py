"""LossSpec: a loss function and what it needs from TreeLoss and TreeStep."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields

import torch
from torch import Tensor

from titan_tree.components.tree_loss.settings import LOSSES, LossFunction, Reduction
from titan_tree.errors import AgreedError, UserError
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.paths import TokenPath

COUNT_ONCE = ("distinct_token_mean", "first_path_token_mean")  # need ``TokenTree.weigh_edges``

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
LossResult = Tensor | LossAndMetrics  # losses [F], or losses [F] and metrics, each [F]


@dataclass(frozen=True)
class Measurement:
    """A mean over the global batch that a loss depends on."""

    option: str  # option of the loss that receives the mean, unless the user sets it
    sums: Callable[[Tensor, PathPairs], Tensor]  # (log-probs [F], pairs) -> [2]: sum and number of members
    members: str  # what the mean runs over, for the error message if there is nothing

    def mean(self, sums: Tensor) -> Tensor:
        """Returns the mean, 0-dim. Raises AgreedError if there is no member."""
        if not sums[1]:
            raise AgreedError(
                f"loss: expected {self.members} in the global batch, got none; add them to the data, or set "
                f"loss.options.{self.option}"
            )
        return sums[0] / sums[1]


@dataclass(frozen=True)
class LossSpec:
    """A loss function and what it needs.

    Declare needs with a decorator such as ``@partial(LossSpec, needs_whole_paths=True)``. A plain function
    declares none.
    """

    function: LossFunction
    _: KW_ONLY
    reduction: Reduction | None = None  # the only reduction that defines the loss; None: any
    # Whether a token's loss depends on other tokens of its path. A partition of a tree sees only parts of the
    # paths, so TreeStep first scores all partitions without gradients.
    needs_whole_paths: bool = False
    # Whether a token's loss may also depend on other paths of its tree. Ranks then never split a tree.
    compares_paths: bool = False
    corrects_rollout: bool = False  # whether it reads rollout_logprobs and so takes no RolloutCorrection
    # Whether it reads ref_logprobs. In reinforcement learning, the reference model then scores rollouts.
    reads_reference: bool = False
    reads_targets: bool = False  # whether it reads ``PathPairs.targets``; not with needs_whole_paths
    reads_preferences: bool = False  # whether it reads preferences, so that every path needs one
    # Whether it reads the pairs. Otherwise the loss of an edge is the same on all paths, and batches may hold
    # one pair per edge (``merged_pairs``).
    reads_pairs: bool = True
    # TreeStep measures the mean in a pass over all micro-batches, before the first backward pass.
    measurement: Measurement | None = None

    @classmethod
    def of(cls, name: str) -> LossSpec:
        """Returns the registered loss with this name. Raises UserError for an unknown name."""
        return cls.from_function(LOSSES[name])

    @classmethod
    def from_function(cls, function: LossFunction) -> LossSpec:
        """Returns ``function`` itself if it is a LossSpec, and otherwise one without needs."""
        return function if isinstance(function, cls) else cls(function)

    def __call__(self, logprobs: Tensor, pairs: PathPairs, *args: object, **options: object) -> LossResult:
        return self.function(logprobs, pairs, *args, **options)


def call_loss(
    name: str,
    function: LossFunction,
    logprobs: Tensor,
    pairs: PathPairs,
    options: Mapping[str, float | Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the losses and the metrics of ``function``, [F] each.

    Raises:
        UserError: the function returns something else, changes an input in place, runs a backward pass, or
            reads a field that the pairs do not have; or it is the user's, and raises.
    """
    of_targets = {} if pairs.targets is None else vars(pairs.targets)
    inputs = {
        key: value
        for key, value in {"logprobs": logprobs, **vars(pairs), **of_targets}.items()
        if isinstance(value, Tensor) and not value.is_inference()
    }
    before = {key: value._version for key, value in inputs.items()}
    passes: list[object] = []  # the backward passes through the log-probs during the call
    node = logprobs.grad_fn
    hook = node and node.register_prehook(passes.append)
    with LOSSES.calling(name, ", ".join(["logprobs", "pairs", *options])):
        try:
            result: object = function(logprobs, pairs, **options)
        except (AttributeError, TypeError) as error:
            # A missing field is None, which no operator accepts.
            if "NoneType" not in str(error) and getattr(error, "obj", None) is not pairs:
                raise
            raise UserError(f"loss {name!r}: {_missing_field(error, pairs)}") from error
        finally:
            if hook:
                hook.remove()
    if passes:
        raise UserError(
            f"loss {name!r}: expected losses, but it calls backward() itself; remove the call: the trainer "
            "runs the backward pass of what the loss returns"
        )
    if changed := [key for key, version in before.items() if inputs[key]._version != version]:
        raise UserError(
            f"loss {name!r}: expected unchanged inputs, but it changes {changed[0]} in place; compute a new "
            "tensor instead, as x = x + 1 and not x += 1"
        )
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    losses = _checked(f"loss {name!r}: expected losses", losses, logprobs)
    if not losses.is_floating_point():
        raise UserError(f"loss {name!r}: expected floating-point losses, got dtype {losses.dtype}")
    if logprobs.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
        raise UserError(
            f"loss {name!r}: expected losses with a gradient with respect to logprobs, got none; compute "
            "them from logprobs without detach(), .item() or torch.no_grad()"
        )
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
    elif values.is_complex():
        got = f"dtype {values.dtype}"
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
    of_paths = {field.name for field in fields(TokenPath) if field.init}
    missing = [name for name in names if name in of_paths and getattr(pairs, name) is None]
    known = ", ".join(name for name in names if getattr(pairs, name) is not None)
    hint = f"; the paths lack {', '.join(missing)}, so give the field to every path" if missing else ""
    return f"{error} ({line.filename}:{line.lineno}); the pairs have {known}{hint}"
