"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from titan_tree.tree.batch import PathPairs


def sft(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns the negative log-likelihood of each token, [F] in nats."""
    return -logprobs
