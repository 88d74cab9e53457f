"""A server of vLLM itself on the CPU of this machine. scripts/vllm_cpu.sh sets up its environment."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
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


def save_vision_snapshot(folder: Path, special_tokens: dict[str, int]) -> None:
    """Writes a random Qwen3-VL and its processor. vLLM can serve it.

    Args:
        special_tokens: the ids of the special tokens of titan_tree's byte tokenizer, 256 and more.
    """
    vocab_size = 256 + len(special_tokens)
    text: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    rope["mrope_interleaved"] = True
    tower = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 16}
    tower |= {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{side}_token_id": f"vision_{side}" for side in ("start", "end")}
    ids = {key: special_tokens[f"<|{name}|>"] for key, name in names.items()}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "max_position_embeddings": 4096},
        vision_config=tower,
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "conv1d" not in name:
                weight.normal_(std=1.5 * weight[0].numel() ** -0.5)
        # Turns end early.
        model.get_input_embeddings().weight[:, 0] = 3.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[special_tokens["<|im_end|>"], 0] = 12.0
    model.save_pretrained(folder)
    save_tokenizer(folder, sorted(special_tokens, key=special_tokens.__getitem__))
    shared = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": "Qwen3VLProcessor",
    }
    shared |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kinds = {"preprocessor": "image_processor", "video_preprocessor": "video_processor"}
    classes = {"image_processor": "Qwen2VLImageProcessorFast", "video_processor": "Qwen3VLVideoProcessor"}
    for file, name in kinds.items():
        size = {"longest_edge": 16_777_216, "shortest_edge": 1024}
        fields = shared | {"size": size, f"{name}_type": classes[name]}
        (folder / f"{file}_config.json").write_text(json.dumps(fields))


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
    save_tokenizer(snapshot, [f"<{i}>" for i in range(config["vocab_size"] - 256)])


def save_tokenizer(folder: Path, special_tokens: list[str]) -> None:
    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
