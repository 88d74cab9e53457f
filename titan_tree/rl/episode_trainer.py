"""EpisodeTrainer: a Trainer whose samples come from an environment. RLTrainer and WarmStart extend it.

    paths of this rank's tasks -> TokenTrees -> TreeStep -> optimizer

Rank r of R samples the tasks r, r + R, ... of a step. Their trees then travel to the ranks that train on
them (balance/), which also score them.
"""

from __future__ import annotations

import logging
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar

from titan_tree.components.tree_loss.spec import COUNT_ONCE
from titan_tree.data.packing import BASELINES, MicroBatches, merged_trees, pack
from titan_tree.distributed.collectives import call_on_all_ranks
from titan_tree.distributed.faults import start_timeout
from titan_tree.engine.step_io import StepInput
from titan_tree.errors import UserError
from titan_tree.rl.agents import MODEL, TaskFile, play_agents
from titan_tree.rl.environment import ENVIRONMENTS, AgentEnvironment, Environment
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.rollouts import Chat, Rollout, play
from titan_tree.rl.sampler import InterruptedSampling, Sampler
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.truncation import Truncation
from titan_tree.run.balance.sharing import BalancedSharing
from titan_tree.run.build import DEFAULT_STEPS
from titan_tree.run.inputs import SynchronizedInput, synchronized_inputs
from titan_tree.run.trainer import Trainer
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EpisodeTrainer(Trainer, ABC):
    """A Trainer without data files. Each step calls ``paths`` for this rank's samples.

    Args:
        sampler: samples turns. By default, ``default_sampler`` samples from the weights that are trained.

    Raises:
        UserError: the configuration, the environment and the checkpoints do not fit together.
    """

    config: RLRunConfig
    environment: Environment | AgentEnvironment
    chat: Chat
    sampler: Sampler

    def __init__(self, config: RLRunConfig, sampler: Sampler | None = None) -> None:
        self._custom_sampler = sampler
        super().__init__(config)

    @abstractmethod
    def paths(self, step: int) -> list[list[TokenPath]]:
        """Returns the samples of each of this rank's tasks of a step. Steps count from 1. Collective."""

    def add_logprobs(self, trees: Sequence[TokenTree]) -> None:
        """Adds log-probs that the loss reads to the trees on which this rank trains. Collective."""

    def open_data(self) -> None:
        """Makes the environment and the sampler."""
        config, limits = self.config, self.model.config
        if self.tokenizer is None:
            raise UserError("data.tokenizer: expected a tokenizer, got none; set it, or model.hf_path")
        if config.model.flavor and limits.vocab_size > (ids := self.tokenizer.vocab_size):
            raise UserError(
                f"model.overrides.vocab_size: expected at most the tokenizer's {ids:,} ids, got "
                f"{limits.vocab_size:,}, so the model would sample ids without text; set it to {ids}"
            )
        check_parallel(config, self._custom_sampler)
        with ENVIRONMENTS.calling(config.rl.environment):
            make = ENVIRONMENTS[config.rl.environment]
            self.environment = TaskFile(config.rl.agent) if make is TaskFile else make()
        self.chat = Chat(self.tokenizer, config.data.sample)
        self.sampler = self._custom_sampler or default_sampler(self.model, Truncation.of(config.rl))
        self.sampler_name = type(self.sampler).__name__
        logger.info("rollouts: sampled by %s", self.sampler_name)
        self.validation_inputs, self.data_sizes = [], None

    def start_data(self) -> int:
        """Returns the number of steps of the whole run. A step depends only on its number."""
        return self.config.training.steps or DEFAULT_STEPS

    def data_state(self) -> dict[str, Any]:
        return {}

    def inputs(self) -> Iterator[SynchronizedInput]:
        """Returns an iterator over the inputs of the remaining steps, each made when it is needed."""
        timeout_s, sharing = self.config.parallel.timeout_s, None
        if self.balancing:
            sharing = self.balancing.sharing(self.progress.step, start_timeout(timeout_s), timeout_s, 1)
        return synchronized_inputs(self._inputs(sharing), self.stopping)

    def own(self, tasks: Sequence[T]) -> Sequence[T]:
        """Returns those of all tasks that this rank samples."""
        return tasks[self.mesh.get_rank() :: self.mesh.size()]

    def log_sample(self) -> None:
        """Logs nothing, because the first step has not been sampled yet."""

    def sample(
        self, tasks: Sequence[str], number: int, is_interrupted: Callable[[], object] = lambda: False
    ) -> list[list[Rollout]]:
        """Returns ``number`` independent rollouts for each task. A task's name is its seed.

        ``unsharded`` must have gathered the weights, unless the sampler has weights of its own.

        Args:
            is_interrupted: returns whether to end programs that play rollouts, see ``play_agents``.
        """
        environment = self.environment
        if isinstance(environment, Environment):
            groups = [self.chat.start(environment.episode(random.Random(task)), number) for task in tasks]
            self._play(groups, tasks)
            return groups
        from titan_tree.rl.model_recorder import ModelRecorder
        from titan_tree.run.metrics.builtin_loggers import progress_bar
        from titan_tree.serve.agent_server import AgentServer  # imports aiohttp

        rl = self.config.rl
        names = [(task, f"{task}/{i}".replace("/", "-")) for task in tasks for i in range(number)]
        serve = replace(self.config.serve, port=0, max_sessions=len(names) + 1)  # any free port
        recorder = ModelRecorder(self.chat, rl, serve.mode)
        with progress_bar(self.mesh.get_rank() == 0) as bar:
            shown = bar.add_task("programs", total=len(names))
            rollouts = play_agents(
                [(session, environment.task(random.Random(task))) for task, session in names],
                AgentServer(recorder, serve, MODEL, secrets.token_hex()),
                recorder,
                self.sampler,
                concurrency=rl.agent.concurrency,
                is_interrupted=is_interrupted,
                show=lambda ended: bar.update(shown, completed=ended),
            )
        return [rollouts[i : i + number] for i in range(0, len(names), number)]

    def _play(self, groups: Sequence[Sequence[Rollout]], names: Sequence[str]) -> None:
        """Samples groups of rollouts to their end. The name of a group decides its random numbers."""
        rl = self.config.rl
        play(
            list(chain.from_iterable(groups)),
            self.sampler,
            self.chat,
            [f"{name}/{i}" for name, group in zip(names, groups, strict=True) for i in range(len(group))],
            max_turn_tokens=rl.max_turn_tokens,
            max_rollout_tokens=rl.max_rollout_tokens,
        )

    def _inputs(self, sharing: BalancedSharing | None) -> Iterator[tuple[StepInput, dict[str, int]]]:
        if sharing:
            sharing.join(0)
        for number, step in enumerate(count(self.progress.step + 1)):
            try:
                read = partial(self._trees, self.paths(step))
            except InterruptedSampling:
                yield StepInput.nothing(), {}  # ``StopController`` ends the run
                return
            micro_batches: MicroBatches
            if sharing:
                micro_batches = sharing.own_micro_batches(number, read)
            else:
                micro_batches = pack(call_on_all_ranks(read), self.config.data.max_tokens)
            self.add_logprobs(list(chain.from_iterable(micro_batches)))
            position = {"epoch": 0, "group": step * self.config.data.global_batch_groups}
            prepared = self.tree_step.prepare(micro_batches)
            # A policy lags behind the one that is trained, which may not have sampled a token yet.
            counts = replace(prepared.counts, newest_version=step - 1)
            yield replace(prepared, counts=counts), position

    def _trees(self, by_task: Sequence[Sequence[TokenPath]]) -> list[TokenTree]:
        data = self.config.data
        if self.config.loss.reduction in COUNT_ONCE:
            for paths in by_task:
                TokenTree.from_paths(paths, data.replay).weigh_edges()
        if data.layout in BASELINES:
            return [tree for paths in by_task for tree in BASELINES[data.layout](paths, data.replay)]
        if data.merge == "batch":
            return merged_trees(list(chain.from_iterable(by_task)), data.max_tokens, data.replay)
        return [TokenTree.from_paths(paths, data.replay) for paths in by_task]

    def check_limits(self, by_task: Sequence[Sequence[TokenPath]]) -> None:
        """Raises UserError if the model cannot read a path. Samplers with other weights have other limits."""
        config, experts = self.model.config, self.model.experts
        limits = ModelLimits(
            config.max_position_embeddings,
            config.vocab_size,
            experts.sizes if experts else None,
            self.model.image_limits._replace(token_id=None),  # a policy may sample any id
        )
        for path in chain.from_iterable(by_task):
            path.check_limits(limits)


def check_parallel(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError if ranks cannot share the sampling in the way of the configuration.

    Args:
        sampler: samples turns. None: the weights that are trained do.
    """
    parallel = config.parallel
    if sampler is None and parallel.expert_parallel > 1:
        raise UserError(
            "parallel.expert_parallel: expected 1, because sampling from the trained weights needs all "
            f"experts on each rank, got {parallel.expert_parallel}; set it to 1, or set rl.server.url"
        )
    if parallel.sequence_parallel > 1 and not parallel.balance:
        raise UserError(
            "parallel.balance: expected true with parallel.sequence_parallel, because every rank samples "
            "tasks of its own, got false; set it to true"
        )
