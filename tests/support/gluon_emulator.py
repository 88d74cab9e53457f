"""Runs a Gluon kernel for Hopper on the CPU, to test its logic without such a GPU.

``EmulatedKernel(kernel)`` is launched like the kernel. It runs one program after the other. It models:

- Warp groups. Partitions of ``warp_specialize`` are threads, of which one runs at a time. At every access to
  shared resources, the turn goes to a random partition that can continue. Each partition runs in program
  order.
- Asynchronous work. Copies and additions by TMA from shared memory read it as late as the waits for them
  allow. A product reads its operands at once or as late as its wait allows, chosen at random. Copies into
  shared memory arrive at a random later time. So a stage that is released or written too early, or read
  before it is filled, gives wrong numbers. Fresh shared memory is NaN.
- mbarriers, which count arrivals and bytes. A wait names the parity of a phase. Deadlocks are detected.
- TMA, which reads zeros outside of the tensor and writes nothing there.

It does not model layouts, registers, proxies and their fences, int32 overflow, concurrent programs or real
timing.

Raises:
    AssertionError: a deadlock; an access out of bounds; more arrivals than a barrier expects; a product or
        store that is never waited for; operands of the wrong dtype or shape; a TMA copy of a vector from an
        address that is not a multiple of 16 bytes.
    AttributeError: a product that is used before its wait; a name of Gluon that is not emulated.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

# 1. Programs and partitions.


@dataclass
class Partition:
    """A group of warps with its own control flow."""

    name: str
    can_go_on: Callable[[], bool] = lambda: True
    ended: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Product] = field(default_factory=list)  # not yet computed, oldest first
    stores: list[Callable[[], Any]] = field(default_factory=list)  # not yet done, oldest first


class Program:
    """One program of the grid. It passes the turn from partition to partition."""

    def __init__(self, index: int, width: int, rng: random.Random) -> None:
        self.index, self.width, self.rng = index, width, rng
        self.partitions: list[Partition] = []
        self.copies: list[Callable[[], Any]] = []  # TMA copies into shared memory that are in flight
        self.late: Partition | None = None  # runs only when nothing else can continue
        self.failure: BaseException | None = None

    def warp_specialize(
        self, functions: Sequence[tuple[Callable, tuple]], warps: Any, registers: Any
    ) -> None:
        threads: list[threading.Thread] = []
        for function, args in functions:
            partition = Partition(f"{function.__name__} {len(threads)}")
            self.partitions.append(partition)
            threads.append(threading.Thread(target=self._run, args=(partition, function, args), daemon=True))
        for thread in threads:
            thread.start()
        self._pass_turn()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def pause(self, partition: Partition, can_go_on: Callable[[], bool]) -> None:
        """Lets others run until ``can_go_on()``, and sometimes, at random, until nothing else can run."""
        partition.can_go_on = can_go_on
        if self.late is None and self.rng.random() < 0.1:
            self.late = partition
        self._pass_turn()
        partition.turn.acquire()
        assert self.failure is None, "another partition failed"

    def _run(self, partition: Partition, function: Callable, args: tuple) -> None:
        here.program, here.partition = self, partition
        partition.turn.acquire()
        try:
            if self.failure is None:
                function(*args)
                assert not partition.products, f"{partition.name}: a product is never waited for"
                assert not partition.stores, f"{partition.name}: a store is never waited for"
                partition.ended = True
                self._pass_turn()
        except BaseException as error:
            self.failure = self.failure or error
            for other in self.partitions:
                other.turn.release()

    def _pass_turn(self) -> None:
        while True:
            waiting = [p for p in self.partitions if not p.ended]
            ready = [p for p in waiting if p.can_go_on() and p is not self.late]
            if not ready and not self.copies:
                self.late, ready = None, [p for p in waiting if p.can_go_on()]
            if not waiting and not self.copies:
                return
            assert ready or self.copies, f"deadlock: {', '.join(p.name for p in waiting)} wait"
            if ready and (not self.copies or self.rng.random() < 0.8):
                self.rng.choice(ready).turn.release()
                return
            self.copies.pop(self.rng.randrange(len(self.copies)))()


here = threading.local()  # .program, and inside warp_specialize .partition


def others_may_run(can_go_on: Callable[[], bool] = lambda: True) -> None:
    here.program.pause(here.partition, can_go_on)


# 2. Values, pointers, shared memory, descriptors.


class Value(Tensor):
    """A Triton value: ``x += y`` creates a new one."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # torch's own version takes several times as long
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(Value) if isinstance(result, Tensor) else result

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]
    __iadd__ = Tensor.__add__
    __iand__ = Tensor.__and__
    __imul__ = Tensor.__mul__
    __itruediv__ = Tensor.__truediv__


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Returns the offsets, 0 where masked, and the mask."""
        offset = torch.as_tensor(self.offset).long()
        mask = torch.as_tensor(True if mask is None else mask).expand(offset.shape)
        offset = torch.where(mask, offset, 0)
        assert ((offset >= 0) & (offset < len(self.memory))).all(), "access out of bounds"
        return offset, mask

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        offset, mask = self.places(mask)
        return value(torch.where(mask, self.memory[offset], torch.tensor(other, dtype=self.memory.dtype)))

    def store(self, x: Tensor, mask: Any = None) -> None:
        offset, mask = self.places(mask)
        assert x.dtype == self.memory.dtype, f"store of {x.dtype} into {self.memory.dtype}"
        self.memory[offset[mask]] = x.expand(offset.shape)[mask].as_subclass(Tensor)


class Shared:
    """A shared memory descriptor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, list(tensor.shape)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.tensor), f"index {int(i)} of {len(self.tensor)}"
        return Shared(self.tensor[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        assert self.tensor.numel() * self.dtype.itemsize == math.prod(shape) * dtype.itemsize
        return Shared(self.tensor.view(dtype).view(shape))

    def load(self, layout: Any = None) -> Value:
        others_may_run()
        return value(self.tensor.clone())

    def store(self, x: Tensor) -> None:
        assert (x.shape, x.dtype) == (self.tensor.shape, self.dtype)
        others_may_run()
        self.tensor.copy_(x)


class Descriptor:
    """A tensor descriptor: TMA moves tiles of the tensor."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.tensor = host.base.detach().view(host.shape)
        self.layout, self.dtype = host.layout, host.base.dtype
        self.block_shape = list(host.block_shape)
        nbytes = math.prod(host.block_shape) * self.dtype.itemsize
        self.block_type = SimpleNamespace(shape=self.block_shape, nbytes=nbytes)

    def inside(self, corner: Sequence[Any], tile: Shared) -> tuple[Tensor, Tensor]:
        """Returns the part of the tensor inside a tile, and the part of the tile inside the tensor."""
        assert (tile.shape, tile.dtype) == (self.block_shape, self.dtype), "a tile of another shape or dtype"
        bytes_before = int(corner[-1]) * self.dtype.itemsize
        assert len(corner) > 1 or bytes_before % 16 == 0, f"TMA copies a vector from byte {bytes_before}"
        in_tensor, in_tile = self.tensor, tile.tensor
        for dim, (start, length) in enumerate(zip(map(int, corner), tile.shape, strict=True)):
            low = min(max(start, 0), self.tensor.shape[dim])
            size = max(min(start + length, self.tensor.shape[dim]) - low, 0)
            in_tensor = in_tensor.narrow(dim, low, size)
            in_tile = in_tile.narrow(dim, low - start if size else 0, size)
        return in_tensor, in_tile

    def copy_to_shared(self, corner: Sequence[Any], barrier: Barrier, tile: Shared) -> None:
        in_tensor, in_tile = self.inside(corner, tile)
        tile.tensor.fill_(garbage(tile.dtype))  # what a copy overwrites is undefined until it arrives

        def land() -> None:
            tile.tensor.zero_()
            in_tile.copy_(in_tensor)
            barrier.progress(0, -self.block_type.nbytes)

        here.program.copies.append(land)
        others_may_run()

    def store(self, corner: Sequence[Any], tile: Shared) -> None:
        in_tensor, in_tile = self.inside(corner, tile)
        here.partition.stores.append(lambda: in_tensor.copy_(in_tile))

    def add(self, corner: Sequence[Any], tile: Shared) -> None:
        in_tensor, in_tile = self.inside(corner, tile)
        here.partition.stores.append(lambda: in_tensor.add_(in_tile))


# 3. Barriers, TMA, tensor cores.


class Barrier:
    """An mbarrier: a phase ends when all expected arrivals and bytes have arrived."""

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.missing_bytes = self.phases = 0

    def progress(self, arrivals: int, more_bytes: int) -> None:
        self.missing -= arrivals
        self.missing_bytes += more_bytes
        assert self.missing >= 0, "more arrivals than the barrier expects"
        if self.missing == 0 and self.missing_bytes == 0:
            self.phases += 1
            self.missing = self.count

    def expect(self, size: int) -> None:
        self.progress(1, size)

    def arrive(self, count: int = 1) -> None:
        self.progress(count, 0)
        others_may_run()

    def wait(self, phase: Any) -> None:
        others_may_run(lambda: self.phases % 2 != int(phase))

    def invalidate(self) -> None:
        del self.phases, self.missing, self.missing_bytes  # later uses fail


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(list(shape), garbage(dtype), dtype=dtype))


def garbage(dtype: torch.dtype) -> float:
    """Returns the content of undefined memory: NaN or the largest integer, so that results show any read."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def run_oldest(queue: list[Any], pending: int) -> None:
    while len(queue) > pending:
        queue.pop(0)()


def store_wait(pending: int) -> None:
    others_may_run()
    run_oldest(here.partition.stores, pending)


@dataclass
class Product:
    """An asynchronous product a b or acc + a b. a is a value or shared memory, b is shared memory."""

    a: Value | Shared
    b: Shared
    acc: Value
    use_acc: bool
    result: Value = field(init=False)  # exists once computed: earlier use is an AttributeError

    def __call__(self) -> None:
        a = self.a.tensor if isinstance(self.a, Shared) else self.a
        product = a.float() @ self.b.tensor.float()
        assert product.shape == self.acc.shape
        self.result = value(product + self.acc if self.use_acc else product)


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    assert a.dtype == b.dtype != acc.dtype == torch.float32
    product = Product(a, b, acc, use_acc)
    here.partition.products.append(product)
    if here.program.rng.random() < 0.5:
        run_oldest(here.partition.products, 0)
    return product


def warpgroup_mma_wait(pending: int, values: Sequence[Any]) -> Any:
    others_may_run()
    run_oldest(here.partition.products, pending)
    results = [x.result if isinstance(x, Product) else x for x in values]
    return results[0] if len(results) == 1 else tuple(results)


# 4. The language, and launches.


def _no_layout(*args: Any) -> None:
    """Layouts are not modelled."""


_LANGUAGE = SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float16=torch.float16, float32=torch.float32,
    constexpr=lambda x: x, static_range=range,
    program_id=lambda axis: value(here.program.index), num_programs=lambda axis: value(here.program.width),
    warp_specialize=lambda *args: here.program.warp_specialize(*args),
    allocate_shared_memory=allocate_shared_memory, load=Pointer.load, store=Pointer.store,
    arange=lambda start, stop, layout: value(torch.arange(start, stop)),
    zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
    where=lambda condition, x, y: torch.where(value(condition), x, y),
    minimum=lambda x, y: torch.minimum(value(x), value(y)),
    maximum=lambda x, y: torch.maximum(value(x), value(y)),
    zeros_like=torch.zeros_like, reshape=torch.reshape, permute=torch.permute, expand_dims=torch.unsqueeze,
    max=torch.amax, sum=lambda x, axis: torch.sum(x, axis, dtype=x.dtype), abs=torch.abs,
    associative_scan=lambda x, axis, add: torch.cumsum(x, axis),  # only sums
    exp2=torch.exp2, log2=torch.log2, sqrt=torch.sqrt,
    convert_layout=lambda x, layout: x,
    inline_asm_elementwise=lambda *args, **options: 0,  # only opaque_zero uses inline assembly
    SliceLayout=_no_layout, DotOperandLayout=_no_layout, NVMMADistributedLayout=_no_layout,
    BlockedLayout=_no_layout, SwizzledSharedLayout=_no_layout, SharedLinearLayout=_no_layout,
    NVMMASharedLayout=SimpleNamespace(get_default_for=_no_layout),
)  # fmt: skip
_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barriers", init=Barrier.init, expect=Barrier.expect, arrive=Barrier.arrive,
    wait=Barrier.wait, invalidate=Barrier.invalidate,
)  # fmt: skip
_TMA = SimpleNamespace(
    async_copy_global_to_shared=Descriptor.copy_to_shared, async_copy_shared_to_global=Descriptor.store,
    store_wait=store_wait,
)  # fmt: skip
_EMULATED: list[tuple[Any, Any]] = [
    (gl, _LANGUAGE),
    (hopper.mbarrier, _MBARRIER),
    (hopper.tma, _TMA),
    (hopper.fence_async_shared, lambda: None),
    (hopper.warpgroup_mma, warpgroup_mma),
    (hopper.warpgroup_mma_wait, warpgroup_mma_wait),
]


