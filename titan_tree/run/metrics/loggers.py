"""The interface of loggers, and the group of loggers that a run uses.

A logger of your own is a subclass of Logger, which metrics.loggers names, as "my_package.parts:MyLogger".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from titan_tree.config.registry import Registry


class Logger:
    """Base class of loggers. Only rank 0 constructs them.

    Args:
        folder: the run's folder; it exists and holds config.toml.
        start_step: number of steps already done, 0 for a new run. A resumed run repeats the steps after its
            checkpoint, so a logger must replace or ignore its earlier records of these steps.
        total_steps: number of steps of the whole run.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        self.folder, self.start_step, self.total_steps = folder, start_step, total_steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step, which counts from 1."""
        raise NotImplementedError

    def sample(self, text: str) -> None:
        """Records the first sample of a new run, in which the trained tokens are marked."""

    def advance(self, step: int) -> None:
        """Shows progress. It is called when training starts and after every step, logged or not."""

    def close(self) -> None:
        """Releases all resources. It is called once, when training ends or fails."""


class Tracker(Logger):
    """Base class of loggers to a tracker. A resumed run continues the tracker's run, whose id is in a file.

    A tracker removes no values. Steps that a resumed run repeats have equal values, unless the configuration
    has changed. ``RunFolder`` then sets the file aside, so that the tracker gets a new run.

    Attributes:
        id: the id of the run in the tracker. ``close`` writes it into the file, with the newest step.
    """

    id: str
    file_name: ClassVar[str]  # ends in "_run_id"

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.file, self.newest = folder / self.file_name, start_step

    def earlier_id(self) -> str | None:
        """Returns the id of the run that is continued, or None. The file then has no step until ``close``."""
        words = self.file.read_text().split() if self.start_step and self.file.exists() else []
        if not words:  # a crash may have emptied the file
            return None
        self.file.write_text(words[0])
        return words[0]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.newest = step

    def close(self) -> None:
        self.file.write_text(f"{self.id} {self.newest}")


LOGGERS: Registry[type[Logger]] = Registry(
    "logger",
    {
        "console": "titan_tree.run.metrics.builtin_loggers:ConsoleLogger",
        "csv": "titan_tree.run.metrics.builtin_loggers:CsvLogger",
        "tensorboard": "titan_tree.run.metrics.builtin_loggers:TensorBoardLogger",
        "wandb": "titan_tree.run.metrics.wandb:WandbLogger",
        "mlflow": "titan_tree.run.metrics.mlflow:MlflowLogger",
    },
    interface=("log", "advance", "close"),
    key="metrics.loggers",
)


class Loggers(Logger):
    """Passes every call to the loggers called ``names``. Leaving its ``with`` block closes them.

    Raises:
        UserError: a logger's package is missing or refuses to start.
    """

    def __init__(self, names: Sequence[str], folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.loggers: dict[str, Logger] = {}  # the open ones
        for name in names:
            with LOGGERS.calling(name, "folder, start_step, total_steps", (OSError,)):
                self.loggers[name] = LOGGERS[name](folder, start_step, total_steps)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, values))

    def sample(self, text: str) -> None:
        self._each(lambda logger: logger.sample(text))

    def advance(self, step: int) -> None:
        self._each(lambda logger: logger.advance(step))

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in self.loggers.items():
            with LOGGERS.calling(name, passed=(OSError,)):
                call(logger)

    def close(self) -> None:
        while self.loggers:
            name, logger = self.loggers.popitem()
            with LOGGERS.calling(name):
                logger.close()

    def __enter__(self) -> Self:
        self.advance(self.start_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
