"""AgentServer: the HTTP server to which agents send their requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import sys
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import UserError, keep_secret, shorten
from titan_tree.serve.dialects import DIALECTS
from titan_tree.serve.request import Answer, Dialect, Json, Request
from titan_tree.serve.settings import ServeConfig

logger = logging.getLogger(__name__)
PING_S = 10.0  # seconds between comments in a stream whose turn is being sampled; clients end silent ones
STOP_S = 5.0  # seconds in which clients may read their answers when the server stops
ADDRESSES = (
    f"/s/SESSION/v1/ and one of {', '.join(DIALECTS)}, where SESSION has up to 200 letters, digits and _.:-; "
    "base URLs of OpenAI's clients end in /v1, those of Anthropic's do not"
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class Recorder(Protocol):
    """What answers requests and records the tokens of sessions. Only the server's thread calls it."""

    @property
    def sessions(self) -> Collection[str]:
        """The names of the sessions that are open."""
        ...

    async def turn(self, session: str, request: Request, *, digest: str, is_retry: bool) -> Answer:
        """Returns a turn of the model. Raises UserError if the request cannot be served.

        Equal requests of a session have equal digests. A retry may be one whose answer the client has missed.
        """
        ...

    def count(self, session: str, request: Request) -> int:
        """Returns the number of tokens that the model would read."""
        ...

    def end(self, session: str, reward: float | None) -> None:
        """Ends a session. Raises KeyError if it is unknown."""
        ...


