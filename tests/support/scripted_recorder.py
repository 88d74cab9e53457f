"""A recorder that answers as a script says, behind a server, for tests with the clients' own libraries."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.errors import UserError
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.request import Answer, Message, Request
from titan_tree.serve.settings import ServeConfig

PIXEL = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
USER = {"role": "user", "content": "Hello"}
REFUSED = UserError("the context has 40 tokens; expected at most 32")
TEXTS: list[Message] = [
    {"content": "Hi."},
    {"content": "  Two\n\nparagraphs, é and \N{GRINNING FACE}. " * 20},
    {"content": "The answer.", "reasoning_content": "I think.\n" * 30},
]


@dataclass
class Turn:
    session: str
    request: Request
    digest: str
    is_retry: bool


class ScriptedRecorder:
    """Answers the requests of each session with ``answers`` in turn; the last one is repeated.

    An exception is raised in place of an answer. While ``is_held``, turns wait. Equal requests of a session
    get the same answer if the second one is a retry, as with the true recorder.
    """

    def __init__(self, *answers: Message | Exception, finish: Any = "stop") -> None:
        self.answers = answers or ({"content": "Hi."},)
        self.finish = finish
        self.turns: list[Turn] = []
        self.sessions: set[str] = set()
        self.ended: list[tuple[str, float | None]] = []
        self.is_held = False
        self.sampled = 0
        self._tasks: dict[tuple[str, str], asyncio.Task[Answer]] = {}
        self._ids = itertools.count()

    async def turn(self, session: str, request: Request, *, digest: str, is_retry: bool) -> Answer:
        self.sessions.add(session)
        self.turns.append(Turn(session, request, digest, is_retry))
        key = (session, digest)
        if not (is_retry and key in self._tasks):
            self._tasks[key] = asyncio.create_task(self._sample(session))
        return await asyncio.shield(self._tasks[key])

    async def _sample(self, session: str) -> Answer:
        while self.is_held:
            await asyncio.sleep(0.005)
        number = sum(turn.session == session for turn in self.turns) - 1
        message = self.answers[min(number, len(self.answers) - 1)]
        if isinstance(message, Exception):
            raise message
        self.sampled += 1
        identifier = f"a{next(self._ids)}"
        calls = [
            call | {"id": f"call_{identifier}{n}"} for n, call in enumerate(message.get("tool_calls", ()))
        ]
        message = message | ({"tool_calls": calls} if calls else {})
        return Answer(
            id=identifier, message=message, finish=self.finish, prompt_tokens=11, completion_tokens=7
        )

    def count(self, session: str, request: Request) -> int:
        return sum(len(str(message["content"])) for message in request.messages)

    def end(self, session: str, reward: float | None) -> None:
        if session not in self.sessions:
            raise KeyError(session)
        self.sessions.discard(session)
        self.ended.append((session, reward))


@contextmanager
def serving(recorder: ScriptedRecorder, secret: str | None = None, **config: Any) -> Iterator[str]:
    """Yields the URL of a server in front of a recorder."""
    server = AgentServer(recorder, ServeConfig(port=0, **config), "policy", secret)
    url = server.start()
    try:
        yield url
    finally:
        recorder.is_held = False
        server.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits, for at most 20 seconds."""
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def call(name: str, arguments: str) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assert_read(request: Request, *messages: Message) -> None:
    """A request has these messages, whatever the ids of their calls are; a role left out is the assistant's.

    Each result of a tool must have the id of a call before it.
    """
    ids: set[str] = set()
    for message in request.messages:
        assert message["role"] != "tool" or message["tool_call_id"] in ids
        ids |= {call["id"] for call in message.get("tool_calls", ())}
    want = normalize_messages([{"role": "assistant", **message} for message in messages], "test")
    assert _without_ids(request.messages) == _without_ids(want)


def _without_ids(messages: list[Message]) -> list[Message]:
    result = []
    for message in messages:
        message = {name: value for name, value in message.items() if name != "tool_call_id"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in calls]
        result.append(message)
    return result
