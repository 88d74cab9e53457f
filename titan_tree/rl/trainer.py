"""RLTrainer and WarmStart: Trainers whose steps come from tasks of an environment.

    episodes -> rollouts, turn by turn -> branches -> advantages -> TokenTrees -> TreeStep -> optimizer

The weights sample right before the step that trains on the rollouts, so nothing is made ahead. All random
choices of a step follow from ``data.seed`` and its number, so a resumed run needs no other state.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from titan_tree.build import DEFAULT_STEPS
from titan_tree.config.rl_tables import RLRunConfig
from titan_tree.config.tables import check_warmup
from titan_tree.data.advantages import advantages, check_options
from titan_tree.data.packing import flat_trees, pack
from titan_tree.engine.records import StepInput
from titan_tree.errors import UserError
from titan_tree.leaving import AgreedInput
from titan_tree.models.tree_model import TreeModel
from titan_tree.registry import ENVIRONMENTS
from titan_tree.rl.branching import branches
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import Demonstrator, Environment
from titan_tree.rl.generate_sampler import GenerateSampler
from titan_tree.rl.reference import Reference, build_reference
from titan_tree.rl.rollouts import Chat, Limits, Rollout, play
from titan_tree.rl.sampler import Sampler
from titan_tree.trainer import Trainer
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)


class EpisodeTrainer(Trainer, ABC):
    """A Trainer without data files: each step calls ``paths`` for its samples.

    Args:
        sampler: samples turns. Default: the weights that are trained, through ``default_sampler``.

    Raises:
        UserError: the configuration, the environment and the checkpoints do not fit together.
    """

    config: RLRunConfig
    environment: Environment
    chat: Chat
    sampler: Sampler

    def __init__(self, config: RLRunConfig, sampler: Sampler | None = None) -> None:
        check_options(config.rl.advantage, config.rl.advantage_options, "rl")
        self._given_sampler = sampler
        super().__init__(config)

    @abstractmethod
    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the samples of each task of a step, which counts from 1."""

    def open_data(self) -> int:
        """Makes the environment and the sampler. Returns the number of steps of the whole run."""
        config, limits = self.config, self.model.config
        if self.mesh.size() > 1:
            raise UserError(
                f"titan_tree.rl: expected one process, got {self.mesh.size()}, because sampling needs all "
                "weights on one device; start it without torchrun"
            )
        if self.tokenizer is None:
            raise UserError("data.tokenizer: expected a tokenizer, got none; set it, or model.hf_path")
        if config.model.flavor and limits.vocab_size > (ids := self.tokenizer.vocab_size):
            raise UserError(
                f"model.overrides.vocab_size: expected at most the tokenizer's {ids:,} ids, got "
                f"{limits.vocab_size:,}, so the model would sample ids without text; set it to {ids}"
            )
        self.environment = ENVIRONMENTS[config.rl.environment]()
        self.chat = Chat(self.tokenizer)
        self.sampler = self._given_sampler or default_sampler(self.model)
        logger.info("rollouts: sampled by %s", type(self.sampler).__name__)
        self.validation_inputs, self.data_sizes = [], None
        steps = config.training.steps or DEFAULT_STEPS
        check_warmup(config.lr_scheduler.warmup_steps, steps)
        return steps

    def resume_data(self) -> None:
        """Does nothing: a step depends only on its number."""

    def data_state(self) -> dict[str, Any]:
        return {}

    def inputs(self) -> Iterator[AgreedInput]:
        """Returns an iterator over the inputs of the remaining steps, each made when it is needed."""
        return self.leaving.agree(self._inputs())

    def log_sample(self) -> None:
        """Logs nothing: the first step has not been sampled yet."""

    def sample(self, tasks: Sequence[str], number: int) -> list[list[Rollout]]:
        """Returns ``number`` independent rollouts for each task, which its seed determines."""
        groups = [self.chat.start(self.environment.episode(random.Random(task)), number) for task in tasks]
        self._play(list(chain.from_iterable(groups)), tasks[0])
        return groups

    def _play(self, rollouts: Sequence[Rollout], seed: str) -> None:
        rl = self.config.rl
        play(rollouts, self.sampler, self.chat, Limits(rl.max_turn_tokens, rl.max_rollout_tokens), seed)

    def _inputs(self) -> Iterator[tuple[StepInput, dict[str, int]]]:
        data = self.config.data
        for step in count(self.progress.step + 1):
            by_task = self.paths(step)
            if data.layout == "flat":
                trees = flat_trees(list(chain.from_iterable(by_task)))
            else:
                trees = [TokenTree.from_paths(paths) for paths in by_task]
            position = {"epoch": 0, "group": step * data.global_batch_groups}
            yield self.tree_step.prepare(pack(trees, data.max_tokens)), position


