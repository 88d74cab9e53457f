"""Environments make tasks and answer the model's turns, in text. They know neither tokens nor models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]  # of a chat API: role, content, ...


@dataclass(frozen=True)
class Reply:
    """The answer of an environment to a turn.

    Attributes:
        messages: what the model reads before its next turn, such as the results of several tool calls; None
            if the episode is over.
        reward: reward of the whole episode if it is over.
        new_context: the next turn sees only ``messages``, in place of all that the model has read and written
            so far. This compacts a context that has become too long.
    """

    messages: list[Message] | None
    reward: float = 0.0
    new_context: bool = False


class Episode(Protocol):
    """One task. It keeps no state between turns, so every turn of it can be sampled several times.

    Attributes:
        prompt: the messages before the model's first turn.
        tools: optional; JSON schemas of tools, which the chat template renders into the prompt.
    """

    prompt: list[Message]

    def reply(self, turns: Sequence[str]) -> Reply:
        """Answers the last of ``turns``: all turns of the model so far, without their end-of-turn tokens."""
        ...


class Environment(Protocol):
    """Makes the tasks of a run."""

    def episode(self, draw: random.Random) -> Episode:
        """Returns a task that depends on nothing but ``draw``."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can show how a task is done, for a warm start."""

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns whole conversations on one task, with the model's turns as messages of the assistant.

        The task has the tools of ``episode`` with an equal ``draw``.
        """
        ...
