"""TinkerAPI: what clients of the package ``tinker`` ask under /api/v1, answered by an ``Engine``.

    request -> its session, of the same key -> the model's queue, in the order of seq_id -> Engine
            <- the number of a future, at once
    retrieve_future -> waits for the result

A client may send a request twice, because it has missed the answer. Its number names the future, so it runs
once. Requests of one model run in their order.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from tinker import types

from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import UserError, shorten
from titan_tree.serve.agent_server import client_key
from titan_tree.serve.tinker import wire
from titan_tree.serve.tinker.jobs import Future, Job, JobQueue, Result
from titan_tree.serve.tinker.wire import Pass, PassResult, Sample, Sequences

WAIT_S = 20.0  # seconds for which a request for a result waits; clients wait for 45
IDLE_S = 900.0  # seconds without a heartbeat, of which clients send one every 10 s, until a session ends
KEPT_S = 300.0  # seconds for which a result stays after a client has fetched it
NEW = "~"  # ends the name of a saved folder until ``_publish``
PROTOBUF = "application/x-protobuf"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
SAVED = re.compile(
    rf"tinker://([0-9a-f]{{32}}:train:[0-9]{{1,9}})/(weights|sampler_weights)/({NAME.pattern})"
)
INFO = (
    "titan_tree: adapters cover the linears of the layers, so train_unembed has no effect; ttl_seconds and "
    "user_metadata have none either, and files stay until you delete them; log-probs of samples are those at "
    "the temperature and over the ids that were sampled from"
)
META = "tinker.json"  # of saved weights
Weights = str | tuple[Path, types.LoraConfig | None]  # a name, or a folder and what adapters in it cover


class Engine(Protocol):
    """Trains and samples. One thread calls all methods but ``check`` and ``check_sample``."""

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a sequence."""
        ...

    def create(self, model: str, adapter: types.LoraConfig | None) -> None:
        """Creates a model: an adapter of the base, or all weights."""
        ...

    def drop(self, models: Sequence[str]) -> None:
        """Forgets models, and weights to sample from by their names or folders."""
        ...

    def check(self, call: Pass) -> None:
        """Raises UserError if a pass cannot run."""
        ...

    def run(self, calls: Sequence[Pass]) -> list[PassResult]:
        """Runs passes of one kind."""
        ...

    def step(self, model: str, params: types.AdamParams) -> dict[str, float]:
        """Steps the optimizer of a model, and returns metrics."""
        ...

    def save(self, model: str, folder: Path, meta: dict[str, Any]) -> None:
        """Writes a model into a new folder, with ``meta`` as META."""
        ...

    def load(self, model: str, folder: Path, adapter: types.LoraConfig | None, with_optimizer: bool) -> None:
        """Gives a model, which it creates if needed, saved weights."""
        ...

    def snapshot(self, model: str, name: str) -> None:
        """Keeps a copy of a model's weights to sample from."""
        ...

    def check_sample(self, sample: Sample) -> None:
        """Raises UserError if nothing can be sampled."""
        ...

    def sample(self, weights: Weights, samples: Sequence[Sample]) -> list[Sequences]:
        """Draws samples of one kind."""
        ...


@dataclass(eq=False)
class _Model:
    """A model of a session. Requests with a later number wait in ``waiting``."""

    adapter: types.LoraConfig | None
    next: int = 1
    waiting: dict[int, Job] = field(default_factory=dict)


@dataclass(eq=False)
class _Session:
    owner: str  # digest of the key
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, _Model] = field(default_factory=dict)
    samplers: dict[str, tuple[Weights, str | None]] = field(default_factory=dict)  # and the saved path
    futures: dict[str, Future] = field(default_factory=dict)