class EmulatedKernel:
    """``kernel`` for CPU tensors. substitutes: functions that replace names of the kernel's file."""

    def __init__(self, kernel: JITFunction, **substitutes: Callable) -> None:
        self.rng, self.substitutes = random.Random(0), substitutes
        self.scopes: dict[int, dict[str, Any]] = {}
        self.function = self._translate(kernel)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            def run() -> None:
                self.function(*map(_argument, args), **constants)

            for index in range(grid[0]):
                here.program = Program(index, grid[0], self.rng)
                if "warp_specialize" in self.function.__code__.co_names:
                    run()
                else:  # all warps are one partition
                    here.program.warp_specialize([(run, ())], None, None)

        return launch

    def _translate(self, x: Any) -> Any:
        """Returns the replacement of a global of a kernel's file."""
        if isinstance(x, gl.constexpr):
            return x.value
        if isinstance(x, JITFunction):
            fn = x.fn
            return FunctionType(fn.__code__, self._scope(fn.__globals__), fn.__name__, fn.__defaults__)
        return next((emulation for real, emulation in _EMULATED if x is real), x)

    def _scope(self, scope: dict[str, Any]) -> dict[str, Any]:
        if id(scope) not in self.scopes:
            new = self.scopes[id(scope)] = {}
            new |= {name: self._translate(x) for name, x in scope.items()} | self.substitutes
        return self.scopes[id(scope)]


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    return Pointer(x.detach().view(-1)) if isinstance(x, Tensor) else x
