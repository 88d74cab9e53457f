"""A server of vLLM itself on the CPU of this machine. scripts/vllm_cpu.sh sets up its environment."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titan_tree.models.hf.snapshot_files import WEIGHTS

ROOT = Path(__file__).parents[2]
IS_INSTALLED = (ROOT / ".venv-vllm" / "ready").exists()
START_S = 600.0  # seconds until the server must answer. It takes 30 on two idle cores.


class VLLMServer:
    """Serves a snapshot as "policy" on loopback from ``start`` to ``kill``, after which it may start again.

    Args:
        snapshot: its folder, see ``prepare``.
        log: the file for what the server prints.
        options: further options of ``vllm serve``.

    Attributes:
        url: the address, which stays the same.
    """

    def __init__(self, snapshot: Path, log: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        self._command = [str(ROOT / "scripts/vllm_cpu.sh"), str(snapshot), "--port", str(port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server with the weights of its snapshot, and waits until it answers."""
        one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | one_thread,
                start_new_session=True,
            )
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < end, f"no answer within {START_S:g} s"
            time.sleep(1.0)

    def kill(self) -> None:
        """Ends all processes of the server at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


def prepare(snapshot: Path) -> None:
    """Changes a snapshot, so that vLLM on a CPU can serve it and take over other weights.

    vLLM refuses to return log-probs without a tokenizer. Any with as many ids will do. If the output layer is
    tied to the embedding, vLLM 0.32 goes on using a packed copy of its first weights on a CPU.
    """
    config = json.loads((snapshot / "config.json").read_text())
    weights = load_file(snapshot / WEIGHTS)
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, snapshot / WEIGHTS, {"format": "pt"})
        (snapshot / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{i}>" for i in range(config["vocab_size"] - len(ids))])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(snapshot)
