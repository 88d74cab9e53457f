"""BackgroundWriter: writes checkpoints in a thread while training continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageWriter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_tree.distributed.titan import OptimizersContainer
from titan_tree.errors import UserError

Tensors = Mapping[str, Mapping[str, Tensor]]


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors on this rank that a DTensor or a quantized tensor is made of, or a plain tensor."""
    if is_traceable_wrapper_subclass(value):
        for part in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, part))
    elif isinstance(value, Tensor):
        yield value


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread. Collective: every rank makes the same calls.

    The thread first copies the tensors to host memory, beside the forward and backward passes of the next
    step. ``optimizers`` change the tensors, so their next step waits for these copies, but not for the disk.
    Tensors on a GPU are copied to pinned memory, on a stream of their own. Later checkpoints use the same
    host memory again, because pinning is slow.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, optimizers: OptimizersContainer, device: torch.device) -> None:
        self._group = dist.new_group(backend="gloo")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # CUDA's current device belongs to a thread.
        enter = partial(torch.cuda.set_device, self._stream.device) if self._stream else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=enter)
        self._copied: Future[Tensors] | None = None
        self._host: dict[str, Tensor] = {}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._wait_for_copies)

    def start(self, tensors: Tensors, writer: StorageWriter) -> Future[None]:
        """Starts to write ``tensors``: plain tensors, DTensors or quantized ones.

        Returns:
            A future that ends when ``writer`` has finished. Wait for it before you start another checkpoint.
        Raises:
            UserError: host memory cannot be allocated; raised by the future and by the optimizers' next step.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())  # which may still be computing them
        copied = self._copied = self._thread.submit(self._copy_all, tensors)

        def write() -> None:
            dcp.save(copied.result(), storage_writer=writer, process_group=self._group)

        return self._thread.submit(write)

    def _wait_for_copies(self, *_: object) -> None:
        if self._copied:
            self._copied.result()

    def _copy_all(self, tensors: Tensors) -> Tensors:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            copies = {
                group: {name: self._copy(f"{group}.{name}", tensor) for name, tensor in named.items()}
                for group, named in tensors.items()
            }
        if self._stream:
            self._stream.synchronize()
        return copies

    def _copy(self, name: str, value: Any) -> Any:
        """Returns a copy of a tensor on the CPU, and anything else as it is."""
        if is_traceable_wrapper_subclass(value):  # made of other tensors, as DTensors and 8-bit states are
            parts, context = value.__tensor_flatten__()
            copies = {part: self._copy(f"{name}.{part}", getattr(value, part)) for part in parts}
            return type(value).__tensor_unflatten__(copies, context, value.size(), value.stride())
        if not isinstance(value, Tensor):
            return value  # the mesh of a DTensor
        if name not in self._host:
            try:
                self._host[name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            except RuntimeError as error:
                raise UserError(
                    f"checkpoint.async_save: cannot allocate {value.nbytes:,} bytes of host memory for "
                    f"{name}: {str(error).splitlines()[0]}; free some memory, or set it to false"
                ) from None
        return self._host[name].copy_(value, non_blocking=True)
