"""Broadcasts: send weights to a server's workers over a process group.

SGLang's workers join a group of torch, with NCCL from a GPU and gloo from a CPU. vLLM's workers form a group
in a way of their own, which vLLM's classes for trainers implement, see
https://docs.vllm.ai/en/latest/training/weight_transfer/. No other file imports vllm.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from titan_tree.errors import UserError, shorten
from titan_tree.models.pretrained import snapshot_tensors
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import in_daemon
from titan_tree.rl.server.client import Json, ServerClient

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_WORKERS = 2**16  # a larger number is an error of the server
BUCKET_BYTES = 512 * 2**20  # maximal size of several tensors in one request, which a worker allocates at once


class SGLangBroadcast:
    """Broadcasts tensors under their names in a Hugging Face snapshot.

    The trainer is rank 0 of the group, and the server's workers are the other ranks. The first ``send`` forms
    the group.

    Args:
        dtype: dtype of the sent weights.
        source: the snapshot from which the model started, or None.
    """

    def __init__(self, client: ServerClient, dtype: torch.dtype, source: str | None) -> None:
        self._client, self._dtype, self._source = client, dtype, source
        self._group: dist.ProcessGroup | None = None
        self._name = f"titan_tree_{uuid4().hex}"

    def send(self, model: TreeModel, weights: Mapping[str, Tensor] | None, version: str) -> None:
        """Broadcasts all weights. The last request also sends the name of their version.

        Args:
            weights: the weights by the model's names; needed if the model's own are sharded.

        Raises:
            UserError: the server refused a request, or the process group failed.
        """
        tensors, device = snapshot_tensors(model, self._source, weights), model.embedding_weight.device
        group = self._group = self._group or self._join(device)
        buckets = list(self._buckets(tensors))
        for names in buckets:
            body = {
                "names": names,
                "dtypes": [str(self._dtype).removeprefix("torch.")] * len(names),
                "shapes": [list(tensors[name].shape) for name in names],
                "group_name": self._name,
                "flush_cache": False,  # it was flushed when the server paused
            }
            if names is buckets[-1]:
                body["weight_version"] = version
            answer = in_daemon(partial(self._command, "/update_weights_from_distributed", body), "update")
            sent = [tensors[name].to(device, self._dtype).contiguous() for name in names]
            self._wait(answer, in_daemon(partial(_broadcast, group, sent), "broadcast"))

    def close(self) -> None:
        """Leaves the group. The server's workers leave it, too, if they can."""
        if self._group is None:
            return
        try:
            self._command("/destroy_weights_update_group", {"group_name": self._name})
        except UserError as error:
            logger.warning("the group of this run stays open: %s", error)
        self._drop()

    def _command(self, path: str, body: Mapping[str, object]) -> None:
        self._client.command(path, body, attempts=1)  # a second attempt would wait for a second broadcast

    def _join(self, device: torch.device) -> dist.ProcessGroup:
        """Forms the group together with the workers of the server."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        size, address = 1 + sglang_workers(self._client), self._client.local_address()
        timeout = timedelta(seconds=self._client.timeout_s)
        store = dist.TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        body = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self._name,
            "backend": backend,
        }
        answer = in_daemon(partial(self._command, "/init_weights_update_group", body), "join")
        joined = in_daemon(
            partial(_new_group, Backend(backend), store, size, self._name, timeout), "weights group"
        )
        return self._wait(answer, joined)

    def _wait(self, answer: Future[None], trainers_part: Future[T]) -> T:
        """Returns the result of the trainer's part of a command, and waits for the server's answer.

        Raises:
            UserError: one of both failed. The other one might wait forever.
        """
        url, timeout_s = self._client.url, self._client.timeout_s
        hint = f"check that the server's workers run and reach {self._client.local_address()}"
        parts: tuple[Future[Any], ...] = (answer, trainers_part)
        done, waiting = wait(parts, timeout_s, FIRST_EXCEPTION)
        try:
            for future in sorted(done, key=parts.index):
                future.result()
            if waiting:
                raise UserError(
                    f"{url}: expected the process group to answer within {timeout_s:g} s; {hint}, or raise "
                    "rl.server.timeout_s"
                )
            return trainers_part.result()
        except RuntimeError as error:
            self._drop()
            raise UserError(f"{url}: the process group failed with {error}; {hint}") from None
        except UserError:
            self._drop()
            raise

    def _drop(self) -> None:
        """Leaves the group without waiting for other ranks, which may have failed."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _buckets(self, tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Yields the names of the tensors of each request."""
        names: list[str] = []
        bucket_bytes = 0
        for name, tensor in tensors.items():
            tensor_bytes = tensor.numel() * self._dtype.itemsize
            if names and bucket_bytes + tensor_bytes > BUCKET_BYTES:
                yield names
                names, bucket_bytes = [], 0
            names.append(name)
            bucket_bytes += tensor_bytes
        yield names


