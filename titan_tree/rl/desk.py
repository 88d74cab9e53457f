"""Desk: a task of two turns with a tool, small enough that a tiny model learns it on a CPU in minutes.

user       caps pens
assistant  ?caps?pens      calls the tool for both things
tool       3
tool       4
assistant  7               answers the sum
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from titan_tree.data.demo import ITEMS
from titan_tree.rl.environment import Message, Reply

MOST = 5  # pieces of a thing
MAX_CALLS = 3  # in one turn
RIGHT = 0.8  # probability that a demonstration names the right thing, and that its answer is right


class DeskEpisode:
    """One task: how many pieces of two things are there together?

    The reward is 0.2 for looking up both things and nothing else, and 0.8 for the sum.
    """

    def __init__(self, draw: random.Random) -> None:
        self.items = draw.sample(ITEMS, 2)
        self.count = {item: draw.randint(1, MOST) for item in ITEMS}
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
        answer = self.answer if draw.random() < RIGHT else str(draw.randint(2, 2 * MOST))
        calls = {"role": "assistant", "content": "".join(f"?{item}" for item in items)}
        return [*self.prompt, calls, *self._looked_up(items), {"role": "assistant", "content": answer}]

    def _looked_up(self, items: Sequence[str]) -> list[Message]:
        return [{"role": "tool", "content": str(self.count.get(item, "unknown"))} for item in items]


class Desk:
    """The environment of desk tasks. Its demonstrations are often wrong, which leaves something to learn."""

    def episode(self, draw: random.Random) -> DeskEpisode:
        return DeskEpisode(draw)

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns four conversations on one task."""
        episode = DeskEpisode(draw)
        return [episode.demonstration(draw) for _ in range(4)]
