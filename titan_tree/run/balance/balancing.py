"""Balancing: the costs that distribute trees over ranks, first estimated and then fitted to measured times.

    steps 1 to 64      measured: sizes and seconds of every rank's passes -> CostFit -> fitted costs
    steps 1 to 128     use the estimated costs
    steps 129 and on   use the fitted costs, on all ranks

Inputs are made ahead of training, so fitted costs are used only FIT_STEPS steps after they are known. A
checkpoint contains the costs, and a resumed run makes the same assignments with any number of workers. The
costs are fitted once, because times vary from run to run, and the order of sums varies with the assignments.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.distributed.collectives import call_on_rank_0
from titan_tree.engine.device_clock import DeviceClock, Mark
from titan_tree.engine.step_io import StepCounts, StepInput
from titan_tree.errors import UserError, shorten
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.balance.assignment import idle_share
from titan_tree.run.balance.data_group import DataAddress
from titan_tree.run.balance.sharing import BalancedSharing
from titan_tree.tree.costs import SIZES, TreeCosts

FIT_STEPS = 64  # steps that are measured; more than any rank makes ahead of training


class Balancing:
    """Measures the steps of a run on several ranks, and shares their trees. Collective.

    Args:
        model: the parallelized model.
        device: device of the model.
        max_tokens: largest number of tokens of a micro-batch.
        sequence_parallel: number of adjacent ranks that share the tokens of each tree.
        expert_parallel: whether ranks exchange tokens in every pass. Their work cannot be measured alone.
        fixed: keep the estimated costs, so that equal runs get equal results.
        splits: whether the paths of a tree may be divided among ranks.
    """

    def __init__(
        self,
        model: TreeModel,
        device: torch.device,
        max_tokens: int,
        *,
        sequence_parallel: int,
        expert_parallel: bool,
        fixed: bool,
        splits: bool,
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.max_tokens, self.expert_parallel, self.splits = max_tokens, expert_parallel, splits
        self.timer = None if expert_parallel else WorkTimer(model, device)
        self.is_fixed = fixed or expert_parallel
        self.estimated = model.costs().tree_costs()
        self.fitted: TreeCosts | None = None  # known after ``fit_step``
        self.fit = CostFit(self.estimated)
        self.fit_step: int | None = None  # the last measured step, if steps are measured
        self._address: DataAddress | None = None
        self._is_first_step = True

    def sharing(
        self, step: int, start_timeout_s: float, timeout_s: float, start_steps: int
    ) -> BalancedSharing:
        """Returns a ``BalancedSharing`` for the steps that follow the first ``step`` steps.

        Args:
            start_timeout_s, timeout_s, start_steps: see ``DataAddress``.
        """
        self._address = DataAddress.new(start_timeout_s, timeout_s, start_steps)
        self._is_first_step = True
        if not self.is_fixed and self.fitted is None and (self.fit_step or 0) <= step:
            self.fit_step = step + FIT_STEPS
        self._publish(0, self.estimated)
        if self.fitted is not None:
            self._publish(1, self.fitted)
        return BalancedSharing(
            self._address,
            self.max_tokens,
            always_in_step=self.expert_parallel,
            fitted_from=None if self.fit_step is None else self.fit_step + FIT_STEPS - step,
            ranks_per_owner=self.sequence_parallel,
            splits=self.splits,
        )

    def start_step(self) -> None:
        if self.timer:
            self.timer.start()

    def finish_step(
        self, step: int, step_input: StepInput, total: StepCounts, is_good: bool
    ) -> dict[str, float]:
        """Measures a step, and fits the costs if it is time to. The device must have finished the step.

        Args:
            step: number of the step, from 1.
            is_good: whether the step has changed the weights. Otherwise it is not measured.
        Returns:
            The fractions of time for which ranks wait, by name: ``planned_idle_share`` and, if ranks can be
            measured alone, ``idle_share``. The dict is empty if the step is bad.
        """
        values = {}
        if self.timer:
            self.timer.stop()
        if is_good:
            work = self._gather(step_input, total)  # [ranks, rounds, 8]
            values["planned_idle_share"] = idle_share(self._costs_of(step).seconds(work[..., 1:]))
            if self.timer:
                values["idle_share"] = idle_share(work[..., 0])
            if not self._is_first_step:  # which compiles and allocates
                self._add(work)
            self._is_first_step = False
        if step == self.fit_step:
            self.fitted = TreeCosts(*call_on_rank_0(self.fit.solve))
            self._publish(1, self.fitted)
        return values

    def _costs_of(self, step: int) -> TreeCosts:
        """Returns the costs with which trees were assigned in a step, numbered from 1."""
        if self.fitted is not None and self.fit_step is not None and step > self.fit_step + FIT_STEPS:
            return self.fitted
        return self.estimated

    def state_dict(self) -> dict[str, object]:
        """Returns the costs and the measurements as JSON values."""
        costs = [list(costs) for costs in (self.estimated, self.fitted) if costs is not None]
        return {"costs": costs, "fit_step": self.fit_step, "fit": self.fit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError unless ``state`` is one that ``state_dict`` has returned."""
        stored, fit_step = state.get("costs"), state.get("fit_step")
        if isinstance(stored, list) and stored and isinstance(stored[0], list) and len(stored[0]) == 5:
            return  # of an earlier version, without pixels: costs are fitted anew
        shape = (2 if isinstance(stored, list) and len(stored) == 2 else 1, len(self.estimated))
        costs = [TreeCosts(*row) for row in finite_array("costs", stored, shape).tolist()]
        if self.is_fixed or fit_step is None:
            self.estimated = costs[-1]
            return
        self.estimated, self.fitted = costs[0], costs[1] if len(costs) == 2 else None
        self.fit_step = int(finite_array("fit_step", fit_step, ()))
        self.fit.load_state_dict(state.get("fit") or {})

    def _gather(self, step_input: StepInput, total: StepCounts) -> np.ndarray:
        """Returns [ranks, rounds, 8]: seconds of work, the ``SIZES`` and the number of passes of each round.

        A round is a micro-batch. If ranks run freely, the whole step is one round.
        """
        is_free = total.is_partitioned and not self.expert_parallel
        shape = 1 if is_free else total.max_micro_batches, len(SIZES) + 2
        work = torch.zeros(shape, dtype=torch.float64)
        for i, sizes_of_batch in enumerate(step_input.micro_batch_sizes):
            work[0 if is_free else i, 1:] += torch.tensor(sizes_of_batch)
        # The count passes of all micro-batches may come before the train passes.
        for i, seconds in enumerate(self.timer.seconds() if self.timer else []):
            work[i % len(work), 0] += seconds
        by_rank = [torch.empty_like(work) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, work)
        return torch.stack(by_rank).numpy()

    def _add(self, work: np.ndarray) -> None:
        """Adds the measurements of a step, see ``_gather``, until the costs are fitted."""
        if self.fit_step is None or self.fitted is not None:
            return
        for seconds, *sizes in work.reshape(-1, work.shape[-1]):
            if sizes[-1]:  # the rank had trees
                self.fit.add(np.array(sizes), seconds)

    def _publish(self, version: int, costs: TreeCosts) -> None:
        assert self._address is not None
        if dist.get_rank() == 0:
            self._address.publish_costs(version, costs)


