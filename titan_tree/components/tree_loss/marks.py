"""Decorators with which a loss function declares what it needs. TreeLoss and TreeStep read the attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from titan_tree.components.tree_loss.call import LossFunction
from titan_tree.errors import AgreedError
from titan_tree.tree.batch import PathPairs

Reduction = Literal["path_mean", "token_mean", "path_token_mean", "rollout_token_mean"]


def whole_path_loss(function: LossFunction, compares_paths: bool = True) -> LossFunction:
    """Marks a loss in which a token's loss depends on other tokens of its path.

    A partition of a tree sees only parts of the paths. For such a loss, TreeStep first scores all partitions
    without gradients.

    Args:
        compares_paths: whether the loss may also depend on other paths of the tree. Such a tree is never
            split over ranks.
    """
    function.needs_whole_paths = True  # type: ignore[attr-defined]
    function.compares_paths = compares_paths  # type: ignore[attr-defined]
    return function


def fixed_reduction(reduction: Reduction) -> Callable[[LossFunction], LossFunction]:
    """Returns a decorator that marks a loss defined with one reduction. TreeLoss refuses the others."""

    def mark(function: LossFunction) -> LossFunction:
        function.reduction = reduction  # type: ignore[attr-defined]
        return function

    return mark


def corrects_rollout(function: LossFunction) -> LossFunction:
    """Marks a loss that reads rollout_logprobs itself. It takes no ``RolloutCorrection``."""
    function.corrects_rollout = True  # type: ignore[attr-defined]
    return function


def reads_reference(function: LossFunction) -> LossFunction:
    """Marks a loss that reads ref_logprobs. In reinforcement learning, the reference then scores rollouts."""
    function.reads_reference = True  # type: ignore[attr-defined]
    return function


class Measurement(NamedTuple):
    """A mean over the global batch that a loss depends on."""

    option: str  # of the loss, which gets the mean unless it is set
    sums: Callable[[Tensor, PathPairs], Tensor]  # (log-probs [F], pairs) -> [2]: sum and number of members
    members: str  # what they are, for the error if there is none

    def mean(self, sums: Tensor) -> Tensor:
        """Returns the mean, 0-dim. Raises AgreedError if there is no member."""
        if not sums[1]:
            raise AgreedError(
                f"loss: expected {self.members} in the global batch, got none; add them to the data, or set "
                f"loss.options.{self.option}"
            )
        return sums[0] / sums[1]


def measures(
    option: str, sums: Callable[[Tensor, PathPairs], Tensor], members: str
) -> Callable[[LossFunction], LossFunction]:
    """Returns a decorator for a loss that depends on a mean over the global batch, see ``Measurement``.

    TreeStep measures it in a pass over all micro-batches, before the first backward pass.
    """

    def mark(function: LossFunction) -> LossFunction:
        function.measurement = Measurement(option, sums, members)  # type: ignore[attr-defined]
        return function

    return mark
