"""Sampler: the protocol of objects that continue contexts of token ids with one turn each.

``draw`` samples a token for each row of logits. Each row has random numbers of its own. The other rows of a
batch change its logits by rounding only. In bf16, this may change a turn; in fp32, it hardly ever does.

Shapes: B rows, V vocabulary size.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree.context import Completion, Ids, context_images
from titan_tree.tree.paths import TokenPath

T = TypeVar("T")
UNIT = 2.0**40  # the integer that stands for probability 1


class Sampler(Protocol):
    """Samples turns at temperature 1, from the whole vocabulary or from the ids of ``sampling_mask``."""

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """Samples one turn for each context, in the same order.

        Args:
            contexts: token ids. Several may be equal. Those with images are of type ``Context``, and only
                samplers with an attribute ``reads_images`` that is true get them.
            max_tokens: maximal number of tokens of each turn.
            stops: the ids that end a turn.
            seeds: a number from 0 to 2**62 for each turn. A deterministic sampler returns the same turns for
                the same weights and arguments. If only the other contexts differ, rounding may differ.
        """
        ...


class LockedSampler:
    """A sampler that holds a lock while it samples."""

    def __init__(self, sampler: Sampler, lock: threading.Lock) -> None:
        self.sampler, self.lock = sampler, lock
        self.reads_images = getattr(sampler, "reads_images", False)

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``."""
        with self.lock:
            return self.sampler.sample(contexts, max_tokens, stops, seeds)


@runtime_checkable
class RemoteSampler(Sampler, Protocol):
    """A sampler with weights of its own. It may sample in other threads while the model trains.

    With ``rl.async_steps`` above 1, several threads may call ``sample`` at once. Each rank has one, and
    samples tasks of its own.
    """

    def update(self, model: TreeModel, step: int) -> None:
        """Takes over the weights of ``model``, which ``step`` optimizer steps have trained.

        The main thread calls it before the first ``sample`` with these weights, never during a ``sample``.
        On several ranks, it is collective, and ``model`` is sharded.
        """
        ...

    def close(self) -> None:
        """Ends a running ``sample``, which may raise any exception, and frees the sampler's resources."""
        ...


class SharedSampler:
    """A RemoteSampler that several threads use, while the main thread updates its weights between rounds.

    A round is a call of ``sample``. An update waits for the rounds that run, and holds back others, so no
    turn mixes weights. Completions get the version of the weights that sampled them.

    Args:
        sampler: the sampler.
        wait: called with a condition, returns when it is true. On several ranks, it is collective.
    """

    def __init__(self, sampler: RemoteSampler, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.sampler, self.wait, self.version = sampler, wait, -1
        self.reads_images = getattr(sampler, "reads_images", False)
        self._changed = threading.Condition()
        self._num_rounds, self._is_updating = 0, False

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_updating)
            self._num_rounds += 1
        try:
            turns = self.sampler.sample(contexts, max_tokens, stops, seeds)
            return [turn._replace(policy_version=self.version) for turn in turns]
        finally:
            with self._changed:
                self._num_rounds -= 1

    def update(self, model: TreeModel, step: int) -> None:
        with self._changed:
            self._is_updating = True
        try:
            self.wait(lambda: not self._num_rounds)
            self.sampler.update(model, step)
            self.version = step
        finally:
            with self._changed:
                self._is_updating = False
                self._changed.notify_all()

    def close(self) -> None:
        self.sampler.close()


class InterruptedSampling(Exception):  # noqa: N818  # not an error: the run is about to end
    """A signal arrived while training waited for rollouts."""


def check_positions(contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], num_positions: int) -> None:
    """Raises UserError if a context and its turn may exceed the model's positions."""
    size = max(len(context) + limit for context, limit in zip(contexts, max_tokens, strict=True))
    if size > num_positions:
        raise UserError(
            f"rl.max_rollout_tokens: expected at most the model's {num_positions:,} positions, got {size:,} "
            "for a context and its turn; lower it"
        )


def distinct_contexts(contexts: Sequence[Ids]) -> tuple[list[TokenPath], list[int]]:
    """Returns the distinct contexts as paths, and for each context the number of its path.

    Raises:
        UserError: images do not fit a context, or a context ends with one.
    """
    paths: dict[tuple[object, ...], TokenPath] = {}
    keys = []
    for context in contexts:
        images = context_images(context)
        if any(start + len(image) == len(context) for start, image in images):
            raise UserError("a context: expected text behind its last image, with which the turn begins")
        keys.append((tuple(context), *((start, image.key) for start, image in images)))
        if keys[-1] not in paths:
            paths[keys[-1]] = TokenPath(context, np.zeros(len(context)), images=images)
    numbers = {key: number for number, key in enumerate(paths)}
    return list(paths.values()), [numbers[key] for key in keys]


def uniforms(seeds: Sequence[int], number: int, device: torch.device) -> Tensor:
    """Returns ``number`` random numbers from [0, 1) for each of B seeds: [B, number] fp64."""
    rows = [[source.random() for _ in range(number)] for source in map(random.Random, seeds)]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits [B, V] divided by the temperature, in fp32 unless it is 1."""
    return logits if temperature == 1 else logits.float() / temperature


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token from each row of logits.

    Probabilities become integers, whose sums are exact in any order. CUDA's sums of floats are not
    deterministic.

    Args:
        logits: [B, V].
        uniform: [B] fp64, a random number from [0, 1) for each row.

    Returns:
        The tokens [B], and their log-probs [B] in fp32: NaN if the row's are.
    """
    logprobs = logits.float().log_softmax(-1)
    ends = (logprobs.exp() * UNIT).long().cumsum(-1)
    chosen = (uniform * ends[:, -1]).long()[:, None]
    tokens = torch.searchsorted(ends, chosen, right=True).clamp_max(logits.shape[1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def check_logprobs(logprobs: Iterable[float]) -> None:
    """Raises UserError if log-probs of sampled tokens are NaN."""
    if any(map(math.isnan, logprobs)):
        raise UserError(
            "sampling: the model's log-probs: expected numbers, got nan; check that its weights are finite, "
            "or set training.dtype to float32"
        )


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
