"""The server: sessions and their keys, limits, streams of slow turns, retries, and its end."""

import asyncio
import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.cases import for_each
from tests.support.scripted_recorder import REFUSED, ScriptedRecorder, serving, wait_until
from titan_tree.errors import UserError
from titan_tree.serve import agent_server
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.dialects import DIALECTS
from titan_tree.serve.settings import ServeConfig

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
PATHS = {"chat/completions": CHAT, "messages": CHAT, "responses": {"model": "policy", "input": "Hello"}}
SECRET = "a secret of the house"


def send(
    url: str, body: Any = CHAT, path: str = "s/task/v1/chat/completions", **headers: str
) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/{path}", content=content, headers=names, timeout=20)


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


def test_routes() -> None:
    recorder = ScriptedRecorder()
    with serving(recorder) as url:
        assert [httpx.head(url).status_code, httpx.get(f"{url}/").status_code] == [200, 200]
        for path, body in PATHS.items():
            assert send(url, body, f"s/task/v1/{path}?beta=true").status_code == 200
        assert httpx.get(f"{url}/s/task/v1/models").json()["data"][0]["id"] == "policy"
        assert send(url, {"reward": 1}, "s/task/end").json() == {}
        assert send(url, {"reward": None}, "s/task/end").status_code == 404  # it has ended
        assert send(url, CHAT, "s/task/v1/chat/completions").status_code == 200
        assert send(url, {"reward": None}, "s/task/end").status_code == 200
        assert message(send(url, {"reward": 1}, "s/other/end")) == "no open session other"
        for reward in ("1", True, [1]):
            assert message(send(url, {"reward": reward}, "s/task/end")).startswith(
                "reward: expected a number"
            )
        for path in ("v1/nothing", "s/a%2Fb/v1/messages", "s/a%20b/v1/messages"):
            assert send(url, CHAT, path).status_code == 404
            assert message(send(url, CHAT, path)).startswith("unknown address '/")
        assert httpx.get(f"{url}/s/task/v1/messages").status_code == 405
    assert {turn.session for turn in recorder.turns} == {"task"}
    assert len({turn.digest for turn in recorder.turns}) == 3  # equal bodies at two paths
    assert recorder.ended == [("task", 1.0), ("task", None)]


def test_without_a_session_in_the_address_the_key_names_one() -> None:
    recorder = ScriptedRecorder()
    with serving(recorder) as url:
        send(url, path="v1/chat/completions", Authorization="Bearer mine")
        send(url, path="v1/messages", x_api_key="mine")
        send(url, path="v1/messages", x_api_key="yours")
    name = "key-" + hashlib.sha256(b"mine").hexdigest()[:16]
    first, second, third = (turn.session for turn in recorder.turns)
    assert (first, second) == (name, name)
    assert third != name


def test_web_pages_need_keys() -> None:
    recorder = ScriptedRecorder()
    with serving(recorder) as url:
        for path in ("s/task/v1/chat/completions", "s/task/end"):
            response = send(url, CHAT, path, Origin="http://page.example", Content_Type="text/plain")
            assert (response.status_code, message(response)) == (
                403,
                "web pages need keys; set serve.secret_env",
            )
    assert (recorder.turns, recorder.ended) == ([], [])


def test_keys_of_sessions() -> None:
    recorder = ScriptedRecorder()
    server = AgentServer(recorder, ServeConfig(port=0), "policy", SECRET)
    key, end = server.key("task"), server.key("task/end")
    with closing(server):
        url = server.start()
        assert send(url, Authorization=f"Bearer {key}").status_code == 200
        assert send(url, path="s/task/v1/messages", x_api_key=key).status_code == 200
        paths = ("s/other/v1/messages", "v1/messages", "s/other/v1/messages/count_tokens")
        for path in (*paths, "end", "s/other/end", "s/task/end"):  # an agent cannot reward itself
            assert send(url, path=path, x_api_key=key).status_code == 401
        assert message(send(url, path="s/task/end", x_api_key=key)).endswith("the key of SESSION/end")
        for path in (*paths, "end", "s/other/end", "s/task/v1/messages"):
            assert send(url, path=path, x_api_key=end).status_code == 401
        assert recorder.ended == []
        assert send(url, {"reward": 1}, "s/task/end", x_api_key=end).status_code == 200
        assert recorder.ended == [("task", 1.0)]
        assert httpx.get(f"{url}/s/other/v1/models", headers={"x-api-key": key}).status_code == 401
        for wrong in ("Bearer", "Bearer x", f"Bearer {key[:-1]}", f"Bearer {SECRET}"):
            refused = send(url, Authorization=wrong)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        with (
            pytest.raises(openai.AuthenticationError),
            closing(openai.OpenAI(base_url=f"{url}/s/task/v1", api_key="x")) as client,
        ):
            client.chat.completions.create(**CHAT)  # type: ignore
        with (
            pytest.raises(anthropic.AuthenticationError),
            closing(
                anthropic.Anthropic(base_url=f"{url}/s/task", api_key="é".encode().decode("latin-1"))
            ) as client,
        ):
            client.messages.create(**CHAT, max_tokens=1)  # type: ignore
    assert len(recorder.turns) == 2
    assert len(key) == 64
    assert AgentServer(recorder, ServeConfig(port=0), "policy", f"{SECRET}, too").key("task") != key


