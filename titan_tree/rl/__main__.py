"""The command of reinforcement learning: a warm start if the configuration has one, then RL.

    python -m titan_tree.rl --config train_configs/rl_demo.toml [key=value ...]

To continue an interrupted run from its newest checkpoint, start the same command again.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_tree.config.toml import load_tables
from titan_tree.rl.settings import RLRunConfig
from titan_tree.train import exit_process, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the training and returns the exit status, see ``run_command``."""
    return run_command("titan_tree.rl", "Train a model on its own rollouts.", _train, argv)


def _train(path: str, overrides: Sequence[str]) -> None:
    config = load_tables(RLRunConfig, path, overrides)
    from titan_tree.rl.run import run  # takes seconds, so check the configuration first

    run(config)


if __name__ == "__main__":
    exit_process(main)
