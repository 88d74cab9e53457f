"""Engines: how servers of vLLM and SGLang sample turns and take over trained weights.

The commands are documented in docs/advanced_features/sglang_for_rl.md of SGLang's repository, and in
docs/training/weight_transfer/ of vLLM's. A server of vLLM needs VLLM_SERVER_DEV_MODE=1 for them, and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters. Token ids go in and out, so nothing is tokenized twice.
"""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_tree.checkpoint.export import gathered_weights
from titan_tree.config.rl import ServerConfig
from titan_tree.errors import UserError
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import Completion
from titan_tree.rl.server.answers import read_completions, read_generate
from titan_tree.rl.server.broadcast import SGLangBroadcast, VLLMBroadcast
from titan_tree.rl.server.client import Json, ServerClient
from titan_tree.tree.paths import ExpertSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How the trained weights of a run are sent to a server.

    Attributes:
        run: the prefix of the names of all versions.
        folder: a folder for the newest snapshot or adapter. Its earlier contents are deleted. The server must
            see it under the same path. Broadcasts do not use it.
        dtype: the dtype of sent weights. An adapter keeps its own dtype.
        source: the snapshot from which the model started, or None.
    """

    run: str
    folder: Path
    dtype: torch.dtype
    source: str | None


class Engine(ABC):
    """A server that samples turns and takes over weights. Each subclass speaks the protocol of one software.

    Args:
        config: the table [rl.server].
        push: how weights are sent. None: the server keeps its own weights.
        experts: sizes of the model whose experts the answers must contain. None: experts are not recorded.

    Attributes:
        adapter: name of the adapter that requests ask for. None: they ask for the model itself.
        version: name of the weights that the server must report. None: it need not report any.

    Raises:
        UserError: weights are broadcast to vLLM, whose package is not installed.
    """

    sampling_path: str  # path of the requests that sample
    version_paths: tuple[str, ...]  # paths under which releases of the software report the version of weights
    adapters_path: str  # prefix of the commands for adapters
    broadcast: type[SGLangBroadcast | VLLMBroadcast]
    adapter: str | None = None
    version: str | None = None

    def __init__(
        self,
        config: ServerConfig,
        client: ServerClient,
        push: PushSettings | None = None,
        experts: ExpertSizes | None = None,
    ) -> None:
        self.config, self.client, self.experts, self.settings = config, client, experts, push
        self._broadcast: SGLangBroadcast | VLLMBroadcast | None = None
        if push is not None and config.weights == "broadcast":
            self._broadcast = self.broadcast(client, push.dtype, push.source)
        self._loaded_adapter: str | None = None
        self._has_warned = False

    def sample(self, context: Sequence[int], limit: int, stop: int, seed: int) -> Completion:
        """Returns a turn that continues ``context``, see ``Sampler``.

        Raises:
            UserError: the answer is not one whole turn, or comes from other weights than the last push.
            UserError, StoppedError: errors of ``ServerClient.post``.
        """
        answer = self.client.post(self.sampling_path, self._sampling_request(context, limit, stop, seed))
        self._check_version(self._version_in(answer))
        try:
            return self._read(answer, len(context), limit, stop)
        except UserError as error:
            raise UserError(f"{self.client.url}: {error}") from None

    def push(self, model: TreeModel, step: int) -> None:
        """Sends the weights of ``model`` after ``step`` optimizer steps. No request may sample meanwhile.

        If this fails, the server may hold weights of two versions. It therefore stays paused.

        Raises:
            UserError: the server did not take over the weights.
        """
        settings = self.settings
        assert settings is not None
        version = f"{settings.run}-{step}"
        try:
            if self.config.weights == "adapter":
                self._push_adapter(model, version, settings)
                return
            self._pause()
            if self._broadcast is not None:
                self._broadcast.send(model, version)
            else:
                folder = _emptied(settings.folder) / version
                save_pretrained(model, folder, gathered_weights(model, settings.dtype), settings.source)
                self._load_folder(folder)
            self._resume(version)
        except UserError as error:
            what, problem = f"weights of step {step}", "did not take them over, and may stay paused"
            if self.config.weights == "adapter":
                what, problem = f"adapter of step {step}", "did not load it"
            raise UserError(f"{what}: the server {problem}: {error}") from None
        self.version = version
        self.check_version()

    def check_version(self) -> None:
        """Raises UserError if the server reports that it has other weights than those of the last push."""
        if self.version is None:
            return
        reported = (self.client.find(*self.version_paths) or {}).get("weight_version")
        self._check_version(reported)
        if reported is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: this version of the server does not report the version of its weights, so nothing "
                "checks that it samples from the trained ones",
                self.client.url,
            )

    def close(self) -> None:
        """Leaves the group of a broadcast, or unloads the adapter and deletes the files of the last push."""
        if self._broadcast is not None:
            self._broadcast.close()
        elif self.settings is not None:
            _emptied(self.settings.folder)
        try:
            self._unload_adapter()
        except UserError as error:
            logger.warning("adapter %s stays loaded: %s", self._loaded_adapter, error)

    def _push_adapter(self, model: TreeModel, name: str, settings: PushSettings) -> None:
        """Loads LoRA as an adapter. Its name is its version, so no request gets another step's adapter."""
        folder = _emptied(settings.folder) / name
        save_adapter(model, folder, source=settings.source)
        self._unload_adapter()
        body = {"lora_name": name, "lora_path": str(folder)}
        self.client.command(f"{self.adapters_path}/load_lora_adapter", body)
        self.adapter = self._loaded_adapter = name

    def _unload_adapter(self) -> None:
        if self._loaded_adapter is not None:
            body = {"lora_name": self._loaded_adapter}
            self.client.command(f"{self.adapters_path}/unload_lora_adapter", body)
            self._loaded_adapter = None

    def _check_version(self, reported: object) -> None:
        if self.version is not None and reported not in (None, self.version):
            raise UserError(
                f"{self.client.url}: weight version: expected {self.version!r}, which this run sent, got "
                f"{reported!r}; does another program send weights to this server?"
            )

    def _version_in(self, answer: Json) -> object:
        """Returns the version of the weights that the answer of a sampling request reports, or None."""
        return None

    @abstractmethod
    def _sampling_request(
        self, context: Sequence[int], limit: int, stop: int, seed: int
    ) -> dict[str, object]:
        """Returns the body of a request for one turn at temperature 1 from the whole vocabulary."""

    @abstractmethod
    def _read(self, answer: Json, prompt: int, limit: int, stop: int) -> Completion:
        """Returns the turn in an answer. Raises UserError if it is not one whole turn."""

    @abstractmethod
    def _pause(self) -> None:
        """Stops sampling, so that weights can change."""

    @abstractmethod
    def _resume(self, version: str) -> None:
        """Names the weights, and starts sampling again."""

    @abstractmethod
    def _load_folder(self, folder: Path) -> None:
        """Lets the server load a Hugging Face snapshot."""


