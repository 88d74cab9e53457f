"""What the kernels for Hopper share: rings of shared memory, and descriptors of tensors that TMA moves."""

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
    """Slots that one side fills, mostly the producer warp by TMA, and groups of consumer warps read.

    A slot is full when TMA's bytes, or all WRITERS, have arrived, and empty when all READERS have.
    The n-th filling is in slot n % STAGES; the phase of its barriers is the parity of n // STAGES.
    """

    slots: gl.shared_memory_descriptor  # [STAGES, rows, D]
    full: gl.shared_memory_descriptor  # [STAGES, 1] barriers: slot is filled
    empty: gl.shared_memory_descriptor  # [STAGES, 1] barriers: all readers are done


@gluon.jit
def make_ring(slots, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=WRITERS)
        mbarrier.init(empty.index(s), count=READERS)
    return Ring(slots, full, empty)


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr):
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(ring, n, STAGES: gl.constexpr):
    mbarrier.wait(ring.empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def release(ring, n, STAGES: gl.constexpr):
    mbarrier.arrive(ring.empty.index(n % STAGES), count=1)


@gluon.jit
def opaque_zero(i):
    """0 that LLVM does not know.

    Descriptors of an operand at an address made from it are computed in every step, by the uniform datapath,
    not hoisted out of the loop into two registers each, which then spill.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0; // $1", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [N, H, D] as a matrix [N, H * D] moved by TMA in tiles; rows past N read as zero, are not written."""
    return TensorDescriptor.from_tensor(x.flatten(1), [rows, columns], _tile_layout(rows, columns, x.dtype))


@functools.cache  # to make one takes the host as long as a launch
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def vector(x: Tensor, size: int) -> TensorDescriptor:
    """x as a vector of 32-bit values that TMA reads in runs of ``size``, zero past its end.

    A run starts at a multiple of 4: TMA knows only addresses of 16 bytes, and stops the GPU at others.
    """
    return TensorDescriptor.from_tensor(x.flatten(), [size], _VECTOR_LAYOUT)


_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0. Not cached: torch.compile traces it."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
