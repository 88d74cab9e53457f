"""Weights & Biases (W&B): values of a run in its web interface. Needs the package wandb.

W&B's own environment variables configure it: WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME, WANDB_MODE=offline, ...
"""

from __future__ import annotations

import html
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from titan_tree.errors import UserError
from titan_tree.run.metrics.loggers import Tracker

try:
    import wandb
except ImportError as error:
    raise UserError(
        f"metrics.loggers: 'wandb' needs the package wandb ({error}): run `pip install wandb`, "
        "or remove 'wandb' from metrics.loggers"
    ) from None


class WandbLogger(Tracker):
    """Logs to the W&B run whose id is in the folder's file wandb_run_id; see ``Tracker``.

    W&B ignores steps that it already has, which a resumed run repeats with equal numbers.
    """

    file_name = "wandb_run_id"

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        config = folder / "config.toml"
        try:
            self.run = wandb.init(
                id=self.earlier_id(),
                resume="allow",
                dir=folder,
                project=os.environ.get("WANDB_PROJECT", "titan_tree"),
                name=os.environ.get("WANDB_NAME", folder.name),
                config=tomllib.loads(config.read_text()) if config.exists() else {},
            )
        except wandb.Error as error:
            raise UserError(
                f"metrics.loggers: 'wandb': {' '.join(str(error).split())}; run `wandb login`, "
                "or set the environment variable WANDB_MODE=offline"
            ) from None
        self.id = self.run.id
        self.file.write_text(self.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        self.run.log(dict(values), step=step)

    def sample(self, text: str) -> None:
        self.run.log({"first_sample": wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=0)

    def close(self) -> None:
        super().close()
        # W&B shows a run as failed if an exception closes it.
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))
