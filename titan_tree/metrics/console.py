"""A log line per logged step, and on a terminal a progress bar below the lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from titan_tree.metrics.loggers import Logger

logger = logging.getLogger(__name__)

# The values that the line shows, in this order, and those that it omits. Any other value, such as one of your
# own loss or metric, follows the loss and the reward.
FORMATS = {
    "bad_steps": "{:.0f} bad steps so far",
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "grad_norm": "grad {:.3f}",
    "lr": "lr {:.2e}",
    "por": "POR {:.1%}",
    "logical_tokens_per_s": "{:,.0f} logical tok/s",
    "executed_tokens_per_s": "{:,.0f} executed tok/s",
    "step_s": "{:.2f} s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.1f} GiB",
}
OMITTED = {
    "epoch",
    "err",
    "logical_tokens",
    "executed_tokens",
    "scored_edges",
    "forwards",
    "chain_peak_tokens",
    "gateway_gib",
    "extra_forward_tokens",
    "dummy_forwards",
    "replayed_rows",
    "replay_disagreement",
    "rollouts",
    "sampled_tokens",
    "sampling_s",
    "scoring_s",
}


class ConsoleLogger(Logger):
    """Writes log lines through ``logging`` and shows a progress bar if stdout is a terminal."""

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
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
        self.bar = self.progress.add_task("training", total=total_steps, completed=start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        logger.info("step %*d/%d  %s", len(str(self.total_steps)), step, self.total_steps, _line(values))

    def advance(self, step: int) -> None:
        self.progress.start()  # does nothing if the bar is already visible
        self.progress.update(self.bar, completed=step)

    def close(self) -> None:
        self.progress.stop()


def _line(values: Mapping[str, float]) -> str:
    parts = [text.format(values[name]) for name, text in FORMATS.items() if name in values]
    others = [
        f"{name} {value:.4f}"
        for name, value in values.items()
        if name not in FORMATS and name not in OMITTED and not _repeats_loss(name, values)
    ]
    after_loss = sum(name in values for name in ("loss", "reward"))
    parts[after_loss:after_loss] = others
    return "  ".join(parts)


def _repeats_loss(name: str, values: Mapping[str, float]) -> bool:
    """Returns whether the value is the loss itself: ``nll`` is the loss of sft with token_mean."""
    return name == "nll" and "loss" in values and math.isclose(values["nll"], values["loss"], rel_tol=1e-3)
