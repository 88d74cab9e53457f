"""ServerClient: requests to an HTTP server that samples rollouts."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from typing import Any, TypeAlias

import httpx
import tenacity

from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import UserError, hide, keep_secret, secret_of, shorten
from titan_tree.rl.settings import ServerConfig

Json: TypeAlias = Any  # decoded JSON, whose structure the server determines
logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # its level INFO logs every request

RETRIED = (408, 409, 425, 429)  # and 500 to 599: statuses of a server that may answer the same request later
LONGEST_ERROR = 1000  # number of characters of a refusal that are quoted
CONNECT_S = 30.0  # seconds until a connection must be open. ``stop`` cannot end this wait.
LARGEST_ANSWER = 2**22  # bytes of an answer, unless the caller expects more
PAUSE_S = 1.0  # seconds before the second attempt. The pause doubles with each further attempt.


class StoppedError(RuntimeError):
    """``ServerClient.stop`` ended a request."""


class _FailedAttempt(UserError):  # noqa: N818  # only the last one becomes an error
    """A request failed, and may be sent again."""


class ServerClient:
    """Sends requests to a server, each over a connection of its own. Several threads may share a client.

    A request is sent again if its connection fails, its answer takes too long or is not strict JSON, or its
    status is 5xx or one of ``RETRIED``.

    Args:
        url: address of the server.
        config: the table [rl.server], which holds the limits.
        api_key: a key to send as a bearer token. By default, ``config.api_key_env`` names its variable.

    Raises:
        UserError: the address is not a URL, the variable is not set, or a header cannot hold the key. The
            message shows none of them: each might be, or contain, a secret.
    """

    def __init__(self, url: str, config: ServerConfig, api_key: str | None = None) -> None:
        self.url, self.timeout_s, self._attempts = _checked(url), config.timeout_s, config.attempts
        if config.api_key_env is not None:
            api_key = secret_of(config.api_key_env, "rl.server.api_key_env")
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
        self._timeout = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_S), pool=None)
        # A transport alone reads neither cookies nor the target of a redirect nor settings of proxies.
        self._http = httpx.HTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            # The certificates of the system, which take a while to read.
            verify=ssl.create_default_context() if self.url.startswith("https:") else False,
        )
        self._lock = threading.Lock()
        self._stopped = threading.Event()  # for all requests until ``stop`` sets and replaces it
        self._sockets: set[socket.socket] = set()

    def post(self, path: str, body: Mapping[str, object], largest: int = LARGEST_ANSWER) -> Json:
        """Sends ``body`` as JSON, and returns the JSON of the answer.

        Args:
            largest: maximum number of bytes of the answer.

        Raises:
            UserError: the server refuses the request, answers none of the attempts, or answers more bytes.
            StoppedError: ``stop`` ended the request.
        """
        return self._request("POST", path, body, needs_json=True, largest=largest)

    def command(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Sends a command, whose answer need not be JSON. Raises the same errors as ``post``.

        Raises:
            UserError: the answer is JSON with a field "success" that is not true, or with an error.
        """
        answer = self._request("POST", path, body or {})
        fields = answer if isinstance(answer, dict) else {}
        has_failed = fields.get("success", True) is not True or fields.get("error")
        if has_failed or fields.get("status") == "error":
            message = fields.get("message")
            reason = hide(message)[:LONGEST_ERROR] if isinstance(message, str) else shorten(answer)
            raise UserError(f"{self.url}{path}: expected success, got {reason}; see the log of the server")

    def find(self, path: str) -> dict[str, Json] | None:
        """Returns the JSON of a path, or None if the server does not know it. Raises the same as ``post``."""
        answer = self._request("GET", path, None, unknown=(404, 405))
        return answer if isinstance(answer, dict) else None

    def stop(self) -> None:
        """Ends all requests that have been sent. They raise StoppedError."""
        with self._lock:
            self._stopped.set()
            _shut_down(self._sockets)
            self._stopped = threading.Event()

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        *,
        needs_json: bool = False,
        unknown: tuple[int, ...] = (),
        largest: int = LARGEST_ANSWER,
    ) -> Json:
        """Sends a request until the server answers it, and returns the JSON of the answer.

        Args:
            needs_json: whether to send the request again if the answer is not JSON. Otherwise, it is None.
            unknown: statuses that say that the server does not know the path. The answer is then None.
        """
        where, attempts, stopped = f"{self.url}{path}", self._attempts, self._stopped

        def send() -> Json:
            status, content = self._send(method, path, body, stopped, largest)
            if status in unknown:
                return None
            if status == 200:
                try:
                    return parse_json(content, "the answer")
                except UserError as error:
                    if needs_json:
                        raise _FailedAttempt(str(error)) from None
                    return None
            text = hide(content.decode(errors="replace"))  # before it is cut inside of a secret
            problem = f"status {status}: {text[:LONGEST_ERROR]}"
            if status >= 500 or status in RETRIED:
                raise _FailedAttempt(problem)
            raise UserError(
                f"{where}: refused a request with {problem}; check the settings, and the version and the "
                "options of the server"
            )

        def warn(state: tenacity.RetryCallState) -> None:
            problem = state.outcome and state.outcome.exception()
            logger.warning("%s: attempt %d of %d failed: %s", where, state.attempt_number, attempts, problem)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_FailedAttempt),
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
                f"{error.last_attempt.exception()}; check that the server runs, or raise "
                "rl.server.attempts or rl.server.timeout_s"
            ) from None

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        stopped: threading.Event,
        largest: int,
    ) -> tuple[int, bytes]:
        """Sends a request once, and returns the status and the content of the answer.

        ``stop`` and the end of ``timeout_s`` shut down its sockets, which ends the wait for the answer.
        """
        where = f"{self.url}{path}"
        if stopped.is_set():
            raise StoppedError(where)
        opened: list[socket.socket] = []
        late = threading.Event()

        def expire() -> None:
            with self._lock:
                late.set()
                _shut_down(opened)

        def register(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                opened.append(info["return_value"].get_extra_info("socket"))
                with self._lock:
                    self._sockets.update(opened)
                    if stopped.is_set() or late.is_set():
                        _shut_down(opened)

        extensions = {"trace": register, "timeout": self._timeout.as_dict()}
        request = httpx.Request(method, where, headers=self._headers, json=body, extensions=extensions)
        timer = threading.Timer(self.timeout_s, expire)
        timer.daemon = True
        timer.start()
        content = bytearray()
        try:
            with closing(self._http.handle_request(request)) as response:
                if encoding := response.headers.get("Content-Encoding", "").replace("identity", ""):
                    raise UserError(
                        f"{where}: expected an answer that is not compressed, got the Content-Encoding "
                        f"{shorten(encoding)}; let the server, or the proxy before it, send plain answers"
                    )
                assert isinstance(response.stream, httpx.SyncByteStream)
                for chunk in response.stream:
                    content += chunk
                    if len(content) > largest:
                        raise UserError(
                            f"{where}: expected an answer of at most {largest:,} bytes, got more; check that "
                            "rl.server.url is the address of vLLM, and use another version of it"
                        )
        except httpx.HTTPError as error:
            if not late.is_set():
                raise _FailedAttempt(f"{type(error).__name__}: {error}") from None
        finally:
            timer.cancel()
            with self._lock:
                self._sockets.difference_update(opened)
        if late.is_set():
            raise _FailedAttempt(f"no whole answer within {self.timeout_s:g} s")
        return response.status_code, bytes(content)


def _shut_down(connections: Iterable[socket.socket]) -> None:
    """Ends all waits for these connections."""
    for connection in connections:
        with suppress(OSError):  # the server may have closed it
            connection.shutdown(socket.SHUT_RDWR)


def _checked(address: str) -> str:
    """Returns the address of a server in normal form, without a slash at its end."""
    try:
        url = httpx.URL(address)
        host = url.raw_host.decode().encode("idna")
    except (ValueError, httpx.InvalidURL):
        url, host = httpx.URL(), b""
    is_complete = url.scheme in ("http", "https") and host and b"%" not in host and (url.port or 80) < 2**16
    if not is_complete or url.userinfo or url.query or url.fragment:
        raise UserError(
            "rl.server.url: expected a URL such as 'http://localhost:8000', with a port of at most 65535 and "
            "without user, password and query; a key belongs in the variable that rl.server.api_key_env names"
        )
    return str(url).rstrip("/")


def _checked_key(key: str) -> str:
    """Returns a key. Error messages and logs hide it from now on."""
    keep_secret(key)
    if not key or not all("!" <= char <= "~" for char in key):
        raise UserError(
            "rl.server.api_key_env: expected a key of ASCII characters without spaces and line breaks, got "
            "another value of the variable; export the key again, for example with KEY=$(cat FILE)"
        )
    return key
