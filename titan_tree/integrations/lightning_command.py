"""The run of `titan-tree train --trainer lightning`, with the Trainer that [lightning] describes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from titan_tree.config.registry import Registry
from titan_tree.distributed.collectives import rank
from titan_tree.distributed.faults import failures_named
from titan_tree.distributed.launch import Launch, ranks_of_machine
from titan_tree.distributed.mesh import init_distributed
from titan_tree.errors import UserError, unknown_name
from titan_tree.integrations.lightning import (
    L,
    ModelParallelStrategy,
    TreeCheckpoints,
    TreeDataModule,
    TreeLightningModule,
)
from titan_tree.integrations.lightning_settings import LightningRunConfig
from titan_tree.run.config import Config
from titan_tree.run.folder import RunFolder

logger = logging.getLogger(__name__)

# Keys without an effect on ``run``.
UNUSED = ("metrics.loggers", "profiler.enable", "profiler.memory_snapshot")
DECIDED = {  # arguments of lightning.Trainer that ``run`` sets -> what decides them
    "accelerator": "whether the machine has GPUs",
    "devices": "--nproc-per-node of torchrun",
    "num_nodes": "--nnodes of torchrun",
    "strategy": "the table [parallel]",
    "max_epochs": "training.steps or training.epochs",
    "logger": "the table [lightning.loggers]",
    "callbacks": "the table [lightning.callbacks]",
    "log_every_n_steps": "metrics.log_interval",
    "default_root_dir": "folder",
    "deterministic": "training.deterministic",
}


def run(config: LightningRunConfig) -> None:
    """Trains by Lightning's loop, starting from the newest checkpoint if there is one. Collective.

    Raises:
        UserError: the configuration, the data and the checkpoints do not fit together.
    """
    with failures_named(lambda: "training with Lightning", lambda: "run the same command again"):
        trainer = build_trainer(config)
        init_distributed(config.parallel.timeout_s)  # Lightning uses this process group
        folder = RunFolder(config)
        unused = [key for key in UNUSED if _is_set(config, key)]
        if unused and rank() == 0:
            logger.warning("keys without effect with --trainer lightning: %s", ", ".join(unused))
        try:
            trainer.fit(TreeLightningModule(config), TreeDataModule(config))
        except (RuntimeError, L.utilities.exceptions.MisconfigurationException) as error:
            # A callback that monitors an unknown metric; EarlyStopping raises the first of the two.
            if isinstance(error, RuntimeError) and not str(error).startswith("Early stopping conditioned"):
                raise
            raise UserError(f"[lightning]: {' '.join(str(error).split())}") from None
        folder.close()
        dist.destroy_process_group()


def _is_set(config: Config, key: str) -> bool:
    """Returns whether a key has another value than its default."""
    name, field = key.split(".")
    table = getattr(config, name)
    return getattr(table, field) != getattr(type(table)(), field)


def build_trainer(config: LightningRunConfig) -> L.Trainer:
    """Returns Lightning's Trainer for the ranks that torchrun describes, with ``TreeCheckpoints``.

    Raises:
        UserError: [lightning] has a wrong class or argument.
    """
    table, launch = config.lightning, Launch.of()
    known = list(inspect.signature(L.Trainer.__init__).parameters)[1:]
    for name in table.trainer:
        if name in DECIDED:
            raise UserError(
                f"lightning.trainer.{name}: expected no value, because {DECIDED[name]} decides it; remove it"
            )
        if name not in known:
            raise unknown_name("argument of lightning.Trainer, in [lightning.trainer],", name, known)
    ranks = launch.num_ranks if launch else 1
    devices = ranks_of_machine(ranks)
    arguments = {
        "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
        "devices": devices,
        "num_nodes": ranks // devices,
        "strategy": ModelParallelStrategy() if ranks > 1 else "auto",
        "max_epochs": -1,
        "logger": _made("loggers", table.loggers) or None,
        "callbacks": [*_made("callbacks", table.callbacks), TreeCheckpoints()],
        "log_every_n_steps": config.metrics.log_interval,
        "default_root_dir": config.folder,
        "deterministic": config.training.deterministic or None,
    }
    return _make("trainer", L.Trainer, arguments | table.trainer)


def _made(key: str, table: dict[str, Any]) -> list[Any]:
    """Returns the objects that [lightning.callbacks] or [lightning.loggers] describe."""
    package = f"lightning.pytorch.{key}"
    own = {name: f"{package}:{name}" for name in import_module(package).__all__}
    classes: Registry[Any] = Registry(f"class in [lightning.{key}],", own | {n: n for n in table if ":" in n})
    made = []
    for name, options in table.items():
        try:
            kind = classes[name]
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"lightning.{key}: {name!r} cannot be imported: {error}") from None
        made.append(_make(f"{key}.{name}", kind, options))
    return made


def _make(key: str, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Calls a class with the options of a table, and names the table if it refuses them."""
    try:
        return kind(**options)
    except (TypeError, ValueError, ImportError, L.utilities.exceptions.MisconfigurationException) as error:
        raise UserError(f"lightning.{key}: {' '.join(str(error).split())}") from None
