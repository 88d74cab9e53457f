"""The environment of agent_openai.py: a program plays the task of "desk" (titan_tree/rl/environment.py)."""

import json
import random
import sys
from pathlib import Path

from examples.agent_openai import TOOLS
from titan_tree.rl.environment import AgentTask, DeskEpisode, Message

AGENT = Path(__file__).with_name("agent_openai.py")


class AgentDesk:
    """Makes tasks whose reward is 1 for the right sum. Demonstrations are often wrong."""

    def task(self, draw: random.Random) -> AgentTask:
        episode = DeskEpisode(draw)

        def reward(folder: Path, status: int) -> float:
            answer = folder / "answer.txt"
            return float(status == 0 and answer.exists() and answer.read_text().strip() == episode.answer)

        return AgentTask(
            command=[sys.executable, str(AGENT)],
            files={"task.json": json.dumps({"question": " ".join(episode.items), "counts": episode.count})},
            reward=reward,
            time_limit_s=120.0,
            tools=TOOLS,
        )

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns four conversations on one task, as the agent holds them."""
        episode = DeskEpisode(draw)
        return [_with_tool(episode.demonstration(draw)) for _ in range(4)]


def _with_tool(messages: list[Message]) -> list[Message]:
    """Returns a conversation in which calls such as "?caps?pens" have become calls of the tool."""
    question, calls, *rest = messages
    named = [{"name": "count", "arguments": {"thing": thing}} for thing in calls["content"].split("?")[1:]]
    return [question, {"role": "assistant", "content": "", "tool_calls": named}, *rest]
