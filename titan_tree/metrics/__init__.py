"""Where a run's numbers go: one console line, one CSV row and TensorBoard scalars per logged step."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from titan_tree.config import MetricsConfig
from titan_tree.distributed import titan
from titan_tree.engine.records import StepResult

logger = logging.getLogger(__name__)


def cost_metrics(
    result: StepResult, seconds: float, world_size: int, device: torch.device
) -> dict[str, float]:
    """What a step cost and what the tree saved. Tokens per second are those of all ranks together.

    ``mfu`` is the share of the GPUs' peak bf16 rate that went into the model's own operations (PaLM,
    arXiv:2204.02311, appendix B: recomputation does not count); absent on a CPU, whose peak is unknown.
    """
    counts = result.counts
    metrics = {
        "por": counts.por,
        "err": counts.err,
        "logical_tokens": counts.logical_tokens,
        "executed_tokens": counts.executed_tokens,
        "scored_edges": counts.scored_edges,
        "forwards": counts.forwards,
        "chain_peak_tokens": result.chain_peak,
        "gateway_gib": counts.gateway_bytes / 2**30,
        "extra_forward_tokens": float(result.extra_forward_tokens),
        "dummy_forwards": float(result.dummy_forwards),
        "logical_tokens_per_s": counts.logical_tokens / seconds,
        "executed_tokens_per_s": counts.executed_tokens / seconds,
        "step_s": seconds,
    }
    if counts.replayed_rows:
        metrics["replayed_rows"] = counts.replayed_rows
        metrics["replay_disagreement"] = counts.disagreeing_rows / counts.replayed_rows
    if device.type == "cuda":
        peak = titan.peak_flops(torch.cuda.get_device_name(device)) * world_size
        metrics["mfu"] = counts.flops / seconds / peak
        metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return metrics


class MetricsLogger:
    """Console, ``metrics.csv`` and ``tensorboard/`` in a run's folder. For one rank only.

    Args:
        start_step: steps already done. What a run that was cut off had logged beyond them is removed,
            because those steps come again.
    Attributes:
        progress: a bar below the log lines while it is entered (``with``), on a terminal.
    """

    def __init__(self, config: MetricsConfig, folder: Path, start_step: int, steps: int) -> None:
        self.steps = steps
        self.csv = CsvFile(folder / "metrics.csv", start_step) if config.csv else None
        self.tensorboard = (
            SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
            if config.tensorboard
            else None
        )
        console = Console()
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.bar = self.progress.add_task("training", total=steps, completed=start_step)

    def advance(self, step: int) -> None:
        self.progress.update(self.bar, completed=step)

    def log(self, step: int, metrics: Mapping[str, float], of_loss: Mapping[str, float]) -> None:
        """``of_loss``: the loss function's own metrics, whatever they are called."""
        logger.info(self._line(step, metrics, of_loss))
        values = {**metrics, **of_loss}
        if self.csv:
            self.csv.append({"step": step, **values})
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)

    def _line(self, step: int, m: Mapping[str, float], of_loss: Mapping[str, float]) -> str:
        parts = [f"step {step:>{len(str(self.steps))}}/{self.steps}", f"loss {m['loss']:.4f}"]
        for name, value in of_loss.items():
            # nll is the loss of sft by token_mean; others come close to a loss by chance alone.
            if name != "nll" or not math.isclose(value, m["loss"], rel_tol=1e-3):
                parts.append(f"{name} {value:.4f}")
        parts += [
            f"grad {m['grad_norm']:.3f}",
            f"lr {m['lr']:.2e}",
            f"POR {m['por']:.1%}",
            f"{m['logical_tokens_per_s']:,.0f} logical, {m['executed_tokens_per_s']:,.0f} executed tok/s",
            f"{m['step_s']:.2f} s",
        ]
        if "mfu" in m:
            parts.append(f"MFU {m['mfu']:.1%}  {m['peak_memory_gib']:.1f} GiB")
        return "  ".join(parts)

    def close(self) -> None:
        if self.tensorboard:
            self.tensorboard.close()


class CsvFile:
    """One row per logged step, flushed at once. Columns are those of the first row and may grow later."""

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.columns: list[str] = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                # A row cut short by a crash has None for its last columns; its step was not checkpointed.
                rows = [row for row in reader if None not in row.values() and int(row["step"]) <= start_step]
                self.columns = list(reader.fieldnames or [])
            self._rewrite(rows)

    def append(self, row: Mapping[str, float]) -> None:
        if not set(row) <= set(self.columns):
            rows = []
            if self.path.exists():
                with self.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            self.columns += [name for name in row if name not in self.columns]
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            self._writer(file).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_suffix(".csv.part")
        with part.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.path)

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
