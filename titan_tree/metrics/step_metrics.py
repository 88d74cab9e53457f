"""The metrics of an optimizer step: functions from a StepReport to values by name, listed in METRICS.

Counts and tokens per second cover all ranks together.
"""

from __future__ import annotations

import torch

from titan_tree.distributed import titan
from titan_tree.metrics.step_report import StepReport


def rollout_metrics(report: StepReport) -> dict[str, float]:
    """Returns the rewards and sizes of the sampled rollouts. Returns nothing if the step sampled none."""
    return dict(report.rollouts)


def tree_metrics(report: StepReport) -> dict[str, float]:
    """Returns how much computation the trees saved. docs/concepts.md defines POR and ERR."""
    counts = report.result.counts
    return {
        "por": counts.por,
        "err": counts.err,
        "logical_tokens": counts.logical_tokens,
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
    """Returns tokens per second and the seconds of the step."""
    counts = report.result.counts
    return {
        "logical_tokens_per_s": counts.logical_tokens / report.seconds,
        "executed_tokens_per_s": counts.executed_tokens / report.seconds,
        "step_s": report.seconds,
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
    peak = titan.peak_flops(torch.cuda.get_device_name(report.device)) * report.world_size
    return {
        "mfu": report.result.counts.flops / report.seconds / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated(report.device) / 2**30,
    }
