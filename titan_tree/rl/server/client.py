"""ServerClient: requests to an HTTP server that samples rollouts, such as vLLM or SGLang."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from json import JSONDecodeError
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
import tenacity

from titan_tree.config.rl import ServerConfig
from titan_tree.errors import UserError

Json: TypeAlias = Any  # decoded JSON, whose structure the server determines
logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its level INFO logs every request

RETRIED = (408, 409, 425, 429)  # and 500 to 599: statuses of a server that may answer the same request later
LONGEST_ERROR = 1000  # number of characters of a refusal that are quoted
CONNECT_S = 30.0  # seconds until a connection must be open. ``stop`` cannot end this wait.
PAUSE_S = 1.0  # seconds before the second attempt. The pause doubles with each further attempt.


class StoppedError(RuntimeError):
    """``ServerClient.stop`` ended a request."""


class ServerClient:
    """Sends requests to a server, each over a connection of its own. Several threads may share a client.

    A request is sent again if its connection fails, its answer takes too long, or its status is 5xx or one of
    ``RETRIED``.

    Args:
        config: the table [rl.server], which holds the address and the limits.
        api_key: a key to send as a bearer token. By default, ``config.api_key_env`` names its variable.

    Raises:
        UserError: the address is not a URL, or the variable is not set.
    """

    def __init__(self, config: ServerConfig, api_key: str | None = None) -> None:
        url, key_name = config.url or "", config.api_key_env
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise UserError(f"rl.server.url: expected a URL such as 'http://localhost:8000', got {url!r}")
        if key_name is not None and (api_key := os.environ.get(key_name)) is None:
            raise UserError(
                f"rl.server.api_key_env: expected the name of an environment variable, got {key_name!r}, "
                "which is not set; export it"
            )
        self.url, self.timeout_s, self._attempts = url.rstrip("/"), config.timeout_s, config.attempts
        authorization = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | authorization,
            timeout=httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_S), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxies
            verify=ssl.create_default_context(),  # the certificates of the system
        )
        self._lock = threading.Lock()
        self._stopped = threading.Event()  # for all requests until ``stop`` sets and replaces it
        self._sockets: set[socket.socket] = set()

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """Sends ``body`` as JSON, and returns the JSON of the answer.

        Raises:
            UserError: the server refuses the request, or answers none of the attempts.
            StoppedError: ``stop`` ended the request.
        """
        return self._request("POST", path, body, needs_json=True)

    def command(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        retried: tuple[int, ...] = (),
        attempts: int | None = None,
    ) -> None:
        """Sends a command, whose answer need not be JSON. Raises the same errors as ``post``.

        Args:
            retried: further statuses after which the command is sent again.
            attempts: maximum number of attempts. None: the number of the configuration.

        Raises:
            UserError: the answer is JSON with a field "success" that is false.
        """
        answer = self._request("POST", path, body or {}, retried=retried, attempts=attempts)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UserError(f"{self.url}{path}: expected success, got {answer}; see the log of the server")

    def find(self, *paths: str) -> dict[str, Json] | None:
        """Returns the JSON of the first path that the server knows, or None. Raises the same as ``post``."""
        answers = (self._request("GET", path, None, unknown=(404, 405)) for path in paths)
        return next((answer for answer in answers if isinstance(answer, dict)), None)

    def stop(self) -> None:
        """Ends all requests that have been sent. They raise StoppedError."""
        with self._lock:
            self._stopped.set()
            for connection in self._sockets:
                with suppress(OSError):  # the server may have closed it
                    connection.shutdown(socket.SHUT_RDWR)
            self._stopped = threading.Event()

    def local_address(self) -> str:
        """Returns the address of this machine on the network that leads to the server."""
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port or 80
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        *,
        needs_json: bool = False,
        unknown: tuple[int, ...] = (),
        retried: tuple[int, ...] = (),
        attempts: int | None = None,
    ) -> Json:
        """Sends a request until the server answers it, and returns the JSON of the answer.

        Args:
            needs_json: whether to send the request again if the answer is not JSON. Otherwise, it is None.
            unknown: statuses that say that the server does not know the path. The answer is then None.
        """
        where, attempts, stopped = f"{self.url}{path}", attempts or self._attempts, self._stopped

        def send() -> Json:
            response = self._send(method, path, body, stopped)
            status = response.status_code
            if status in unknown:
                return None
            if status == 200:
                try:
                    return response.json()
                except ValueError:
                    if needs_json:
                        raise
                    return None
            problem = f"status {status}: {response.text[:LONGEST_ERROR]}"
            if status >= 500 or status in (*RETRIED, *retried):
                raise httpx.HTTPStatusError(problem, request=response.request, response=response)
            raise UserError(
                f"{where}: refused a request with {problem}; check the settings, and the version and the "
                "options of the server"
            )

        def warn(state: tenacity.RetryCallState) -> None:
            number, problem = state.attempt_number, _problem(state.outcome)
            logger.warning("%s: attempt %d of %d failed: %s", where, number, attempts, problem)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((httpx.HTTPError, JSONDecodeError)),
            stop=tenacity.stop_after_attempt(attempts) | tenacity.stop_when_event_set(stopped),
            wait=tenacity.wait_exponential(PAUSE_S),
            sleep=tenacity.sleep_using_event(stopped),
            before_sleep=warn,
        )
        try:
            return retrying(send)
        except tenacity.RetryError as error:
            if stopped.is_set():
                raise StoppedError(where) from None
            raise UserError(
                f"{where}: no answer after {attempts} attempts, the last one failed with "
                f"{_problem(error.last_attempt)}; check that the server runs, or raise rl.server.attempts or "
                "rl.server.timeout_s"
            ) from None

    def _send(
        self, method: str, path: str, body: Mapping[str, object] | None, stopped: threading.Event
    ) -> httpx.Response:
        """Sends a request once. ``stop`` can shut down its sockets, which ends the wait for the answer."""
        if stopped.is_set():
            raise StoppedError(f"{self.url}{path}")
        opened: list[socket.socket] = []

        def register(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                opened.append(info["return_value"].get_extra_info("socket"))
                with self._lock:
                    self._sockets.update(opened)
                    if stopped.is_set():
                        opened[-1].shutdown(socket.SHUT_RDWR)

        try:
            return self._http.request(method, path, json=body, extensions={"trace": register})
        finally:
            with self._lock:
                self._sockets.difference_update(opened)


def _problem(attempt: tenacity.Future | None) -> str:
    """Returns why an attempt failed."""
    error = attempt.exception() if attempt else None
    return str(error) if isinstance(error, httpx.HTTPStatusError) else f"{type(error).__name__}: {error}"
