"""Ending a run early: all ranks leave between the same two steps, after a checkpoint.

The reduction of counts before a step also carries a *notice* of each rank, and every rank obeys the largest:

    NONE          run the step
    CHECKPOINT    write a checkpoint first, because checkpoint.minutes have passed
    SIGNAL + n    signal number n arrived: write a checkpoint and leave
    REFUSED       a rank has no input for the step, because its data are wrong: likewise
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals as SignalName
from typing import Any, NoReturn

import torch.distributed as dist

from titan_tree.checkpoint import Checkpoints, Progress
from titan_tree.config import CheckpointConfig
from titan_tree.distributed.collectives import world_size
from titan_tree.engine.records import GlobalSizes, StepInput, all_reduce_counts
from titan_tree.errors import AgreedError, UserError
from titan_tree.signals import Interrupted, Signals

logger = logging.getLogger(__name__)

NONE, CHECKPOINT, SIGNAL, REFUSED = 0, 1, 100, 1000
AgreedInput = tuple[StepInput, dict[str, Any], GlobalSizes]


class Leaving:
    """Decides, together with all ranks, when a run writes checkpoints and when it ends early.

    Args:
        progress: of the run, after it has resumed.
    """

    def __init__(self, config: CheckpointConfig, checkpoints: Checkpoints, progress: Progress) -> None:
        self.config, self.checkpoints, self.progress = config, checkpoints, progress
        self.signals = Signals()
        self._saved_step, self._saved_at = progress.step, time.monotonic()

    def agree(self, inputs: Iterator[tuple[StepInput, dict[str, Any]]]) -> Iterator[AgreedInput]:
        """Yields (input, position, sizes of all ranks) as soon as all ranks are ready to run the next step.

        Raises:
            Interrupted: a rank received a signal.
            AgreedError: the data of a rank are wrong.
        """
        while True:
            error = None
            try:
                if (item := next(inputs, None)) is None:
                    return
            except UserError as refused:
                item, error = (StepInput.nothing(), {}), refused
            step_input, position = item
            sizes = all_reduce_counts(step_input, self._notice(error))
            if sizes.notice == REFUSED:
                raise AgreedError(_first_message(error))
            if sizes.notice >= SIGNAL:
                self._leave(sizes.notice - SIGNAL)
            if sizes.notice == CHECKPOINT:
                self.save(due=True)
            yield step_input, position, sizes

    def save(self, due: bool = False) -> None:
        """Writes a checkpoint of the current step if the interval says so, or if it is ``due``."""
        step, interval = self.progress.step, self.config.interval
        if step > self._saved_step and interval > 0 and (due or step % interval == 0):
            self.checkpoints.save(due=True)
            self._saved_step, self._saved_at = step, time.monotonic()

    @contextmanager
    def checkpoint_before_error(self) -> Iterator[None]:
        """Writes a checkpoint if a step raises a UserError, unless other ranks may still be in the step."""
        try:
            yield
        except UserError as error:
            if self.progress.step == 0 or not (world_size() == 1 or isinstance(error, AgreedError)):
                raise
            self.save(due=True)
            self.checkpoints.close()
            raise type(error)(f"{error}; {self._what_next()}") from None

    def _notice(self, error: UserError | None) -> int:
        """Returns this rank's notice."""
        if error is not None:
            return REFUSED
        if self.signals.received:
            return SIGNAL + self.signals.received
        waited = time.monotonic() - self._saved_at
        is_due = self.config.minutes is not None and waited >= 60 * self.config.minutes
        return CHECKPOINT if is_due and dist.get_rank() == 0 else NONE

    def _leave(self, number: int) -> NoReturn:
        self.save(due=True)
        self.checkpoints.close()
        if dist.get_rank() == 0:
            logger.warning("%s: %s", SignalName(number).name, self._what_next())
        dist.barrier()  # torchrun ends all ranks as soon as one has ended
        raise Interrupted(number)

    def _what_next(self) -> str:
        """Returns how to continue the run. No checkpoint may be in the making."""
        ended = f"the run ended after step {self.progress.step}"
        if self.config.interval == 0:
            return f"{ended} without a checkpoint (checkpoint.interval = 0); the same command starts over"
        if (newest := self.checkpoints.newest()) is None:
            return f"{ended}; there is no checkpoint; the same command starts over"
        more = "" if self.config.resume else " with checkpoint.resume=true"
        return f"{ended}; the same command{more} continues from {newest}"


def _first_message(error: UserError | None) -> str:
    """Returns the error message of the first rank that has one. Collective."""
    messages: list[str | None] = [None] * world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    return next(message for message in messages if message is not None)
