"""AsyncSampling: samples from a RemoteSampler in another thread, at most one step ahead of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import RemoteSampler

T = TypeVar("T")

POLL_S = 0.05  # seconds until a signal ends the wait for rollouts


class InterruptedSampling(Exception):  # noqa: N818  # not an error: the run is about to end
    """A signal arrived while training waited for rollouts."""


class AsyncSampling(Generic[T]):
    """Samples the steps of a run in order.

    Without async steps, step n samples right before it trains, from the weights after step n - 1. With one,
    it samples while step n - 1 trains, from the weights after step n - 2.

    Args:
        sample: samples a step. It runs in another thread.
        async_steps: 0 or 1.
        num_steps: number of steps of the whole run. No later step is sampled.
    """

    def __init__(
        self, sampler: RemoteSampler, sample: Callable[[int], T], async_steps: int, num_steps: int
    ) -> None:
        self._sampler, self._sample = sampler, sample
        self._async_steps, self._num_steps = async_steps, num_steps
        # The step that is sampled, the number of optimizer steps of its weights, and its result.
        self._pending: tuple[int, int, Future[T]] | None = None

    def step(self, step: int, model: TreeModel, is_interrupted: Callable[[], object]) -> tuple[T, int]:
        """Returns what ``step`` has sampled, and starts to sample the next step if there are async steps.

        Args:
            model: the model after the previous step.
            is_interrupted: returns whether a signal asks the run to end.

        Returns:
            The result of ``sample``, and the number of optimizer steps of the weights that sampled it.

        Raises:
            InterruptedSampling: ``is_interrupted`` returned True during the wait.
            Exception: whatever the sampling or the update of its weights raised.
        """
        if self._pending is None:
            self._start(step, model, step - 1)
        assert self._pending is not None
        pending_step, sampled_after, future = self._pending
        assert pending_step == step, "steps are sampled in order"
        while not future.done():
            if is_interrupted():
                raise InterruptedSampling
            time.sleep(POLL_S)
        self._pending = None
        result = future.result()
        if self._async_steps and step < self._num_steps:
            self._start(step + 1, model, step - 1)
        return result, sampled_after

    def close(self) -> None:
        """Ends the sampling of a step that will not train."""
        self._sampler.close()

    def _start(self, step: int, model: TreeModel, trained_steps: int) -> None:
        """Starts to sample ``step`` from the weights of ``model`` after ``trained_steps`` optimizer steps."""
        self._sampler.update(model, trained_steps)
        self._pending = step, trained_steps, in_daemon(partial(self._sample, step), "rollouts")


def in_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Starts ``function`` in a daemon thread, which does not keep the process alive. Returns its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
