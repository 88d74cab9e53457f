"""LossSpec: a loss function and what it needs from TreeLoss and TreeStep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from titan_tree.errors import AgreedError
from titan_tree.registry import LOSSES
from titan_tree.tree.batch import PathPairs

Reduction = Literal["path_mean", "token_mean", "path_token_mean", "rollout_token_mean"]

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
LossResult = Tensor | LossAndMetrics  # losses [F], or losses [F] and metrics, each [F]
LossFunction = Callable[..., LossResult]  # called as function(log-probs [F] in nats, pairs, **options)


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
        """Calls the function."""
        return self.function(logprobs, pairs, *args, **options)
