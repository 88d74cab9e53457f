"""Saves a run's state, resumes it exactly, and exports its weights.

A run resumes only from complete checkpoints of the same model and optimizer. It removes incomplete ones.

<folder>/model.json     the architecture of the model, and the optimizer
<folder>/step-100/      one torch.distributed.checkpoint; complete once it contains a .metadata file
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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from titan_tree.config import CheckpointConfig
from titan_tree.distributed.titan import CheckpointManager, LRSchedulersContainer, OptimizersContainer
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import save_pretrained

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """The state that a resume needs besides model, optimizer and scheduler.

    It contains no random generators, because the trainer seeds them in every step.
    """

    step: int = 0  # optimizer steps done
    data: dict[str, Any] = field(default_factory=dict)  # state of the dataset after these steps

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "data": json.dumps(self.data)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.data = state["step"], json.loads(state["data"])


class Checkpoints:
    """Saves and resumes a run's state. Collective: every rank makes the same calls.

    Args:
        folder: folder of the checkpoints, created when the first one is written.
        architecture: the configuration of the model, and the optimizer, as JSON values. A run only resumes
            from checkpoints with the same architecture.
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
        self.saving: int | None = None  # step of a checkpoint that is being written
        self.manager = CheckpointManager.Config(
            enable=config.interval > 0,
            folder=folder.name,
            interval=1,  # ``save`` calls it only when a checkpoint is due
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
        """Loads the newest complete checkpoint, if any, and removes incomplete ones.

        Raises:
            UserError: checkpoints exist although ``resume`` is false, or belong to another architecture.
        """
        if self.config.interval == 0:
            return
        complete, incomplete = self._scan()
        if dist.get_rank() == 0:
            for step in incomplete:
                logger.info("removed %s: it is incomplete, because its run was interrupted", self._path(step))
                shutil.rmtree(self._path(step))
        dist.barrier()
        if not complete:
            return
        if not self.config.resume:
            raise UserError(
                f"{self.folder}: contains checkpoints up to step {complete[-1]}, but checkpoint.resume is "
                "false; choose another folder, or remove the checkpoints"
            )
        self._check_architecture()
        hyperparameters = self._hyperparameters()
        with warnings.catch_warnings():
            # torchtitan's scheduler triggers this warning whenever it is loaded.
            warnings.filterwarnings("ignore", message="To get the last learning rate")
            self.manager.load()
        self._set_hyperparameters(hyperparameters)
        logger.info("resumed from %s", self._path(self.progress.step))

    def save(self, due: bool = False) -> None:
        """Writes a checkpoint of the current step if the interval says so, or if it is ``due``.

        Raises:
            UserError: writing to the disk failed, for this checkpoint or for an asynchronous one before it.
                The incomplete checkpoint is removed; earlier ones stay.
        """
        step = self.progress.step
        if self.config.interval == 0 or not (due or step % self.config.interval == 0):
            return
        self.wait()
        self.saving = step
        with self._removed_on_failure():
            self._write_architecture()
            self.manager.save(step)
        if not self.config.async_save:
            self.saving = None

    def wait(self) -> None:
        """Waits until an asynchronous checkpoint is complete."""
        with self._removed_on_failure():
            self.manager.maybe_wait_for_saving()
        self.saving = None

    def newest(self) -> Path | None:
        """Returns the folder of the newest complete checkpoint."""
        complete, _ = self._scan()
        return self._path(complete[-1]) if complete else None

    def close(self) -> None:
        """Waits for the last checkpoint and stops the threads that write checkpoints."""
        self.wait()
        self.manager.close()

    def _scan(self) -> tuple[list[int], list[int]]:
        """Returns the steps of complete checkpoints, ascending, and of incomplete ones."""
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        steps = sorted(int(match[1]) for match in found if match)
        complete = [step for step in steps if (self._path(step) / ".metadata").is_file()]
        return complete, [step for step in steps if step not in complete]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Removes the checkpoint that is being written if the context raises."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException
            assert self.saving is not None
            path = self._path(self.saving)
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            if (cause := _failed_write(error)) is None:
                raise
            raise UserError(
                f"{path}: writing the checkpoint failed: {cause}; it was removed, earlier ones are intact; "
                "if the disk is full, free some space, then run the same command again to resume"
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
            # Checkpoints from before optimizer.name existed do not name the optimizer.
            saved = {"optimizer": "adamw"} | json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: cannot be read: {error}; it describes the model of this folder's checkpoints; "
                "restore the file, or choose another folder"
            ) from None
        wrong = [
            f"{key} = {saved.get(key)} (now {self.architecture.get(key)})"
            for key in sorted(saved | self.architecture)
            if saved.get(key) != self.architecture.get(key)
        ]
        if wrong:
            raise UserError(
                f"{self.folder}: contains checkpoints of another model or optimizer: {', '.join(wrong)}; "
                "restore these settings, or choose another folder"
            )

    def _hyperparameters(self) -> list[dict[str, Any]]:
        names = ("betas", "eps", "weight_decay")
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [{name: group[name] for name in names} for group in groups]

    def _set_hyperparameters(self, hyperparameters: list[dict[str, Any]]) -> None:
        """Replaces the learning rates and other hyperparameters of the checkpoint by the configuration's."""
        rates = [rate for scheduler in self.lr_schedulers for rate in scheduler.get_last_lr()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, own, lr in zip(groups, hyperparameters, rates, strict=True):
            group.update(own, lr=lr)


def export_hf(model: Decoder, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """Writes the weights as a Hugging Face snapshot and replaces an earlier one. Collective.

    Args:
        model: may be sharded.
        dtype: dtype of the written weights.
        source: folder of the snapshot that the weights started from, or None. Its tokenizer and other
            files are copied.
    """
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            weights[name] = full.to("cpu", dtype)
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        save_pretrained(model, folder, weights, source=source)
        logger.info("Hugging Face snapshot: %s", folder)
    dist.barrier()


def _failed_write(error: BaseException) -> BaseException | None:
    """Returns the failed write that caused ``error``, or None for any other cause, which is a bug."""
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
