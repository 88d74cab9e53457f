"""A server that speaks the protocols of vLLM and SGLang, and samples from the weights that it was sent.

In a test's own process:      with rollout_server(RolloutServer("vllm", model)) as url: ...
As a process of its own:      with server_process() as url: ...  (SGLang's protocol with broadcasts over gloo)
"""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
)

from titan_tree.models.decoder import Decoder
from titan_tree.models.hf.snapshot_files import WEIGHTS
from titan_tree.models.lora.peft import load_adapter
from titan_tree.models.pretrained import build_model, load_pretrained
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

    def __init__(self, api: str, model: Decoder | None = None) -> None:
        self.api, self.model, self.base = api, model, model
        self.calls: list[tuple[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.fail: Callable[[str, Any], Any] = lambda path, body: None
        self.version, self.paused, self.reports_version = "default", False, True
        self.adapters: dict[str, Decoder] = {}
        self.received: dict[str, torch.Tensor] = {}
        self._lock = threading.RLock()
        self._groups: dict[str, dist.ProcessGroup] = {}

    def answer(self, path: str, body: Any) -> Any:
        """Returns JSON, a status and a text, or None for an unknown path."""
        samples = path in ("/v1/completions", "/generate")
        with self._lock:
            (self.samples if samples else self.calls).append(body if samples else (path, body))
        if (instead := self.fail(path, body)) is not None:
            return instead
        if samples:
            return self._sample(body)
        handler = {"vllm": self._vllm, "sglang": self._sglang}[self.api]
        return handler(path, body)

    def _sample(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "sampled while paused"
        if self.api == "vllm":
            prompt, limit, (stop,), seed = (
                body[name] for name in ("prompt", "max_tokens", "stop_token_ids", "seed")
            )
            model = self.adapters.get(body["model"], self.model)
        else:
            own = body["sampling_params"]
            prompt, limit, (stop,), seed = (
                body["input_ids"],
                own["max_new_tokens"],
                own["stop_token_ids"],
                own["sampling_seed"],
            )
            model = self.adapters[body["lora_path"]] if "lora_path" in body else self.model
        with self._lock:
            tokens, logprobs, experts = random_turn(model, prompt, limit, stop, seed)
        finish = "stop" if tokens[-1] == stop else "length"
        if self.api == "vllm":
            choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}
            if experts is not None:
                file = io.BytesIO()
                np.save(file, experts)
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            return {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}
        info = {
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
            ],
            "completion_tokens": len(tokens),
            "finish_reason": {"type": finish},
        }
        if body.get("return_routed_experts"):
            info["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
        return {"meta_info": info | ({"weight_version": self.version} if self.reports_version else {})}

    def _vllm(self, path: str, body: Any) -> Any:
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
        elif path == "/get_world_size":
            return {"world_size": 1}
        elif path.startswith("/v1/"):
            return self._adapter(path.removeprefix("/v1"), body)
        elif path not in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights") and (
            path != "/finish_weight_update"
        ):
            return None
        return {"status": "ok"}

    def _sglang(self, path: str, body: Any) -> Any:
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/flush_cache":
            assert self.paused
        elif path == "/update_weights_from_disk":
            assert self.paused
            self.model = load_pretrained(body["model_path"], torch.float32)
            self.version = body["weight_version"]
            return {"success": True, "message": "loaded"}
        elif path == "/get_weight_version" and self.reports_version:
            return {"weight_version": self.version}
        elif path == "/server_info":
            return {"tp_size": 1, "dp_size": 1}
        elif path == "/init_weights_update_group":
            self._join(body)
            return {"success": True, "message": ""}
        elif path == "/update_weights_from_distributed":
            self._receive(body)
            return {"success": True, "message": ""}
        elif path == "/destroy_weights_update_group":
            self._groups.pop(body["group_name"])
            return {"success": True, "message": ""}
        elif path == "/received":  # not of SGLang: writes what was broadcast to a file
            torch.save(self.received, body["file"])
            return {"calls": self.calls}
        else:
            return self._adapter(path, body)
        return {"status": "ok"}

    def _adapter(self, path: str, body: Any) -> Any:
        if path == "/load_lora_adapter":
            model = copy.deepcopy(self.base)
            load_adapter(model, body["lora_path"])
            self.adapters[body["lora_name"]] = model
        elif path == "/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 400, "no such adapter"
        else:
            return None
        return 200, f"Success: {path}"  # vLLM answers with text

    def _join(self, body: dict[str, Any]) -> None:
        """Joins a group as SGLang does: rendezvous, a prefix, and a group beside the default one."""
        name, size = body["group_name"], body["world_size"]
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, _ = next(dist.rendezvous(url, body["rank_offset"], size))
        store = PrefixStore(name, store)
        backend = dist.Backend(body["backend"])
        group, _ = _new_process_group_helper(size, rank, [], backend, store, name, timeout=default_pg_timeout)
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._groups[name] = group
        self._device = "cuda" if body["backend"] == "nccl" else "cpu"

    def _receive(self, body: dict[str, Any]) -> None:
        """Receives the tensors of a request, as SGLang does."""
        assert self.paused
        group, works, received = self._groups[body["group_name"]], [], {}
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            works.append(dist.broadcast(received[name], src=0, group=group, async_op=True))
        for work in works:
            work.wait()
        self.received |= {name: tensor.cpu() for name, tensor in received.items()}
        if "weight_version" in body:
            self.version = body["weight_version"]
            if self.model is not None:
                self._load_received()

    def _load_received(self) -> None:
        """Loads what was broadcast as a snapshot, so all names and shapes must be right."""
        with TemporaryDirectory() as folder:
            save_file({name: tensor.clone() for name, tensor in self.received.items()}, f"{folder}/{WEIGHTS}")
            Path(folder, "config.json").write_text(json.dumps(self.model.config.to_hf()))
            self.model = load_pretrained(folder, torch.float32)


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


@contextmanager
def server_process(mode: str = "", **sizes: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts an SGLang server in a process of its own, and yields its address.

    Args:
        mode: "refuse_join", "refuse_update" or "die": how it misbehaves.
        sizes: of its model; without any, it cannot sample.
    """
    command = [sys.executable, "-m", "tests.support.rollout_server", mode, json.dumps(sizes)]
    folder = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.wait()


class _Loopback(ThreadingHTTPServer):
    request_queue_size = 100  # connections that wait; the kernel resets others
    daemon_threads = True

    def __init__(self, server: RolloutServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rollouts = server

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors of the server, but not that a client has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Loopback

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.close_connection = True
        with suppress(ConnectionError):
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


def _main(mode: str, sizes: dict[str, Any]) -> None:
    server = RolloutServer("sglang", build_model("qwen3", "debug", **sizes) if sizes else None)

    def fail(path: str, body: Any) -> Any:
        if mode == "refuse_join" and path == "/init_weights_update_group":
            return 400, "cannot join"
        if mode == "refuse_update" and path == "/update_weights_from_distributed":
            return 400, "out of memory"
        if mode == "die" and path == "/update_weights_from_distributed":
            import os

            os._exit(1)
        return None

    server.fail = fail
    with _Loopback(server) as loopback:
        print(loopback.server_port, flush=True)
        loopback.serve_forever(0.01)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
