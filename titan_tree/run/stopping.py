"""StopController: ends a run early on all ranks, between the same two steps and after a checkpoint.

Before each step, ranks reduce their counts (inputs.py). The reduction also carries a ``Notice`` of each rank,
and all ranks follow the largest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from signal import Signals as SignalName
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn

from titan_tree.distributed.agreement import check_weights
from titan_tree.distributed.collectives import rank, world_size
from titan_tree.distributed.faults import failures_named, set_timeout, start_timeout
from titan_tree.engine.step_io import StepInput
from titan_tree.errors import AgreedError, LostRankError, UserError
from titan_tree.run.checkpoint import Checkpoints, Progress
from titan_tree.run.config import Config
from titan_tree.signals import Interrupted, Signals

logger = logging.getLogger(__name__)

SHOWN_PATHS = 4  # paths that a message names


class Notice(NamedTuple):
    """What a rank asks of all ranks before a step. The first field that is set decides.

    Attributes:
        is_refused: the rank has no input for the step, or cannot log: write a checkpoint and end the run with
            an error.
        signal: number of a signal that arrived: write a checkpoint and end the run. 0: none.
        is_checkpoint_due: write a checkpoint first, because checkpoint.minutes have passed.
    """

    is_refused: bool = False
    signal: int = 0
    is_checkpoint_due: bool = False

    def code(self) -> int:
        """Returns a number that is larger for a notice that precedes others."""
        return self.is_refused << 8 | self.signal << 1 | self.is_checkpoint_due

    @classmethod
    def of(cls, code: int) -> Notice:
        return cls(bool(code >> 8), code >> 1 & 127, bool(code & 1))


class StopController:
    """Decides, together with all ranks, when a run writes checkpoints and when it ends early.

    Args:
        progress: the progress of the run, after a resume.
        num_steps: the number of steps of the whole run.
    """

    def __init__(
        self, config: Config, model: nn.Module, checkpoints: Checkpoints, progress: Progress, num_steps: int
    ) -> None:
        self.config, self.model, self.num_steps = config, model, num_steps
        self.checkpoints, self.progress = checkpoints, progress
        self.signals = Signals()
        self._first_step = progress.step
        self._saved_at = time.monotonic()
        self._running: StepInput | None = None
        self._error_of_this_rank: UserError | None = None

    def notice(self, step_input: StepInput, refused: UserError | None) -> Notice:
        """Returns this rank's notice before a step.

        Args:
            step_input: the rank's input. Messages of failures name its paths.
            refused: why the rank has no input.
        """
        self._running = step_input
        self._error_of_this_rank = refused or self._error_of_this_rank
        minutes = self.config.checkpoint.minutes
        waited = time.monotonic() - self._saved_at
        is_due = minutes is not None and waited >= 60 * minutes
        return Notice(self._error_of_this_rank is not None, self.signals.received, is_due and rank() == 0)

    def follow(self, notice: Notice) -> None:
        """Does what the largest notice of all ranks asks. Collective.

        Raises:
            Interrupted: a rank received a signal.
            AgreedError: the data of a rank are wrong, or it cannot log.
        """
        if notice.is_refused:
            raise AgreedError(_first_message(self._error_of_this_rank))
        if notice.signal:
            self._stop(notice.signal)
        if notice.is_checkpoint_due:
            self.save(due=True)

    def save(self, due: bool = False) -> None:
        """Writes a checkpoint of the current step if the interval says so, or if it is ``due``."""
        if self.checkpoints.save(due):
            self._saved_at = time.monotonic()

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Keeps rank 0's error of a logger or metric until the next ``notice`` tells all ranks."""
        try:
            yield
        except UserError as error:
            self._error_of_this_rank = error
        except OSError as error:
            self._error_of_this_rank = UserError(
                f"step {self.progress.step}: its metrics cannot be written: {error}; if the disk is full, "
                "free some space"
            )

    @contextmanager
    def guard_step(self, saves: bool = True) -> Iterator[None]:
        """Runs one training step in its block, and names failures.

        Args:
            saves: write a checkpoint if one is due. Otherwise the caller does.
        """
        parallel = self.config.parallel
        is_first = self.progress.step == self._first_step
        timeout_s = start_timeout(parallel.timeout_s) if is_first else parallel.timeout_s
        with failures_named(self._describe(self.progress.step + 1), self._what_next, timeout_s):
            if is_first:
                set_timeout(timeout_s)  # also for the groups that sharding has created
            with self._checkpoint_before_error():
                yield
            step, interval = self.progress.step, parallel.check_interval
            if interval and world_size() > 1 and (is_first or step % interval == 0):
                check_weights(self.model, self._schedule(), step, interval)
            if saves:
                self.save(due=step == self.num_steps)
            if self._error_of_this_rank and step == self.num_steps:  # no later step tells the other ranks
                self.checkpoints.wait()
                raise self._error_of_this_rank
            if is_first:
                set_timeout(parallel.timeout_s)

    def _describe(self, step: int) -> Callable[[], str]:
        """Returns a function that returns the step, with the first paths of this rank's trees."""

        def describe() -> str:
            ids = list(chain.from_iterable(self._running.path_ids)) if self._running else []
            more = f" and {len(ids) - SHOWN_PATHS} more" if len(ids) > SHOWN_PATHS else ""
            return f"step {step} (paths {', '.join(ids[:SHOWN_PATHS]) or 'none'}{more})"

        return describe

    def _schedule(self) -> tuple[object, ...]:
        """Returns what determines the next steps. It must be the same on all ranks."""
        tables = ("loss", "router_loss", "router_bias", "optimizer", "lr_scheduler", "training", "partition")
        settings = [getattr(self.config, table) for table in tables]
        return self.num_steps, self.progress.step, self.progress.data, settings

    @contextmanager
    def _checkpoint_before_error(self) -> Iterator[None]:
        """Writes a checkpoint if a step raises a UserError, unless other ranks may still run the step."""
        try:
            yield
        except UserError as error:
            if self.progress.step == 0 or not (world_size() == 1 or isinstance(error, AgreedError)):
                raise
            self.save(due=True)
            self.checkpoints.close()
            raise type(error)(f"{error}; {self._what_next()}") from None

    def _stop(self, number: int) -> NoReturn:
        self.save(due=True)
        self.checkpoints.close()
        if rank() == 0:
            logger.warning("%s: %s", SignalName(number).name, self._what_next())
        if world_size() > 1:
            dist.barrier()  # torchrun ends all ranks as soon as one has ended
        raise Interrupted(number)

    def _what_next(self) -> str:
        """Returns a sentence on how to continue the run. No checkpoint may be in progress."""
        ended = f"the run ended after step {self.progress.step}"
        if self.config.checkpoint.interval == 0:
            return f"{ended} without a checkpoint (checkpoint.interval = 0); the same command starts over"
        if (newest := self.checkpoints.newest()) is None:
            return f"{ended}; there is no checkpoint; the same command starts over"
        more = "" if self.config.checkpoint.resume else " with checkpoint.resume=true"
        return f"{ended}; the same command{more} continues from {newest}"


def _first_message(error: UserError | None) -> str:
    """Returns the error message of the first rank that has one. Collective.

    A rank that has only lost another one comes last.
    """
    own = None if error is None else (isinstance(error, LostRankError), str(error))
    messages = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(messages, own)
    present = [message for message in messages if message is not None]
    return min(present, key=lambda message: message[0])[1]
