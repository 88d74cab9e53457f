"""Turns objects that contain tensors into two byte strings, and back."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; of every tensor


class Packed(NamedTuple):
    """An object without its tensors, and their bytes."""

    skeleton: bytes  # a pickle, with (offset, shape, dtype) in place of every tensor
    content: bytearray


def to_bytes(value: object) -> Packed:
    """Packs an object that contains CPU tensors into two byte strings."""
    file, tensors = io.BytesIO(), _Tensors()
    _Pickler(file, tensors).dump(value)
    return Packed(file.getvalue(), tensors.content)


def from_bytes(packed: Packed, pin: bool = False) -> Any:
    """Returns the object. Its tensors are views of one buffer, page-locked with ``pin``."""
    content = torch.frombuffer(packed.content or bytearray(1), dtype=torch.uint8)
    unpickler = pickle.Unpickler(io.BytesIO(packed.skeleton))
    buffer = content.pin_memory() if pin else content

    def tensor(place: tuple[int, tuple[int, ...], torch.dtype]) -> Tensor:
        offset, shape, dtype = place
        size = int(np.prod(shape)) * dtype.itemsize
        return buffer[offset : offset + size].view(dtype).view(shape)

    unpickler.persistent_load = tensor  # type: ignore[method-assign]
    return unpickler.load()


class _Tensors:
    """The bytes of tensors, one after another."""

    def __init__(self) -> None:
        self.content = bytearray()

    def add(self, tensor: Tensor) -> int:
        """Appends a tensor and returns its offset."""
        self.content += bytes(-len(self.content) % ALIGNMENT)
        offset = len(self.content)
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.content += values.view(-1).view(torch.uint8).numpy().tobytes()  # NumPy has no bfloat16
        return offset


class _Pickler(pickle.Pickler):
    """Stores tensors in ``tensors`` and pickles their places instead."""

    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return self.tensors.add(value), tuple(value.shape), value.dtype
