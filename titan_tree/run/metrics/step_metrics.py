"""The outcome of an optimizer step, and its values by name: the columns of metrics.csv.

METRICS lists functions that compute values from a StepReport. Counts and tokens per second cover all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_tree.config.registry import Registry
from titan_tree.errors import UserError, shorten

if TYPE_CHECKING:
    import torch

    from titan_tree.engine.step_io import StepResult


# The metrics that compare log-probs of paths with the trainer's, by the field of the path. The trainer makes
# old_logprobs of losses that read rollout_logprobs, too.
KL_METRICS = {"old_logprobs": "old_kl", "rollout_logprobs": "rollout_kl"}
ROW = ("step", "bad_steps")  # columns of metrics.csv besides the values of a good step
MAX_KL = 0.2  # in nats per token, far more than rounding or a policy that is a few steps older make
MANY_TOKENS = 32  # whose mean log-prob is by accident not within 2 % of the trainer's in another base


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of one optimizer step that changed the weights. Metrics are computed from it."""

    result: StepResult  # the step's result over all ranks
    loss: float
    grad_norm: float  # before clipping
    lr: float  # learning rate of the step
    # Seconds of this rank's device: forward and backward passes; waits for FSDP2 within them;
    # gradient norm, clipping and optimizer.
    passes_seconds: float
    exchange_seconds: float
    optimizer_seconds: float
    world_size: int  # number of ranks
    device: torch.device  # device of this rank
    # What is known only at the end of the step.
    epoch: int = 0  # index of the epoch of the step's last group, from 0
    seconds: float = 0.0  # wall-clock time of the step
    validation: Mapping[str, float] = field(default_factory=dict)  # loss and accuracy, if the step validated
    balance: Mapping[str, float] = field(default_factory=dict)  # see balance/balancing.py; empty on one rank
    rollouts: Mapping[str, float] = field(default_factory=dict)  # see rl/; empty unless the step samples them


# Functions of a step's report that return numbers by name. A metric that does not apply returns {}.
METRICS: Registry[Callable[[StepReport], dict[str, float]]] = Registry(
    "metric",
    {
        "rollouts": "titan_tree.run.metrics.step_metrics:rollout_metrics",
        "tree": "titan_tree.run.metrics.step_metrics:tree_metrics",
        "partitions": "titan_tree.run.metrics.step_metrics:partition_metrics",
        "speed": "titan_tree.run.metrics.step_metrics:speed_metrics",
        "balance": "titan_tree.run.metrics.step_metrics:balance_metrics",
        "replay": "titan_tree.run.metrics.step_metrics:replay_metrics",
        "gpu": "titan_tree.run.metrics.step_metrics:gpu_metrics",
    },
)


def logprob_gaps(report: StepReport) -> dict[str, str]:
    """Returns how the log-probs of the paths differ from the trainer's, as ends of sentences.

    Keys are the names of the fields of the paths. Fields are left out whose KL divergence is at most
    ``MAX_KL``, unless their mean is that of another base, and fields that the loss has no metrics of.
    """
    counts = report.result.counts
    metrics = {name: value.item() for name, value in report.result.loss_metrics.items()}
    gaps = {}
    for name, metric in KL_METRICS.items():
        if (kl := metrics.get(metric, 0)) > MAX_KL:
            gaps[name] = (
                f"with a KL divergence of {kl:.3g} nats per token from them; check that they are log-probs, "
                "not probabilities, and that they come from the same weights, chat template and temperature"
            )
        mean = metrics.get(name.replace("logprobs", "nll"), 0.0)
        for base in (2, 10) if mean and counts.scored_edges >= MANY_TOKENS else ():
            if abs(mean * math.log(base) - metrics["nll"]) < 0.02 * metrics["nll"]:
                gaps[name] = f"that seem to have base {base}; multiply them by {math.log(base):.4f}"
    return gaps


def step_values(report: StepReport) -> dict[str, float]:
    """Returns all values of a step by name: the columns of metrics.csv, in their order.

    The loss function's and the router's metrics come last. Reading them waits for the device.

    Raises:
        UserError: two values have the same name.
    """
    values = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "epoch": report.epoch}
    loss_metrics = report.result.loss_metrics | report.result.router_metrics
    for name in METRICS:
        with METRICS.calling(name, "report"):
            new = METRICS[name](report)
        _add(values, new, f"metric {name!r}")
    _add(values, {name: value.item() for name, value in loss_metrics.items()}, "loss")
    _add(values, validation_values(report.validation), "validation")
    return values