class SGLang(Engine):
    """A server of SGLang, which samples through its own endpoint /generate."""

    sampling_path = "/generate"
    version_paths = ("/get_weight_version", "/model_info", "/get_model_info")
    adapters_path = ""
    broadcast = SGLangBroadcast

    def _sampling_request(
        self, context: Sequence[int], limit: int, stop: int, seed: int
    ) -> dict[str, object]:
        request: dict[str, object] = {
            "input_ids": list(context),
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
        if self.adapter is not None:
            request["lora_path"] = self.adapter
        if self.experts is not None:
            request["return_routed_experts"] = True
        return request

    def _read(self, answer: Json, prompt: int, limit: int, stop: int) -> Completion:
        return read_generate(answer, prompt, limit, stop, self.experts)

    def _version_in(self, answer: Json) -> object:
        info = answer.get("meta_info") if isinstance(answer, dict) else None
        return info.get("weight_version") if isinstance(info, dict) else None

    def _pause(self) -> None:
        self.client.command("/pause_generation", {"mode": "abort"})
        self.client.command("/flush_cache", retried=(400,))  # its status while requests are ending

    def _resume(self, version: str) -> None:
        self.client.command("/continue_generation")

    def _load_folder(self, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": folder.name}
        self.client.command("/update_weights_from_disk", body)


class VLLM(Engine):
    """A server of vLLM, which samples through OpenAI's completions API with vLLM's fields.

    OpenAI's own API has no token ids in its answers. The field return_token_ids adds them. SGLang knows this
    field, too.
    """

    sampling_path = "/v1/completions"
    version_paths = ("/weight_info",)
    adapters_path = "/v1"
    broadcast = VLLMBroadcast

    def _sampling_request(
        self, context: Sequence[int], limit: int, stop: int, seed: int
    ) -> dict[str, object]:
        return {
            "model": self.adapter or self.config.model,
            "prompt": list(context),
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

    def _read(self, answer: Json, prompt: int, limit: int, stop: int) -> Completion:
        return read_completions(answer, prompt, limit, stop, self.experts)

    def _pause(self) -> None:
        self.client.command("/pause?mode=wait")

    def _resume(self, version: str) -> None:
        self.client.command("/reset_prefix_cache")
        if self.client.find("/weight_info") is not None:  # newer versions
            self.client.command("/update_weight_version", {"new_version": version})
        self.client.command("/resume")

    def _load_folder(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.client.command("/collective_rpc", body)


def _emptied(folder: Path) -> Path:
    """Deletes a folder with all its contents, and returns its absolute path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder.resolve()
