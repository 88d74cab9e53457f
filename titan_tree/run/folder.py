"""What a run writes: its folder with config.toml and the loggers, and the lines at its start and end."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist

from titan_tree.config.files import regular, write_output
from titan_tree.config.toml import dump_config
from titan_tree.data.data_files import DataSizes
from titan_tree.engine.step_io import StepCounts
from titan_tree.errors import UserError, count
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.checkpoint import FolderLock, set_aside
from titan_tree.run.config import Config
from titan_tree.run.metrics import Loggers

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
            if _text(file) != text:
                set_aside(file, f"until-step-{step}")
                forget_trackers(self.path, step)
                write_output(file, text, force=True)
            if step == 0 and (earlier := set_aside(self.path / "metrics.csv", "earlier")):
                logger.info("metrics of an earlier run: moved to %s", earlier)
            return Loggers(self.config.metrics.loggers, self.path, step, num_steps)
        except OSError as error:
            raise UserError(
                f"{self.path}: the configuration or the metrics cannot be written: {error}; if the disk is "
                "full, free some space; else correct the cause, or set another folder"
            ) from None

    def close(self) -> None:
        self._lock.release()


def forget_trackers(folder: Path, step: int) -> None:
    """Sets aside the ids of a tracker's runs that may have values of later steps, see ``Tracker``."""
    for file in sorted(folder.glob("*_run_id")):
        _, *newest = (_text(file) or "").split() or [""]
        if not newest or int(newest[0]) > step:
            moved = set_aside(file, f"until-step-{step}")
            logger.info("the configuration has changed: the tracker gets a new run; id moved to %s", moved)


def _text(path: Path) -> str | None:
    """Returns the text of a file, or None if there is no such file."""
    if not path.exists():
        return None
    with open(path, errors="replace", opener=regular) as file:
        return file.read()


def introduction(
    config: Config, model: TreeModel, world_size: int, device: torch.device, steps: int, steps_done: int
) -> str:
    """Returns one line that says what is trained, on what hardware, for how long, and where results go."""
    done = f", {steps_done} of them done" if steps_done else ""
    trained = "" if model.lora is None else f", {model.num_trained():,} of them trained (LoRA)"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return (
        f"{model.family} {config.model.flavor or config.model.hf_path}, "
        f"{model.num_parameters():,} parameters{trained}, on {world_size} x {name} in "
        f"{config.training.dtype}; {count(steps, 'step')}{done}; results in {config.folder}"
    )


def describe_data(sizes: DataSizes, groups_per_step: int) -> str:
    steps = math.ceil(sizes.groups / groups_per_step)
    return (
        f"data: {count(sizes.groups, 'group')} with {count(sizes.samples, 'sample')}; "
        f"an epoch takes {count(steps, 'step')} of {count(groups_per_step, 'group')}"
    )


def summary(steps: int, total: StepCounts, bad_steps: int) -> str:
    """Returns one line on what the steps of this process have trained on.

    Args:
        steps: number of the steps that changed the weights.
        total: their counts, summed.
        bad_steps: number of the other steps.
    """
    skipped = f"skipped {count(bad_steps, 'bad step')}" if bad_steps else ""
    if not steps and bad_steps:
        return f"trained no step; {skipped}"
    if not steps:
        return (
            "nothing left to train: raise training.steps or training.epochs to continue, or set a new folder "
            "to start a new run"
        )
    return (
        f"trained {count(steps, 'step')} on {count(total.num_trees, 'tree')} of "
        f"{count(total.num_paths, 'path')}: {total.logical_tokens:,} tokens of all paths, "
        f"{total.leaf_tokens:,} of leaf paths, {total.executed_tokens:,} executed "
        f"(POR {100 * total.por:.1f}%, {total.leaf_tokens / total.executed_tokens:.2f}x fewer)"
        f"{'; ' if skipped else ''}{skipped}"
    )
