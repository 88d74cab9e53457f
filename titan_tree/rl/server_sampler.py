"""ServerSampler: samples turns from a server with OpenAI's completions API, such as vLLM or SGLang.

Token ids go in and out, so nothing is tokenized twice. OpenAI's own API has no token ids in its answers; the
field return_token_ids of vLLM and of SGLang adds them.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from titan_tree.errors import UserError, shorten
from titan_tree.rl.sampler import Completion

logger = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429)  # and 500 to 599: statuses of a server that may answer the same request later
LONGEST_ERROR = 1000  # bytes of a refusal that are read


@dataclass(frozen=True)
class ServerSampler:
    """Samples each turn with a request of its own to ``url``/v1/completions.

    A request whose connection fails, whose answer takes too long, or whose status is 5xx is sent again, with
    the same seed. Every context gets its turn, or an error ends the run.

    The server must report log-probs at temperature 1 without truncation: vLLM's logprobs_mode
    "raw_logprobs" and "processed_logprobs" both do. It samples from its own weights. If you change them, the
    log-probs are still those of the weights that sampled.

    Args:
        url: of the server, such as "http://localhost:8000".
        model: name under which the server serves the model.
        api_key: sent as a bearer token; None: no key.
        concurrency: requests at a time.
        timeout_s: seconds that a connection may stay silent.
        attempts: number of times that a request is sent at most.
        pause_s: seconds before the second attempt. The pause doubles with each further one.
    """

    url: str
    model: str
    api_key: str | None = None
    concurrency: int = 64
    timeout_s: float = 600.0
    attempts: int = 5
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"ServerSampler: url: expected a URL such as 'http://localhost:8000', got {self.url!r}"
            )

    def sample(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seed: int
    ) -> list[Completion]:
        """See ``Sampler``. Each request has a seed of its own, so that equal contexts get different turns.

        Raises:
            UserError: the server refuses a request, answers it wrongly, or answers none of the attempts.
        """
        draw = random.Random(seed)
        seeds = [draw.getrandbits(31) for _ in contexts]
        with ThreadPoolExecutor(self.concurrency, "sampler") as threads:
            turns = [
                threads.submit(self._complete, list(context), limit, stop, own)
                for context, limit, own in zip(contexts, max_tokens, seeds, strict=True)
            ]
            try:
                return [turn.result() for turn in turns]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _complete(self, context: list[int], limit: int, stop: int, seed: int) -> Completion:
        request = {
            "model": self.model,
            "prompt": context,
            "max_tokens": limit,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,  # some models' generation_config.json sets other defaults
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "n": 1,
            "logprobs": 1,
            "seed": seed,
            "stop_token_ids": [stop],
            "return_token_ids": True,
        }
        answer = self._post(json.dumps(request).encode())
        try:
            return _read(answer, limit, stop)
        except UserError as error:
            raise UserError(f"{self.url}: {error}") from None

    def _post(self, body: bytes) -> Any:
        """Sends a request until it is answered, and returns the JSON of the answer."""
        for attempt in range(1, self.attempts + 1):
            try:
                status, content = self._post_once(body)
                if status == 200:
                    return json.loads(content)
                problem = f"status {status}: {content[:LONGEST_ERROR].decode(errors='replace')}"
                if status not in RETRIED and status < 500:
                    raise UserError(
                        f"{self.url}: refused a request with {problem}; correct the sampler's arguments"
                    )
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.attempts:
                logger.warning("%s: attempt %d of %d failed: %s", self.url, attempt, self.attempts, problem)
                time.sleep(self.pause_s * 2 ** (attempt - 1))
        raise UserError(
            f"{self.url}: no answer after {self.attempts} attempts, the last one failed with {problem}; "
            "check that the server runs, or raise attempts or timeout_s"
        )

    def _post_once(self, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/v1/completions", body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _read(answer: Any, limit: int, stop: int) -> Completion:
    """Returns the turn in an answer. Raises UserError if tokens and log-probs are not those of one turn."""
    try:
        (choice,) = answer["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        counted = answer["usage"]["completion_tokens"]
        finish = choice["finish_reason"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            "expected one choice with token_ids, logprobs.token_logprobs and finish_reason, and "
            f"usage.completion_tokens, got {shorten(answer)}; use a version of vLLM or SGLang that knows "
            "return_token_ids"
        ) from None
    if not _all_numbers(tokens, int) or not _all_numbers(logprobs, (int, float)):
        raise UserError(
            f"expected integer token_ids and numbers as token_logprobs, got {shorten(tokens)} and "
            f"{shorten(logprobs)}; use another version of the server"
        )
    if not len(tokens) == len(logprobs) == counted or not 1 <= counted <= limit:
        raise UserError(
            f"expected as many token_ids as token_logprobs and completion_tokens, from 1 to {limit}, got "
            f"{len(tokens)}, {len(logprobs)} and {counted}; the server loses tokens, so use another version"
        )
    is_ended = tokens[-1] == stop and stop not in tokens[:-1]
    is_cut_off = len(tokens) == limit and stop not in tokens
    if not (is_ended or is_cut_off):
        raise UserError(
            f"expected a turn that ends with the stop token {stop} or has {limit} tokens, got "
            f"{len(tokens)} tokens that end with {shorten(tokens[-3:])} (finish_reason {shorten(finish)}); "
            "start the server without other stop tokens, for example with --generation-config vllm"
        )
    return Completion(tokens, [float(logprob) for logprob in logprobs])


def _all_numbers(values: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and type(value) is not bool and math.isfinite(value)  # type: ignore[arg-type]
        for value in values
    )
