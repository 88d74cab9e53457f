"""ServerClient through ServerSampler: connections, addresses and keys that fail, and what is shown."""

import base64
import json
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.support.cases import for_each
from tests.support.loopback_server import STOP, server, turn
from titan_tree.errors import UserError
from titan_tree.rl.sampler import in_daemon
from titan_tree.rl.server.client import ServerClient, StoppedError
from titan_tree.rl.server.server_sampler import ServerSampler
from titan_tree.rl.settings import ServerConfig


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_prints_no_traceback(reset: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends its connection, or resets it, in the middle of a request or before the answer."""
    answers = threading.Event()
    with server(lambda *_: turn([STOP]) if answers.wait(10) else None) as (url, requests):
        address = urllib.parse.urlsplit(url)
        for size in (20, 2):
            with socket.create_connection((address.hostname, address.port)) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n{}" % size)
                deadline = time.monotonic() + 10
                while size == 2 and not requests and time.monotonic() < deadline:
                    time.sleep(0.01)
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        answers.set()
    assert len(requests) == 1
    assert capfd.readouterr().err == ""


def test_closing_ends_requests_that_are_under_way() -> None:
    arrived, released = threading.Event(), threading.Event()

    def hang(request: dict[str, Any], number: int) -> Any:
        arrived.set()
        released.wait(10)
        return b""

    with server(hang) as (url, _):
        sampler = ServerSampler(url, "m")
        future = in_daemon(lambda: sampler.sample([[1]] * 3, [5] * 3, [STOP], range(3)), "test")
        assert arrived.wait(10)
        started = time.monotonic()
        sampler.close()
        with pytest.raises(StoppedError):
            future.result(timeout=10)
        assert time.monotonic() - started < 2.0
        with pytest.raises(StoppedError):
            sampler.sample([[1]], [5], [STOP], [0])
        released.set()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "user:sk-SECRET@localhost:8000",
        "http://user:sk-SECRET@localhost:8000",
        "https://sk-SECRET@localhost",
        "http://localhost:99999",
        "http://local host",
        "http://localhost:port",
        "http://localhost?key=sk-SECRET",
        f"http://{'a' * 70}.example",
    ],
)
def test_a_wrong_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError) as refused:
        ServerSampler(url, "m")
    assert str(refused.value) == (
        "rl.server.url: expected a URL such as 'http://localhost:8000', with a port of at most 65535 and "
        "without user, password and query; a key belongs in the variable that rl.server.api_key_env names"
    )


@pytest.mark.parametrize("key", ["sk-SECRET\n", "", "sk-SECRÉT", "sk SECRET", "sk-SECRET\r\nX-Other: 1"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(UserError, match=r"^rl\.server\.api_key_env: expected a key of ASCII") as refused:
        ServerSampler("http://localhost", "m", api_key_env="TEST_KEY")
    assert "SECR" not in str(refused.value)


def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown() -> None:
    with pytest.raises(
        UserError, match="expected the name of an environment variable that is set"
    ) as refused:
        ServerSampler("http://localhost", "m", api_key_env="sk-SECRET")
    assert "SECR" not in str(refused.value)


KEY = "sk-SECRET/+0123456789"


@for_each(
    "echo",
    [
        KEY,
        KEY.upper(),
        urllib.parse.quote(KEY, safe=""),
        *(base64.b64encode(f"{user}:{KEY}".encode()).decode() for user in ("u", "us", "use")),
        f"{'x' * 990}{KEY}",  # the quoted text ends inside of the key
    ],
)
def test_a_key_that_the_server_sends_back_is_hidden(echo: str) -> None:
    answers: list[Any] = [
        http(400, f"no key {echo}"),
        http(503, f"no key {echo}"),
        http(200, f"no key {echo}"),
        http(302, "", f"Location: http://u:{echo}@host/"),
        {"error": echo},
        turn([1, STOP], [echo, -1.0]),
        f"HTTP/1.1 200 OK\r\nbad header {echo}\r\n\r\n".encode(),
    ]
    parts = {echo[-24:-4], KEY, "SECRET"}
    for answer in answers:
        with server(lambda request, number, a=answer: a) as (url, _), pytest.raises(UserError) as refused:
            ServerSampler(url, "m", api_key=KEY, attempts=1).sample([[1]], [5], [STOP], [0])
        assert not [part for part in parts if part in str(refused.value)], (answer, str(refused.value))
        assert len(str(refused.value)) < 1500


@for_each(
    ("answer", "reason"),
    [
        ({"success": False, "message": f"{'x' * 990}{KEY}"}, f"{'x' * 990}***"),
        ({"success": "false", "message": "no"}, "no"),
        ({"error": "no"}, "{'error': 'no'}"),
        ({"status": "error", "message": "no"}, "no"),
        (
            {"success": False, "message": ["deep"], "of": {KEY: 1}},
            "{'message': ['deep'], 'of': {'***': 1}, 'success': False}",
        ),
    ],
)
def test_a_command_that_failed_says_why(answer: Any, reason: str) -> None:
    with server(lambda request, number: answer) as (url, _), pytest.raises(UserError) as refused:
        ServerClient(url, ServerConfig(), KEY).command("/v1/completions")
    where = f"{url}/v1/completions"
    assert str(refused.value) == f"{where}: expected success, got {reason}; see the log of the server"


def http(status: int, body: str | bytes, header: str = "Server: none") -> bytes:
    """Returns a whole answer as it is sent."""
    content = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status} Any\r\n{header}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@for_each(
    ("answer", "message"),
    [
        (http(200, b'{"choices": "\xff"}'), "the answer: expected UTF-8 text: .* at byte 14"),
        (http(200, "[" * 10**5), "the answer: broken JSON: brackets are nested too deeply"),
        (http(200, f"[{'1' * 5000}]"), "the answer: broken JSON: Exceeds the limit"),
        (http(200, '{"choices": NaN}'), "choices: expected a finite number, got NaN"),
        (
            http(200, json.dumps(turn([1, STOP], [-1.5, -2.5])).replace("-1.5", "-1e999")),
            "got -inf|finite number",
        ),
        (http(200, "[-Infinity]"), r"\[0\]: expected a finite number, got -Infinity"),
        (http(200, '{"choices": [], "choices": []}'), "choices: expected every key once"),
        (http(200, ""), "the answer: broken JSON at character 1"),
        (http(200, b"\x1f\x8b", "Content-Encoding: gzip"), "not compressed, got the Content-Encoding 'gzip'"),
        (http(200, b" " * 5 * 2**20), "expected an answer of at most 4,200,448 bytes, got more"),
        (http(307, "", "Location: http://localhost:1/"), "refused a request with status 307"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            "failed with RemoteProtocolError",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "failed with RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}", "RemoteProtocolError"),
        (http(500, b"\x1b[2J\xff"), r"status 500: \\x1b\[2J\ufffd; check that the server"),
    ],
)
def test_answers_that_are_not_what_http_and_json_allow_end_in_one_line(answer: bytes, message: str) -> None:
    with (
        server(lambda request, number: answer) as (url, _),
        pytest.raises(UserError, match=message) as refused,
    ):
        ServerSampler(url, "m", attempts=1).sample([[1]], [5], [STOP], [0])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"]
)
def test_a_server_that_sends_a_byte_at_a_time_does_not_hold_the_run(head: bytes) -> None:
    """Each byte arrives long before a connection counts as silent."""
    with trickle(head) as url, pytest.raises(UserError, match=r"failed with no whole answer within 0\.4 s"):
        ServerSampler(url, "m", timeout_s=0.4, attempts=1).sample([[1]], [5], [STOP], [0])


@contextmanager
def trickle(head: bytes) -> Iterator[str]:
    """Yields the address of a server that answers with ``head``, then with a byte every 20 ms."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                connection.sendall(head)
                while True:
                    connection.sendall(b"H" if not head else b" ")
                    time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()
