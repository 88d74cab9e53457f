"""Trains with Lightning, and compares the run with one of titan_tree's own trainer."""

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.tensor import DTensor

from tests.support.tiny_run import MEASURED, read_metrics
from titan_tree.integrations.lightning import TreeDataModule, TreeLightningModule
from titan_tree.run.config import Config

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def lightning_trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Returns a trainer that logs every step into ``folder``, and saves a checkpoint every 3 steps."""
    saves = ModelCheckpoint(
        folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=3, save_on_train_epoch_end=False
    )
    fixed: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": CSVLogger(folder, name="", version="log"),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [*callbacks, saves],
    }
    return L.Trainer(**fixed | options)


def fit(config: Config, trainer: L.Trainer, resume: Path | None = None) -> TreeLightningModule:
    """Trains a new module from start to end, or from a checkpoint."""
    module = TreeLightningModule(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        trainer.fit(module, TreeDataModule(config), ckpt_path=resume)
    return module


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """Returns what Lightning has logged, without NaNs, by the number of the step, from 1."""
    steps: dict[int, dict[str, float]] = {}
    with (folder / "log" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):  # a step has a row for training and one for validation
            values = {
                name: float(value)
                for name, value in row.items()
                if value not in ("", "nan") and name not in MEASURED
            }
            step = int(values.pop("step")) + 1
            steps[step] = values | steps.get(step, {})
    return steps


def expected(config: Config) -> dict[int, dict[str, float]]:
    """Returns the values in metrics.csv of a run, as ``logged`` returns them. Lightning rounds to fp32."""
    steps = {}
    for row in read_metrics(config):
        step = int(row.pop("step"))
        steps[step] = {k: float(np.float32(v)) for k, v in row.items() if v}
    return steps


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of this rank's shards of all weights."""
    state = model.state_dict()
    return {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}
