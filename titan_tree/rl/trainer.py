"""RLTrainer: an EpisodeTrainer that trains on its own rollouts.

    episodes -> rollouts, turn by turn -> branches -> advantages -> TokenTrees -> TreeStep -> optimizer

The weights sample right before the step that trains on the rollouts. Only a ``RemoteSampler`` may sample
steps ahead. All random choices of a rollout follow from ``data.seed``, the step, the task and the rollout's
number. A resumed run therefore needs no other state, and any number of ranks samples the same rollouts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from titan_tree.data.advantages import WITHOUT_BRANCHES, check_options
from titan_tree.distributed.collectives import call_and_gather, call_on_all_ranks
from titan_tree.distributed.gradient_sync import unsharded
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.environment import ENVIRONMENTS, AgentEnvironment
from titan_tree.rl.episode_trainer import EpisodeTrainer
from titan_tree.rl.reference_policy import Reference, check_reference, check_vocabulary
from titan_tree.rl.rollouts import Rollout, branches, rewards, token_paths
from titan_tree.rl.sampler import InterruptedSampling, RemoteSampler, Sampler, SharedSampler, in_daemon
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.teachers import Teachers, check_teachers
from titan_tree.rl.truncation import Truncation
from titan_tree.run.build import build_loss
from titan_tree.scoring.score_trees import set_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

POLL_S = 0.05  # seconds until a signal ends the wait for rollouts


class RankRollouts(NamedTuple):
    """The rollouts that a rank has sampled for a step."""

    groups: list[list[Rollout]]  # of each of the rank's tasks, branches included
    rewards: list[float]  # of the independent rollouts
    seconds: float


class RLTrainer(EpisodeTrainer):
    """Trains a model on its own rollouts. Each step samples new tasks.

    metrics.csv gets the columns ``reward`` (mean over independent rollouts; branches do not count),
    ``cut_off`` (share of rollouts that a limit ended), ``rollouts``, ``sampled_tokens``, ``sampling_s`` and
    ``scoring_s``. If the sampler has weights of its own, ``policy_lag`` is the mean number of optimizer
    steps that the weights which sampled a token are older than those which train on it.
    """

    reference: Reference | None  # scores rollouts if the loss reads ref_logprobs
    teachers: Teachers | None  # score rollouts if the loss reads their likeliest tokens

    def __init__(self, config: RLRunConfig, sampler: Sampler | None = None) -> None:
        check_settings(config, sampler)
        self._pending: dict[int, Future[RankRollouts]] = {}  # what a RemoteSampler samples, by step
        super().__init__(config, sampler)
        self.optimizer_step.is_on_policy = config.rl.async_steps == 0

    def open_data(self) -> None:
        config = self.config
        check_model(config, self.model, self._custom_sampler)
        if config.rl.server.url is not None:
            from titan_tree.rl.server.server_sampler import build_server_sampler  # imports httpx

            self._custom_sampler = build_server_sampler(config, self.model, self.folder.run)
        needs_reference = self.tree_step.loss.needs_reference
        self.reference = Reference(config, self.tree_step, self.mesh) if needs_reference else None
        has_teachers = bool(config.rl.teacher.models)
        self.teachers = Teachers(config, self.tree_step, self.mesh) if has_teachers else None
        super().open_data()
        if isinstance(self.sampler, RemoteSampler):
            wait = self._wait_until
            self.sampler = SharedSampler(self.sampler, lambda done: call_on_all_ranks(partial(wait, done)))
        check_agents(config, self.environment)

    def start_data(self) -> int:
        """Checks that reference and teachers are those of the run so far. Returns the number of steps."""
        if self.progress.step and not self.config.checkpoint.allow_changes:
            for name, identity in self.data_state().items():
                if (expected := self.progress.data.get(name)) not in (None, identity):
                    raise UserError(
                        f"rl.{name}: expected the {name} of the run so far, {expected}, got {identity}; "
                        "restore it, or set checkpoint.allow_changes = true"
                    )
        return super().start_data()

    def data_state(self) -> dict[str, Any]:
        found = {"reference": self.reference, "teacher": self.teachers}
        return {name: model.identity for name, model in found.items() if model is not None}

    def train(self) -> None:
        try:
            super().train()
        finally:
            if isinstance(self.sampler, RemoteSampler):
                self.sampler.close()

    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the rollouts of each of this rank's tasks, branches included, with their advantages."""
        if isinstance(self.sampler, RemoteSampler):
            groups, values = self._remote_rollouts(step, self.sampler)
        else:
            with unsharded(self.model):
                groups, values = gathered(lambda: self.rollouts(step))
        self.rollout_values = values
        return call_on_all_ranks(lambda: self._paths(step, groups))

    def add_logprobs(self, trees: Sequence[TokenTree]) -> None:
        """Adds ``old_logprobs`` if the loss reads both policies, and what reference and teachers say."""
        started = time.perf_counter()
        if self.tree_step.loss.reads_rollout:
            set_logprobs(
                self.model,
                trees,
                "old_logprobs",
                max_tokens=self.config.data.max_tokens,
                partitioner=self.tree_step.partitioner,
            )
        if self.reference:
            self.reference.set_ref_logprobs(trees)
        if self.teachers:
            self.teachers.set_teacher_topk(trees)
        self.rollout_values = {**self.rollout_values, "scoring_s": time.perf_counter() - started}

    def _paths(self, step: int, groups: Sequence[Sequence[Rollout]]) -> list[list[TokenPath]]:
        rl = self.config.rl
        by_task = [
            token_paths(group, task, rl.advantage, rl.advantage_options)
            for task, group in zip(self._tasks(step), groups, strict=True)
        ]
        if self.teachers:
            for task, group, paths in zip(self._tasks(step), groups, by_task, strict=True):
                made: object = group[0].episode
                if isinstance(self.environment, AgentEnvironment):
                    made = self.environment.task(random.Random(task))
                self.teachers.name_paths(paths, getattr(made, "teacher", None))
        self.check_limits(by_task)
        if self.tree_step.loss.reads_rollout:
            for path in chain.from_iterable(by_task):
                path.rollout_logprobs = path.old_logprobs
        return by_task

    def _remote_rollouts(
        self, step: int, sampler: RemoteSampler
    ) -> tuple[list[list[Rollout]], dict[str, float]]:
        """Returns what ``gathered`` returns, and starts to sample the next steps if there are async steps.

        Without async steps, step n samples right before it trains, from the weights after step n - 1. With
        N of them, it begins to sample before step n - N trains, from the weights after step n - N - 1, and
        gets newer ones between its turns. No token is therefore older than N steps when it is trained.

        Raises:
            InterruptedSampling: a signal arrived during the wait.
            Exception: whatever the sampling or the update of its weights raised.
        """

        def start(steps: Iterable[int]) -> None:
            sampler.update(self.model, step - 1)
            for each in steps:
                if each not in self._pending:
                    self._pending[each] = in_daemon(partial(self.rollouts, each), "rollouts")

        if step not in self._pending:
            start([step])
        future = self._pending.pop(step)
        groups, values = gathered(lambda: self._wait(future))
        if self.config.rl.async_steps and step < self.num_steps:
            start(range(step + 1, min(step + self.config.rl.async_steps, self.num_steps) + 1))
        return groups, values

    def _wait(self, future: Future[RankRollouts]) -> RankRollouts:
        self._wait_until(future.done)
        return future.result()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self.stopping.signals.received:
                raise InterruptedSampling
            time.sleep(POLL_S)

    def rollouts(self, step: int) -> RankRollouts:
        """Samples the rollouts of this rank's tasks of a step. It communicates with no other rank."""
        started, rl, tasks = time.perf_counter(), self.config.rl, self._tasks(step)
        groups = self.sample(tasks, rl.rollouts, lambda: self.stopping.signals.received)
        forks = [
            branches(group, rl.branches, random.Random(f"{task}/branches"))
            for task, group in zip(tasks, groups, strict=True)
        ]
        self._play(forks, [f"{task}/branches" for task in tasks])
        all_groups = [group + group_forks for group, group_forks in zip(groups, forks, strict=True)]
        if self.config.data.replay != "off" and not all(r.experts for r in chain.from_iterable(all_groups)):
            raise UserError(
                f"data.replay: expected a sampler that records experts, but {self.sampler_name} "
                'recorded none; give ServerSampler the argument experts, or set data.replay = "off"'
            )
        return RankRollouts(all_groups, rewards(groups), time.perf_counter() - started)

    def _tasks(self, step: int) -> list[str]:
        """Returns the names of this rank's tasks of a step, which are also their seeds."""
        data = self.config.data
        return [f"{data.seed}/{step}/{task}" for task in self.own(range(data.global_batch_groups))]


