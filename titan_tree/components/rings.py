"""Code shared by the Gluon kernels for Hopper: rings of shared memory, and descriptors of tensors for TMA.

TMA is Hopper's engine for asynchronous copies between global and shared memory. An mbarrier is a counter in
shared memory: a phase completes when all expected arrivals and all expected bytes of copies have arrived. A
wait names the parity of its phase.

An mbarrier must be invalidated after its last use, because Triton then gives its memory to other data, and
the GPU writes its state there when it switches to another process. Barriers that the groups of
``warp_specialize`` share keep their memory until all groups have ended, and then the kernel returns.

A kernel has one producer warp, which only issues copies, and groups of four consumer warps, which compute.
They communicate through rings: the producer fills stage after stage while consumers read earlier stages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Ring(NamedTuple):
    """Shared memory in STAGES stages. One side fills them, mostly the producer by TMA; consumer groups read.

    A stage is full when the bytes of its copies, or all WRITERS, have arrived. It is empty when all READERS
    have released it. Filling number n uses stage n % STAGES, and the parity of n // STAGES is the phase of
    its barriers. Rings whose stages are released together share ``empty``.
    """

    stages: gl.shared_memory_descriptor  # [STAGES, rows, D]
    full: gl.shared_memory_descriptor  # [STAGES, 1] mbarriers: the stage is filled
    empty: gl.shared_memory_descriptor  # [STAGES, 1] mbarriers: all readers are done


@gluon.jit
def make_ring(stages, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """A ring of these stages. READERS and WRITERS: how many arrivals empty and fill a stage."""
    return Ring(stages, make_barriers(STAGES, WRITERS), make_barriers(STAGES, READERS))


@gluon.jit
def make_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """STAGES mbarriers, whose phases complete after this many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(barriers.index(s), count=ARRIVALS)
    return barriers


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr):
    """Waits until filling n is in its stage."""
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(ring, n, STAGES: gl.constexpr):
    """Waits until the stage of filling n is empty. The first STAGES fillings do not wait."""
    mbarrier.wait(ring.empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def release(ring, n, STAGES: gl.constexpr):
    """Says that this reader is done with filling n."""
    mbarrier.arrive(ring.empty.index(n % STAGES), count=1)


@gluon.jit
def opaque_zero(i):
    """A 0 that LLVM cannot see through. i: a value that changes in every iteration of the loop.

    An operand in shared memory needs a descriptor of its address. If the address is constant, LLVM hoists the
    descriptor out of the loop into two registers, which then spill. If the address includes this 0, the
    uniform datapath computes the descriptor in every iteration.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0; // $1", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a TMA descriptor of contiguous x [N, H, D] as a matrix [N, H * D], in tiles of rows x columns.

    Rows past N read as zero and are not written.
    """
    assert x.is_contiguous()
    n, heads, dim = x.shape
    width = heads * dim
    layout = _tile_layout(rows, columns, x.dtype)
    return TensorDescriptor(x, [n, width], [width, 1], [rows, columns], layout)


@functools.cache  # making one takes the host as long as a launch
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def vector(x: Tensor, size: int) -> TensorDescriptor:
    """Returns a TMA descriptor of x as a vector of 32-bit values, read in runs of ``size``.

    Values past its end read as zero. Every run must start at a multiple of 4 values: TMA faults at addresses
    that are not multiples of 16 bytes.
    """
    return TensorDescriptor.from_tensor(x.flatten(), [size], _VECTOR_LAYOUT)


_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def is_hopper(device: torch.device) -> bool:
    """Returns whether ``device`` is a GPU of compute capability 9.0.

    It is not cached, because torch.compile traces it.
    """
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
