"""Activations: where those of partitions that wait for others are kept until their backward.

On the device; in the host's memory, copied there and back beside the computation; or nowhere, so that the
forward runs again. What autograd saves passes through ``saved_tensors_hooks``. Each storage is a block here,
and the oldest blocks, those of the partitions that wait longest, are the first to leave.
"""

from __future__ import annotations

import math
import os
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

from titan_tree.errors import UserError

Policy = Literal["auto", "keep", "offload", "recompute"]

SMALLEST = 2**20  # bytes of a block that is worth a copy
IN_FLIGHT = 2**28  # bytes that may be on their way at once, in either direction


class Activations:
    """What becomes of the activations of waiting partitions, in one run of a plan after the other.

    Args:
        device: where the model is.
        policy:
            "keep": they stay on the device.
            "offload": they go to the host's memory, pinned.
            "recompute": there are none, the forward runs again.
            "auto": up to ``device_bytes`` they stay, then the oldest go to the host, and partitions that
                start when it holds ``host_bytes`` run again. "keep" where ``device_bytes`` is None.
        device_bytes: for all that backwards need, of the partition that runs too, but for its logits.
        host_bytes: None: half of what is available now, shared by the ranks of this host; 0 without a GPU.
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
        self.on_device = self.on_host = self.leaving = self.arriving = 0  # bytes
        self._blocks: dict[int, weakref.ref[_Block]] = {}  # on the device, by address
        self._kept: deque[weakref.ref[_Block]] = deque()  # the oldest first
        self._leaving: deque[_Block] = deque()  # copied to the host, but nothing has waited for that
        self._last: weakref.ref[_Block] | None = None
        self._shared: set[int] = set()
        self._limit = 0.0

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream | None]:
        """For copies to the host and back."""
        return [torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in range(2)]

    def are_full(self) -> bool:
        """Whether a partition that starts now, and is to wait, runs again later."""
        if self.policy == "auto":
            return self.on_device >= self.device_bytes and self.on_host >= self.host_bytes
        return self.policy == "recompute"

    def may_offload(self) -> bool:
        """Whether some go to the host, or run again because of others: what happens depends on the rank."""
        return self.policy == "offload" or (self.policy == "auto" and self.device_bytes < math.inf)

    def saving(self, waits: bool, shared: Iterable[Tensor] = ()) -> AbstractContextManager[object]:
        """For the forward of a partition: takes care of what is saved in it.

        waits: for other partitions. shared: tensors that are not of this partition alone, and stay.
        """
        limit = 0.0 if self.policy == "offload" and waits else self.device_bytes
        if limit == math.inf or self.policy in ("keep", "recompute"):
            return nullcontext()
        self._limit = max(limit, IN_FLIGHT)
        self._last = None
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        return saved_tensors_hooks(self._pack, self._unpack)

    def release(self) -> None:
        """Forget copies under way: nobody needs them any more."""
        while self._leaving:
            self._left(self._leaving.popleft())

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        storage = tensor.untyped_storage()
        is_shared = is_weight or storage.data_ptr() in self._shared
        elsewhere = tensor.device.type != self.device.type  # of one type: "cuda" is "cuda:0", a rank has one
        if is_shared or elsewhere or storage.nbytes() < SMALLEST:
            # Not the tensor itself: an operator's output would hold the graph that holds it.
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
        bytes_on_device = self._arrived(saved.block)
        before = saved.block.before
        while before and (block := before()) and self.arriving < IN_FLIGHT:  # what the backward needs next
            self._fetch(block)
            before = block.before
        empty = torch.empty(0, dtype=saved.dtype, device=self.device)
        return empty.set_(bytes_on_device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _make_room(self) -> None:
        """Copies start before the limit is reached, so that there is time to make them."""
        host_limit = self.host_bytes if self.policy == "auto" else math.inf
        while self._kept and self.on_device - self.leaving > self._limit - IN_FLIGHT:
            if self.on_host >= host_limit:
                break
            block = self._kept.popleft()()
            if block and block.on_device is not None and block.on_host is None:
                pinned = self.device.type == "cuda"
                on_host = torch.empty(block.size, dtype=torch.uint8, pin_memory=pinned)
                block.copied = self._copy(on_host, block.on_device, self._streams[0])
                block.on_host = on_host
                self.leaving += block.size
                self.on_host += block.size_on_host
                self._leaving.append(block)
        while len(self._leaving) > 1 and self.on_device > self._limit:  # the newest may be saved once more
            self._left(self._leaving.popleft())

    def _left(self, block: _Block) -> None:
        """What the block took on the device is free for what is computed from now on."""
        assert block.on_device is not None
        self._wait(block.copied)
        self._unlist(block)
        block.on_device = block.copied = None
        self.leaving -= block.size
        self.on_device -= block.size

    def _fetch(self, block: _Block) -> None:
        """Starts the copy back, if there is something to be copied."""
        if block.on_device is None:
            assert block.on_host is not None
            on_device = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            block.copied = self._copy(on_device, block.on_host, self._streams[1])
            block.on_device = on_device
            block.on_host = None  # pinned memory is not used again before the copy is done
            block.stream = torch.cuda.current_stream(self.device) if block.copied else None
            self.on_host -= block.size_on_host
            self.on_device += block.size
            self.arriving += block.size
            block.arrives = True

    def _arrived(self, block: _Block) -> Tensor:
        """The block's bytes on the device, for what is computed from now on."""
        self._fetch(block)
        assert block.on_device is not None
        if block.arrives:
            self._wait(block.copied)
            self.arriving -= block.size
            block.arrives = False
        return block.on_device

    def _copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        """Beside the computation, from where that stands now. Returns when it is done."""
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _forget(self, block: _Block) -> None:
        """No backward needs the block any more."""
        if block.on_device is not None:
            if block.arrives:
                self.arriving -= block.size
                if block.stream is not None and block.copied is not None:
                    block.stream.wait_event(block.copied)  # before its memory is used again
            self.on_device -= block.size
            self._unlist(block)
        if block.on_host is not None:
            self.on_host -= block.size_on_host

    def _unlist(self, block: _Block) -> None:
        known = self._blocks.get(block.address)
        if known is not None and known() in (block, None):  # else another storage has that address now
            del self._blocks[block.address]


class _Block:
    """One storage that a backward needs: on the device, on the host, or on its way."""

    def __init__(self, owner: Activations, storage: torch.UntypedStorage, before: weakref.ref[_Block] | None):
        self.owner, self.before = owner, before  # the block saved before it, in the same forward
        self.size, self.address = storage.nbytes(), storage.data_ptr()
        self.size_on_host = (
            1 << (self.size - 1).bit_length()
        )  # what torch takes for a pinned tensor of that size
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.on_device: Tensor | None = empty.set_(storage)
        self.on_host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # the last copy, in either direction
        self.arrives = False  # from the host; nothing has waited for that
        self.stream: torch.cuda.Stream | None = None  # whose memory it arrives in
        owner.on_device += self.size

    def __del__(self) -> None:
        self.owner._forget(self)


class _Saved(NamedTuple):
    """A saved tensor: a view of a block's bytes."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _half_of_host(device: torch.device) -> float:
    """Half of the memory that this host has available now, in bytes, per rank of it."""
    meminfo = Path("/proc/meminfo")
    if device.type != "cuda" or not meminfo.exists():
        return 0.0
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    return available / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
