"""MLflow: values of a run on a tracking server or in a local store. Needs mlflow or mlflow-skinny.

MLflow's own environment variables configure it: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_tree.errors import UserError
from titan_tree.run.metrics.loggers import Tracker

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise UserError(
        f"metrics.loggers: 'mlflow' needs the package mlflow ({error}): run `pip install mlflow-skinny`, "
        "or remove 'mlflow' from metrics.loggers"
    ) from None


class MlflowLogger(Tracker):
    """Logs to the MLflow run whose id is in the folder's file mlflow_run_id; see ``Tracker``.

    Steps that a resumed run repeats appear twice, with equal numbers.
    """

    file_name = "mlflow_run_id"

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        config = folder / "config.toml"
        try:
            self.client = MlflowClient()
            if earlier := self.earlier_id():
                self.id = earlier
                self.client.update_run(self.id, "RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "titan_tree")
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
            self.id = self.client.create_run(experiment_id, run_name=folder.name).info.run_id
            self.file.write_text(self.id)
            if config.exists():
                keys = _keys(tomllib.loads(config.read_text()))
                self.client.log_batch(self.id, params=[Param(key, str(value)) for key, value in keys])
        except Exception as error:  # a folder that is missing is no MlflowException
            raise UserError(
                f"metrics.loggers: 'mlflow': {' '.join(str(error).split())}; "
                "check the environment variable MLFLOW_TRACKING_URI"
            ) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, [Metric(name, value, now, step) for name, value in values.items()])

    def sample(self, text: str) -> None:
        self.client.log_text(self.id, text, "first_sample.txt")

    def close(self) -> None:
        super().close()
        self.client.set_terminated(self.id, "FAILED" if sys.exc_info()[0] else "FINISHED")


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the keys of a configuration as on the command line, such as optimizer.lr, with their values."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