class AgentServer:
    """Serves the APIs in ``DIALECTS``, in a thread of its own.

    POST /s/SESSION/v1/{chat/completions, messages, responses}  a turn of the model, also streamed
    POST /s/SESSION/v1/messages/count_tokens                    {"input_tokens": number}
    GET  /s/SESSION/v1/models                                   the name of the model
    POST /s/SESSION/end                                         {"reward": number or null}

    Without /s/SESSION, the client's key names the session. A turn goes on if its client closes the
    connection, so that the recorder has it when the client tries again. ``secret`` decides the key of a
    session, and that of SESSION/end, without which no agent can reward itself. Without a secret, any key is
    accepted, only this machine may reach the server, and web pages that a browser shows there may not.
    """

    def __init__(
        self,
        recorder: Recorder,
        config: ServeConfig,
        model: str,
        secret: str | None = None,
        routes: Sequence[web.RouteDef] = (),
    ) -> None:
        if secret is None and config.host not in LOOPBACK:
            raise UserError(
                f"serve.host: other machines reach {config.host}, so sessions need keys; set "
                "serve.secret_env, or listen on 127.0.0.1"
            )
        if secret is not None and not secret.strip():
            raise UserError("serve.secret_env: expected a secret in this variable, got an empty text")
        keep_secret(secret or "")
        self._recorder, self._config, self._model, self._secret = recorder, config, model, secret
        self._thread: threading.Thread | None = None
        self._app = web.Application(client_max_size=config.max_body_mb << 20, middlewares=[self._errors])
        router = self._app.router
        router.add_get("/", self._hello)  # Claude Code asks it first
        for prefix in ("", "/s/{session:[A-Za-z0-9_.:-]{1,200}}"):
            for path in DIALECTS:
                router.add_post(f"{prefix}/v1/{path}", self._answer)
            router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            router.add_get(f"{prefix}/v1/models", self._models)
            router.add_post(f"{prefix}/end", self._end)
        router.add_routes(routes)

    def start(self) -> str:
        """Starts the thread, and returns the server's URL. Raises UserError if the port is taken."""
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="titan_tree agents", daemon=True
        )
        self._thread.start()
        return started.result()

    def close(self) -> None:
        """Answers requests under way with status 503, and ends the thread."""
        if self._thread is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the thread is ending
                self._loop.call_soon_threadsafe(self._closing.cancel)
            self._thread.join()

    def key(self, session: str) -> str:
        """Returns the key with which clients reach SESSION, or with which its owner ends it: SESSION/end."""
        return hmac.new((self._secret or "").encode(), session.encode(), hashlib.sha256).hexdigest()

    async def _serve(self, started: Future[str]) -> None:
        """Runs the server until ``close``."""
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[None] = self._loop.create_future()
        host, port = self._config.host, self._config.port
        runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=STOP_S)
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
            shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            shown = f"[{shown}]" if ":" in shown else shown
            started.set_result(f"http://{shown}:{runner.addresses[0][1]}")
            await asyncio.wait([self._closing])
        except Exception as error:
            problem = f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
            started.set_exception(UserError(f"serve.port: {problem}; 0 takes a free port"))
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._session(request), _dialect(request)
        body, digest = await _body(request)
        asked = dialect.request(body)
        known = self._recorder.sessions
        if session not in known and len(known) >= self._config.max_sessions:
            raise web.HTTPTooManyRequests(text=f"{len(known)} sessions are open; end one")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        turn = asyncio.create_task(self._recorder.turn(session, asked, digest=digest, is_retry=is_retry))
        if body.get("stream") is True:
            return await self._stream(request, dialect, body, turn)
        await self._wait(turn, None)
        return web.json_response(dialect.answer(body, turn.result()))

    async def _stream(
        self, request: web.Request, dialect: Dialect, body: Json, turn: asyncio.Task[Answer]
    ) -> web.StreamResponse:
        """Streams a turn. An error has a status of its own unless a comment has been sent before."""
        response = web.StreamResponse(headers=STREAM)
        try:
            while not await self._wait(turn, PING_S):
                await _send(request, response, ": the turn is being sampled\n\n")
            text = "".join(_event(name, data) for name, data in dialect.events(body, turn.result()))
        except Exception as error:
            if not response.prepared:
                raise
            text = _event("error", dialect.error(*_status(request, error)))
        await _send(request, response, text)
        return response

    async def _wait(self, turn: asyncio.Task[Answer], timeout_s: float | None) -> bool:
        """Returns whether a turn has ended within a time. Raises an HTTPException if the server stops."""
        awaited: list[asyncio.Future[Json]] = [turn, self._closing]
        await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._closing.done() and not turn.done():
            raise web.HTTPServiceUnavailable(text="the server stops")
        return turn.done()

    async def _count(self, request: web.Request) -> web.Response:
        session, (body, _) = self._session(request), await _body(request)
        asked = _dialect(request).request(body)
        return web.json_response({"input_tokens": self._recorder.count(session, asked)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "titan_tree"}
        return web.json_response({"object": "list", "data": [model]})

    async def _end(self, request: web.Request) -> web.Response:
        session, (body, _) = self._session(request, "/end"), await _body(request)
        reward = expect(body, dict, "body", "a JSON object").get("reward")
        if reward is not None and (type(reward) not in (int, float) or abs(reward) > sys.float_info.max):
            raise UserError(f"reward: expected a number or null, got {reward!r:.60}")
        try:
            self._recorder.end(session, None if reward is None else float(reward))
        except KeyError:
            raise web.HTTPNotFound(text=f"no open session {session}") from None
        return web.json_response({})

    async def _hello(self, request: web.Request) -> web.Response:
        return web.Response(text="titan_tree\n")

    def _session(self, request: web.Request, right: str = "") -> str:
        """Returns the session of a request whose key is right: ``key(session + right)``."""
        key, session = client_key(request, self._secret is not None), request.match_info.get("session")
        if self._secret is not None:
            if session is None or not hmac.compare_digest(key, self.key(session + right).encode()):
                raise web.HTTPUnauthorized(text=f"expected /s/SESSION and the key of SESSION{right}")
            return session
        return session or f"key-{hashlib.sha256(key).hexdigest()[:16]}"

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers errors as the API of the request has them."""
        try:
            return await handler(request)
        except Exception as error:
            status, message = _status(request, error)
            return web.json_response(_dialect(request).error(status, message), status=status)


def client_key(request: web.Request, has_secret: bool) -> bytes:
    """Returns the key that a client sent. Without a secret, raises HTTPForbidden for web pages."""
    if not has_secret and "Origin" in request.headers:  # browsers send it with each POST, clients do not
        raise web.HTTPForbidden(text="web pages need keys; set serve.secret_env")
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return (request.headers.get("x-api-key") or bearer).encode(errors="surrogateescape")


def _dialect(request: web.Request) -> Dialect:
    """Returns the API of a request. Requests that have none, such as /end, get errors as in OpenAI's."""
    path = request.path.partition("/v1/")[2].removesuffix("/count_tokens")
    return DIALECTS.get(path, DIALECTS["chat/completions"])


async def _body(request: web.Request) -> tuple[Json, str]:
    """Returns the JSON body of a request, and the digest of path and body."""
    content = await request.read()
    digest = hashlib.sha256(request.path.encode() + b"\n" + content).hexdigest()
    return parse_json(content, "body"), digest


async def _send(request: web.Request, response: web.StreamResponse, text: str) -> None:
    """Sends a part of a stream, unless the client is gone."""
    with suppress(ConnectionError):
        if not response.prepared:
            await response.prepare(request)
        await response.write(text.encode())


def _status(request: web.Request, error: Exception) -> tuple[int, str]:
    """Returns the status and the message with which an error is answered. Logs it if it is a bug."""
    if isinstance(error, UserError):
        return 400, str(error)
    if isinstance(error, web.HTTPNotFound) and request.match_info.http_exception is not None:  # no such route
        return 404, f"unknown address {shorten(request.path)}; expected {ADDRESSES}"
    if isinstance(error, web.HTTPException):
        return error.status, error.text or error.reason
    logger.error("%s %s: %s", request.method, request.path, "internal error", exc_info=error)
    return 500, "internal error; the log of the server says more"


def _event(name: str | None, data: Json) -> str:
    """Returns an event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
