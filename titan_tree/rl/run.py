"""run: a whole run of reinforcement learning. Its warm start is a run of its own in the folder warm_start."""

from __future__ import annotations

import dataclasses
import logging
import random
import statistics
from itertools import chain
from pathlib import Path

import torch

from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.config.plugins import imports_refused
from titan_tree.config.toml import load_tables
from titan_tree.data.images import with_loaded_images
from titan_tree.distributed.collectives import call_and_gather, call_on_all_ranks
from titan_tree.distributed.gradient_sync import unsharded
from titan_tree.distributed.settings import LRSchedulerConfig
from titan_tree.errors import UserError
from titan_tree.models.settings import LoRAConfig
from titan_tree.rl.environment import Demonstrator, Environment
from titan_tree.rl.episode_trainer import EpisodeTrainer
from titan_tree.rl.rollouts import rewards
from titan_tree.rl.sampler import Sampler
from titan_tree.rl.settings import RLConfig, RLRunConfig, WarmStartConfig
from titan_tree.rl.trainer import RLTrainer, check_model, check_settings
from titan_tree.run.build import build_router_bias
from titan_tree.run.checkpoint.changes import DECISIVE, config_changes
from titan_tree.run.model_setup import add_configured_lora, build_model_without_weights, snapshot_model
from titan_tree.tree.paths import TokenPath

logger = logging.getLogger(__name__)

# Keys that determine the weights before the warm start.
FIRST_WEIGHTS = ("model.flavor", "model.hf_path", "model.name", "model.overrides.", "training.seed")


class WarmStart(EpisodeTrainer):
    """Trains a model on demonstrations until its sampled rollouts reach ``warm_start.reward``.

    ``warm_start_config`` makes its configuration. metrics.csv gets the column ``validation_reward``, the mean
    reward of rollouts on tasks that no step has shown.
    """

    reward: float | None = None  # the newest measurement

    def open_data(self) -> None:
        super().open_data()
        if not isinstance(self.environment, Demonstrator):
            raise UserError(
                f"warm_start.steps: expected 0, because the environment {self.config.rl.environment!r} has "
                "no method demonstrations; add one, or start from model.hf_path"
            )

    def train(self) -> None:
        target, tasks = self.config.warm_start.reward, self.config.warm_start.measured_tasks
        logger.info(
            "warm start: ends early, once %d sampled rollouts have a mean reward of %g", tasks, target
        )
        if step := self.progress.step:
            self.validate(step)  # again, because a checkpoint does not tell whether the reward was reached
        super().train()

    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the demonstrations of each task of this rank."""
        return call_on_all_ranks(lambda: self._demonstrations(step))

    def _demonstrations(self, step: int) -> list[list[TokenPath]]:
        assert self.tokenizer is not None
        assert isinstance(self.environment, Demonstrator)
        by_task = []
        for task in self.own(range(self.config.data.global_batch_groups)):
            name = f"{self.config.data.seed}/warm start/{step}/{task}"
            demonstrations = self.environment.demonstrations(random.Random(name))
            of, draw = self.environment, random.Random(name)
            tools = getattr(of.episode(draw) if isinstance(of, Environment) else of.task(draw), "tools", None)
            by_task.append(
                [
                    path
                    for messages in demonstrations
                    for path in self.tokenizer.samples(
                        with_loaded_images(messages, "", {}), tools, turns="whole", **self.config.data.sample
                    )
                ]
            )
        self.check_limits(by_task)
        return by_task

    def validate(self, step: int) -> dict[str, float]:
        """Measures the reward if it is due, and ends the run if it is high enough."""
        if step % self.config.warm_start.interval and step != self.num_steps:
            return {}
        self.reward = self._measure(step)
        if self.reward >= self.config.warm_start.reward:
            self.num_steps = self.stopping.num_steps = step
        return {"reward": self.reward}

    def finish(self) -> None:
        """Exports the weights. Raises UserError if the reward is too low."""
        warm_start, step = self.config.warm_start, self.progress.step
        assert self.reward is not None
        if self.reward < warm_start.reward:
            raise UserError(
                f"warm_start.reward: expected a mean reward of at least {warm_start.reward}, got "
                f"{self.reward:.3f} after {step} steps; lower it, or raise warm_start.steps"
            )
        logger.info("warm start: mean reward %.3f after %d steps", self.reward, step)
        super().finish()

    def _measure(self, step: int) -> float:
        tasks = self.own(range(self.config.warm_start.measured_tasks))
        names = [f"{self.config.data.seed}/measured/{step}/{task}" for task in tasks]
        with unsharded(self.model):
            of_ranks = call_and_gather(lambda: rewards(self.sample(names, 1)))
        return statistics.fmean(chain.from_iterable(of_ranks))


def run(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Trains until ``training.steps``, starting from the newest checkpoints if there are some.

    Args:
        sampler: samples turns, see ``RLTrainer``. A warm start always uses the weights that it trains.

    Raises:
        Interrupted: a signal ended the run.
        UserError: the warm start did not reach its reward, or an error of ``Trainer``.
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
        loss=LossConfig(name="sft", reduction="token_mean"),
        rl=RLConfig(
            environment=rl.environment,
            agent=rl.agent,
            max_turn_tokens=rl.max_turn_tokens,
            max_rollout_tokens=rl.max_rollout_tokens,
        ),
        lora=LoRAConfig(),
        optimizer=dataclasses.replace(config.optimizer, lr=table.lr),
        lr_scheduler=LRSchedulerConfig(
            warmup_steps=min(10, table.steps), decay_type="linear", min_lr_factor=0.1
        ),
        training=dataclasses.replace(config.training, steps=table.steps),
        checkpoint=dataclasses.replace(config.checkpoint, folder="checkpoints", export_hf=True),
    )


def after_warm_start(config: RLRunConfig, sampler: Sampler | None = None) -> RLRunConfig:
    """Runs the warm start, if there is one and it is not complete, and returns the configuration after it.

    Args:
        sampler: the sampler of the training that follows, see ``run``.

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
    with imports_refused():  # of code that ``config`` does not name
        earlier = warm_start_config(load_tables(RLRunConfig, folder / "config.toml"))
    decisive, other = config_changes(dataclasses.asdict(earlier), warm, (*DECISIVE, *FIRST_WEIGHTS))
    if decisive:
        raise UserError(
            f"{folder}: its warm start had other settings: {', '.join(decisive)}; restore them, or choose "
            "another folder"
        )
    for change in other:
        logger.info("changed since the warm start: %s", change)
    model = snapshot_model(config.model, str(folder / "hf"))
    return dataclasses.replace(config, model=model, warm_start=WarmStartConfig())


def check_without_weights(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError for all that ``RLTrainer`` would refuse and that does not depend on weights.

    A warm start takes minutes, so these checks run before it.

    Args:
        sampler: the sampler that Python code passes, see ``check_settings``.
    """
    check_settings(config, sampler)
    with torch.device("meta"):
        model = build_model_without_weights(config.model)
    if config.lora.is_on:
        add_configured_lora(model, config.lora)
    build_router_bias(config.router_bias, model)
    check_model(config, model, sampler)
    if config.rl.server.url is not None:
        from titan_tree.rl.server.server_sampler import build_server_sampler  # imports httpx

        build_server_sampler(config, model, run="")  # sends no request
