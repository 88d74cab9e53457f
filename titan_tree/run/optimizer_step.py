"""OptimizerStep: the step that Trainer and Lightning share, from the seed to the report.

    seed -> forward and backward passes -> clip -> optimizer -> router biases -> learning rate -> report

A bad step (engine/bad_steps.py) leaves weights, optimizer states and router biases unchanged. It still
counts: the data and the learning rate move on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.optim.lr_scheduler import LRScheduler

from titan_tree.components.moe.routing import RouterBias
from titan_tree.distributed.collectives import rank, world_size
from titan_tree.distributed.optimizers import clip_and_step
from titan_tree.engine.bad_steps import BadStepError
from titan_tree.engine.device_clock import DeviceClock
from titan_tree.engine.step_io import StepCounts, StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import AgreedError, count
from titan_tree.run.balance.balancing import Balancing
from titan_tree.run.metrics import StepReport, logprob_gaps

logger = logging.getLogger(__name__)


ZERO_STEPS = 5  # steps in a row without a gradient that are worth a warning


@dataclass(kw_only=True)
class OptimizerStep:
    """Runs the optimizer steps of a run.

    Args:
        optimizers: the optimizers of all weights, see ``clip_and_step``. Iterating over them yields torch
            optimizers, as iterating over ``Optimizers`` does: one per part of the model.
        lr_schedulers: one per optimizer. They set the learning rate of each step by torchtitan's schedule:
            warm-up, then decay.
        router_bias: updates the router biases of a model with experts. None: they stay unchanged.
        balancing: measures the steps of several ranks. None: nothing is measured.
        seed: the run's ``training.seed``.
        max_bad_steps: number of bad steps in a row after which training ends.
        good_steps: number of good steps of this process.
        bad_steps: number of the other ones.
        bad_steps_in_a_row: number of bad steps since the last good one.
        is_on_policy: whether the weights before each step have sampled its paths. The log-probs of the paths
            are then compared with the model's in every step, otherwise only in the first good one.
    """

    tree_step: TreeStep
    optimizers: Collection[torch.optim.Optimizer]
    lr_schedulers: Sequence[LRScheduler]
    router_bias: RouterBias | None
    balancing: Balancing | None
    max_grad_norm: float
    seed: int
    max_bad_steps: int
    good_steps: int = 0
    bad_steps: int = 0
    bad_steps_in_a_row: int = 0
    is_on_policy: bool = False
    _has_warned: bool = field(default=False, init=False)
    _zero_steps: int = field(default=0, init=False)  # in a row, up to the newest step

    def __post_init__(self) -> None:
        self._clock = DeviceClock(self.tree_step.device, self.tree_step.model)

    def run(
        self, step: int, step_input: StepInput, total: StepCounts, *, epoch: int, started: float
    ) -> StepReport | None:
        """Runs one step. Returns its report, or None for a bad step. Collective.

        Args:
            step: the number of the step, which counts from 1.
            step_input: this rank's part of the step.
            total: the counts of all ranks, from ``all_reduce_counts``.
            epoch: index of the epoch of the step's last group, from 0.
            started: ``time.perf_counter()`` at the start of the step.
        Raises:
            AgreedError: too many steps in a row were bad.
        """
        # Each step has a seed of its own, so a resumed run needs no state of random generators.
        # Python does not salt the hashes of integers, so every process computes the same seed from these.
        torch.manual_seed(hash((self.seed, step, rank())))
        report, balance = None, {}
        if self.balancing:
            self.balancing.start_step()
        try:
            report = self.update_weights(step_input, total)
            self.good_steps += 1
            self.bad_steps_in_a_row = 0
        except BadStepError as reason:
            self._skip(step, reason)
        for scheduler in self.lr_schedulers:
            scheduler.step()
        if self.balancing:
            balance = self.balancing.finish_step(step, step_input, total, is_good=report is not None)
        if report is None:
            return None
        self._count_zeros(step, report.grad_norm)
        report = replace(report, epoch=epoch, seconds=time.perf_counter() - started, balance=balance)
        if rank() == 0 and not self._has_warned and (self.is_on_policy or step == 1 + self.bad_steps):
            self._check_logprobs(step, report)
        return report

    def check_learned(self) -> None:
        """Raises AgreedError if most steps of a complete run were bad."""
        steps = self.good_steps + self.bad_steps
        if self.bad_steps > self.good_steps:
            raise AgreedError(
                f"{self.bad_steps:,} of {steps:,} steps were skipped, so the model has hardly learned; the "
                "warnings above name the cause of each"
            )

    def update_weights(self, step_input: StepInput, total: StepCounts) -> StepReport:
        """Runs forward and backward passes, then steps the optimizer and the router biases. Collective.

        Returns:
            The report of the step, without what is known only at its end.
        Raises:
            BadStepError: the loss or its gradient is not finite, or the loss counts no token. Weights,
                optimizer states and router biases are unchanged, and no gradients are left.
        """
        clock = self._clock
        clock.start()
        started = clock.mark()
        result = self.tree_step.run(step_input, total)
        passes_done = clock.mark()
        clock.stop()
        norm = clip_and_step(self.optimizers, result.loss, self.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        optimizer_done = clock.mark()
        loss, grad_norm = result.loss.item(), norm.item()  # waits for the device
        values = {"loss": loss, "grad_norm": grad_norm}
        if wrong := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
            cause = self.tree_step.find_cause(step_input, result.statistics)
            raise BadStepError(f"{' and '.join(wrong)}; {cause}; check their values, or lower optimizer.lr")
        if self.router_bias:
            assert result.routing is not None
            assert self.tree_step.model.experts is not None
            self.router_bias.update(self.tree_step.model.experts.router_biases().values(), result.routing)
        exchange = clock.exchange_seconds()
        return StepReport(
            result=result,
            loss=loss,
            grad_norm=grad_norm,
            lr=float(self.lr_schedulers[0].get_last_lr()[0]),
            passes_seconds=clock.seconds(started, passes_done) - exchange,
            exchange_seconds=exchange,
            optimizer_seconds=clock.seconds(passes_done, optimizer_done),
            world_size=world_size(),
            device=self.tree_step.device,
        )

    def _count_zeros(self, step: int, grad_norm: float) -> None:
        """Warns once if the gradient has been 0 for ``ZERO_STEPS`` steps in a row."""
        if self._zero_steps >= ZERO_STEPS:  # warned
            return
        self._zero_steps = 0 if grad_norm else self._zero_steps + 1
        if self._zero_steps == ZERO_STEPS and rank() == 0:
            logger.warning(
                "steps %d to %d: the gradient is 0, so nothing is learned; check that advantages are not all "
                "0 (groups whose rewards are equal), and that ratios are not all clipped",
                step - ZERO_STEPS + 1,
                step,
            )

    def _check_logprobs(self, step: int, report: StepReport) -> None:
        """Warns if the weights before the step cannot have computed the log-probs of the paths."""
        gaps = logprob_gaps(report)
        self._has_warned = bool(gaps)
        for name, gap in gaps.items():
            message = "step %d: %s: expected log-probs under the weights before this step, got values %s"
            logger.warning(message, step, name, gap)

    def _skip(self, step: int, reason: BadStepError) -> None:
        """Counts and logs a bad step. Raises AgreedError if there were too many in a row."""
        self.bad_steps += 1
        self.bad_steps_in_a_row += 1
        if self.bad_steps_in_a_row == self.max_bad_steps:
            raise AgreedError(
                f"step {step}: {reason} (training ended after {count(self.max_bad_steps, 'bad step')} "
                "in a row, which left the weights unchanged)"
            )
        if rank() == 0:
            logger.warning("step %d is skipped: %s", step, reason)
