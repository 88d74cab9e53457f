"""A server that speaks vLLM's protocol, and samples from the weights that it was sent.

with rollout_server(RolloutServer(model)) as url: ...
"""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import torch

from tests.support.loopback_server import LoopbackServer, read_json
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora.peft import load_adapter
from titan_tree.models.pretrained import load_pretrained
from titan_tree.scoring.score_trees import tree_logprobs


class RolloutServer:
    """Answers requests, and records them.

    Attributes:
        calls: (path, body) of all requests but those that sample.
        samples: bodies of the requests that sample.
        fail: called with each (path, body); may return what to answer instead: a status and a text, JSON, or
            None for the usual answer. It may also raise ConnectionError: the connection then closes.
        reports_version: whether the server knows versions of weights.
    """

    def __init__(self, model: Decoder | None = None) -> None:
        self.model = self.base = model
        self.calls: list[tuple[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.fail: Callable[[str, Any], Any] = lambda path, body: None
        self.version, self.paused, self.reports_version = "default", False, True
        self.adapters: dict[str, Decoder] = {}
        self._lock = threading.RLock()

    def answer(self, path: str, body: Any) -> Any:
        """Returns JSON, a status and a text, or None for an unknown path."""
        samples = path == "/v1/completions"
        with self._lock:
            (self.samples if samples else self.calls).append(body if samples else (path, body))
        if (instead := self.fail(path, body)) is not None:
            return instead
        return self._sample(body) if samples else self._command(path, body)

    def _sample(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "sampled while paused"
        prompt, limit, (stop,), seed = (
            body[name] for name in ("prompt", "max_tokens", "stop_token_ids", "seed")
        )
        model = self.adapters.get(body["model"], self.model)
        with self._lock:
            tokens, logprobs, experts = random_turn(model, prompt, limit, stop, seed)
        finish = "stop" if tokens[-1] == stop else "length"
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}
        if experts is not None:
            file = io.BytesIO()
            np.save(file, experts)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return {"choices": [choice | {"prompt_token_ids": prompt}], "usage": usage}

    def _command(self, path: str, body: Any) -> Any:
        if path == "/pause?mode=wait":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_weights"
            self.model = load_pretrained(body["kwargs"]["weights_path"], torch.float32)
            return {"results": [None]}
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/update_weight_version" and self.reports_version:
            self.version = body["new_version"]
        elif path == "/weight_info" and self.reports_version:
            return {"weight_version": self.version}
        else:
            return self._adapter(path, body)
        return {"status": "ok"}

    def _adapter(self, path: str, body: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            model = copy.deepcopy(self.base)
            load_adapter(model, body["lora_path"])
            self.adapters[body["lora_name"]] = model
        elif path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 400, "no such adapter"
        else:
            return None
        return 200, f"Success: {path}"  # vLLM answers with text


def random_turn(
    model: Decoder, prompt: list[int], limit: int, stop: int, seed: int
) -> tuple[list[int], list[float], np.ndarray | None]:
    """Returns a turn of random tokens, their log-probs under ``model``, and the experts of all but the last.

    The turn has at most four tokens before ``stop``. A model with random weights would hardly end a turn.
    """
    draw = random.Random(seed)
    vocabulary = [token for token in range(model.config.vocab_size) if token != stop]
    tokens = [*draw.choices(vocabulary, k=draw.randint(1, 4)), stop][:limit]
    with torch.no_grad():
        if model.experts is None:
            (logprobs,), experts = tree_logprobs(model, [prompt + tokens]), None
        else:
            (logprobs,), (used,) = tree_logprobs(model, [prompt + tokens], return_routed_experts=True)
            experts = used[:-1].numpy()
    return tokens, logprobs[len(prompt) - 1 :].tolist(), experts


@contextmanager
def rollout_server(server: RolloutServer) -> Iterator[str]:
    """Serves in threads, and yields the address."""
    with _Loopback(server) as loopback:
        thread = threading.Thread(target=loopback.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{loopback.server_port}"
        finally:
            loopback.shutdown()
            thread.join()


class _Loopback(LoopbackServer):
    daemon_threads = True

    def __init__(self, server: RolloutServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rollouts = server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Loopback

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(read_json(self))

    def _answer(self, body: Any) -> None:
        self.close_connection = True
        answer = self.server.rollouts.answer(self.path, body)
        if answer is None:
            answer = 404, "unknown path"
        status, text = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
