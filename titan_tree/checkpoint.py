"""Checkpoints of a run: complete or absent, resumed exactly, never mistaken for another model's.

<folder>/model.json     the architecture that the checkpoints are of, and the optimizer
<folder>/step-100/      one torch.distributed.checkpoint; complete once it has a .metadata file
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_tree.config import CheckpointConfig
from titan_tree.distributed.titan import CheckpointManager, LRSchedulersContainer, OptimizersContainer
from titan_tree.errors import UserError

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come: all that a resume needs besides model, optimizer and scheduler.

    Random generators are not part of it: the trainer seeds them anew in every step.
    """

    step: int = 0  # optimizer steps done
    data: dict[str, Any] = field(default_factory=dict)  # the dataset's state after them

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "data": json.dumps(self.data)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.data = state["step"], json.loads(state["data"])


class Checkpoints:
    """Saves and resumes a run's state. Collective: every rank makes the same calls.

    Args:
        folder: of the checkpoints; made when the first one is written.
        architecture: the model's configuration and the optimizer's name, JSON; a checkpoint of others is
            refused.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        *,
        model: nn.Module,
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        progress: Progress,
        architecture: Mapping[str, Any],
    ) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        self.optimizers, self.lr_schedulers = optimizers, lr_schedulers
        self.architecture = json.loads(json.dumps(architecture))
        self.saving: int | None = None  # the step whose checkpoint may still be in the writing
        self.manager = CheckpointManager.Config(
            enable=config.interval > 0,
            folder=folder.name,
            interval=1,  # called only when a checkpoint is due
            keep_latest_k=config.keep,
            async_mode="async" if config.async_save else "disabled",
            initial_load_model_only=False,
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states={"progress": progress},
            sd_adapter=None,
            base_folder=str(folder.parent),
        )

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one. Removes what a crash left half-written."""
        if self.config.interval == 0:
            return
        complete, incomplete = self._scan()
        if dist.get_rank() == 0:
            for step in incomplete:
                logger.info("removed %s: its writing was cut off", self._path(step))
                shutil.rmtree(self._path(step))
        dist.barrier()
        if not complete:
            return
        if not self.config.resume:
            raise UserError(
                f"{self.folder}: holds checkpoints up to step {complete[-1]}, but checkpoint.resume is "
                "false; choose another folder, or remove them"
            )
        self._check_architecture()
        hyperparameters = self._hyperparameters()
        with warnings.catch_warnings():
            # Torch warns of what torchtitan's scheduler does when it is loaded.
            warnings.filterwarnings("ignore", message="To get the last learning rate")
            self.manager.load()
        self._set_hyperparameters(hyperparameters)
        logger.info("resumed from %s", self._path(self.progress.step))

    def save(self, last: bool = False) -> None:
        """Write a checkpoint of the current step if one is due, or if it is the ``last``.

        Raises UserError where the disk refuses (this checkpoint's or, asynchronously, the one before);
        what was half-written is removed, earlier checkpoints stay.
        """
        step = self.progress.step
        if self.config.interval == 0 or not (last or step % self.config.interval == 0):
            return
        self.wait()
        self.saving = step
        with self._removed_on_failure():
            self._write_architecture()
            self.manager.save(step)
        if not self.config.async_save:
            self.saving = None

    def wait(self) -> None:
        """Until no checkpoint is in the writing."""
        with self._removed_on_failure():
            self.manager.maybe_wait_for_saving()
        self.saving = None

    def newest(self) -> Path | None:
        complete, _ = self._scan()
        return self._path(complete[-1]) if complete else None

    def close(self) -> None:
        """After the last save."""
        self.wait()
        self.manager.close()

    def _scan(self) -> tuple[list[int], list[int]]:
        """Steps of complete checkpoints, ascending, and of incomplete ones."""
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        steps = sorted(int(match[1]) for match in found if match)
        complete = [step for step in steps if (self._path(step) / ".metadata").is_file()]
        return complete, [step for step in steps if step not in complete]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            assert self.saving is not None
            path = self._path(self.saving)
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            if (cause := _refused_by_disk(error)) is None:
                raise
            raise UserError(
                f"{path}: writing the checkpoint failed: {cause}; is the disk full? It is removed, earlier "
                "ones are intact; make room, then start the same command again to resume"
            ) from error

    def _write_architecture(self) -> None:
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / "model.json.part"
            part.write_text(json.dumps(self.architecture, indent=1) + "\n")
            part.replace(self.folder / "model.json")

    def _check_architecture(self) -> None:
        path = self.folder / "model.json"
        try:
            # Those written before there was a choice do not name the optimizer.
            saved = {"optimizer": "adamw"} | json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: expected the architecture of the checkpoints beside it: {error}"
            ) from None
        wrong = [
            f"{key} = {saved.get(key)} (now {self.architecture.get(key)})"
            for key in sorted(saved | self.architecture)
            if saved.get(key) != self.architecture.get(key)
        ]
        if wrong:
            raise UserError(
                f"{self.folder}: its checkpoints are of another model or optimizer: {', '.join(wrong)}; "
                "set it back, or choose another folder"
            )

    def _hyperparameters(self) -> list[dict[str, Any]]:
        names = ("betas", "eps", "weight_decay")
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [{name: group[name] for name in names} for group in groups]

    def _set_hyperparameters(self, hyperparameters: list[dict[str, Any]]) -> None:
        """A checkpoint brings its own learning rate and so on; the configuration has the last word."""
        rates = [rate for scheduler in self.lr_schedulers for rate in scheduler.get_last_lr()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, own, lr in zip(groups, hyperparameters, rates, strict=True):
            group.update(own, lr=lr)


def _refused_by_disk(error: BaseException) -> BaseException | None:
    """The failure of a rank to write, if that is what ``error`` says; None: it is something else, our bug."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [failure for failure, _ in error.failures.values()]
    for cause in causes:
        # torch's zip writer reports a failed write as a RuntimeError.
        if (
            isinstance(cause, OSError)
            or "PytorchStreamWriter" in str(cause)
            or "inline_container" in str(cause)
        ):
            return cause
    return None
