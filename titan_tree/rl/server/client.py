"""Server: requests to an HTTP server that samples rollouts, such as vLLM or SGLang."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from titan_tree.errors import UserError

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429)  # and 500 to 599: statuses of a server that may answer the same request later
LONGEST_ERROR = 1000  # bytes of a refusal that are read
CONNECT_S = 30.0  # until a connection stands, which ``stop`` cannot end


class StoppedError(RuntimeError):
    """``Server.stop`` ended a request."""


class Server:
    """Sends requests to a server, each over a connection of its own. Threads may share it.

    A request whose connection fails, whose answer takes too long, or whose status is one of ``RETRIED`` or
    5xx is sent again.

    Args:
        url: of the server, such as "http://localhost:8000".
        api_key: sent as a bearer token; None: no key.
        timeout_s: seconds that a connection may stay silent.
        attempts: number of times that a request is sent at most.
        pause_s: seconds before the second attempt. The pause doubles with each further one.

    Raises:
        UserError: ``url`` is not a URL.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        attempts: int = 5,
        pause_s: float = 1.0,
    ) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise UserError(f"rl.server.url: expected a URL such as 'http://localhost:8000', got {url!r}")
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._api_key, self._attempts, self._pause_s = api_key, attempts, pause_s
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends ``body`` as JSON, and returns the JSON of the answer.

        Raises:
            UserError: the server refuses the request, or answers none of the attempts.
            StoppedError: the requests were stopped.
        """
        return self._request("POST", path, body, json.loads)

    def command(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        retried: tuple[int, ...] = (),
        attempts: int | None = None,
    ) -> None:
        """Sends a command, whose answer need not be JSON. Raises as ``post``.

        Args:
            retried: further statuses after which the command is sent again.
            attempts: None: those of the server.

        Raises:
            UserError: also if the answer is JSON with a field "success" that is false.
        """
        answer = self._request("POST", path, body or {}, _json_or_text, retried, attempts)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UserError(f"{self.url}{path}: expected success, got {answer}; see the log of the server")

    def find(self, *paths: str) -> dict[str, Any] | None:
        """Returns the JSON of the first path that the server knows, or None. Raises as ``post``."""
        for path in paths:
            answer = self._request("GET", path, None, _json_or_text, unknown_is_none=True)
            if isinstance(answer, dict):
                return answer
        return None

    def stop(self) -> None:
        """Ends all requests that are under way. They and all later ones raise StoppedError."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # the other end may have closed it
                    if connection.sock:
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def local_address(self) -> str:
        """Returns the address of this machine on the network that leads to the server."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._parts.hostname, self._parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[bytes], T],
        retried: tuple[int, ...] = (),
        attempts: int | None = None,
        unknown_is_none: bool = False,
    ) -> T | None:
        where, attempts = f"{self.url}{path}", attempts or self._attempts
        content = None if body is None else json.dumps(body).encode()
        problem = ""
        for attempt in range(1, attempts + 1):
            if self._stopped.is_set():
                raise StoppedError(where)
            try:
                status, answer = self._send(method, path, content)
                if status == 200:
                    return read(answer)
                if unknown_is_none and status in (404, 405):
                    return None
                problem = f"status {status}: {answer[:LONGEST_ERROR].decode(errors='replace')}"
                if status < 500 and status not in (*RETRIED, *retried):
                    raise UserError(
                        f"{where}: refused a request with {problem}; check the settings, and the version and "
                        "the options of the server"
                    )
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < attempts:
                if not self._stopped.is_set():
                    logger.warning("%s: attempt %d of %d failed: %s", where, attempt, attempts, problem)
                self._stopped.wait(self._pause_s * 2 ** (attempt - 1))
        if self._stopped.is_set():
            raise StoppedError(where)
        raise UserError(
            f"{where}: no answer after {attempts} attempts, the last one failed with {problem}; "
            "check that the server runs, or raise rl.server.attempts or rl.server.timeout_s"
        )

    def _send(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        """Sends a request once, and returns the status and the content of the answer."""
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname
        connection = kind(parts.hostname, parts.port, timeout=min(self.timeout_s, CONNECT_S))
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout_s)
            if self._stopped.is_set():
                raise StoppedError(path)
            connection.request(method, f"{parts.path.rstrip('/')}{path}", content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _json_or_text(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