def validation_values(validation: Mapping[str, float]) -> dict[str, float]:
    """Returns the values of a validation by the names that ``step_values`` gives them."""
    return {f"validation_{name}": value for name, value in validation.items()}


def rollout_metrics(report: StepReport) -> dict[str, float]:
    """Returns the rewards and sizes of the sampled rollouts. Returns nothing if the step sampled none."""
    return dict(report.rollouts)


def tree_metrics(report: StepReport) -> dict[str, float]:
    """Returns how much computation the trees saved. docs/concepts.md defines POR and ERR."""
    counts = report.result.counts
    return {
        "por": counts.por,
        "por_samples": counts.por_samples,
        "err": counts.err,
        "logical_tokens": counts.logical_tokens,
        "leaf_tokens": counts.leaf_tokens,
        "executed_tokens": counts.executed_tokens,
        "scored_edges": counts.scored_edges,
    }


def partition_metrics(report: StepReport) -> dict[str, float]:
    """Returns what partitions cost: forward passes, live tokens, gateway memory and recomputation."""
    result = report.result
    return {
        "forwards": result.counts.forwards,
        "chain_peak_tokens": result.chain_peak,
        "gateway_gib": result.counts.gateway_bytes / 2**30,
        "extra_forward_tokens": float(result.extra_forward_tokens),
        "dummy_forwards": float(result.dummy_forwards),
    }


def speed_metrics(report: StepReport) -> dict[str, float]:
    """Returns tokens per second, the seconds of the step, and the shares of its parts, whose sum is 1."""
    counts = report.result.counts
    parts = {"passes": report.passes_seconds, "optimizer": report.optimizer_seconds}
    if report.world_size > 1:
        parts["exchange"] = report.exchange_seconds
    parts["host"] = report.seconds - sum(parts.values())
    return {
        "leaf_tokens_per_s": counts.leaf_tokens / report.seconds,
        "executed_tokens_per_s": counts.executed_tokens / report.seconds,
        "step_s": report.seconds,
        **{f"{part}_share": seconds / report.seconds for part, seconds in parts.items()},
    }


def balance_metrics(report: StepReport) -> dict[str, float]:
    """Returns the share of time that ranks wait for slower ones. Returns nothing on one rank."""
    return dict(report.balance)


def replay_metrics(report: StepReport) -> dict[str, float]:
    """Returns the number of rows (a token in a layer) with recorded experts, and the share that disagrees.

    Returns nothing if no path recorded experts (docs/routing.md).
    """
    counts = report.result.counts
    if not counts.replayed_token_layers:
        return {}
    return {
        "replayed_rows": counts.replayed_token_layers,
        "replay_disagreement": counts.disagreeing_token_layers / counts.replayed_token_layers,
    }


def gpu_metrics(report: StepReport) -> dict[str, float]:
    """Returns model FLOPs utilization (MFU) and the peak memory of this rank's GPU. Returns nothing on a CPU.

    MFU is the fraction of the GPUs' peak bf16 rate that the model's own operations reach. Recomputation does
    not count. See PaLM, arXiv:2204.02311, appendix B.
    """
    if report.device.type != "cuda":
        return {}
    # Imported here, because a script that registers a logger imports this file and should not wait for torch.
    import torch

    from titan_tree.distributed import titan

    peak = titan.peak_flops(torch.cuda.get_device_name(report.device)) * report.world_size
    return {
        "mfu": report.result.counts.flops / report.seconds / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated(report.device) / 2**30,
    }


def _add(values: dict[str, float], new: dict[str, float], source: str) -> None:
    if not isinstance(new, dict):
        raise UserError(f"{source}: expected numbers by name, got {shorten(new)}")
    if taken := [name for name in new if name in values or name in ROW]:
        raise UserError(f"{source}: returns a value called {taken[0]!r}, a name in use; rename it")
    for name, value in new.items():
        try:
            values[name] = value if isinstance(value, int | float) else value.__float__()
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{source}: {name}: expected a number, got {shorten(value)}; return numbers by name"
            ) from None
