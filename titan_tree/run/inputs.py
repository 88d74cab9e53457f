"""Inputs of steps for which all ranks are ready: the normalizer is known, and no rank asks to stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_tree.engine.step_io import StepCounts, StepInput, all_reduce_counts
from titan_tree.errors import AgreedError, UserError
from titan_tree.run.stopping import Notice, StopController

SynchronizedInput = tuple[StepInput, dict[str, Any], StepCounts]


def synchronized_inputs(
    inputs: Iterator[tuple[StepInput, dict[str, Any]]], stopping: StopController | None = None
) -> Iterator[SynchronizedInput]:
    """Yields (input, position, counts of all ranks) as soon as all ranks are ready to run the next step.

    Ranks sum the counts of each step, and with them the normalizer. The same reduction carries their notices.

    Args:
        inputs: this rank's inputs, with the position of the dataset after each.
        stopping: makes this rank's notices, and follows the largest one. None: there are no notices, and a
            rank raises the errors of its own data.
    Raises:
        Interrupted: a rank received a signal.
        AgreedError: the data of a rank are wrong.
    """
    while True:
        refused: UserError | None = None
        try:
            if (item := next(inputs, None)) is None:
                return
        except UserError as error:
            if stopping is None:
                raise
            item, refused = (StepInput.nothing(), {}), error
        step_input, position = item
        notice = stopping.notice(step_input, refused) if stopping else Notice()
        total, code = all_reduce_counts(step_input, notice.code(), position.pop("checksum", None))
        if stopping:
            stopping.follow(Notice.of(code))
        yield step_input, position, total


def next_input(inputs: Iterator[SynchronizedInput], step: int, num_steps: int) -> SynchronizedInput:
    """Returns the input of a step. Raises AgreedError if there is none."""
    for ready in inputs:
        return ready
    raise AgreedError(f"data.files: they end before step {step} of {num_steps}; check that they are complete")
