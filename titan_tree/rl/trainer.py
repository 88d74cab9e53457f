"""RLTrainer: a Trainer whose steps come from tasks of an environment.

    episodes -> rollouts, turn by turn -> branches -> advantages -> TokenTrees -> TreeStep -> optimizer

The weights sample right before the step that trains on the rollouts. Only a ``RemoteSampler`` may sample one
step ahead. All random choices of a step follow from ``data.seed`` and the step's number, so a resumed run
needs no other state.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, count
from typing import Any

from titan_tree.components.tree_loss import COUNT_ONCE
from titan_tree.config import check_warmup
from titan_tree.config.rl import RLRunConfig
from titan_tree.data.advantages import WITHOUT_BRANCHES, check_options
from titan_tree.data.packing import BASELINES, pack
from titan_tree.engine.step_io import StepInput
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.registry import ENVIRONMENTS
from titan_tree.rl.environment import Environment
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.reference_policy import Reference, check_reference, check_vocabulary
from titan_tree.rl.rollouts import Chat, Rollout, branches, mean_reward, play, token_paths
from titan_tree.rl.sampler import RemoteSampler, Sampler, in_daemon
from titan_tree.run.build import DEFAULT_STEPS, build_loss
from titan_tree.run.stopping import SynchronizedInput
from titan_tree.run.trainer import Trainer
from titan_tree.scoring.score_trees import set_logprobs
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)

POLL_S = 0.05  # seconds until a signal ends the wait for rollouts
StepRollouts = tuple[list[list[Rollout]], dict[str, float]]  # rollouts of each task, and metrics of the step


class InterruptedSampling(Exception):  # noqa: N818  # not an error: the run is about to end
    """A signal arrived while training waited for rollouts."""


class EpisodeTrainer(Trainer, ABC):
    """A Trainer without data files. Each step calls ``paths`` for its samples.

    Args:
        sampler: samples turns. By default, ``default_sampler`` samples from the weights that are trained.

    Raises:
        UserError: the configuration, the environment and the checkpoints do not fit together.
    """

    config: RLRunConfig
    environment: Environment
    chat: Chat
    sampler: Sampler

    def __init__(self, config: RLRunConfig, sampler: Sampler | None = None) -> None:
        self._custom_sampler = sampler
        super().__init__(config)

    @abstractmethod
    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the samples of each task of a step. Steps count from 1."""

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
        self.sampler = self._custom_sampler or default_sampler(self.model)
        logger.info("rollouts: sampled by %s", type(self.sampler).__name__)
        self.validation_inputs, self.data_sizes = [], None
        return config.training.steps or DEFAULT_STEPS

    def resume_data(self) -> None:
        """Does nothing, because a step depends only on its number."""

    def data_state(self) -> dict[str, Any]:
        return {}

    def inputs(self) -> Iterator[SynchronizedInput]:
        """Returns an iterator over the inputs of the remaining steps, each made when it is needed."""
        return self.stopping.synchronized_inputs(self._inputs())

    def log_sample(self) -> None:
        """Logs nothing, because the first step has not been sampled yet."""

    def sample(self, tasks: Sequence[str], number: int) -> list[list[Rollout]]:
        """Returns ``number`` independent rollouts for each task. A task's name is its seed."""
        groups = [self.chat.start(self.environment.episode(random.Random(task)), number) for task in tasks]
        self._play(list(chain.from_iterable(groups)), tasks[0])
        return groups

    def _play(self, rollouts: Sequence[Rollout], seed: str) -> None:
        rl = self.config.rl
        play(
            rollouts,
            self.sampler,
            self.chat,
            seed,
            max_turn_tokens=rl.max_turn_tokens,
            max_rollout_tokens=rl.max_rollout_tokens,
        )

    def _inputs(self) -> Iterator[tuple[StepInput, dict[str, int]]]:
        data = self.config.data
        for step in count(self.progress.step + 1):
            try:
                by_task = self.paths(step)
            except InterruptedSampling:
                yield StepInput.nothing(), {}  # ``StopController`` ends the run
                return
            if self.config.loss.reduction in COUNT_ONCE:
                for paths in by_task:
                    TokenTree.from_paths(paths, data.replay).weigh_edges()
            if data.layout in BASELINES:
                trees = [tree for paths in by_task for tree in BASELINES[data.layout](paths, data.replay)]
            else:
                trees = [TokenTree.from_paths(paths, data.replay) for paths in by_task]
            position = {"epoch": 0, "group": step * data.global_batch_groups}
            yield self.tree_step.prepare(pack(trees, data.max_tokens)), position

    def check_limits(self, by_task: Sequence[Sequence[TokenPath]]) -> None:
        """Raises UserError if the model cannot read a path. Samplers with other weights have other limits."""
        config, experts = self.model.config, self.model.experts
        limits = ModelLimits(
            config.max_position_embeddings, config.vocab_size, experts.sizes if experts else None
        )
        for path in chain.from_iterable(by_task):
            path.check_limits(limits)