class WorkTimer:
    """Measures how long the forward passes of a rank take between ``start`` and ``stop``, without its waits.

    Before a block runs, FSDP2 gathers its weights. The device then waits for the slowest rank. The timer
    measures and subtracts these waits. The backward pass is not measured: its work is nearly proportional to
    that of the forward pass.

    Args:
        model: sharded by FSDP2. Its ``layers`` are the units of sharding.
        device: the model's device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._is_on = self._is_in_pass = False
        # For each pass: its start, the start and the end of each wait, and its end.
        self._passes: list[list[Mark]] = []
        # FSDP2's hooks of the model come first, so the model's own weights are there when the pass starts.
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._end())
        for block in model.get_submodule("layers").children():
            assert isinstance(block, FSDPModule)
            self._measure_waits(block)

    def _measure_waits(self, block: FSDPModule) -> None:
        # Hooks of the block itself would be compiled into its graph.
        weights: Any = block._get_fsdp_state()._fsdp_param_group
        wait = weights.wait_for_unshard

        def timed_wait() -> None:
            self._mark()
            wait()
            self._mark()

        weights.wait_for_unshard = timed_wait

    def start(self) -> None:
        """Measures all forward passes from now on. Forgets those before."""
        self._passes, self._is_on = [], True

    def stop(self) -> None:
        self._is_on = False

    def seconds(self) -> list[float]:
        """Returns the work of each measured pass. The device must have finished them."""
        return [self._seconds(marks) for marks in self._passes]

    def _begin(self) -> None:
        if self._is_on:
            self._is_in_pass = True
            self._passes.append([])
            self._mark()

    def _end(self) -> None:
        self._mark()
        self._is_in_pass = False

    def _mark(self) -> None:
        if self._is_in_pass:  # FSDP2 gathers weights in the backward pass, too
            self._passes[-1].append(self._clock.mark())

    def _seconds(self, marks: list[Mark]) -> float:
        begin, *waits, end = marks
        waited = sum(map(self._clock.seconds, waits[::2], waits[1::2]))
        return self._clock.seconds(begin, end) - waited


# Relative weight of the start values against the measurements, which cannot tell tokens from edges if all
# trees are alike.
PRIOR = 1e-3
LARGEST_CHANGE = 10.0  # of a coefficient, relative to the others


class CostFit:
    """Fits TreeCosts to measured seconds by least squares.

    All sums are made element by element, so that every rank gets the same bits. Only ``solve`` may round
    differently on another CPU.

    Args:
        start: the coefficients without measurements. A coefficient of 0 stays 0.
    """

    def __init__(self, start: TreeCosts) -> None:
        self.start = start
        self._products = np.zeros((len(start), len(start)))  # sums of size_i size_j, in units of ``start``
        self._moments = np.zeros(len(start))  # sums of size_i seconds, in units of ``start``

    def add(self, sizes: np.ndarray, seconds: float) -> None:
        """Adds a measurement: the ``SIZES`` of a pass, the number of its forward passes, and its seconds."""
        estimated = np.array(self.start) * sizes.astype(np.float64)  # seconds of each size
        # The tower is not measured: its coefficients change as all together do.
        estimated[[SIZES.index("pixels"), SIZES.index("pixel_pairs")]] = 0.0
        self._products += estimated[:, None] * estimated
        self._moments += estimated * seconds

    def solve(self) -> TreeCosts:
        """Returns the fitted coefficients, or ``start`` without measurements."""
        products, moments = self._products, self._moments
        total = products.sum()
        if total <= 0 or moments.sum() <= 0:
            return self.start
        scale = moments.sum() / total  # of all coefficients together
        prior = PRIOR * np.trace(products) * np.eye(len(self.start))
        factors = scale + np.linalg.solve(products + prior, moments - products.sum(1) * scale)
        factors = factors.clip(scale / LARGEST_CHANGE, scale * LARGEST_CHANGE)
        return TreeCosts(*(np.array(self.start) * factors).tolist())

    def state_dict(self) -> dict[str, object]:
        """Returns the sums as JSON values, which keep every bit."""
        return {"products": self._products.tolist(), "moments": self._moments.tolist()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises UserError unless ``state`` is one that ``state_dict`` has returned."""
        self._products = finite_array("products", state.get("products"), self._products.shape)
        self._moments = finite_array("moments", state.get("moments"), self._moments.shape)


def finite_array(name: str, values: object, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values`` of a checkpoint as float64. Raises UserError for another shape or a bad number."""
    array = np.empty(0)
    with suppress(TypeError, ValueError, OverflowError):
        array = np.array(values, np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(
            f"checkpoint: balance.{name}: expected finite numbers of shape {shape}, got {shorten(values)}; "
            "resume from another checkpoint"
        )
    return array
