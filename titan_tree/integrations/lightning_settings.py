"""The table of ``titan-tree train --trainer lightning`` besides those of training: [lightning]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from titan_tree.config.checks import Checked, check, setting
from titan_tree.run.config import Config

options_by_class = check(
    "a table of options for each class",
    lambda table: all(isinstance(options, dict) for options in table.values()),
)


@dataclass(kw_only=True)
class LightningConfig(Checked, table="lightning"):
    """Lightning's own settings (docs/lightning.md)."""

    # Callbacks by class, each with a table of its arguments. A class of another package than Lightning is
    # written "module:Class".
    callbacks: dict[str, Any] = setting({}, options_by_class)
    # Loggers, written as the callbacks. Default: Lightning's own, into lightning_logs/ in the run's folder.
    loggers: dict[str, Any] = setting({}, options_by_class)
    trainer: dict[str, Any] = setting({})  # Further arguments of lightning.Trainer, such as max_time.


@dataclass(kw_only=True)
class LightningRunConfig(Config):
    """All tables of a configuration for ``titan-tree train --trainer lightning``."""

    lightning: LightningConfig = field(default_factory=LightningConfig)
