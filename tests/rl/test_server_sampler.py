"""ServerSampler against HTTP servers on loopback, most of which misbehave on purpose."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.rl.test_sampling import TOKENIZER, started, tiny_model
from titan_tree.errors import UserError
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.rollouts import Limits, play
from titan_tree.rl.server_sampler import ServerSampler

STOP = 7
Answer = Callable[[dict[str, Any], int], Any]  # (request, its number from 0) -> JSON, status or bytes


class LoopbackServer(ThreadingHTTPServer):
    request_queue_size = 100  # connections that wait; the kernel resets others


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the address of a server, and the list of requests that it has received.

    ``answer`` returns the JSON of an answer, an int (an HTTP status), bytes that are sent as they are before
    the connection closes, or a float (seconds of silence before the connection closes).
    """
    requests: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request["authorization"] = self.headers["Authorization"]
            with lock:
                requests.append(request)
                number = len(requests) - 1
            content = answer(request, number)
            self.close_connection = True
            if isinstance(content, bytes):
                self.wfile.write(content)
            elif isinstance(content, float):
                time.sleep(content)
            elif isinstance(content, int):
                self.send_error(content, "on purpose")
            else:
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with LoopbackServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http_server.server_port}", requests
        finally:
            http_server.shutdown()
            thread.join()


def turn(tokens: list[int], logprobs: list[Any] | None = None, **other: Any) -> dict[str, Any]:
    """Returns an answer as vLLM's."""
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "text": "?"}
    choice |= {"finish_reason": "stop"}
    return {"choices": [choice], "usage": {"completion_tokens": len(tokens)}} | other


def echo(request: dict[str, Any], number: int) -> dict[str, Any]:
    """Answers with tokens that identify the request."""
    return turn([request["prompt"][0], request["seed"] % 1000 + 10, STOP])


def test_every_context_gets_its_own_turn_in_order() -> None:
    contexts = [[i, 1] for i in range(100, 140)]
    with server(echo) as (url, requests):
        sampler = ServerSampler(url, "qwen", api_key="secret", concurrency=8)
        turns = sampler.sample(contexts, [5] * 40, STOP, seed=3)
        assert sampler.sample(contexts, [5] * 40, STOP, seed=3) == turns
    assert [turn.tokens[0] for turn in turns] == list(range(100, 140))
    assert all(turn.logprobs == [-0.5] * 3 for turn in turns)
    assert len({request["seed"] for request in requests}) == 40
    first = next(request for request in requests if request["prompt"] == [100, 1])
    expected = {
        "model": "qwen",
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 1,
    }
    expected |= {"return_token_ids": True, "stop_token_ids": [STOP], "authorization": "Bearer secret"}
    assert first.items() >= expected.items()


@pytest.mark.parametrize(
    "failure",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", b"nonsense\r\n", 503, 429, 500, 1.0],
    ids=["dropped", "truncated", "no http", "unavailable", "too many", "error", "slow"],
)
def test_failed_requests_are_sent_again_with_the_same_seed(
    failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failed: set[int] = set()

    def fails_once(request: dict[str, Any], number: int) -> Any:
        if (prompt := request["prompt"][0]) not in failed:
            failed.add(prompt)
            return failure
        return echo(request, number)

    with server(fails_once) as (url, requests):
        turns = ServerSampler(url, "m", timeout_s=0.5, pause_s=0.01).sample([[8], [9]], [5, 5], STOP, seed=0)
    assert [turn.tokens[0] for turn in turns] == [8, 9]
    seeds = [(request["prompt"][0], request["seed"]) for request in requests]
    assert len(seeds) == 4
    assert len(set(seeds)) == 2
    assert "attempt 1 of 5 failed" in caplog.text


def test_a_server_that_never_answers_ends_the_run() -> None:
    with server(lambda request, number: b"") as (url, requests):
        sampler = ServerSampler(url, "m", attempts=3, pause_s=0.01)
        with pytest.raises(UserError, match=r"no answer after 3 attempts, the last one failed with Remote"):
            sampler.sample([[1]], [5], STOP, seed=0)
        assert len(requests) == 3
    with pytest.raises(UserError, match=r"no answer after 2 attempts.*ConnectionRefused"):
        ServerSampler(url, "m", attempts=2, pause_s=0.01).sample([[1]], [5], STOP, seed=0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (400, "refused a request with status 400: .*on purpose"),
        (401, "refused a request with status 401"),
        ({}, "expected one choice with token_ids"),
        (
            {"choices": [{"text": "no ids"}], "usage": {}},
            "a version of vLLM or SGLang that knows return_token",
        ),
        (turn([1, 2, STOP], [-1.0, -1.0]), "got 3, 2 and 3; the server loses tokens"),
        (turn([1, 2, STOP], usage={"completion_tokens": 4}), "got 3, 3 and 4; the server loses tokens"),
        (turn([1, 2, 3, 4, 5, STOP]), "from 1 to 5, got 6, 6 and 6"),
        (turn([]), "from 1 to 5, got 0, 0 and 0"),
        (turn([1, 2]), r"ends with the stop token 7 or has 5 tokens, got 2 tokens that end with \[1, 2\]"),
        (turn([1, STOP, 2, STOP]), "expected a turn that ends with the stop token 7"),
        (turn([1, STOP], [None, -1.0]), "numbers as token_logprobs"),
        (turn(["1", STOP]), "expected integer token_ids"),
        (turn([1, STOP], [float("nan"), -1.0]), "numbers as token_logprobs"),
    ],
)
def test_wrong_answers_are_reported(answer: Any, message: str) -> None:
    with server(lambda request, number: answer) as (url, requests):
        with pytest.raises(UserError, match=message):
            ServerSampler(url, "m", pause_s=0.01).sample([[1]], [5], STOP, seed=0)
        assert len(requests) == 1


def test_one_wrong_answer_among_many_is_not_lost() -> None:
    def wrong_once(request: dict[str, Any], number: int) -> Any:
        return turn([1, 2]) if request["prompt"] == [125] else echo(request, number)

    with server(wrong_once) as (url, _), pytest.raises(UserError, match="got 2 tokens that end with"):
        ServerSampler(url, "m").sample([[i] for i in range(100, 150)], [5] * 50, STOP, seed=0)


def test_a_url_without_a_host_is_refused() -> None:
    with pytest.raises(UserError, match="url: expected a URL such as"):
        ServerSampler("localhost:8000", "m")


def test_rollouts_from_a_server_are_those_of_its_model() -> None:
    """The server samples with CachedSampler, so it returns real turns and log-probs."""
    model = tiny_model()
    lock = threading.Lock()

    def complete(request: dict[str, Any], number: int) -> dict[str, Any]:
        with lock:
            sampler, (stop,) = CachedSampler(model), request["stop_token_ids"]
            (own,) = sampler.sample([request["prompt"]], [request["max_tokens"]], stop, request["seed"])
        return turn(own.tokens, own.logprobs)

    chat, rollouts = started(3)
    with server(complete) as (url, requests):
        play(rollouts, ServerSampler(url, "m"), chat, Limits(12, 200), "seed")
    assert len(requests) >= 3
    for rollout in rollouts:
        assert rollout.reward is not None
        assert TOKENIZER.decode(rollout.tokens).startswith("<|im_start|>user\n")
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 3