class RLTrainer(EpisodeTrainer):
    """Trains a model on its own rollouts. Each step samples new tasks.

    metrics.csv gets the columns ``reward`` (mean over independent rollouts; branches do not count),
    ``cut_off`` (share of rollouts that a limit ended), ``rollouts``, ``sampled_tokens``, ``sampling_s`` and
    ``scoring_s``. If the sampler has weights of its own, ``weights_age`` is the number of optimizer steps
    since it got them.
    """

    reference: Reference | None  # scores rollouts if the loss reads ref_logprobs

    def __init__(self, config: RLRunConfig, sampler: Sampler | None = None) -> None:
        check_settings(config, sampler)
        # The rollouts that a RemoteSampler samples, and the number of optimizer steps of its weights.
        self._pending: tuple[Future[StepRollouts], int] | None = None
        super().__init__(config, sampler)
        self.optimizer_step.is_on_policy = config.rl.async_steps == 0

    def open_data(self) -> int:
        config = self.config
        check_model(config, self.model, self._custom_sampler)
        if config.rl.server.url is not None:
            from titan_tree.rl.server.server_sampler import build_server_sampler  # imports httpx

            self._custom_sampler = build_server_sampler(config, self.model, self.folder.run)
        needs_reference = self.tree_step.loss.needs_reference
        self.reference = Reference(config, self.tree_step) if needs_reference else None
        return super().open_data()

    def resume_data(self) -> None:
        """Checks that the reference is that of the run so far."""
        if self.reference and not self.config.checkpoint.allow_changes:
            self.reference.check(self.progress.data.get("reference"))

    def data_state(self) -> dict[str, Any]:
        return {"reference": self.reference.identity} if self.reference else {}

    def train(self) -> None:
        try:
            super().train()
        finally:
            if isinstance(self.sampler, RemoteSampler):
                self.sampler.close()

    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the rollouts of each task, branches included, with advantages and log-probs."""
        if isinstance(self.sampler, RemoteSampler):
            groups, values = self._remote_rollouts(step, self.sampler)
        else:
            groups, values = self.rollouts(step)
        self.rollout_values = values
        rl = self.config.rl
        by_task = [
            token_paths(group, task, rl.advantage, rl.advantage_options)
            for task, group in zip(self._tasks(step), groups, strict=True)
        ]
        self.check_limits(by_task)
        started = time.perf_counter()
        if self.tree_step.loss.reads_rollout:
            paths = list(chain.from_iterable(by_task))
            sampler_logprobs = [path.old_logprobs for path in paths]
            data, partitioner = self.config.data, self.tree_step.partitioner
            set_logprobs(
                self.model,
                by_task,
                "old_logprobs",
                max_tokens=data.max_tokens,
                partitioner=partitioner,
                replay=data.replay,
            )
            for path, logprobs in zip(paths, sampler_logprobs, strict=True):
                path.rollout_logprobs = logprobs
        if self.reference:
            self.reference.set_ref_logprobs(by_task)
        values["scoring_s"] = time.perf_counter() - started
        return by_task

    def _remote_rollouts(self, step: int, sampler: RemoteSampler) -> StepRollouts:
        """Returns the rollouts of ``step``, and starts to sample the next step if there are async steps.

        Without async steps, step n samples right before it trains, from the weights after step n - 1. With
        one, it samples while step n - 1 trains, from the weights after step n - 2.

        Raises:
            InterruptedSampling: a signal arrived during the wait.
            Exception: whatever the sampling or the update of its weights raised.
        """

        def start(next_step: int) -> tuple[Future[StepRollouts], int]:
            sampler.update(self.model, step - 1)
            return in_daemon(partial(self.rollouts, next_step), "rollouts"), step - 1

        future, sampled_after = self._pending or start(step)
        self._pending = None
        while not future.done():
            if self.stopping.signals.received:
                raise InterruptedSampling
            time.sleep(POLL_S)
        groups, values = future.result()
        values["weights_age"] = step - 1 - sampled_after
        if self.config.rl.async_steps and step < self.num_steps:
            self._pending = start(step + 1)
        return groups, values

    def rollouts(self, step: int) -> StepRollouts:
        """Returns the rollouts of each task of a step, branches included, and the metrics of the step."""
        started, rl, tasks = time.perf_counter(), self.config.rl, self._tasks(step)
        groups = self.sample(tasks, rl.rollouts)
        reward = mean_reward(groups)
        forks = [
            branches(group, rl.branches, random.Random(f"{task}/branches"))
            for task, group in zip(tasks, groups, strict=True)
        ]
        self._play(list(chain.from_iterable(forks)), f"{tasks[0]}/branches")
        groups = [group + group_forks for group, group_forks in zip(groups, forks, strict=True)]
        all_rollouts = list(chain.from_iterable(groups))
        if self.config.data.replay != "off" and not all(rollout.experts for rollout in all_rollouts):
            raise UserError(
                f"data.replay: expected a sampler that records experts, but {type(self.sampler).__name__} "
                'recorded none; give ServerSampler the argument experts, or set data.replay = "off"'
            )
        return groups, {
            "reward": reward,
            "cut_off": statistics.fmean(rollout.is_cut_off for rollout in all_rollouts),
            "rollouts": len(all_rollouts),
            "sampled_tokens": sum(
                sum(rollout.mask[rollout.starts[rollout.inherited] :]) for rollout in all_rollouts
            ),
            "sampling_s": time.perf_counter() - started,
        }

    def _tasks(self, step: int) -> list[str]:
        """Returns the names of the tasks of a step, which are also their seeds."""
        data = self.config.data
        return [f"{data.seed}/{step}/{task}" for task in range(data.global_batch_groups)]


def check_settings(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError if settings do not fit together, whatever the model is.

    Args:
        sampler: the sampler that Python code passes, see ``EpisodeTrainer``. None: the run makes its own.
    """
    rl = config.rl
    check_options(rl.advantage, rl.advantage_options, "rl")
    if rl.branches and rl.advantage in WITHOUT_BRANCHES:
        raise UserError(
            f"rl.branches: expected 0, because rl.advantage = {rl.advantage!r} would take branches for "
            f'independent rollouts, got {rl.branches}; set rl.advantage = "spo", or rl.branches = 0'
        )
    if rl.server.url is not None and sampler is not None:
        raise UserError(
            "rl.server.url: expected none together with a sampler that Python code gives; remove one"
        )
    if rl.async_steps and rl.server.url is None and not isinstance(sampler, RemoteSampler):
        raise UserError(
            "rl.async_steps: expected 0, because the sampler has no weights of its own to sample from while "
            "the model trains; set rl.server.url"
        )
    if config.data.replay != "off" and rl.server.url is None and sampler is None:
        raise UserError(
            "data.replay: expected 'off' without a server, because the model that is trained records no "
            f"experts when it samples, got {config.data.replay!r}; set it to 'off', or set rl.server.url"
        )
    check_warmup(config.lr_scheduler.warmup_steps, config.training.steps or DEFAULT_STEPS)
    check_reference(config, build_loss(config.loss))


def check_model(config: RLRunConfig, model: TreeModel, sampler: Sampler | None = None) -> None:
    """Raises UserError if settings do not fit the model, which may be on the meta device.

    Args:
        sampler: see ``check_settings``. Its contexts may be shorter than ``rl.max_rollout_tokens``.
    """
    limit, positions = config.rl.max_rollout_tokens, model.config.max_position_embeddings
    if sampler is None and limit > positions:
        raise UserError(
            f"rl.max_rollout_tokens: expected at most the model's {positions:,} positions, got {limit:,}; "
            "lower it"
        )
    if config.data.replay != "off" and model.experts is None:
        raise UserError(
            f"data.replay: expected 'off' for a model without experts, got {config.data.replay!r}"
        )
    check_vocabulary(config, model)