class RLTrainer(EpisodeTrainer):
    """Trains a model on its own rollouts. Each step samples new tasks.

    metrics.csv gets the columns ``reward`` (mean over independent rollouts; branches do not count),
    ``cut_off`` (share of rollouts that a limit ended), ``rollouts``, ``sampled_tokens``, ``sampling_s`` and,
    with a reference, ``scoring_s``.
    """

    reference: Reference | None  # scores rollouts if the loss reads ref_logprobs

    def open_data(self) -> int:
        self.reference = build_reference(self.config, self.tree_step)
        return super().open_data()

    def resume_data(self) -> None:
        """Checks that the reference is that of the run so far."""
        if self.reference and not self.config.checkpoint.allow_changes:
            self.reference.check(self.progress.data.get("reference"))

    def data_state(self) -> dict[str, Any]:
        return {"reference": self.reference.identity} if self.reference else {}

    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the rollouts of each task, branches included, with advantages and log-probs."""
        started, config, rl = time.perf_counter(), self.config, self.config.rl
        tasks = [f"{config.data.seed}/{step}/{task}" for task in range(config.data.global_batch_groups)]
        groups = self.sample(tasks, rl.rollouts)
        reward = mean_reward(groups)
        forks = [
            branches(group, rl.branches, random.Random(f"{task}/branches"))
            for task, group in zip(tasks, groups, strict=True)
        ]
        self._play(list(chain.from_iterable(forks)), f"{tasks[0]}/branches")
        groups = [group + own for group, own in zip(groups, forks, strict=True)]
        everything = list(chain.from_iterable(groups))
        self.rollout_values = {
            "reward": reward,
            "cut_off": statistics.fmean(rollout.is_cut_off for rollout in everything),
            "rollouts": len(everything),
            "sampled_tokens": sum(
                sum(rollout.mask[rollout.starts[rollout.inherited] :]) for rollout in everything
            ),
            "sampling_s": time.perf_counter() - started,
        }
        options = rl.advantage_options
        by_task = [
            token_paths(group, task, rl.advantage, options) for task, group in zip(tasks, groups, strict=True)
        ]
        if self.reference:
            started = time.perf_counter()
            self.reference.score(by_task)
            self.rollout_values["scoring_s"] = time.perf_counter() - started
        return by_task


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
            by_task.append(
                [path for messages in shown for path in self.tokenizer.samples(messages, turns="whole")]
            )
        return by_task

    def validate(self, step: int) -> dict[str, float]:
        """Measures the reward if it is due, and ends the run if it is high enough."""
        if step % self.config.warm_start.interval and step != self.num_steps:
            return {}
        self.reward = self._measure(step)
        if self.reward >= self.config.warm_start.reward:
            self.num_steps = self.leaving.num_steps = step
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


def default_sampler(model: TreeModel) -> Sampler:
    """Returns a sampler of the weights of ``model``: ``CachedSampler`` if it can, else ``GenerateSampler``.

    Raises:
        UserError: neither can.
    """
    try:
        return CachedSampler(model)
    except UserError:
        return GenerateSampler(model)


def token_paths(
    rollouts: Sequence[Rollout], name: str, advantage: str, options: Mapping[str, Any]
) -> list[TokenPath]:
    """Returns the finished rollouts of a task as training samples.

    Args:
        rollouts: of one task.
        name: of the task; the ids of paths begin with it.
        advantage: the estimator, a name in ``registry.ADVANTAGES``.
        options: of the estimator.
    """
    paths = [
        TokenPath(rollout.tokens, rollout.mask, old_logprobs=rollout.logprobs, id=f"{name}/{i}")
        for i, rollout in enumerate(rollouts)
    ]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    inherited = [rollout.inherited for rollout in rollouts]
    for path, own in zip(
        paths, advantages(advantage, paths, rewards, inherited=inherited, **options), strict=True
    ):
        path.advantage = own
    return paths


def mean_reward(groups: Sequence[Sequence[Rollout]]) -> float:
    """Returns the mean reward of finished rollouts."""
    rewards = [rollout.reward for rollout in chain.from_iterable(groups)]
    return statistics.fmean(reward for reward in rewards if reward is not None)
