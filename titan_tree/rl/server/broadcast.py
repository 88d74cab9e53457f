"""Broadcasts weights to the workers of an SGLang server, over a process group with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from titan_tree.errors import UserError
from titan_tree.models.pretrained import snapshot_tensors
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.async_sampling import in_daemon
from titan_tree.rl.server.engines import Engine

T = TypeVar("T")
logger = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20  # of the tensors in one request, all of which a worker allocates at once


class BroadcastTransfer:
    """Broadcasts tensors by their names in a Hugging Face snapshot: with NCCL from a GPU, gloo from a CPU.

    The trainer is rank 0 of the group, and the workers follow. The first call forms the group.

    Args:
        dtype: of the sent weights.
        source: the snapshot that the model started from, or None.
        bucket_bytes: of the tensors in one request, unless a single one is larger.
    """

    def __init__(
        self, engine: Engine, dtype: torch.dtype, source: str | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._engine, self._server = engine, engine.server
        self._dtype, self._source, self._bucket_bytes = dtype, source, bucket_bytes
        self._group: dist.ProcessGroup | None = None
        self._name = f"titan_tree_{uuid4().hex}"

    def __call__(self, model: TreeModel, version: str) -> None:
        tensors = snapshot_tensors(model, self._source)
        group = self._group = self._group or self._join(model.embedding_weight.device)
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
            sent = [tensors[name].to(self._dtype).contiguous() for name in names]
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
        self._server.command(path, body, attempts=1)  # a second attempt would wait for a second broadcast

    def _join(self, device: torch.device) -> dist.ProcessGroup:
        """Forms the group together with the workers of the server."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        size, address = 1 + self._engine.world_size(), self._server.local_address()
        timeout = timedelta(seconds=self._server.timeout_s)
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

    def _wait(self, answer: Future[None], own: Future[T]) -> T:
        """Returns the result of the trainer's part of a command, and waits for the server's answer.

        Raises:
            UserError: as soon as one of both fails, even if the other one would wait forever.
        """
        url, timeout_s = self._server.url, self._server.timeout_s
        hint = f"check that the server's workers run and reach {self._server.local_address()}"
        end = time.monotonic() + timeout_s
        try:
            while not (answer.done() and own.done()):
                for future in (answer, own):
                    if future.done():
                        future.result()
                if time.monotonic() > end:
                    raise UserError(
                        f"{url}: expected the process group to answer within {timeout_s:g} s; {hint}, or "
                        "raise rl.server.timeout_s"
                    )
                time.sleep(0.001)
            answer.result()
            return own.result()
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
        names: list[str] = []
        size = 0
        for name, tensor in tensors.items():
            own = tensor.numel() * self._dtype.itemsize
            if names and size + own > self._bucket_bytes:
                yield names
                names, size = [], 0
            names.append(name)
            size += own
        yield names


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
