"""WarmStart: supervised training on demonstrations, before reinforcement learning."""

from __future__ import annotations

import logging
import random

from titan_tree.errors import UserError
from titan_tree.rl.environment import Demonstrator
from titan_tree.rl.trainer import EpisodeTrainer, mean_reward
from titan_tree.tree.paths import TokenPath

logger = logging.getLogger(__name__)


class WarmStart(EpisodeTrainer):
    """Trains a model on demonstrations until its sampled rollouts reach ``warm_start.reward``.

    Its configuration is that of ``warm_start_config``. metrics.csv gets the column ``validation_reward``, the
    mean reward of rollouts on tasks that no step has shown.
    """

    reward: float | None = None  # the last one that was measured

    def open_data(self) -> int:
        steps = super().open_data()
        if not isinstance(self.environment, Demonstrator):
            raise UserError(
                f"warm_start.steps: expected 0, because the environment {self.config.rl.environment!r} has "
                "no method demonstrations; add one, or start from model.hf_path"
            )
        return steps

    def train(self) -> None:
        if step := self.progress.step:
            self.validate(step)  # again, because a checkpoint does not tell whether the reward was reached
        super().train()

    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the demonstrations of each task."""
        assert self.tokenizer is not None
        assert isinstance(self.environment, Demonstrator)
        by_task = []
        for task in range(self.config.data.global_batch_groups):
            name = f"{self.config.data.seed}/warm start/{step}/{task}"
            shown = self.environment.demonstrations(random.Random(name))
            tools = getattr(self.environment.episode(random.Random(name)), "tools", None)
            by_task.append(
                [
                    path
                    for messages in shown
                    for path in self.tokenizer.samples(messages, tools, turns="whole")
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
        tasks = range(self.config.warm_start.measured_tasks)
        return mean_reward(
            self.sample([f"{self.config.data.seed}/measured/{step}/{task}" for task in tasks], 1)
        )
