"""Ahead: samples from a RemoteSampler in another thread, at most one step ahead of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.background import in_daemon
from titan_tree.rl.sampler import RemoteSampler

T = TypeVar("T")

POLL_S = 0.05  # how soon a signal ends the wait for rollouts


class InterruptedSampling(Exception):  # noqa: N818  # no error: the run is about to end
    """A signal arrived while training waited for rollouts."""


@dataclass(frozen=True)
class Sampled(Generic[T]):
    """What was sampled for a step.

    Attributes:
        weights: number of optimizer steps after which the sampler got its weights.
    """

    value: T
    weights: int


class Ahead(Generic[T]):
    """Samples the steps of a run in order.

    With ``steps`` = 0, step n samples right before it trains, from the weights after step n - 1. With 1, it
    samples while step n - 1 trains, from the weights after step n - 2.

    Args:
        sample: samples a step. It runs in another thread.
        steps: 0 or 1.
        num_steps: of the whole run; no later step is sampled.
    """

    def __init__(
        self, sampler: RemoteSampler, sample: Callable[[int], T], steps: int, num_steps: int
    ) -> None:
        self._sampler, self._sample, self._steps, self._num_steps = sampler, sample, steps, num_steps
        self._pending: tuple[int, int, Future[T]] | None = None  # step, its weights, and what it samples

    def step(self, step: int, model: TreeModel, is_interrupted: Callable[[], object]) -> Sampled[T]:
        """Returns what ``step`` has sampled, and starts the next one if it samples ahead.

        Args:
            model: trained until the step before.
            is_interrupted: whether a signal wants the run to end.

        Raises:
            InterruptedSampling: ``is_interrupted`` returned True during the wait.
            Exception: whatever the sampling or the update of its weights raised.
        """
        if self._pending is None:
            self._start(step, model, step - 1)
        assert self._pending is not None
        pending, weights, future = self._pending
        assert pending == step, "steps are sampled in order"
        while not future.done():
            if is_interrupted():
                raise InterruptedSampling
            time.sleep(POLL_S)
        self._pending = None
        value = future.result()
        if self._steps and step < self._num_steps:
            self._start(step + 1, model, step - 1)
        return Sampled(value, weights)

    def close(self) -> None:
        """Ends the sampling of a step that no longer trains."""
        self._sampler.close()

    def _start(self, step: int, model: TreeModel, trained: int) -> None:
        """Starts to sample ``step`` from the weights of ``model`` after ``trained`` steps."""
        self._sampler.update(model, trained)
        self._pending = step, trained, in_daemon(partial(self._sample, step), "rollouts")
