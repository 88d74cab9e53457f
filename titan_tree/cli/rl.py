"""Trains a model on its own rollouts: a warm start if the configuration has one, then reinforcement learning.

titan-tree rl train_configs/rl_demo.toml                     one process
titan-tree rl train_configs/rl_demo.toml training.steps=20   with other values in the configuration
titan-tree rl my_rl.toml --nproc 8                           8 processes, for 8 GPUs of this machine

To continue an interrupted run from its newest checkpoint, start the same command again.
"""

from __future__ import annotations

import argparse

from titan_tree.cli.run_process import add_run_arguments, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree rl``."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree rl``. Raises UserError for wrong input, and Interrupted after a signal."""
    from titan_tree.rl.settings import RLRunConfig

    config = start(args, RLRunConfig)
    from titan_tree.rl.run import run  # takes seconds, so check the configuration first

    run(config)
