"""Checkpoints: saves a run's state and resumes it exactly.

    <folder>/run.lock       locked by the run that uses the folder, see FolderLock
    <folder>/step-100/      a checkpoint, see storage.py
    <folder>/step-100.3f9a41c2.partial/     one that is written or deleted; 3f9a41c2 is the id of the run
    <folder>/step-100.damaged/              one that could not be loaded

The run deletes only checkpoints and partial checkpoints with its own id.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_tree.distributed.collectives import call_on_all_ranks_keep_rank0, call_on_rank_0, rank, world_size
from titan_tree.distributed.faults import is_lost_rank
from titan_tree.distributed.optimizers import Optimizers
from titan_tree.errors import UserError
from titan_tree.models.lora.adapters import frozen_names
from titan_tree.run.checkpoint.background import BackgroundWriter, Tensors, plain_tensors
from titan_tree.run.checkpoint.changes import check_architecture, check_config
from titan_tree.run.checkpoint.lock import FolderLock, set_aside
from titan_tree.run.checkpoint.storage import (
    CheckpointReader,
    CheckpointWriter,
    DamagedCheckpointError,
    clean,
    none_intact,
    own_steps,
    read_verified,
    unreadable,
)
from titan_tree.run.config import Config
from titan_tree.run.settings import CheckpointConfig

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """The state that a resume needs besides model and optimizer. The learning rate follows from the step.

    It contains no random generators, because the trainer seeds them in every step.
    """

    step: int = 0  # optimizer steps done
    data: dict[str, Any] = field(default_factory=dict)  # state of the dataset after these steps


class Checkpoints:
    """Saves and resumes a run's state. Collective: every rank makes the same calls.

    Args:
        folder: folder of the checkpoints. The constructor creates it, so a wrong path fails at the start.
        architecture: the configuration of the model, and the optimizer, as JSON values. A run only resumes
            from checkpoints with the same architecture.
        run_config: the whole configuration. A resume names what has changed.

    Attributes:
        more_state: makes further state, as JSON values, and adds its tensors to a dict. None: there is none.
        more: this state, as it was loaded; (None, {}) if the checkpoint has none.

    Raises:
        UserError: the folder cannot be written, another run uses it, or not all ranks see it.
    """

    more_state: Callable[[dict[str, Tensor]], object] | None = None
    more: tuple[object, dict[str, Tensor]] = (None, {})

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        *,
        model: nn.Module,
        optimizers: Optimizers,
        progress: Progress,
        architecture: Mapping[str, object],
        run_config: Config,
    ) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        self.model, self.optimizers = model, optimizers
        self.architecture = json.loads(json.dumps(architecture))
        self.run_config = run_config
        self.writing: tuple[int, Path] | None = None  # step and folder of the checkpoint being written
        self._written: Future | None = None  # ends when an asynchronous checkpoint is complete
        self.last_saved = 0
        if config.interval:
            self.lock = FolderLock(folder)
            self.lock.check_shared(folder)
            device = next(model.parameters()).device
            self._background = BackgroundWriter(optimizers, device) if config.async_save else None

    def resume(self) -> None:
        """Loads the newest good checkpoint, if any, and deletes partial ones of this run.

        If a checkpoint is damaged, a warning names it, it is renamed to step-N.damaged, and the one before it
        is loaded.

        Raises:
            UserError: no checkpoint is good; ``resume`` is false although there are some; or they belong to
                another architecture, or to a configuration whose curves cannot be compared.
        """
        if self.config.interval == 0:
            return
        steps = call_on_rank_0(partial(clean, self.folder, self.lock.run))
        if steps and not self.config.resume:
            raise UserError(
                f"{self.folder}: contains checkpoints up to step {steps[-1]}, but checkpoint.resume is "
                "false; choose another folder, or remove the checkpoints"
            )
        for step in reversed(steps):
            try:
                self._load(step)
            except DamagedCheckpointError as damage:
                moved = call_on_rank_0(partial(set_aside, self._path(step), "damaged"))
                logger.warning("damaged checkpoint: %s; moved to %s", damage, moved)
            else:
                logger.info("resumed from %s", self._path(step))
                return
        if steps:
            raise none_intact(self.folder)

    def save(self, due: bool = False) -> bool:
        """Writes a checkpoint of the current step if the interval says so, or if ``due``.

        Returns:
            Whether it wrote one. A step is never written twice.

        Raises:
            UserError: the optimizer has states that a checkpoint cannot hold; or writing to the disk failed,
                for this checkpoint or for an asynchronous one before it. The partial checkpoint is removed;
                earlier ones stay.
        """
        step = self.progress.step
        newest = self.writing[0] if self.writing else self.last_saved
        if self.config.interval and step == self.last_saved + 1:  # early, so that little is lost
            self.optimizers.check_states()
        if self.config.interval == 0 or step == newest or not (due or step % self.config.interval == 0):
            return False
        self.wait()
        unfinished = self._unfinished(step)
        self.writing = step, unfinished
        with self._removed_on_failure():
            call_on_rank_0(partial(unfinished.mkdir, exist_ok=True))
            tensors, more = self._tensors(), dict[str, Tensor]()
            content = {
                "run": self.lock.run,
                "step": step,
                "data": self.progress.data,
                "lr_scheduler": {"last_epoch": step},  # for versions before 2026-11-28
                "architecture": self.architecture,
                "config": dataclasses.asdict(self.run_config),
                "more": self.more_state(more) if self.more_state else None,
            }
            if more:
                tensors["more"] = more
            writer = CheckpointWriter(unfinished, self._path(step), content)
            if self._background:
                self._written = self._background.start(tensors, writer)
                return True
            dcp.save(tensors, storage_writer=writer)
        self._saved()
        return True

    def wait(self) -> None:
        """Waits until an asynchronous checkpoint is complete."""
        if self._written:
            written, self._written = self._written, None
            with self._removed_on_failure():
                written.result()
            self._saved()

    def newest(self) -> Path | None:
        """Returns the folder of the newest checkpoint that this run has written or resumed."""
        return self._path(self.last_saved) if self.last_saved else None

    def close(self) -> None:
        """Waits for the last checkpoint and unlocks the folder."""
        self.wait()
        if self.config.interval:
            self.lock.release()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"step-{step}.{self.lock.run}.partial"

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of the model and of the optimizer. Loading replaces their values in place.

        Frozen weights are left out: the run reads or draws them again when it starts.
        """
        states, frozen = self.optimizers.state_dict(), frozen_names(self.model)
        return {
            "model": {name: w for name, w in self.model.state_dict().items() if name not in frozen},
            "optimizer": {name: value for name, value in states.items() if isinstance(value, Tensor)},
        }

    def _load(self, step: int) -> None:
        """Verifies a checkpoint and loads it.

        Raises:
            DamagedCheckpointError: it is not as it was written.
            UserError: it belongs to another architecture or experiment.
        """
        path = self._path(step)
        with _damaged(path):
            content = call_on_all_ranks_keep_rank0(partial(read_verified, path, step, rank(), world_size()))
            architecture, config, data = content["architecture"], content["config"], content["data"]
            data |= {name: int(data[name]) for name in ("epoch", "group")}
            reader = CheckpointReader(path, content["files"])
            check_architecture(self.folder, architecture, self.architecture)
            check_config(self.folder, config, self.run_config, self.config.allow_changes)
        tensors = self._tensors()
        _check_dtypes(path, tensors, reader)
        with _damaged(path):
            more = {
                name.removeprefix("more."): torch.empty(stored.size, dtype=stored.properties.dtype)
                for name, stored in reader.metadata.state_dict_metadata.items()
                if name.startswith("more.") and isinstance(stored, TensorStorageMetadata)
            }
            if more and self.more_state:
                dcp.load({"more": more}, storage_reader=reader)
            dcp.load(tensors, storage_reader=reader)
            call_on_all_ranks_keep_rank0(partial(_check_finite, tensors))
        self.model.load_state_dict(self.model.state_dict() | tensors["model"])
        # The hyperparameters of the optimizer are those of the configuration.
        self.optimizers.load_state_dict(self.optimizers.state_dict() | tensors["optimizer"])
        self.progress.step, self.progress.data = step, data
        self.last_saved, self.more = step, (content.get("more"), more)
        if content.get("more") and not self.more_state:
            logger.info("%s: the states of Lightning's callbacks are left out", path)

    def _saved(self) -> None:
        """Notes that a checkpoint is complete, and deletes those that are no longer kept."""
        assert self.writing
        self.last_saved, self.writing = self.writing[0], None
        if rank() == 0 and self.config.keep:
            for step in own_steps(self.folder, self.lock.run)[: -self.config.keep]:
                self._delete(step)

    def _delete(self, step: int) -> None:
        """Deletes a checkpoint. If that is interrupted, the next start deletes the rest."""
        path = self._path(step)
        try:
            shutil.rmtree(path.rename(self._unfinished(step)))
        except OSError as error:
            logger.warning("%s: cannot be deleted: %s", path, error)

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Removes the checkpoint that is being written if the context raises."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException
            assert self.writing
            (step, unfinished), self.writing = self.writing, None
            if rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            if (cause := _failed_write(error)) is None:
                raise
            steps = own_steps(self.folder, self.lock.run)
            newest = f"the newest one is {self._path(steps[-1])}" if steps else "there is none in its folder"
            raise UserError(
                f"{self._path(step)}: writing the checkpoint failed: {cause}; {newest}; if the disk is full, "
                "free some space, then run the same command again to resume"
            ) from error


