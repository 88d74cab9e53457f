"""ServerSampler: samples turns from a server, such as vLLM or SGLang.

Token ids go in and out, so nothing is tokenized twice. OpenAI's own API has no token ids in its answers; the
field return_token_ids of vLLM adds them. SGLang is spoken to through its own endpoint, /generate.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import Completion
from titan_tree.rl.server.answers import read_completions, read_generate
from titan_tree.rl.server.client import Server, StoppedError
from titan_tree.rl.server.weight_push import Served, WeightPush, check_version
from titan_tree.tree.paths import ExpertSizes

logger = logging.getLogger(__name__)

Api = Literal["vllm", "sglang"]


@dataclass
class ServerSampler:
    """Samples each turn with a request of its own. Every context gets its turn, or an error ends the run.

    Failed requests are sent again with the same seed, see ``Server``. The server must report log-probs at
    temperature 1 without truncation. vLLM's logprobs_mode "raw_logprobs" and "processed_logprobs" both do,
    and SGLang does by default.

    Args:
        url: of the server, such as "http://localhost:8000".
        model: name under which the server serves the model. SGLang's /generate needs none.
        api_key: sent as a bearer token; None: no key.
        concurrency: requests at a time.
        timeout_s: seconds that a connection may stay silent.
        attempts: number of times that a request is sent at most.
        pause_s: seconds before the second attempt. The pause doubles with each further one.
        api: "vllm": /v1/completions, OpenAI's API with vLLM's fields, which SGLang knows, too.
            "sglang": /generate.
        push: sends the trained weights to the server; None: the server keeps its own.
        experts: sizes of the model whose experts to record; None: do not record experts.
    """

    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    timeout_s: float = 600.0
    attempts: int = 5
    pause_s: float = 1.0
    api: Api = "vllm"
    push: WeightPush | None = None
    experts: ExpertSizes | None = None
    _served: Served = field(default_factory=Served, init=False, repr=False)
    _has_warned: bool = field(default=False, init=False, repr=False)
    _is_closed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._requests = self._server()

    def sample(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seed: int
    ) -> list[Completion]:
        """See ``Sampler``. Each request has a seed of its own, so that equal contexts get different turns.

        Raises:
            UserError: the server refuses a request, answers it wrongly, or answers none of the attempts, or
                it samples from other weights than the last ``update`` gave it.
            StoppedError: ``close`` ended it.
        """
        draw = random.Random(seed)
        seeds = [draw.getrandbits(31) for _ in contexts]
        requests = self._requests = self._server()
        if self._is_closed:
            raise StoppedError(self.url)
        with ThreadPoolExecutor(self.concurrency, "sampler") as threads:
            turns = [
                threads.submit(self._complete, requests, list(context), limit, stop, own)
                for context, limit, own in zip(contexts, max_tokens, seeds, strict=True)
            ]
            try:
                completions = [turn.result() for turn in turns]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                requests.stop()
                raise
        if self.push is not None and self._served.version is not None:
            self.push.check(self._served.version)
        return completions

    def update(self, model: TreeModel, step: int) -> None:
        """See ``RemoteSampler``. Without ``push``, the server must get its weights in another way.

        Raises:
            UserError: the server did not take over the weights.
        """
        if self.push is not None:
            self._served = self.push(model, step)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("%s: nothing sends the trained weights to it, so its own may be stale", self.url)

    def close(self) -> None:
        """Ends all requests. Later calls of ``sample`` raise StoppedError."""
        self._is_closed = True
        self._requests.stop()
        if self.push is not None:
            self.push.close()

    def _server(self) -> Server:
        return Server(self.url, self.api_key, self.timeout_s, self.attempts, self.pause_s)

    def _complete(self, requests: Server, context: list[int], limit: int, stop: int, seed: int) -> Completion:
        if self.api == "vllm":
            path, request, read = "/v1/completions", self._completions_request, read_completions
        else:
            path, request, read = "/generate", self._generate_request, read_generate
        answer = requests.post(path, request(context, limit, stop, seed))
        if self.api == "sglang" and self._served.version is not None:
            check_version(self.url, _version(answer), self._served.version)
        try:
            return read(answer, len(context), limit, stop, self.experts)
        except UserError as error:
            raise UserError(f"{self.url}: {error}") from None

    def _completions_request(self, context: list[int], limit: int, stop: int, seed: int) -> dict[str, Any]:
        return {
            "model": self._served.adapter or self.model,
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

    def _generate_request(self, context: list[int], limit: int, stop: int, seed: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "input_ids": context,
            "sampling_params": {
                "max_new_tokens": limit,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": [stop],
                "sampling_seed": seed,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
        }
        if self._served.adapter:
            request["lora_path"] = self._served.adapter
        if self.experts is not None:
            request["return_routed_experts"] = True
        return request


def _version(answer: Any) -> object:
    """Returns the version of the weights that an answer of SGLang reports, or None."""
    info = answer.get("meta_info") if isinstance(answer, dict) else None
    return info.get("weight_version") if isinstance(info, dict) else None
