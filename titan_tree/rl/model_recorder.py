"""ModelRecorder: answers requests of agents with turns that a sampler makes, and keeps their sessions."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from titan_tree.errors import UserError
from titan_tree.rl.rollouts import Chat, cut_at_placeholder
from titan_tree.rl.sampler import RemoteSampler, Sampler
from titan_tree.rl.settings import RLConfig
from titan_tree.serve.request import Answer, Message, Request
from titan_tree.serve.session import Mode, Session
from titan_tree.serve.session_files import SessionFiles
from titan_tree.serve.turn_text import read_turn
from titan_tree.tree.context import Completion, Context

logger = logging.getLogger(__name__)
WAIT_S = 0.02  # seconds until the turns that wait make a batch
POLL_S = 0.1  # seconds until the end of all agents is seen


class SamplingError(RuntimeError):
    """A sampler failed. Its own error is for whoever runs it, not for agents."""


class _Waiting(NamedTuple):
    """A turn that has not been sampled."""

    context: Context
    limit: int
    seed: int
    result: Future[Completion]


@dataclass(eq=False)
class _OpenSession:
    session: Session
    answers: dict[str, Answer] = field(default_factory=dict)  # by digest of the request
    running: dict[str, asyncio.Task[Answer]] = field(default_factory=dict)


class ModelRecorder:
    """Answers requests with turns of a model.

    Args:
        chat: turns messages into tokens.
        config: the limits of turns and contexts, and of requests to other servers.
        mode: what prompts have of earlier turns, see ``Session``.
        seed: with the name of a session and the number of a call, it decides the turn.
        folder: a folder for the files of sessions, see ``SessionFiles``. None: there are none.
    """

    def __init__(
        self,
        chat: Chat,
        config: RLConfig,
        mode: Mode = "faithful",
        seed: str = "",
        folder: Path | None = None,
    ) -> None:
        self.chat, self.config, self.mode, self.seed = chat, config, mode, seed
        self._sessions: dict[str, _OpenSession] = {}
        self._files = None if folder is None else SessionFiles(folder, self._session)
        if self._files is not None:
            self._sessions = {name: _OpenSession(*each) for name, each in self._files.sessions.items()}
        self._waiting: queue.Queue[_Waiting] = queue.Queue()
        self._forks: Counter[str] = Counter()  # of sessions that ended
        self._ignored: set[str] = set()  # names of fields of requests; each is logged once

    async def turn(self, session: str, request: Request, *, digest: str, is_retry: bool) -> Answer:
        """Returns the next turn of a session. A client's retry gets the answer of its first attempt.

        Raises:
            UserError: the template refuses the messages, or the context leaves no room for a turn.
        """
        opened = self._open(session)
        for text in request.ignored:
            if (name := text.partition(" = ")[0]) not in self._ignored:
                self._ignored.add(name)
                logger.warning("requests: %s has no effect on turns (docs/agents.md)", text)
        if is_retry and digest not in opened.running and (answer := opened.answers.get(digest)) is not None:
            return answer
        if not is_retry or digest not in opened.running:
            task = asyncio.create_task(self._turn(opened, session, request, digest))
            opened.running[digest] = task
            task.add_done_callback(lambda done: _forget(opened.running, digest, done))
        return await asyncio.shield(opened.running[digest])

    def count(self, session: str, request: Request) -> int:
        """Returns the number of tokens of a request's prompt. Raises UserError as ``turn`` does."""
        found = self._sessions.get(session)
        opened = self._session() if found is None else found.session  # the question opens no session
        return opened.size(*self._printed(opened, request), self.chat.observation)

    def end(self, session: str, reward: float | None) -> None:
        """Ends a session. Raises KeyError if there is none of this name."""
        ended = self._sessions[session].session
        if self._files is not None:
            self._files.end(session, ended, reward)
        del self._sessions[session]
        self._forks += ended.forks()

    def close(self) -> Counter[str]:
        """Ends all sessions, without rewards. Returns the number of all forks by their cause."""
        for session in list(self._sessions):
            self.end(session, None)
        return self._forks

    @property
    def sessions(self) -> Collection[str]:
        """The names of the sessions that are open, restored ones included."""
        return self._sessions.keys()

    def session(self, session: str) -> Session:
        """Returns a session. Raises KeyError if it made no request."""
        return self._sessions[session].session

    def take(self, session: str) -> Session | None:
        """Removes a session, and returns it. None: it made no request."""
        opened = self._sessions.pop(session, None)
        return None if opened is None else opened.session

    def run(self, sampler: Sampler, until: threading.Event) -> None:
        """Samples the turns that wait until the event is set. An error of the sampler ends it."""
        ends, running = self.chat.ends, set[Future[None]]()
        with ThreadPoolExecutor(self.config.server.concurrency) as pool:
            while not until.is_set() or not self._waiting.empty():
                batch = self._batch()
                if isinstance(sampler, RemoteSampler):  # it samples each turn while others wait for theirs
                    running |= {pool.submit(_sample, sampler, [turn], ends) for turn in batch}
                elif batch:
                    _sample(sampler, batch, ends)
                for turn in [turn for turn in running if turn.done()]:
                    running.remove(turn)
                    turn.result()

    def _batch(self) -> list[_Waiting]:
        try:
            batch = [self._waiting.get(timeout=POLL_S)]
        except queue.Empty:
            return []
        threading.Event().wait(WAIT_S)  # for requests of other agents
        while not self._waiting.empty():
            batch.append(self._waiting.get())
        return [turn for turn in batch if turn.result.set_running_or_notify_cancel()]

    def _open(self, name: str) -> _OpenSession:
        if name not in self._sessions:
            self._sessions[name] = _OpenSession(self._session())
        return self._sessions[name]

    def _session(self) -> Session:
        return Session(self.chat.tokenizer.decode, self.chat.ends, self.mode)

    async def _turn(self, opened: _OpenSession, name: str, request: Request, digest: str) -> Answer:
        session = opened.session
        request, printed = self._printed(session, request)
        call = session.begin(request, printed, self.chat.observation)
        try:
            sampled = await self._sampled(call.prompt, request, f"{self.seed}/{name}/{call.number}")
            turn = cut_at_placeholder(sampled, call.prompt)
            if self._sessions.get(name) is not opened:
                raise UserError(f"session {name}: it ended while a turn was sampled; end it after all turns")
            answer = self._answer(request, len(call.prompt), turn)
            session.finish(call, turn, answer)
            if self._files is not None:
                self._files.add(name, call, digest)
        except BaseException:
            session.drop(call)
            raise
        session.index(call)  # only now, so that the file has what later calls continue
        opened.answers[digest] = answer
        return answer

    def _answer(self, request: Request, size: int, turn: Completion) -> Answer:
        text, is_whole = self.chat.text(turn.tokens), turn.tokens[-1] in self.chat.ends
        message = read_turn(text, request.tools, lambda message: self._printed_turn(request, message))
        for tool_call in message.get("tool_calls", ()):
            tool_call["id"] = f"call_{secrets.token_hex(12)}"
        return Answer(
            id=secrets.token_hex(12),
            message=message,
            finish="stop" if is_whole else "length",
            prompt_tokens=size,
            completion_tokens=len(turn.tokens),
        )

    async def _sampled(self, context: Context, request: Request, seed: str) -> Completion:
        config = self.config
        limit = min(
            request.max_tokens or config.max_turn_tokens,
            config.max_turn_tokens,
            config.max_rollout_tokens - len(context),
        )
        if limit < 1:
            raise UserError(
                f"messages: expected fewer than rl.max_rollout_tokens = {config.max_rollout_tokens:,} "
                f"tokens, got {len(context):,}; shorten the context, or raise the limit"
            )
        result: Future[Completion] = Future()
        self._waiting.put(_Waiting(context, limit, random.Random(seed).getrandbits(62), result))
        return await asyncio.wrap_future(result)

    def _printed(self, session: Session, request: Request) -> tuple[Request, Context]:
        """Returns a request as the model wrote its calls, if the template prints that, and what it prints."""
        tools, written = SimpleNamespace(tools=request.tools), session.as_written(request)
        try:
            return written, self.chat.prompt(tools, written.messages)
        except UserError:  # such as a template that needs objects, and would change a number in one
            return request, self.chat.prompt(tools, request.messages)

    def _printed_turn(self, request: Request, message: Message) -> str | None:
        """Returns what the template prints for a message, without the token that ends it."""
        try:
            (path,) = self.chat.tokenizer.samples(
                [*request.messages, message], request.tools, turns="last", **self.chat.variables
            )
        except UserError:  # such as a template that shows no thoughts
            return None
        return self.chat.text(path.tokens[np.flatnonzero(path.loss_mask)].tolist())


def _forget(running: dict[str, asyncio.Task[Answer]], digest: str, done: asyncio.Task[Answer]) -> None:
    if running.get(digest) is done:
        del running[digest]


def _sample(sampler: Sampler, batch: Sequence[_Waiting], ends: Sequence[int]) -> None:
    """Samples turns at once. An error is raised, and those who wait get SamplingError."""
    try:
        turns = sampler.sample(
            [turn.context for turn in batch],
            [turn.limit for turn in batch],
            ends,
            [turn.seed for turn in batch],
        )
    except BaseException:
        for turn in batch:
            turn.result.set_exception(SamplingError("no turn was sampled"))
        raise
    for turn, completion in zip(batch, turns, strict=True):
        turn.result.set_result(completion)
