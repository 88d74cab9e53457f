"""The training command with Lightning's loop, loggers and callbacks.

    python -m titan_tree.lightning --config train_configs/demo.toml training.steps=20
    torchrun --nproc-per-node 8 -m titan_tree.lightning --config train_configs/qwen3_8b.toml model.hf_path=DIR

To continue an interrupted run from its newest checkpoint, start the same command again, or titan_tree.train.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_tree.config.toml import load_tables
from titan_tree.integrations.lightning_settings import LightningRunConfig
from titan_tree.train import exit_process, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the training and returns the exit status, see ``run_command``."""
    return run_command("titan_tree.lightning", "Train a model on token trees with Lightning.", _train, argv)


def _train(path: str, overrides: Sequence[str]) -> None:
    config = load_tables(LightningRunConfig, path, overrides)
    # This import takes seconds, so the configuration is checked first.
    from titan_tree.integrations.lightning_command import run

    run(config)


if __name__ == "__main__":
    exit_process(main)
