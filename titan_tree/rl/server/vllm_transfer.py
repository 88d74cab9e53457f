"""Broadcasts weights to the workers of a vLLM server. The only file that imports vllm.

vLLM's workers form the group in a way of their own, which its classes for trainers implement. See
https://docs.vllm.ai/en/latest/training/weight_transfer/.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.models.pretrained import snapshot_tensors
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.server.engines import Engine


class VLLMTransfer:
    """Sends weights over NCCL with vLLM's ``WeightTransferTrainerFactory``. The first call forms the group.

    Args:
        dtype: of the sent weights.
        source: the snapshot that the model started from, or None.

    Raises:
        UserError: vllm is not installed, or its version has no such class.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype, source: str | None) -> None:
        try:
            from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise UserError(
                f'rl.server.weights: "broadcast" needs vllm 0.28 or later, but {error}: '
                f"{sys.executable} -m pip install 'vllm>=0.28', or set rl.server.weights = \"folder\""
            ) from None

        class Weights(WeightSource):
            tensors: Mapping[str, Tensor]

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, dtype, tuple(value.shape)) for name, value in self.tensors.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, value in self.tensors.items():
                    yield name, value.to(dtype).contiguous()

        self._init = WeightTransferTrainerFactory.trainer_init
        self._init_info, self._weights = NCCLTrainerInitInfo, Weights()
        self._engine, self._source = engine, source
        self._sender: Any = None

    def __call__(self, model: TreeModel, version: str) -> None:
        self._weights.tensors = snapshot_tensors(model, self._source)
        try:
            self._sender = self._sender or self._join()
            self._sender.send_weights()
        except UserError:
            raise
        except Exception as error:  # vllm has no class of errors for failed transfers
            raise UserError(
                f"{self._engine.server.url}: the broadcast failed with {type(error).__name__}: {error}; see "
                "the log of the server"
            ) from None

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()

    def _join(self) -> Any:
        """Returns vLLM's sender, after the workers of the server have joined its group."""
        address = self._engine.server.local_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        size = 1 + self._engine.world_size()
        info = self._init_info(master_address=address, master_port=port, world_size=size, rank=0)
        return self._init(init_info=info, client=_Commands(self._engine), source=self._weights)


class _Commands:
    """The commands that vLLM's sender gives to the server: its ``VLLMWeightSyncClient``."""

    def __init__(self, engine: Engine) -> None:
        self._server = engine.server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._server.command("/init_weight_transfer_engine", {"init_info": init_info}, attempts=1)

    def start_weight_update(self) -> None:
        self._server.command("/start_weight_update", attempts=1)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._server.command("/update_weights", {"update_info": update_info}, attempts=1)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.command("/finish_weight_update", {"weight_version": weight_version}, attempts=1)
