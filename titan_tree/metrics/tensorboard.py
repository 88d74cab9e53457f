"""TensorBoard scalars in the run's folder ``tensorboard/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from titan_tree.metrics.loggers import Logger


class TensorBoardLogger(Logger):
    """Writes every value as a scalar. A resumed run hides the steps that it repeats."""

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
