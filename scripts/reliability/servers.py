"""Answers requests of the client of rollout servers wrongly: in bytes, types, depth, headers and timing.

A trial starts a server on loopback. It damages a correct answer of vLLM, and sends it to
``ServerSampler``. The sampler must return the turn that the JSON of the damaged answer holds, or refuse in
one line, within the time that its attempts may take. The key of the request, which some answers repeat in
several encodings, must appear in no message and in no log line.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import random
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import ROOT, check

TRIALS = 2000
KEY = "sk-SECRET/0123456789+abcdef"
STOP, LIMIT = 7, 6  # the token that ends a turn, and the maximum number of its tokens
TIMEOUT_S, ATTEMPTS = 0.5, 2
SLOWEST_S = 10.0  # of a trial on a busy machine; its attempts take at most 1 s
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "1",
        "\ud800",
        [],
        [[]],
        {},
        {"a": 1},
        -1,
        0,
        1,
        2**31,
        2**63,
        10**400,
        -(10**400),
    ),
    *(
        0.5,
        3.0,
        -0.0,
        1e-9,
        0.02,
        1e300,
        float("nan"),
        float("inf"),
        float("-inf"),
        KEY,
        f"Bearer {KEY}",
        "x" * 10**5,
    ),
)


@dataclass
class Answer:
    """What the server sends.

    Attributes:
        body: the JSON, as it is before it is encoded and cut.
        pieces: what is sent, with the seconds of silence before each piece. The connection then closes.
    """

    body: bytes
    pieces: list[tuple[bytes, float]]


def prepare(work: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from titan_tree.rl.server import client
    from titan_tree.rl.server import server_sampler as server_sampler  # imported once, before processes fork

    client.PAUSE_S = 0.01
    logging.getLogger("titan_tree").addHandler(_LOG)


class _Lines(logging.Handler):
    """Keeps the log lines of a trial."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


_LOG = _Lines()


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Sends a damaged answer to each attempt of a request. Returns what the sampler made of it."""
    from titan_tree.errors import UserError
    from titan_tree.rl.server.server_sampler import ServerSampler

    answer = DAMAGES[kind](_correct(draw), draw)
    _LOG.lines.clear()
    started, turn = time.monotonic(), None
    with _server(answer) as url:
        sampler = ServerSampler(url, "m", KEY, timeout_s=TIMEOUT_S, attempts=ATTEMPTS)
        try:
            (turn,) = sampler.sample([[1, 2, 3]], [LIMIT], [STOP], [draw.getrandbits(32)])
            outcome = "read"
        except UserError as error:
            outcome = str(error)
        seconds = time.monotonic() - started
    check(seconds < SLOWEST_S, f"{seconds:.1f} s until: {outcome}")
    for line in (outcome, *_LOG.lines):
        _check_line(line)
    if turn is not None:
        _check_turn(answer.body, list(zip(turn.tokens, turn.logprobs, strict=True)))
    return outcome.removeprefix(url)[:100]


def _check_line(line: str) -> None:
    """Checks that a message is one line of bounded length, and does not show the key."""
    check(len(line.splitlines()) == 1 and line.isprintable(), f"not one line: {line!r}")
    check(len(line) < 5000, f"a line of {len(line)} characters: {line[:300]!r}")
    shown = [part for part in _spellings() if part[6:-6].lower() in line.lower()]
    check(not shown, f"shows the key as {shown}: {line!r}")


def _check_turn(body: bytes, got: list[tuple[int, float]]) -> None:
    """Checks that a turn is what a plain reading of the JSON gives, and that it can be a turn."""
    (choice,) = json.loads(body.decode())["choices"]
    expected = list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))
    check(got == expected, f"expected {expected}, got {got}")
    tokens = [token for token, _ in got]
    check(all(type(token) is int and 0 <= token < 2**31 for token in tokens), f"not token ids: {tokens}")
    check(all(-1e12 <= logprob <= 0.01 for _, logprob in got), f"not log-probs: {got}")
    check(1 <= len(tokens) <= LIMIT and STOP not in tokens[:-1], f"not a turn: {tokens}")


def _correct(draw: random.Random) -> dict[str, Any]:
    """Returns a correct answer."""
    tokens = [draw.randrange(8, 1000) for _ in range(draw.randrange(LIMIT))] + [STOP]
    logprobs = [-draw.expovariate(1.0) for _ in tokens]
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}}


def _spellings() -> list[str]:
    """Returns the key as it is, percent-encoded, and in base64 after a user's name."""
    encoded = [base64.b64encode(f"{user}:{KEY}".encode()).decode() for user in ("u", "us", "use")]
    return [KEY, urllib.parse.quote(KEY, safe=""), KEY.upper(), *encoded]


