"""Trains a model on token trees.

titan-tree train train_configs/demo.toml                           one process
titan-tree train my.toml optimizer.lr=2e-3 folder=outputs/faster   with other values in the configuration
titan-tree train my.toml --nproc 8                                 8 processes, for 8 GPUs of this machine
titan-tree train my.toml --trainer lightning                       with Lightning's loop and callbacks
torchrun --nproc-per-node 8 -m titan_tree train my.toml            the same with options of torchrun

To continue an interrupted run from its newest checkpoint, start the same command again. For several machines,
start torchrun on each of them; see docs/parallelism.md.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from titan_tree.cli.run_process import add_run_arguments, start

if TYPE_CHECKING:
    from titan_tree.run.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree train``."""
    add_run_arguments(parser)
    loops = "native", "lightning"
    parser.add_argument(
        "--trainer", choices=loops, default="native", help="whose training loop runs the steps"
    )


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree train``. Raises UserError for wrong input, and Interrupted after a signal."""
    # Imports of ``run`` and ``_train`` take seconds, so check the configuration first.
    if args.trainer == "native":
        from titan_tree.run.config import Config

        _train(start(args, Config))
        return
    from titan_tree.integrations.lightning_settings import LightningRunConfig

    config = start(args, LightningRunConfig)
    from titan_tree.integrations.lightning_command import run

    run(config)


def _train(config: Config) -> None:
    from titan_tree.distributed.faults import failures_named
    from titan_tree.run.trainer import Trainer

    with failures_named(lambda: "the start or the end of the run", lambda: "run the same command again"):
        trainer = Trainer(config)
        trainer.train()
        trainer.close()