def load_model(path: Path, model: nn.Module) -> None:
    """Loads the weights of a checkpoint into a model that is not sharded. Frozen weights stay as they are.

    Raises:
        UserError: the checkpoint is damaged, or of a model with other weights.
    """
    state, frozen = model.state_dict(), frozen_names(model)
    weights = {name: weight for name, weight in state.items() if name not in frozen}
    try:
        with _damaged(path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            content = read_verified(path, int(path.name.removeprefix("step-")), 0, 1)
            reader = CheckpointReader(path, content["files"])
            dcp.load({"model": weights}, storage_reader=reader, no_dist=True)
    except DamagedCheckpointError as damage:
        raise UserError(f"{damage}; choose another checkpoint") from None
    model.load_state_dict(state | weights)


# What reading a manifest or tensors can raise if titan_tree did not write them.
MALFORMED = (
    *(KeyError, TypeError, ValueError, ArithmeticError, AttributeError, IndexError),
    *(RuntimeError, AssertionError),
)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Converts the errors that a crafted or damaged checkpoint causes into DamagedCheckpointError."""
    try:
        yield
    except (UserError, DamagedCheckpointError):
        raise
    except (*MALFORMED, EOFError, OSError, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        if is_lost_rank(cause) or isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            raise cause from None  # says nothing about the checkpoint
        if isinstance(cause, OSError):
            raise unreadable(path, cause) from None
        lines = str(cause).splitlines() or [type(cause).__name__]
        raise DamagedCheckpointError(f"{path}: cannot be loaded: {lines[0]}") from None


def _check_dtypes(path: Path, tensors: Tensors, reader: CheckpointReader) -> None:
    """Raises UserError if the run has a tensor in another dtype, because loading would round it."""
    for name, tensor in _named(tensors):
        stored = reader.metadata.state_dict_metadata.get(name)
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype != tensor.dtype:
            raise UserError(
                f"{path}: {name}: expected {tensor.dtype} as in this run, got {stored.properties.dtype}; "
                "restore the dtypes of the configuration, or choose another folder"
            )


def _check_finite(tensors: Tensors) -> None:
    """Raises ValueError if a number of this rank is NaN or infinite. No step writes such a number."""
    for name, tensor in _named(tensors):
        for part in plain_tensors(tensor):
            if part.is_floating_point() and not part.isfinite().all():
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")


def _named(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors as DCP stores them."""
    for group, named in tensors.items():
        for name, tensor in named.items():
            yield f"{group}.{name}", tensor


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
