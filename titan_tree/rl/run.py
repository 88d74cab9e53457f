"""run: a whole run of reinforcement learning. Its warm start is a run of its own in the folder warm_start."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from titan_tree.checkpoint.changes import DECISIVE, config_changes
from titan_tree.config import LoRAConfig, LossConfig, LRSchedulerConfig
from titan_tree.config.rl import RLConfig, RLRunConfig, WarmStartConfig
from titan_tree.config.toml import load_tables
from titan_tree.errors import UserError
from titan_tree.rl.checks import check_without_weights
from titan_tree.rl.sampler import Sampler
from titan_tree.rl.trainer import RLTrainer
from titan_tree.rl.warm_start import WarmStart
from titan_tree.run.model_setup import snapshot_model

logger = logging.getLogger(__name__)

RANDOM_WEIGHTS = ("model.flavor", "model.name", "model.overrides.", "training.seed")  # keys that choose them


def run(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Trains until ``training.steps``, starting from the newest checkpoints if there are some.

    Args:
        sampler: see ``RLTrainer``. A warm start always samples from the weights that it trains.

    Raises:
        Interrupted: a signal ended the run.
        UserError: as ``Trainer``, or the warm start did not reach its reward.
    """
    trainer = RLTrainer(after_warm_start(config, sampler), sampler)
    trainer.train()
    trainer.close()


def warm_start_config(config: RLRunConfig) -> RLRunConfig:
    """Returns the configuration of the warm start: supervised training of all weights on demonstrations.

    Keys that only reinforcement learning reads have their defaults.
    """
    table, rl = config.warm_start, config.rl
    return dataclasses.replace(
        config,
        folder=f"{config.folder}/warm_start",
        data=dataclasses.replace(config.data, global_batch_groups=table.tasks, replay="off"),
        loss=LossConfig("sft", "token_mean"),
        rl=RLConfig(
            rl.environment, max_turn_tokens=rl.max_turn_tokens, max_rollout_tokens=rl.max_rollout_tokens
        ),
        lora=LoRAConfig(),
        optimizer=dataclasses.replace(config.optimizer, lr=table.lr),
        lr_scheduler=LRSchedulerConfig(min(10, table.steps), "linear", min_lr_factor=0.1),
        training=dataclasses.replace(config.training, steps=table.steps),
        checkpoint=dataclasses.replace(config.checkpoint, folder="checkpoints", export_hf=True),
    )


def after_warm_start(config: RLRunConfig, sampler: Sampler | None = None) -> RLRunConfig:
    """Runs the warm start, if there is one and it is not complete, and returns the configuration after it.

    Args:
        sampler: of the training that follows, see ``run``.

    Raises:
        UserError: see ``run``.
    """
    if not config.warm_start.steps:
        return config
    check_without_weights(config, sampler)
    warm = warm_start_config(config)
    folder = Path(warm.folder)
    if not (folder / "hf").exists():
        trainer = WarmStart(warm)
        trainer.train()
        trainer.close()
    # Older versions wrote keys of reinforcement learning, too.
    earlier = warm_start_config(load_tables(RLRunConfig, folder / "config.toml"))
    decisive, other = config_changes(
        dataclasses.asdict(earlier), dataclasses.asdict(warm), (*DECISIVE, *RANDOM_WEIGHTS)
    )
    if decisive:
        raise UserError(
            f"{folder}: its warm start had other settings: {', '.join(decisive)}; restore them, or choose "
            "another folder"
        )
    for change in other:
        logger.info("changed since the warm start: %s", change)
    model = snapshot_model(config.model, str(folder / "hf"))
    return dataclasses.replace(config, model=model, warm_start=WarmStartConfig())
