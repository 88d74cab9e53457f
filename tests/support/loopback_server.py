"""An HTTP server on loopback that answers as a test says, like vLLM or not at all."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP = 7
Answer = Callable[[dict[str, Any], int], Any]  # (request, its number from 0) -> JSON, status or bytes


class LoopbackServer(ThreadingHTTPServer):
    request_queue_size = 100  # connections that wait; the kernel resets others

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors of the server, but not that a client has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def read_json(handler: BaseHTTPRequestHandler) -> Any:
    """Returns the body of a request. Raises ConnectionError if the client closes before its end."""
    size = int(handler.headers["Content-Length"])
    body = handler.rfile.read(size)
    if len(body) < size:
        raise ConnectionError
    return json.loads(body)


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
            assert self.path in ("/v1/completions", "/inference/v1/generate")
            request = read_json(self)
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
                usage = content.get("usage", {}) if isinstance(content, dict) else {}
                if "completion_tokens" in usage:
                    read = request.get("prompt") or request.get("token_ids") or []
                    content = content | {"usage": {"prompt_tokens": len(read)} | usage}
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
