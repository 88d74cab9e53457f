"""What a model reads and writes while it samples: contexts and completions, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from titan_tree.tree.images import PathImages

Ids = Sequence[int]  # of tokens


class Context(list[int]):
    """Token ids with the images that they show, see ``TokenPath``."""

    def __init__(self, tokens: Iterable[int] = (), images: PathImages = ()) -> None:
        super().__init__(tokens)
        self.images = images

    def part(self, start: int, stop: int) -> Context:
        """Returns the tokens start .. stop - 1, and the images that begin among them."""
        images = tuple((at - start, image) for at, image in self.images if start <= at < stop)
        return Context(self[start:stop], images)

    def extended(self, tokens: Ids) -> Context:
        """Returns the tokens with others, and their images, behind them."""
        images = tuple((len(self) + at, image) for at, image in context_images(tokens))
        return Context([*self, *tokens], (*self.images, *images))


def context_images(context: Ids) -> PathImages:
    """Returns the images of a context. A plain list has none."""
    return context.images if isinstance(context, Context) else ()


class Completion(NamedTuple):
    """A sampled turn. It ends with a stop token, unless the limit of tokens cut it off.

    Attributes:
        logprobs: log-probs of these tokens in nats, at temperature 1 and over ``sampling_mask``.
        experts: [t, L, k], the experts of the first t tokens of the context and the turn, see ``TokenPath``.
            None if the sampler did not record them.
        sampling_mask: the ids that sampling kept for each token of the turn, see ``TokenPath``. None: the
            whole vocabulary.
        policy_version: optimizer steps of the weights that sampled the turn; None: not known.
    """

    tokens: list[int]
    logprobs: list[float]
    experts: np.ndarray | None = None
    sampling_mask: Sequence[Sequence[int] | np.ndarray] | None = None
    policy_version: int | None = None
