"""RunFolder: the folder of a run, with config.toml, the loggers, and the lock that keeps other runs out."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from titan_tree.checkpoint import FolderLock, set_aside
from titan_tree.config import Config
from titan_tree.config.toml import dump_config
from titan_tree.errors import UserError
from titan_tree.metrics import Loggers

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of a run. Collective.

    An earlier config.toml that differs is renamed, and so is metrics.csv if a run starts at step 0.

    Attributes:
        run: the id of the run, see FolderLock.

    Raises:
        UserError: another run uses the folder, or it cannot be written.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.path = config, Path(config.folder)
        self._lock = FolderLock(self.path)
        self.run = self._lock.run

    def open_loggers(self, step: int, num_steps: int) -> Loggers | None:
        """Writes config.toml and opens the loggers. Returns None except on rank 0.

        Args:
            step: number of optimizer steps done.
            num_steps: number of steps of the whole run.

        Raises:
            UserError: a file cannot be read or written.
        """
        if dist.get_rank() != 0:
            return None
        file, text = self.path / "config.toml", dump_config(self.config)
        try:
            before = file.read_text(errors="replace") if file.exists() else None
            if before != text:
                set_aside(file, f"until-step-{step}")
                file.write_text(text)
            if step == 0 and (earlier := set_aside(self.path / "metrics.csv", "earlier")):
                logger.info("metrics of an earlier run: moved to %s", earlier)
            return Loggers(self.config.metrics, self.path, step, num_steps)
        except OSError as error:
            raise UserError(
                f"{self.path}: the configuration or the metrics cannot be written: {error}; if the disk is "
                "full, free some space; else correct the cause, or set another folder"
            ) from None

    def close(self) -> None:
        """Unlocks the folder."""
        self._lock.release()