def test_other_machines_need_keys() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org", ""):
        with pytest.raises(UserError, match=r"serve\.host: other machines reach"):
            AgentServer(ScriptedRecorder(), ServeConfig(host=host), "policy")
    for host in ("localhost", "127.0.0.1", "::1"):
        AgentServer(ScriptedRecorder(), ServeConfig(host=host), "policy")
    with pytest.raises(UserError, match=r"serve\.secret_env: expected a secret in this variable"):
        AgentServer(ScriptedRecorder(), ServeConfig(), "policy", " ")
    with serving(ScriptedRecorder(), SECRET, host="0.0.0.0") as url:
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(url).status_code == 200


@for_each(
    "body, status, error",
    [
        (b"", 400, "body: broken JSON at character 1"),
        (b"\xff", 400, "body: expected UTF-8 text"),
        (b'{"a": NaN}', 400, "expected a finite number"),
        (b"[1]", 400, "body: expected a JSON object, got [1]"),
        (b"[" * 100_000, 400, "brackets are nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "expected Unicode text"),
        (b'{"x": "' + b"y" * (1 << 20) + b'"}', 413, "Maximum request body size"),
    ],
)
def test_malformed_bodies(body: bytes, status: int, error: str) -> None:
    with serving(ScriptedRecorder(), max_body_mb=1) as url:
        for path in (*PATHS, "messages/count_tokens"):
            answer = send(url, body, f"s/task/v1/{path}")
            assert answer.status_code == status
            assert error in message(answer)
            assert ("type" in answer.json()) == path.startswith("messages")


@for_each("stream, path", [(stream, path) for stream in (False, True) for path in PATHS])
def test_bugs_are_logged_and_not_shown(stream: bool, path: str, caplog: pytest.LogCaptureFixture) -> None:
    recorder = ScriptedRecorder(ConnectionResetError("private"))
    with serving(recorder, SECRET) as url, caplog.at_level(logging.DEBUG):
        key = AgentServer(recorder, ServeConfig(), "policy", SECRET).key("task")
        answer = send(url, PATHS[path] | {"stream": stream}, f"s/task/v1/{path}", x_api_key=key)
    assert answer.status_code == 500
    assert message(answer) == "internal error; the log of the server says more"
    assert "private" in caplog.text
    assert key not in caplog.text
    caplog.clear()


@for_each("path", PATHS)
def test_streams_of_slow_turns_have_comments_and_then_the_answer(path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(agent_server, "PING_S", 0.01)
    recorder = ScriptedRecorder()
    recorder.is_held = True
    texts = []
    with serving(recorder) as url:
        body = PATHS[path] | {"stream": True}
        with httpx.stream("POST", f"{url}/s/task/v1/{path}", json=body) as response:
            assert response.headers["content-type"] == "text/event-stream"
            for line in response.iter_lines():
                texts.append(line)
                recorder.is_held = texts.count(": the turn is being sampled") < 3
    dialect, answer = (
        DIALECTS[path],
        asyncio.run(
            recorder.turn("task", recorder.turns[0].request, digest=recorder.turns[0].digest, is_retry=False)
        ),
    )
    assert len([line for line in texts if line.startswith("data: ")]) == len(
        list(dialect.events(body, answer))
    )


def streams(url: str) -> list[Callable[[], Any]]:
    """Returns what reads a streamed answer by the SDK of each API."""
    options: Any = {"api_key": "any", "max_retries": 0}
    chat = openai.OpenAI(base_url=f"{url}/s/task/v1", **options)
    claude = anthropic.Anthropic(base_url=f"{url}/s/task", **options)
    return [
        lambda: list(chat.chat.completions.create(**CHAT, stream=True)),  # type: ignore
        lambda: list(claude.messages.create(**CHAT, max_tokens=9, stream=True)),  # type: ignore
        lambda: list(chat.responses.create(model="policy", input="Hello", stream=True)),
    ]


def test_an_error_within_a_stream_reaches_the_client(monkeypatch: Any) -> None:
    monkeypatch.setattr(agent_server, "PING_S", 0.01)
    for number in range(3):
        recorder = ScriptedRecorder(REFUSED)
        recorder.is_held = True
        with serving(recorder) as url, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(streams(url)[number])
            wait_until(lambda recorder=recorder: bool(recorder.turns))
            time.sleep(0.05)
            recorder.is_held = False
            with pytest.raises((openai.APIError, anthropic.APIError), match="40 tokens; expected at most 32"):
                asked.result()


def test_a_client_that_leaves_finds_its_turn_when_it_tries_again(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_server, "PING_S", 0.01)
    for stream in (False, True):
        recorder = ScriptedRecorder()
        recorder.is_held = True
        body = CHAT | {"stream": stream}
        with serving(recorder) as url:
            content = json.dumps(body).encode()
            head = "POST /s/task/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            head += f"Content-Length: {len(content)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(head.encode() + content)
                wait_until(lambda recorder=recorder: bool(recorder.turns))
                if stream:
                    assert connection.recv(12) == b"HTTP/1.1 200"
            time.sleep(0.05)  # comments that nobody reads
            recorder.is_held = False
            wait_until(lambda recorder=recorder: recorder.sampled == 1)
            assert send(url, body, x_stainless_retry_count="1").status_code == 200
            assert [turn.is_retry for turn in recorder.turns] == [False, True]
            assert recorder.turns[0].digest == recorder.turns[1].digest
            assert recorder.sampled == 1
            send(url, body, x_stainless_retry_count="0")
            assert recorder.sampled == 2
    assert "internal error" not in caplog.text


def test_the_sdk_tries_again_with_the_same_digest() -> None:
    """The client's time limit ends its first attempts; the last one gets the answer of the one turn."""
    recorder = ScriptedRecorder()
    recorder.is_held = True
    with serving(recorder) as url, ThreadPoolExecutor(1) as pool:
        client = openai.OpenAI(base_url=f"{url}/s/task/v1", api_key="any", max_retries=5, timeout=1.0)
        asked = pool.submit(lambda: client.chat.completions.create(**CHAT))  # type: ignore
        wait_until(lambda: len(recorder.turns) > 1)
        recorder.is_held = False
        assert asked.result().choices[0].message.content == "Hi."
    assert recorder.sampled == 1
    assert len({turn.digest for turn in recorder.turns}) == 1


def test_the_number_of_sessions_is_limited() -> None:
    recorder = ScriptedRecorder()
    server = AgentServer(recorder, ServeConfig(port=0, max_sessions=2), "policy")
    with closing(server):
        url = server.start()
        for session in ("a", "b", "a"):
            assert send(url, path=f"s/{session}/v1/messages").status_code == 200
        refused = send(url, path="s/c/v1/messages")
        assert (refused.status_code, message(refused)) == (429, "2 sessions are open; end one")
        assert send(url, {}, "s/a/end").status_code == 200
        assert send(url, path="s/c/v1/messages").status_code == 200
        assert send(url, {}, "s/b/end").status_code == 200
        assert send(url, path="s/d/v1/messages").status_code == 200
        assert send(url, path="s/e/v1/messages").status_code == 429


def test_64_sessions_at_once() -> None:
    recorder = ScriptedRecorder(*({"content": f"turn {number}"} for number in range(4)))

    def converse(number: int) -> list[str]:
        texts = []
        with openai.OpenAI(base_url=f"{url}/s/n{number}/v1", api_key="any", max_retries=0) as client:
            for _ in range(4):
                answer: Any = client.chat.completions.create(**CHAT)  # type: ignore
                texts.append(answer.choices[0].message.content)
        return texts

    with serving(recorder) as url, ThreadPoolExecutor(64) as pool:
        assert list(pool.map(converse, range(64))) == [[f"turn {number}" for number in range(4)]] * 64


@for_each("stream", [None, False, True])
def test_closing_answers_requests_under_way(stream: bool | None, monkeypatch: Any) -> None:
    """``stream`` is None for a stream that has begun."""
    monkeypatch.setattr(agent_server, "PING_S", 0.01 if stream is None else 10.0)
    recorder = ScriptedRecorder()
    recorder.is_held = True
    server = AgentServer(recorder, ServeConfig(port=0), "policy")
    url = server.start()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(send, url, CHAT | {"stream": stream is not False})
        wait_until(lambda: bool(recorder.turns))
        time.sleep(0.05)
        server.close()
        server.close()
        answer = asked.result()
    if stream is None:
        assert '"message": "the server stops"' in answer.text
    else:
        assert (answer.status_code, message(answer)) == (503, "the server stops")
    assert recorder.sampled == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "titan_tree agents"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = AgentServer(ScriptedRecorder(), ServeConfig(port=port), "policy")
        with pytest.raises(
            UserError, match=rf"serve.port: cannot listen on 127.0.0.1:{port}: .*; 0 takes a free"
        ):
            server.start()
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "titan_tree agents"]
