"""Agents: programs that play the rollouts of their tasks, and call the model over HTTP.

AgentTask -> program in a folder of its own -> server -> recorder -> sampler
                |                                            |
                v  working folder, exit status               v  token ids of its calls, as a tree
              reward                ->  Rollout  <-        paths
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from titan_tree.config.files import regular
from titan_tree.config.plugins import calling, import_attribute
from titan_tree.data.readers.containers import Source
from titan_tree.errors import UserError, shorten
from titan_tree.rl.environment import AgentTask
from titan_tree.rl.rollouts import Rollout
from titan_tree.rl.sampler import InterruptedSampling, Sampler
from titan_tree.rl.settings import AgentConfig
from titan_tree.serve.process import Ended, Limits, Processes

if TYPE_CHECKING:
    from titan_tree.rl.model_recorder import ModelRecorder
    from titan_tree.serve.agent_server import AgentServer
    from titan_tree.serve.session import SessionPath

logger = logging.getLogger(__name__)
MODEL = "policy"  # the name under which programs find the model
IN_BRACES = re.compile(r"\{(\w+)\}")  # a name that a value replaces
POLL_S = 0.05  # seconds until a signal ends the wait for programs

Grader = Callable[[dict[str, Any], Path, int], float]  # of a task, its working folder and the exit status


class TaskFile:
    """The environment "agent": tasks of a file for the program of [rl.agent]."""

    def __init__(self, config: AgentConfig) -> None:
        if not config.command or config.tasks is None:
            raise UserError('rl.agent.command and rl.agent.tasks: expected both with the environment "agent"')
        if config.folder and not Path(config.folder).is_dir():
            raise UserError(f"rl.agent.folder: expected a folder, got {shorten(config.folder)}")
        self.config, self.grade = config, grader(config.reward)
        try:
            self.tasks = [task for _, task in Source(config.tasks).rows()]
        except OSError as error:
            raise UserError(f"rl.agent.tasks: {config.tasks}: {error.strerror}") from None
        if not self.tasks:
            raise UserError(f"rl.agent.tasks: {config.tasks}: expected tasks, got an empty file")
        of_server = values_of_server("", "")
        names = of_server.keys() | set().union(*self.tasks)
        for word in config.command:
            if (found := IN_BRACES.fullmatch(word)) and found[1] not in names:
                raise UserError(
                    f"rl.agent.command: expected a field of {config.tasks} in braces, or one of "
                    f"{', '.join(of_server)}, got {word!r}"
                )

    def task(self, draw: random.Random) -> AgentTask:
        """Returns a random task of the file."""
        task, config = draw.choice(self.tasks), self.config
        return AgentTask(
            command=[filled(word, task) for word in config.command],
            reward=partial(self.grade, task),
            folder=Path(config.folder) if config.folder else None,
            files={"task.json": json.dumps(task)},
            time_limit_s=config.time_limit_s,
            teacher=task.get("teacher"),
        )


def grader(reward: str) -> Grader:
    """Returns the function that ``rl.agent.reward`` means. Raises UserError if there is no such function."""
    kind, _, name = reward.partition(":")
    if kind == "exit":
        return lambda task, folder, status: float(status == 0)
    if kind != "file":
        function: Grader = import_attribute(reward)
        return function

    def from_file(task: dict[str, Any], folder: Path, status: int) -> float:
        try:
            with open(folder / name, opener=regular) as file:  # a FIFO would never end
                return float(file.read(1000))
        except (OSError, ValueError) as error:
            if status:
                return 0.0
            raise UserError(f"expected a number in {name} with exit status 0: {error}") from None

    return from_file


def values_of_server(url: str, key: str) -> dict[str, str]:
    """Returns what words of a command may name beside fields of the task: how to reach the model."""
    return {"url": url, "openai_url": f"{url}/v1", "key": key, "model": MODEL}


def filled(text: str, values: Mapping[str, object]) -> str:
    """Returns a text with values in place of their names in braces. Other words in braces stay."""
    return IN_BRACES.sub(lambda found: str(values.get(found[1], found[0])), text)


def play_agents(
    tasks: Sequence[tuple[str, AgentTask]],
    server: AgentServer,
    recorder: ModelRecorder,
    sampler: Sampler,
    *,
    concurrency: int,
    is_interrupted: Callable[[], object] = lambda: False,
    show: Callable[[int], object] = lambda ended: None,
) -> list[Rollout]:
    """Runs the programs of all tasks to their end, samples what they ask for, and returns their rollouts.

    Args:
        tasks: names of sessions, which are parts of URLs, with their tasks.
        concurrency: maximum number of programs at a time.
        is_interrupted: returns whether to end all programs. It is called again and again.
        show: gets the number of programs that have ended, again and again.

    Raises:
        InterruptedSampling: ``is_interrupted`` returned true.
        UserError: a program made no call, or its reward is no finite number.
    """
    over = threading.Event()  # ends the sampling
    with closing(server), Processes() as processes, ThreadPoolExecutor(concurrency) as pool:
        url = server.start()
        plays = [
            pool.submit(_play, session, task, f"{url}/s/{session}", server.key(session), processes)
            for session, task in tasks
        ]

        def watch() -> None:
            running = set(plays)
            while running and not over.is_set() and not is_interrupted():
                ended, running = wait(running, POLL_S, FIRST_EXCEPTION)
                show(len(plays) - len(running))
                if any(_error(play) for play in ended):
                    break
            over.set()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            recorder.run(sampler, over)
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            watching.join()
    if error := next(filter(None, map(_error, plays)), None):
        raise error
    if any(play.cancelled() or play.result()[0].cause == "stop" for play in plays):
        raise InterruptedSampling
    played = [play.result() for play in plays]
    rollouts = []
    for (session, task), (ended, reward) in zip(tasks, played, strict=True):
        taken = recorder.take(session)
        if not (paths := taken.paths() if taken else []):
            raise UserError(
                f"{session}: expected calls of the model, got none in {ended.seconds:.1f} s ({ended.cause}, "
                f"status {ended.status}) from {shorten(list(task.command))}, which printed: "
                f"{ended.tail or 'nothing'}"
            )
        rollouts.append(rollout_of(paths, reward, is_cut_off=ended.cause == "time limit"))
    failed = [ended for ended, _ in played if ended.status]
    if failed and len(failed) == len(tasks):
        how, tail = f"{failed[0].cause}, status {failed[0].status}", failed[0].tail or "nothing"
        logger.warning("rl.agent: all %d programs failed; one (%s) printed: %s", len(tasks), how, tail)
    return rollouts


def _error(play: Future[tuple[Ended, float]]) -> BaseException | None:
    return None if play.cancelled() else play.exception()


def rollout_of(paths: Sequence[SessionPath], reward: float, is_cut_off: bool) -> Rollout:
    """Returns a rollout with a context for each path of a session."""
    rollout = Rollout(contexts=[], reward=reward, is_cut_off=is_cut_off)
    for path in paths:
        start = len(rollout.tokens)
        rollout.contexts.append(start)
        rollout.tokens.images += tuple((start + at, image) for at, image in path.tokens.images)
        rollout.tokens += path.tokens
        rollout.mask += path.mask
        rollout.logprobs += path.logprobs
        rollout.kept += path.kept
        rollout.starts += [start + at for at in path.starts]
    rollout.experts = [path.experts for path in paths if path.experts is not None]
    if len(rollout.experts) not in (0, len(paths)):
        raise UserError("a session: expected experts of all calls, or of none; check the sampler")
    return rollout


def _play(session: str, task: AgentTask, url: str, key: str, processes: Processes) -> tuple[Ended, float]:
    """Runs the program of a task in a new folder. Returns how it ended, and its reward."""
    values = values_of_server(url, key)
    with TemporaryDirectory(prefix="titan-tree-agent-", ignore_cleanup_errors=True) as parent:
        folder = Path(parent, "work")
        try:
            folder.mkdir()
            if task.folder is not None:
                shutil.copytree(task.folder, folder, symlinks=True, dirs_exist_ok=True)
            for name, text in task.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:  # as shutil.Error
            raise UserError(f"{session}: cannot make the working folder of its program: {error}") from None
        ended = processes.run(
            [filled(word, values) for word in task.command],
            folder,
            {name: filled(value, values) for name, value in task.environment.items()},
            Limits(time_s=task.time_limit_s),
            Path(parent, "output.txt"),
        )
        if ended.cause != "exit":
            return ended, 0.0
        with calling(f"{session}: reward (exit status {ended.status})"):
            reward = task.reward(folder, ended.status)
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise UserError(f"{session}: expected a finite number as reward, got {shorten(reward)}")
    return ended, float(reward)