class VLLMBroadcast:
    """Sends weights over NCCL with vLLM's ``WeightTransferTrainerFactory``.

    The first ``send`` forms the group.

    Args:
        dtype: dtype of the sent weights.
        source: the snapshot from which the model started, or None.

    Raises:
        UserError: vllm is not installed, or its version has no such class.
    """

    def __init__(self, client: ServerClient, dtype: torch.dtype, source: str | None) -> None:
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
            device: torch.device

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, dtype, tuple(value.shape)) for name, value in self.tensors.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, value in self.tensors.items():
                    yield name, value.to(self.device, dtype).contiguous()

        self._client, self._source, self._weights = client, source, Weights()
        self._init, self._init_info = WeightTransferTrainerFactory.trainer_init, NCCLTrainerInitInfo
        self._sender: Any = None

    def send(self, model: TreeModel, weights: Mapping[str, Tensor] | None, version: str) -> None:
        """Sends all weights. ``VLLM.pause`` has named their version.

        Args:
            weights: see ``SGLangBroadcast.send``.

        Raises:
            UserError: the server refused a request, or vLLM's class failed.
        """
        self._weights.tensors = snapshot_tensors(model, self._source, weights)
        self._weights.device = model.embedding_weight.device
        try:
            self._sender = self._sender or self._join()
            self._sender.send_weights()
        except UserError:
            raise
        except Exception as error:  # vllm has no class of errors for failed transfers
            raise UserError(
                f"{self._client.url}: the broadcast failed with {type(error).__name__}: {error}; see "
                "the log of the server"
            ) from None

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()

    def _join(self) -> Any:
        """Returns vLLM's sender, after the workers of the server have joined its group."""
        address = self._client.local_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        path = "/get_world_size"
        workers = (self._client.find(path) or {}).get("world_size")
        size = 1 + _positive(workers, f"{self._client.url}{path}")
        info = self._init_info(master_address=address, master_port=port, world_size=size, rank=0)
        return self._init(init_info=info, client=_VLLMCommands(self._client), source=self._weights)


class _VLLMCommands:
    """The commands that vLLM's sender gives to the server, as vLLM's protocol ``VLLMWeightSyncClient``."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Json]) -> None:
        self._client.command("/init_weight_transfer_engine", {"init_info": init_info}, attempts=1)

    def start_weight_update(self) -> None:
        self._client.command("/start_weight_update", attempts=1)

    def update_weights(self, update_info: dict[str, Json]) -> None:
        self._client.command("/update_weights", {"update_info": update_info}, attempts=1)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.command("/finish_weight_update", {"weight_version": weight_version}, attempts=1)


def sglang_workers(client: ServerClient) -> int:
    """Returns the number of SGLang's workers, which hold different shards of the weights.

    Raises:
        UserError: the server does not report it, or some workers would get the same rank of the group.
    """
    path = "/server_info"
    info = client.find(path, "/get_server_info") or {}
    for name in ("dp_size", "pp_size"):
        copies = info.get(name) or 1
        if copies != 1 and not (name == "dp_size" and info.get("enable_dp_attention")):
            raise UserError(
                f"{client.url}{path}: {name}: expected 1, got {shorten(copies)}, because SGLang gives these "
                "workers the same ranks of the group; start it with another layout, or set "
                'rl.server.weights = "folder"'
            )
    return _positive(info.get("tp_size"), f"{client.url}{path}: tp_size")


def _positive(value: object, where: str) -> int:
    """Returns the number of workers that a server reports. Raises UserError if it reports none."""
    if type(value) is not int or not 1 <= value <= MAX_WORKERS:
        raise UserError(
            f"{where}: expected the number of workers, got {shorten(value)}; use another version of the "
            'server, or set rl.server.weights = "folder"'
        )
    return value


def _broadcast(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Sends the tensors in their order, and returns when all are sent."""
    for work in [group.broadcast(tensor, 0) for tensor in tensors]:
        work.wait()
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)  # for NCCL, wait() only orders the stream


def _new_group(
    backend: Backend, store: dist.Store, size: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Returns a group beside the default one, as rank 0. SGLang's ``init_custom_process_group`` joins it.

    torch has no public function for a group with processes outside of the default one.
    """
    group, _ = _new_process_group_helper(
        size, 0, [], backend, dist.PrefixStore(name, store), GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