class TinkerAPI:
    """Answers clients of the package ``tinker``. Its routes belong to an ``AgentServer``.

    A key sees its own sessions and what these have saved. With a secret, keys follow from it (``key_of``).

    Args:
        engine: trains and samples.
        model: the name of the base. Clients also load the tokenizer by it, if it is a folder.
        folder: gets what clients save.
        max_sessions: maximum number of sessions at a time.
        secret: None accepts any key.
    """

    def __init__(
        self, engine: Engine, model: str, folder: Path, max_sessions: int, secret: str | None = None
    ) -> None:
        self._engine, self._name, self._folder = engine, model, folder
        self._max_sessions, self._secret = max_sessions, secret
        self._sessions: dict[str, _Session] = {}
        self._jobs = JobQueue()

    def routes(self) -> list[web.RouteDef]:
        """Returns the addresses of the API."""
        posts = {
            "client/config": self._client_config,
            "client/dynamic_config": self._client_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "forward": self._pass,
            "forward_backward": self._pass,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "telemetry": self._telemetry,
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        return [
            *(web.post(f"/api/v1/{path}", self._answered(handler)) for path, handler in posts.items()),
            *(web.get(f"/api/v1/{path}", self._answered(handler)) for path, handler in gets.items()),
        ]

    def start(self) -> None:
        """Starts the thread that calls the engine. Tidies up after a server that died while it saved."""
        for new in self._folder.glob(f"*/*/*{NEW}"):
            _publish(new)
        for half in self._folder.glob("*/*/.*.tmp"):
            shutil.rmtree(half)
        self._jobs.start()

    def close(self) -> None:
        """Ends the thread that calls the engine, see ``JobQueue.close``."""
        self._jobs.close()

    def _answered(self, handler: Callable[..., Any]) -> Callable[[web.Request], Any]:
        """Returns a handler that answers errors as JSON, and knows the key of the request."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                body = await handler(request, self._owner(request), await request.read())
            except UserError as error:
                return web.json_response({"error": str(error)}, status=400)
            except web.HTTPException as error:
                return web.json_response({"error": error.text or error.reason}, status=error.status)
            except ConnectionError:  # the client has hung up while it sent the body
                return web.Response(status=400)
            return body if isinstance(body, web.StreamResponse) else web.json_response(body)

        return answer

    def _owner(self, request: web.Request) -> str:
        key = client_key(request, self._secret is not None)
        if self._secret is not None:
            user = key.decode(errors="surrogateescape").removeprefix("tml-").rpartition("-")[0]
            right = key_of(self._secret, user).encode(errors="surrogateescape")
            if not hmac.compare_digest(key, right):
                raise web.HTTPUnauthorized(text="expected the key of a user, see docs/tinker.md")
        return hashlib.sha256(key).hexdigest()

    def _session(self, owner: str, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise web.HTTPNotFound(
                text=f"session {shorten(name)}: unknown, or it has ended; open another one"
            )
        session.seen = time.monotonic()
        return session

    def _model(self, owner: str, name: str) -> tuple[_Session, _Model]:
        session = self._session(owner, name.partition(":")[0])
        if name not in session.models:
            raise web.HTTPNotFound(text=f"model {shorten(name)}: unknown; create it, or load saved weights")
        return session, session.models[name]

    def _later(self, session: _Session, name: str, job: Job) -> dict[str, Any]:
        """Hands a job to the engine, and returns the name of its future."""
        session.futures[name] = job.future
        self._jobs.put([job])
        return {"request_id": name, "model_id": job.model}

    def _in_turn(
        self,
        owner: str,
        name: str,
        seq: int | None,
        run: Callable[[Sequence[Any]], Sequence[Result]],
        value: Any = None,
        key: tuple[object, ...] | None = None,
    ) -> Result:
        """Hands a request for a model to the engine, in the order of ``seq``. See ``Job``."""
        session, model = self._model(owner, name)
        if seq is None or seq < 1:
            raise UserError(f"seq_id: expected a number from 1, got {seq}")
        future = f"{name}:{seq}"
        if future in session.futures:  # the client asks again
            return {"request_id": future, "model_id": name}
        if seq < model.next or seq > model.next + 100_000:
            raise UserError(f"seq_id: expected {model.next} or a later one, got {seq}")
        job = model.waiting[seq] = Job(run, value, name, key)
        session.futures[future] = job.future
        ready = []
        while (following := model.waiting.pop(model.next, None)) is not None:
            ready.append(following)
            model.next += 1
        self._jobs.put(ready)
        return {"request_id": future, "model_id": name}

    async def _client_config(self, request: web.Request, owner: str, body: bytes) -> Result:
        return {"pjwt_auth_enabled": False}

    async def _health(self, request: web.Request, owner: str, body: bytes) -> Result:
        return {"status": "ok"}

    async def _telemetry(self, request: web.Request, owner: str, body: bytes) -> Result:
        return {"status": "accepted"}

    async def _capabilities(self, request: web.Request, owner: str, body: bytes) -> Result:
        model = {"model_name": self._name, "max_context_length": self._engine.max_length}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    async def _create_session(self, request: web.Request, owner: str, body: bytes) -> Result:
        wire.read_json(types.CreateSessionRequest, body)
        now = time.monotonic()
        for idle in [n for n, session in self._sessions.items() if now - session.seen > IDLE_S]:
            self._end(idle)
        if len(self._sessions) >= self._max_sessions:
            raise web.HTTPTooManyRequests(text=f"{len(self._sessions)} sessions are open; end one")
        name = secrets.token_hex(16)
        self._sessions[name] = _Session(owner)
        return {"type": "create_session", "session_id": name, "info_message": INFO}

    def _end(self, name: str) -> None:
        """Ends a session. Its models go after the requests that wait."""
        ended = self._sessions.pop(name)

        def drop(_: Sequence[Any]) -> list[Result]:
            self._engine.drop([*ended.models, *ended.samplers])
            return [{}]

        self._jobs.put([Job(drop, model=name)])

    async def _heartbeat(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.SessionHeartbeatRequest, body)
        try:
            self._session(owner, asked.session_id)
        except web.HTTPNotFound as error:
            raise web.HTTPGone(text=error.text) from None
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: web.Request, owner: str, body: bytes) -> Result:
        name = request.match_info["session"]
        self._session(owner, name)
        self._end(name)
        return {}

    async def _create_model(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.CreateModelRequest, body)
        self._check_base(asked.base_model)
        _check_optimizer(asked.optimizer_config)
        session = self._session(owner, asked.session_id)
        name = f"{asked.session_id}:train:{asked.model_seq_id}"
        if name not in session.models:
            session.models[name] = _Model(asked.lora_config)

            def create(_: Sequence[Any]) -> list[Result]:
                self._engine.create(name, asked.lora_config)
                return [{"type": "create_model", "model_id": name}]

            return self._later(session, f"{name}:0", Job(create, model=name))
        return {"request_id": f"{name}:0", "model_id": name}

    def _check_base(self, name: str) -> None:
        if name not in (self._name, Path(self._name).name):
            raise UserError(
                f"base_model: expected {self._name!r}, the model of this server, got {name!r:.100}"
            )

    async def _get_info(self, request: web.Request, owner: str, body: bytes) -> Result:
        name = wire.read_json(types.GetInfoRequest, body).model_id
        adapter = self._model(owner, name)[1].adapter
        data = {"arch": "titan_tree", "model_name": self._name, "tokenizer_id": self._name}
        return {
            "type": "get_info",
            "model_id": name,
            "model_name": self._name,
            "model_data": data,
            "is_lora": adapter is not None,
            "lora_rank": None if adapter is None else adapter.rank,
        }

    async def _pass(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_request(body)

        def run(calls: Sequence[Pass]) -> list[Result]:
            return [wire.write_pass(result) for result in self._engine.run(calls)]

        try:
            call = wire.read_pass(asked)
            self._engine.check(call)
        except UserError as error:  # the numbers of later requests follow this one's
            return self._in_turn(owner, asked.model_id, asked.seq_id, _failing(error))
        return self._in_turn(owner, call.model, call.number, run, call, ("pass", *call.kind))

    async def _optim_step(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.OptimStepRequest, body)

        def run(_: Sequence[Any]) -> list[Result]:
            if not isinstance(params := asked.optim_params, types.AdamParams):
                raise UserError(f"optim_params: expected those of AdamW, got {params.type!r}")
            return [{"type": "optim_step", "metrics": self._engine.step(asked.model_id, params)}]

        return self._in_turn(owner, asked.model_id, asked.seq_id, run)

    async def _save_weights(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.SaveWeightsRequest, body)
        adapter = self._model(owner, asked.model_id)[1].adapter

        def run(_: Sequence[Any]) -> list[Result]:
            name = asked.path or f"step-{asked.seq_id}"
            path = self._save(owner, asked.model_id, adapter, "weights", name, asked.overwrite)
            return [{"type": "save_weights", "path": path}]

        return self._in_turn(owner, asked.model_id, asked.seq_id, run)

    def _save(
        self,
        owner: str,
        model: str,
        adapter: types.LoraConfig | None,
        kind: str,
        name: str,
        overwrite: bool = False,
    ) -> str:
        """Saves a model, in the engine's thread. Returns the path by which clients load it."""
        if not NAME.fullmatch(name):
            expected = "a name of up to 200 letters, digits and _.- that does not begin with a dot"
            raise UserError(f"path: expected {expected}, got {shorten(name)}")
        folder = self._folder / model / kind / name
        if folder.exists() and not overwrite:
            raise UserError(f"path: {name!r} exists already; choose another name, or set overwrite")
        lora = None if adapter is None else adapter.model_dump()
        meta = {"owner": owner, "base_model": self._name, "lora_config": lora}
        new = folder.with_name(f"{name}{NEW}")
        self._engine.save(model, new, meta)
        _publish(new)
        self._engine.drop([str(folder)])  # weights of this name that were loaded to sample from
        return f"tinker://{model}/{kind}/{name}"

    def _saved(self, owner: str, path: str) -> tuple[Path, types.LoraConfig | None]:
        """Returns the folder of a saved path, and what its adapter covers."""
        match = SAVED.fullmatch(path)
        folder = self._folder.joinpath(*match.groups()) if match else Path()
        meta = json.loads((folder / META).read_bytes()) if match and folder.is_dir() else {}
        if meta.get("owner") != owner:
            raise UserError(f"path: expected weights that this key has saved here, got {shorten(path)}")
        self._check_base(meta["base_model"])
        lora = meta["lora_config"]
        return folder, None if lora is None else types.LoraConfig(**lora)

    async def _save_for_sampler(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.SaveWeightsForSamplerRequest, body)
        session, model = self._model(owner, asked.model_id)

        def run(_: Sequence[Any]) -> list[Result]:
            if asked.kind != "snapshot":
                raise UserError(f"kind: expected 'snapshot', got {asked.kind!r}")
            if asked.path is None and asked.sampling_session_seq_id is None:
                raise UserError("path: expected a name, or sampling_session_seq_id, got neither")
            kind = {"type": "save_weights_for_sampler"}
            if asked.path is not None:
                path = self._save(owner, asked.model_id, model.adapter, "sampler_weights", asked.path)
                return [kind | {"path": path}]
            name = f"{asked.model_id.partition(':')[0]}:sample:{asked.sampling_session_seq_id}"
            self._engine.snapshot(asked.model_id, name)
            session.samplers[name] = (name, None)
            return [kind | {"sampling_session_id": name}]

        return self._in_turn(owner, asked.model_id, asked.seq_id, run)

    async def _load_weights(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.LoadWeightsRequest, body)
        name = asked.model_id or f"{asked.session_id}:train:{asked.model_seq_id}"

        def run(_: Sequence[Any]) -> list[Result]:
            if asked.base_model is not None:
                self._check_base(asked.base_model)
            if asked.optimizer_config is not None:
                _check_optimizer(asked.optimizer_config)
            folder, adapter = self._saved(owner, asked.path)
            self._engine.load(name, folder, adapter, asked.optimizer)
            return [{"type": "load_weights", "path": asked.path, "model_id": name}]

        if asked.model_id is not None:
            return self._in_turn(owner, name, asked.seq_id, run)
        session = self._session(owner, asked.session_id or "")
        if name not in session.models:
            session.models[name] = _Model(self._saved(owner, asked.path)[1])
            return self._later(session, f"{name}:0", Job(run, model=name))
        return {"request_id": f"{name}:0", "model_id": name}

    async def _weights_info(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = expect(parse_json(body, "body"), dict, "body", "a JSON object")
        _, adapter = self._saved(owner, str(asked.get("tinker_path")))
        known = {"base_model": self._name, "is_lora": adapter is not None}
        if adapter is None:
            return known
        return known | {
            "lora_rank": adapter.rank,
            "train_unembed": adapter.train_unembed,
            "train_mlp": adapter.train_mlp,
            "train_attn": adapter.train_attn,
        }

    async def _create_sampling_session(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.CreateSamplingSessionRequest, body)
        session = self._session(owner, asked.session_id)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        session.samplers[name] = self._weights(owner, asked.model_path, asked.base_model), asked.model_path
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _weights(self, owner: str, path: str | None, base: str | None) -> Weights:
        if path is not None:
            return self._saved(owner, path)
        if base is None:
            raise UserError("base_model: expected it, or model_path, got neither")
        self._check_base(base)
        return ""

    async def _sampler(self, request: web.Request, owner: str, body: bytes) -> Result:
        name = request.match_info["sampler"]
        _, path = self._sampling_session(owner, name)[1]
        return {"sampler_id": name, "base_model": self._name, "model_path": path}

    def _sampling_session(self, owner: str, name: str) -> tuple[_Session, tuple[Weights, str | None]]:
        session = self._session(owner, name.partition(":")[0])
        if name not in session.samplers:
            raise web.HTTPNotFound(text=f"sampling session {shorten(name)}: unknown; create it")
        return session, session.samplers[name]

    async def _sample(self, request: web.Request, owner: str, body: bytes) -> Result:
        asked = wire.read_json(types.SampleRequest, body)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise UserError("sampling_session_id, seq_id: expected both; create a sampling session")
        session, (weights, _) = self._sampling_session(owner, asked.sampling_session_id)
        future = f"{asked.sampling_session_id}:{asked.seq_id}"
        sample = wire.read_sample(asked)
        self._engine.check_sample(sample)
        ids = {"sample_sequence_ids": [f"{future}:{i}" for i in range(sample.number)]}
        if future in session.futures:  # the client asks again
            return {"request_id": future, **ids}

        def run(samples: Sequence[Sample]) -> list[Result]:
            return [wire.write_sequences(result) for result in self._engine.sample(weights, samples)]

        job = Job(run, sample, key=("sample", weights, *sample.kind))
        return self._later(session, future, job) | ids

    async def _retrieve(self, request: web.Request, owner: str, body: bytes) -> web.StreamResponse:
        name = wire.read_json(types.FutureRetrieveRequest, body).request_id
        session = self._session(owner, name.partition(":")[0])
        if (future := session.futures.get(name)) is None:
            raise web.HTTPGone(text=f"request {shorten(name)}: unknown, or its result was fetched long ago")
        try:
            await asyncio.wait_for(future.done.wait(), WAIT_S)
        except TimeoutError:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(waits, status=408)
        asyncio.get_running_loop().call_later(KEPT_S, session.futures.pop, name, None)
        if isinstance(future.result, bytes):
            return web.Response(body=future.result, content_type=PROTOBUF)
        return web.json_response(future.result)


def key_of(secret: str, user: str) -> str:
    """Returns the key of a user of a server with a secret."""
    # No session of an agent has a name that begins with "/", so none has this key (AgentServer.key).
    digest = hmac.new(secret.encode(), f"/tinker/{user}".encode(errors="replace"), hashlib.sha256)
    return f"tml-{user}-{digest.hexdigest()}"


def _publish(new: Path) -> None:
    """Gives a new, whole folder its name, in place of an earlier one. After a death, ``start`` repeats it."""
    folder = new.with_name(new.name.removesuffix(NEW))
    if folder.exists():
        shutil.rmtree(folder)
    new.replace(folder)


def _check_optimizer(config: types.OptimizerConfig) -> None:
    if config.type != "adamw":
        raise UserError(f"optimizer_config: expected 'adamw', got {config.type!r:.100}")


def _failing(error: UserError) -> Callable[[Sequence[Any]], Sequence[Result]]:
    def fail(_: Sequence[Any]) -> Sequence[Result]:
        raise error

    return fail