def _http(body: bytes, *headers: str, status: int | str = 200, content: bytes | None = None) -> Answer:
    """Returns an answer with correct headers, and ``content`` in place of ``body``."""
    content = body if content is None else content
    lines = [f"HTTP/1.1 {status} Any", f"Content-Length: {len(content)}", *headers]
    head = "".join(f"{line}\r\n" for line in lines).encode(errors="replace")
    return Answer(body, [(head + b"\r\n" + content, 0.0)])


def damage_bytes(answer: Any, draw: random.Random) -> Answer:
    """Changes, inserts, deletes or repeats bytes of the JSON."""
    body = bytearray(json.dumps(answer).encode())
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, size = draw.randrange(len(body)), draw.choice((1, 1, 4))
        written = bytes(draw.choices(b'0123456789-.eE,:[]{}" ntf', k=size))
        odd = draw.choice((draw.randbytes(size), b"", b"\x00", b"\xff", b"\xc0\x80"))
        new = draw.choice((written, written, written, bytes(body[at : at + 20]), odd))
        body[at : at + draw.choice((0, size))] = new
    return _http(bytes(body))


def damage_value(answer: Any, draw: random.Random) -> Answer:
    """Replaces a value at any depth by an odd one, or removes or repeats it."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for name in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, name))
            if isinstance(value[name], dict | list):
                walk(value[name])

    walk(answer)
    container, name = draw.choice(places)
    change = draw.choice(("replace", "replace", "replace", "remove", "repeat"))
    if change == "replace":
        container[name] = draw.choice(ODD)
    elif change == "remove":
        del container[name]
    elif isinstance(container, list):
        container.insert(name, container[name])
    else:
        container[f"{name} "] = container[name]
    sys.set_int_max_str_digits(0)
    body = json.dumps(answer, indent=draw.choice((None, 1)))
    sys.set_int_max_str_digits(4300)
    return _http(body.encode())


def damage_text(answer: Any, draw: random.Random) -> Answer:
    """Writes what a JSON library seldom writes: numbers out of range, deep brackets, repeated keys."""
    text = json.dumps(answer)
    depth = draw.choice((100, 900, 5000, 10**5))
    odd = draw.choice(
        (
            *(
                "1e999",
                "-1e999",
                "NaN",
                "-Infinity",
                "9" * 5000,
                f"-{'9' * 5000}",
                "1e-999",
                f"0.{'3' * 10**5}",
                "01",
            ),
            *(
                "[" * depth + "]" * depth,
                "[" * depth,
                '{"a":' * depth + "1" + "}" * depth,
                '"\\ud83d"',
                '"\\u0000"',
            ),
        )
    )
    numbers = [i for i, char in enumerate(text) if char.isdigit() and not text[i - 1].isalnum()]
    start = draw.choice(numbers)
    end = next(i for i in range(start, len(text)) if text[i] not in "0123456789.e+-")
    start -= text[start - 1] == "-"
    name = draw.choice([part for part in text.split('"') if part.isidentifier()])
    whole = f'{{"{name}": {odd}, {text[1:]}'
    return _http(
        draw.choice((text[:start] + odd + text[end:], whole, odd, f"{text}{odd}", f"[{text}]")).encode()
    )


def damage_encoding(answer: Any, draw: random.Random) -> Answer:
    """Encodes the JSON as UTF-16, as compressed bytes, or with wrong bytes."""
    answer["text"] = "naïve 你好 🙂"
    body = json.dumps(answer, ensure_ascii=False).encode()
    name = draw.choice(("utf-8-sig", "utf-16", "utf-32-le", "gb18030", "gzip", "gzip bomb", "latin-1"))
    if name == "latin-1":
        return _http(body, content=body.replace("ï".encode(), b"\xef"))
    if not name.startswith("gzip"):
        return _http(
            body, f"Content-Type: application/json; charset={name}", content=body.decode().encode(name)
        )
    content = gzip.compress(body if name == "gzip" else b" " * 2**24 + body)
    encoding = draw.choice(
        ("Content-Encoding: gzip", "Content-Encoding: br", "content-encoding: Identity, gzip", "A: b")
    )
    return _http(body, encoding, content=content)


def damage_headers(answer: Any, draw: random.Random) -> Answer:
    """Sends another status, wrong lengths and chunks, redirects, cookies, and long or broken headers."""
    body = json.dumps(answer).encode()
    status = draw.choice(
        (200, 200, 200, 204, 206, 301, 302, 307, 400, 401, 404, 429, 500, 503, 999, "abc", 99999, 100)
    )
    lines = (
        *(
            "Location: http://[::1",
            "Location: //\x00",
            "Location: http://h:99999/",
            "Set-Cookie: a=b; expires=" + "1-" * 9,
        ),
        *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", f"Content-Length: {'9' * 5000}"),
        *(
            "Content-Length: -1",
            "Content-Length: 3",
            "Content-Length: 1000000",
            "Connection: upgrade",
            "no colon",
            " folded",
        ),
        *(
            f"A: {'b' * 200_000}",
            "Content-Type: text/html; charset=base64",
            "A: \xff\x00",
            ": empty",
            "WWW-Authenticate: Basic",
        ),
    )
    result = _http(body, *draw.choices(lines, k=draw.randint(0, 2)), status=status)
    content = result.pieces[0][0]
    if draw.random() < 0.3:
        chunk = draw.choice(
            (f"{len(body):x}", "0", "zz", "-5", "f" * 30, f"{len(body):x};{'x' * 50_000}")
        ).encode()
        content = (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk
            + b"\r\n"
            + body
            + b"\r\n0\r\n\r\n"
        )
    if draw.random() < 0.2:
        content = (
            draw.choice((b"HTTP/1.1 100 Continue\r\n\r\n" * 5, b"\r\n", b"HTTP/2 200\r\n", b"SSH-2.0\r\n"))
            + content
        )
    return Answer(body, [(content, 0.0)])


def damage_size(answer: Any, draw: random.Random) -> Answer:
    """Sends more than any answer needs, with or without a length."""
    body = json.dumps(answer).encode()
    size = draw.choice((2**20, 5 * 2**20, 2**25))
    head = draw.choice(
        (b"HTTP/1.0 200 OK\r\n\r\n", f"HTTP/1.1 200 OK\r\nContent-Length: {2**40}\r\n\r\n".encode())
    )
    return Answer(body, [(head, 0.0), *[(b" " * 2**20, 0.0)] * (size // 2**20), (body, 0.0)])


def damage_timing(answer: Any, draw: random.Random) -> Answer:
    """Drops the connection anywhere, or sends small pieces with pauses, now and then for too long."""
    whole = _http(json.dumps(answer).encode())
    content = whole.pieces[0][0]
    if draw.random() < 0.6:
        return Answer(whole.body, [(content[: draw.randrange(len(content))], 0.0)])
    if draw.random() < 0.7:
        middle = draw.randrange(len(content))
        return Answer(whole.body, [(content[:middle], 0.0), (content[middle:], 0.02)])
    endless = draw.choice((b" ", b"H", b"HTTP/1.1 100 Continue\r\n\r\n", content[:60]))
    return Answer(whole.body, [(endless, 0.0), *[(draw.choice((b" ", b"a", endless)), 0.05)] * 100])


def repeat_key(answer: Any, draw: random.Random) -> Answer:
    """Sends the key back, in the body or the headers of a refusal or of an answer."""
    key = draw.choice([*_spellings(), "".join(draw.choice((c, f"%{ord(c):02x}")) for c in KEY)])
    text = draw.choice(("", "x" * draw.randrange(900, 1100), "\x1b[2J\n")) + f"no such key: {key} "
    body = draw.choice((text, json.dumps({"error": text}), json.dumps([text]), json.dumps(answer))).encode()
    status = draw.choice((200, 302, 400, 401, 403, 500, 503))
    headers = draw.choice(
        ((), (f"Location: http://u:{key}@h/",), (f"bad header {key}",), (f"Content-Encoding: {key}",))
    )
    return _http(body, *headers, status=status)


@contextmanager
def _server(answer: Answer) -> Iterator[str]:
    """Yields the address of a server that sends ``answer`` to each request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                connection.settimeout(SLOWEST_S)  # a loaded machine may lose what ends a connection
                with connection, suppress(OSError):
                    if not connection.recv(2**16):  # from the end of the trial
                        return
                    for content, pause in answer.pieces:
                        time.sleep(pause)
                        connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()


DAMAGES: dict[str, Callable[[Any, random.Random], Answer]] = {
    "bytes": damage_bytes,
    "value": damage_value,
    "text": damage_text,
    "encoding": damage_encoding,
    "headers": damage_headers,
    "size": damage_size,
    "timing": damage_timing,
    "key repeated": repeat_key,
}
KINDS = ("bytes", "bytes", "value", "value", *DAMAGES)
