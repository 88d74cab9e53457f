"""The commands of SGLang and vLLM that change the weights of a running server.

SGLang: docs/advanced_features/sglang_for_rl.md of its repository. vLLM: docs/training/weight_transfer/ of its
repository; a server needs VLLM_SERVER_DEV_MODE=1 for them, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for
adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from titan_tree.errors import UserError
from titan_tree.rl.server.client import Server


class Engine(Protocol):
    """Commands that change the weights of a server. All raise UserError if the server refuses one."""

    server: Server

    def pause(self) -> None:
        """Stops sampling and drops cached keys and values."""
        ...

    def resume(self, version: str) -> None:
        """Names the weights, and starts sampling again."""
        ...

    def load_folder(self, folder: Path) -> None:
        """Loads a Hugging Face snapshot, at a path that the server sees."""
        ...

    def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter of PEFT, at a path that the server sees."""
        ...

    def unload_adapter(self, name: str) -> None: ...

    def version(self) -> str | None:
        """Returns the name of the current weights; None if this version of the server has no names."""
        ...

    def world_size(self) -> int:
        """Returns the number of workers that hold weights."""
        ...


class SGLang:
    """The commands of SGLang. See ``Engine``."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def pause(self) -> None:
        self.server.command("/pause_generation", {"mode": "abort"})
        self.server.command("/flush_cache", retried=(400,))  # the answer while requests are ending

    def resume(self, version: str) -> None:
        self.server.command("/continue_generation")

    def load_folder(self, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": folder.name}
        self.server.command("/update_weights_from_disk", body)

    def load_adapter(self, name: str, folder: Path) -> None:
        self.server.command("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self.server.command("/unload_lora_adapter", {"lora_name": name})

    def version(self) -> str | None:
        answer = self.server.find("/get_weight_version", "/model_info", "/get_model_info")
        return (answer or {}).get("weight_version")

    def world_size(self) -> int:
        path = "/server_info"
        info = self.server.find(path, "/get_server_info") or {}
        for name in ("dp_size", "pp_size"):
            copies = info.get(name) or 1
            if copies != 1 and not (name == "dp_size" and info.get("enable_dp_attention")):
                raise UserError(
                    f"{self.server.url}{path}: {name}: expected 1, got {copies}, because SGLang gives these "
                    "workers the same ranks of the group; start it with another layout, or set "
                    'rl.server.weights = "folder"'
                )
        return _positive(info.get("tp_size"), f"{self.server.url}{path}: tp_size")


class VLLM:
    """The commands of vLLM. See ``Engine``."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def pause(self) -> None:
        self.server.command("/pause?mode=wait")

    def resume(self, version: str) -> None:
        self.server.command("/reset_prefix_cache")
        if self.server.find("/weight_info") is not None:  # newer versions
            self.server.command("/update_weight_version", {"new_version": version})
        self.server.command("/resume")

    def load_folder(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.server.command("/collective_rpc", body)

    def load_adapter(self, name: str, folder: Path) -> None:
        self.server.command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self.server.command("/v1/unload_lora_adapter", {"lora_name": name})

    def version(self) -> str | None:
        return (self.server.find("/weight_info") or {}).get("weight_version")

    def world_size(self) -> int:
        path = "/get_world_size"
        return _positive((self.server.find(path) or {}).get("world_size"), f"{self.server.url}{path}")


def _positive(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise UserError(
            f"{where}: expected the number of workers, got {value!r}; use another version of the server, or "
            'set rl.server.weights = "folder"'
        )
    return value
