"""Decompresses gzip and Zstandard files while they are read."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from titan_tree.errors import UserError

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
SKIPPABLE = b"\x2a\x4d\x18"  # behind 0x50 to 0x5F: a frame of Zstandard without data, with which pzstd begins
CHUNK_BYTES = 128 * 1024
ZSTD_BYTES = 4096  # of a Zstandard file at a time, because each byte can become 30,000 bytes
# A file that expands more than MAX_RATIO times is refused once it has become FREE_BYTES. Real data can reach
# a few hundred, where every record repeats a long history.
MAX_RATIO = 1000
FREE_BYTES = 1 << 28


class ZstdError(Exception):
    """A Zstandard file is truncated, or its content is damaged."""


DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, ZstdError)  # what reading a damaged file raises


def compression(first_bytes: bytes) -> str | None:
    """Returns "gzip" or "zstd" by the first bytes of a file, or None for any other file."""
    if first_bytes[1:] == SKIPPABLE and first_bytes[0] >> 4 == 5:
        return "zstd"
    return next((name for magic, name in MAGIC.items() if first_bytes.startswith(magic)), None)


def decompressed(raw: BinaryIO, kind: str | None) -> BinaryIO:
    """Returns a stream of the decompressed content. Closing it closes ``raw``.

    Raises:
        UserError: Zstandard without the package zstandard.
    """
    if kind is None:
        return raw
    stream: Any = gzip.GzipFile(fileobj=raw) if kind == "gzip" else _ZstdStream(raw)
    return io.BufferedReader(_Limited(stream, raw), CHUNK_BYTES)


class _Limited(io.RawIOBase):
    """Passes on a decompressed stream. Raises UserError if it expands too much."""

    def __init__(self, stream: io.RawIOBase, raw: BinaryIO) -> None:
        self._stream = stream
        # Of a gzip file, one block at a time, so that the data before a damaged block is read.
        self._readinto = getattr(stream, "readinto1", stream.readinto)
        self._raw = raw
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._readinto(buffer)
        self._bytes += count
        if self._bytes > FREE_BYTES and self._bytes > MAX_RATIO * self._raw.tell():
            name = getattr(self._raw, "name", "the file")
            raise UserError(
                f"{name}: expands more than {MAX_RATIO:,} times, as a decompression bomb does; if it is "
                "real data, decompress it first"
            )
        return count

    def close(self) -> None:
        super().close()
        self._stream.close()
        self._raw.close()


class _ZstdStream(io.RawIOBase):
    """Decompresses the frames of a Zstandard file. A truncated last frame is an error."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._new_frame, self._error = _zstandard()
        self._frame = self._new_frame()
        self._is_inside = False  # the current frame has begun
        self._pending = memoryview(b"")  # decompressed, not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._is_inside = self._new_frame(), False
            if not (chunk := chunk or self._raw.read(ZSTD_BYTES)):
                if self._is_inside:
                    raise ZstdError("the file ended before the end of its last frame")
                return 0
            try:
                self._pending, self._is_inside = memoryview(self._frame.decompress(chunk)), True
            except self._error as error:
                raise ZstdError(str(error)) from None
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count


def _zstandard() -> tuple[Callable[[], Any], type[Exception]]:
    """Returns a constructor of decompressors for one frame, and the error that they raise."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            "reading Zstandard files needs the package zstandard; run pip install 'titan_tree[data]'"
        ) from None
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