def gathered(sample: Callable[[], RankRollouts]) -> tuple[list[list[Rollout]], dict[str, float]]:
    """Calls ``sample`` on every rank. Returns this rank's rollouts, and metrics of all ranks. Collective.

    Raises:
        Exception: whatever ``sample`` raised on some rank. All ranks raise the first such exception.
    """
    own: list[list[Rollout]] = []

    def counts() -> tuple[list[float], list[bool], int, float]:
        groups, independent, seconds = sample()
        own.extend(groups)
        rollouts = list(chain.from_iterable(groups))
        sampled_tokens = sum(sum(r.mask[r.starts[r.inherited] :]) for r in rollouts)
        return independent, [r.is_cut_off for r in rollouts], sampled_tokens, seconds

    rewards_of_ranks, cuts, sampled_tokens, seconds = zip(*call_and_gather(counts), strict=True)
    is_cut_off = list(chain.from_iterable(cuts))
    return own, {
        "reward": statistics.fmean(chain.from_iterable(rewards_of_ranks)),
        "cut_off": statistics.fmean(is_cut_off),
        "rollouts": len(is_cut_off),
        "sampled_tokens": sum(sampled_tokens),
        "sampling_s": max(seconds),
    }


def check_settings(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError if settings do not fit together, whatever the model is.

    Args:
        sampler: the sampler that Python code passes, see ``EpisodeTrainer``. None: the run makes its own.
    """
    rl = config.rl
    check_options(rl.advantage, rl.advantage_options, "rl")
    check_agents(config, ENVIRONMENTS[rl.environment])
    if rl.branches and rl.advantage in WITHOUT_BRANCHES:
        raise UserError(
            f"rl.branches: expected 0, because rl.advantage = {rl.advantage!r} would take branches for "
            f'independent rollouts, got {rl.branches}; set rl.advantage = "spo", or rl.branches = 0'
        )
    if rl.server.url is not None and sampler is not None:
        raise UserError(
            "rl.server.url: expected none together with a sampler that Python code gives; remove one"
        )
    if Truncation.of(rl).is_on and sampler is not None:
        raise UserError(
            "rl.top_p, rl.top_k and rl.min_p: expected 1, 0 and 0 with a sampler that Python code gives, "
            f"got {rl.top_p}, {rl.top_k}, {rl.min_p}; remove them"
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
    loss = build_loss(config.loss)
    if not loss.spec.reads_pairs:
        raise UserError(
            "loss.name: expected a loss that reads the advantages of rollouts, such as 'grpo', got "
            f"{config.loss.name!r}, which ignores rewards"
        )
    check_reference(config, loss)
    check_teachers(config, loss)


def check_agents(config: RLRunConfig, environment: object) -> None:
    """Raises UserError if programs cannot play the rollouts of an environment, or its class."""
    is_agent = hasattr(environment, "task") and not hasattr(environment, "episode")
    for key in ("branches", "async_steps"):
        if is_agent and (value := getattr(config.rl, key)):
            raise UserError(
                f"rl.{key}: expected 0 with rl.environment = {config.rl.environment!r}, whose programs play "
                f"whole rollouts with the weights of their step, got {value}; set it to 0"
            )


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
