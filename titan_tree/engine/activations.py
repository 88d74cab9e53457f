"""Stores the activations of suspended partitions: on the GPU, in host memory, or not at all.

A partition is *suspended* while its descendants run. Its activations stay on the GPU, are copied to pinned
host memory and back while the GPU computes, or are dropped and recomputed. ``saved_tensors_hooks`` intercepts
every tensor that autograd saves. The unit of storage is a *block*, the storage of one or several such
tensors. The oldest blocks are offloaded first, because their partitions stay suspended longest.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan_tree.distributed.launch import ranks_of_machine
from titan_tree.errors import UserError

Policy = Literal["auto", "keep", "offload", "recompute"]

MIN_BLOCK_BYTES = 2**20  # smaller blocks stay on the device
MAX_IN_FLIGHT = 2**28  # bytes that are copied at once, in either direction


class Activations:
    """Decides where the activations of suspended partitions are stored, and moves them.

    Args:
        device: the device of the model.
        policy:
            "keep": on the device.
            "offload": in pinned host memory.
            "recompute": nowhere; the forward pass is recomputed before the backward pass.
            "auto": on the device up to ``device_bytes``. Beyond that, the oldest blocks move to the host, up
                to ``host_bytes``. A partition that starts while both budgets are used up is recomputed.
                Without ``device_bytes``, "auto" equals "keep".
        device_bytes: budget for everything that backward passes need, except logits. The running partition
            counts too.
        host_bytes: budget on the host. None: half of the memory available now, divided by the ranks of this
            host; 0 without a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        policy: Policy = "auto",
        device_bytes: float | None = None,
        host_bytes: float | None = None,
    ) -> None:
        if policy not in get_args(Policy):
            expected = ", ".join(get_args(Policy))
            raise UserError(f"Activations: policy: expected one of {expected}, got {policy!r}")
        self.device, self.policy = device, policy
        self.device_bytes = math.inf if device_bytes is None else device_bytes
        self.host_bytes = _half_of_host(device) if host_bytes is None else host_bytes
        self.on_device = self.on_host = self.offloading = self.fetching = 0  # bytes
        self._blocks: dict[int, weakref.ref[_Block]] = {}  # blocks on the device, by address
        self._kept: deque[weakref.ref[_Block]] = deque()  # not yet offloaded, the oldest first
        self._offloading: deque[_Block] = deque()  # copy to the host started, not yet awaited
        self._last: weakref.ref[_Block] | None = None  # the newest block of the current forward pass
        self._shared: set[int] = set()  # addresses of storages that stay on the device
        self._limit = 0.0  # bytes that may stay on the device in the current forward pass

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream | None]:
        """The streams for copies to the host and back; None without a GPU."""
        return [torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in range(2)]

    def are_full(self) -> bool:
        """Returns whether a partition that starts now and will be suspended must be recomputed."""
        if self.policy == "auto":
            return self.on_device >= self.device_bytes and self.on_host >= self.host_bytes
        return self.policy == "recompute"

    def check_lockstep(self) -> None:
        """Raises UserError if ranks would decide by their own memory use what to offload or to recompute.

        Ranks that communicate in every pass need equal schedules.
        """
        if self.policy == "offload" or (self.policy == "auto" and self.device_bytes < math.inf):
            raise UserError(
                "partition.activations: expected 'keep' or 'recompute' with parallel.expert_parallel or "
                f"parallel.sequence_parallel, or 'auto' without partition.device_gb, got {self.policy!r}; "
                "offloading would make the schedules of ranks differ"
            )

    def saving(self, is_suspended: bool, shared: Iterable[Tensor] = ()) -> AbstractContextManager[object]:
        """Returns the context for a partition's forward pass, which stores the tensors that autograd saves.

        Args:
            is_suspended: whether descendants will run before the backward pass of this partition. If not,
                "offload" and "auto" keep its activations on the device up to ``device_bytes``. Without
                ``device_bytes``, the context then does nothing.
            shared: tensors that other partitions use too; they stay on the device.
        """
        limit = 0.0 if self.policy == "offload" and is_suspended else self.device_bytes
        if limit == math.inf or self.policy in ("keep", "recompute"):
            return nullcontext()
        self._limit = max(limit, MAX_IN_FLIGHT)
        self._last = None
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        return saved_tensors_hooks(self._pack, self._unpack)

    def release(self) -> None:
        """Completes all pending offloads. Call it after the last backward pass of a plan."""
        while self._offloading:
            self._finish_offload(self._offloading.popleft())

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor.detach()
        storage = tensor.untyped_storage()
        is_shared = storage.data_ptr() in self._shared
        # Compare types, not devices: "cuda" and "cuda:0" are the same device, and a rank has only one.
        is_elsewhere = tensor.device.type != self.device.type
        if is_shared or is_elsewhere or storage.nbytes() < MIN_BLOCK_BYTES:
            # Detached, because the output of an operator would keep alive the graph that saves it.
            return tensor.detach()
        known = self._blocks.get(storage.data_ptr())
        block = None if known is None else known()
        if block is None:
            block = _Block(self, storage, self._last)
            self._last = self._blocks[storage.data_ptr()] = weakref.ref(block)
            while self._kept and self._kept[-1]() is None:
                self._kept.pop()
            self._kept.append(self._last)
            self._make_room()
        return _Saved(block, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        bytes_on_device = self._bytes_on_device(saved.block)
        previous = saved.block.previous
        # The backward pass needs the previous blocks next.
        while previous and (block := previous()) and self.fetching < MAX_IN_FLIGHT:
            self._fetch(block)
            previous = block.previous
        empty = torch.empty(0, dtype=saved.dtype, device=self.device)
        return empty.set_(bytes_on_device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _make_room(self) -> None:
        """Starts offloads before the limit is reached, so that they finish in time."""
        host_limit = self.host_bytes if self.policy == "auto" else math.inf
        while self._kept and self.on_device - self.offloading > self._limit - MAX_IN_FLIGHT:
            if self.on_host >= host_limit:
                break
            block = self._kept.popleft()()
            if block and block.on_device is not None and block.on_host is None:
                pinned = self.device.type == "cuda"
                on_host = torch.empty(block.size, dtype=torch.uint8, pin_memory=pinned)
                block.copied = self._copy(on_host, block.on_device, self._streams[0])
                block.on_host = on_host
                self.offloading += block.size
                self.on_host += block.size_on_host
                self._offloading.append(block)
        # Do not finish the newest offload yet: autograd may save the same storage again, and a finished block
        # is no longer found by its address.
        while len(self._offloading) > 1 and self.on_device > self._limit:
            self._finish_offload(self._offloading.popleft())

    def _finish_offload(self, block: _Block) -> None:
        """Waits for the copy and frees the block's memory on the device."""
        assert block.on_device is not None
        self._wait(block.copied)
        self._unlist(block)
        block.on_device = block.copied = None
        self.offloading -= block.size
        self.on_device -= block.size

    def _fetch(self, block: _Block) -> None:
        """Starts the copy back to the device if the block is on the host only."""
        if block.on_device is None:
            assert block.on_host is not None
            on_device = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            block.copied = self._copy(on_device, block.on_host, self._streams[1])
            block.on_device = on_device
            block.on_host = None  # the allocator does not reuse pinned memory before the copy is done
            block.stream = torch.cuda.current_stream(self.device) if block.copied else None
            self.on_host -= block.size_on_host
            self.on_device += block.size
            self.fetching += block.size
            block.is_fetching = True

    def _bytes_on_device(self, block: _Block) -> Tensor:
        """Returns the block's bytes on the device; the current stream waits for their copy."""
        self._fetch(block)
        assert block.on_device is not None
        if block.is_fetching:
            self._wait(block.copied)
            self.fetching -= block.size
            block.is_fetching = False
        return block.on_device

    def _copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        """Copies on ``stream`` after all work queued so far. Returns the event that marks its end."""
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            copied: torch.cuda.Event = stream.record_event()
            return copied

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _forget(self, block: _Block) -> None:
        """Subtracts a block from the totals, because no backward pass needs it any more."""
        if block.on_device is not None:
            if block.is_fetching:
                self.fetching -= block.size
                if block.stream is not None and block.copied is not None:
                    block.stream.wait_event(block.copied)  # before the allocator reuses its memory
            self.on_device -= block.size
            self._unlist(block)
        if block.on_host is not None:
            self.on_host -= block.size_on_host

    def _unlist(self, block: _Block) -> None:
        known = self._blocks.get(block.address)
        if known is not None and known() in (block, None):  # otherwise another storage has this address now
            del self._blocks[block.address]


class _Block:
    """One storage that a backward pass needs: on the device, on the host, or being copied."""

    def __init__(
        self, owner: Activations, storage: torch.UntypedStorage, previous: weakref.ref[_Block] | None
    ) -> None:
        # ``previous`` is the block saved before this one in the same forward pass.
        self.owner, self.previous = owner, previous
        self.size, self.address = storage.nbytes(), storage.data_ptr()
        # torch rounds the size of pinned tensors up to a power of two.
        self.size_on_host = 1 << (self.size - 1).bit_length()
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.on_device: Tensor | None = empty.set_(storage)
        self.on_host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # marks the end of the last copy, in either direction
        self.is_fetching = False  # copy from the host started, not yet awaited
        self.stream: torch.cuda.Stream | None = None  # the stream that allocated the fetched copy
        owner.on_device += self.size

    def __del__(self) -> None:
        self.owner._forget(self)


class _Saved(NamedTuple):
    """A tensor that autograd saved, as a view of a block's bytes."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _half_of_host(device: torch.device) -> float:
    """Returns half of the host memory available now, in bytes, divided by the ranks on this host."""
    meminfo = Path("/proc/meminfo")
    if device.type != "cuda" or not meminfo.exists():
        return 0.0
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    return available / 2 / ranks_of_machine()
