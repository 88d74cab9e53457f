"""Environments make tasks and answer the model's turns, without tokens and models.

``Desk`` is the smallest environment: a task of two turns and a tool, which a tiny model learns in minutes.

    user       caps pens
    assistant  ?caps?pens      calls the tool for both things
    tool       3
    tool       4
    assistant  7               answers the sum
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_tree.config.registry import Registry
from titan_tree.data.demo import ITEMS

Message = dict[str, Any]  # a message of a chat API, with the keys role, content, ...

MAX_COUNT = 5  # pieces of one thing
MAX_CALLS = 3  # calls in one turn
RIGHT = 0.8  # probability that a demonstration names the right thing, and that its answer is right


@dataclass(frozen=True)
class Reply:
    """The answer of an environment to a turn.

    Attributes:
        messages: what the model reads before its next turn, such as the results of several tool calls. None
            ends the episode.
        reward: reward of the whole episode. It counts only if the episode is over.
        new_context: whether the next turn sees only ``messages``, instead of all that the model has read and
            written so far. An environment compacts a context that has become too long this way.
    """

    messages: list[Message] | None
    reward: float = 0.0
    new_context: bool = False


class Episode(Protocol):
    """One task. It keeps no state between turns, so every turn of it can be sampled several times.

    Attributes:
        prompt: the messages before the model's first turn.
        tools: JSON schemas of tools, which the chat template renders into the prompt. This attribute is
            optional.
        teacher: name of the task's teacher in ``rl.teacher.models``. This attribute is optional, too.
    """

    prompt: list[Message]

    def reply(self, turns: Sequence[str]) -> Reply:
        """Answers the last of ``turns``: all turns of the model so far, without their end-of-turn tokens."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Makes the tasks of a run."""

    def episode(self, draw: random.Random) -> Episode:
        """Returns a task that depends on nothing but ``draw``."""
        ...


# Variables from which clients of OpenAI and Anthropic read where the model is.
CLIENTS = {
    "OPENAI_BASE_URL": "{openai_url}",
    "OPENAI_API_KEY": "{key}",
    "OPENAI_MODEL": "{model}",
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_API_KEY": "{key}",
    "ANTHROPIC_MODEL": "{model}",
}


@dataclass(kw_only=True)
class AgentTask:
    """One task whose rollouts a program plays: an agent, which calls the model over HTTP.

    In ``command`` and in the values of ``environment``, {url} stands for the address of the rollout,
    {openai_url} for the same with /v1, {key} for its key, and {model} for the name of the model.
    """

    command: Sequence[str]  # the program and its arguments
    # Takes the working folder and the exit status, -n after signal n. It runs in a thread beside others.
    reward: Callable[[Path, int], float]
    environment: Mapping[str, str] = field(default_factory=CLIENTS.copy)  # beside PATH, which it inherits
    folder: Path | None = None  # its content is copied to the working folder
    files: Mapping[str, str] = field(default_factory=dict)  # texts of further files of the working folder
    time_limit_s: float = 600.0  # until the program is killed, with reward 0
    tools: list[dict[str, Any]] | None = None  # JSON schemas of its tools, which only demonstrations read
    teacher: str | None = None  # name of its teacher in ``rl.teacher.models``


@runtime_checkable
class AgentEnvironment(Protocol):
    """Makes tasks for agents."""

    def task(self, draw: random.Random) -> AgentTask:
        """Returns a task that depends on nothing but ``draw``."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can demonstrate its tasks, which a warm start needs."""

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns whole conversations on one task, with the model's turns as messages of the assistant.

        The task has the tools of ``episode``, or of ``task``, with an equal ``draw``.
        """
        ...


class DeskEpisode:
    """One task of ``Desk``: how many pieces of two things are there together?

    The reward is 0.2 for looking up both things and nothing else, plus 0.8 for the right sum.
    """

    def __init__(self, draw: random.Random) -> None:
        self.items = draw.sample(ITEMS, 2)
        self.count = {item: draw.randint(1, MAX_COUNT) for item in ITEMS}
        self.prompt: list[Message] = [{"role": "user", "content": " ".join(self.items)}]

    @property
    def answer(self) -> str:
        return str(sum(self.count[item] for item in self.items))

    def reply(self, turns: Sequence[str]) -> Reply:
        calls = [re.findall(r"\?([a-z]*)", turn)[:MAX_CALLS] for turn in turns]
        if calls[-1] and len(turns) < 3:
            return Reply(self._looked_up(calls[-1]))
        called = [item for turn in calls for item in turn]
        right_calls = sum(called.count(item) == 1 for item in self.items) / max(2, len(called))
        return Reply(None, 0.2 * right_calls + 0.8 * (turns[-1].strip() == self.answer))

    def demonstration(self, draw: random.Random) -> list[Message]:
        """Returns a conversation with random mistakes."""
        items = [item if draw.random() < RIGHT else draw.choice(ITEMS) for item in self.items]
        answer = self.answer if draw.random() < RIGHT else str(draw.randint(2, 2 * MAX_COUNT))
        calls = {"role": "assistant", "content": "".join(f"?{item}" for item in items)}
        return [*self.prompt, calls, *self._looked_up(items), {"role": "assistant", "content": answer}]

    def _looked_up(self, items: Sequence[str]) -> list[Message]:
        return [{"role": "tool", "content": str(self.count.get(item, "unknown"))} for item in items]


class Desk:
    """Makes desk tasks. Its demonstrations are often wrong, which leaves something to learn."""

    def episode(self, draw: random.Random) -> DeskEpisode:
        return DeskEpisode(draw)

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns four conversations on one task."""
        episode = DeskEpisode(draw)
        return [episode.demonstration(draw) for _ in range(4)]


# Classes, or functions without arguments, that make the environments of reinforcement learning.
ENVIRONMENTS: Registry[Callable[[], Environment | AgentEnvironment]] = Registry(
    "environment",
    {
        "desk": "titan_tree.rl.environment:Desk",
        "search": "titan_tree.rl.search:Search",
        "agent": "titan_tree.rl.agents:TaskFile",
    },
    interface=("episode|task",),
    key="rl.environment",
)
