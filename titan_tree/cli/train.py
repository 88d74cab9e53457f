"""Trains a model on token trees.

titan-tree train train_configs/demo.toml                           one process
titan-tree train my.toml optimizer.lr=2e-3 folder=outputs/faster   with other values in the configuration
titan-tree train my.toml --nproc 8                                 8 processes, for 8 GPUs of this machine
titan-tree train my.toml --trainer lightning                       with Lightning's loop and callbacks

To continue an interrupted run from its newest checkpoint, start the same command again. For several machines,
start torchrun on each of them; see docs/parallelism.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_tree.run.config import Config

TRAINERS = {"native": "titan_tree.train", "lightning": "titan_tree.lightning"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree train``."""
    add_run_arguments(parser)
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        default="native",
        help="whose training loop runs the steps",
    )


def run(args: argparse.Namespace) -> None:
    """Replaces this process by the training. Raises UserError for a wrong configuration or --nproc."""
    start(TRAINERS[args.trainer], args)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of a command that starts a run."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the configuration of the run: a file, or a name such as demo")
    add("overrides", nargs="*", default=[], metavar="key=value", help="override a key of the configuration")
    add("--nproc", type=_count, default=1, metavar="N", help="processes, one for each GPU")


def start(module: str, args: argparse.Namespace) -> None:
    """Replaces this process by ``python -m module``, so that its signals and its exit status are the run's.

    torchrun starts several processes. It would show a wrong configuration as a failure of each of them, so
    the configuration is loaded once before.
    """
    if args.nproc > 1:
        load(module, args.config, args.overrides)
    sys.stdout.flush()
    os.execv(sys.executable, command(module, args.config, args.overrides, args.nproc))


def load(module: str, path: str, overrides: Sequence[str]) -> Config:
    """Returns the configuration as ``python -m module`` loads it."""
    from titan_tree.config.toml import load_tables
    from titan_tree.integrations.lightning_settings import LightningRunConfig
    from titan_tree.rl.settings import RLRunConfig
    from titan_tree.run.config import Config

    tables = {"titan_tree.lightning": LightningRunConfig, "titan_tree.rl": RLRunConfig}
    return load_tables(tables.get(module, Config), path, overrides)


def command(module: str, config: str, overrides: Sequence[str], nproc: int) -> list[str]:
    """Returns the command of a run: ``module`` itself, or torchrun if there are several processes."""
    torchrun = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    launcher = torchrun if nproc > 1 else ()
    return [sys.executable, *launcher, "-m", module, "--config", config, *overrides]


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 1000:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer from 1 to 1,000, got {text!r}")
