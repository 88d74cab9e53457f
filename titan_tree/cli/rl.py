"""Trains a model on its own rollouts: a warm start if the configuration has one, then reinforcement learning.

titan-tree rl train_configs/rl_demo.toml                     one process
titan-tree rl train_configs/rl_demo.toml training.steps=20   with other values in the configuration
titan-tree rl my_rl.toml --nproc 8                           8 processes, for 8 GPUs of this machine

To continue an interrupted run from its newest checkpoint, start the same command again.
"""

from __future__ import annotations

import argparse

from titan_tree.cli.train import add_run_arguments, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree rl``."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Replaces this process by the run. Raises UserError for a wrong configuration."""
    start("titan_tree.rl", args)
