"""One checkpoint on disk: how its files are written, verified and read.

    step-100/
      __0_0.distcp ...    tensors, as torch.distributed.checkpoint (DCP) writes them: one file per rank
      tensors.json        where each tensor lies in these files
      checkpoint.json     the rest of the state, the configuration, and checksums of all files

A checkpoint is written into a folder with a temporary name, which is renamed at the end. A folder called
step-100 was therefore complete, and the checksums show whether it still is. DCP's own index is a pickle,
which can run code when it is read, so it is neither written nor read. Tensors are read with
``weights_only=True``.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_tree.config.files import regular
from titan_tree.distributed.launch import ranks_of_machine
from titan_tree.errors import UserError

logger = logging.getLogger(__name__)

MANIFEST, TENSORS = "checkpoint.json", "tensors.json"
CHECKPOINT = re.compile(r"step-(0|[1-9]\d{0,11})")  # the name of a checkpoint's folder
BLOCK = 1 << 26  # bytes per checksum
# What opening a file of a damaged checkpoint raises. ENXIO: it is no regular file.
DAMAGE = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG)


class DamagedCheckpointError(Exception):
    """A checkpoint cannot be used. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileSum:
    """The size of a file, and the CRC-32 of each of its blocks of ``BLOCK`` bytes."""

    num_bytes: int
    crc32: tuple[int, ...]

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Reads a file. Threads compute the blocks, because zlib releases the interpreter lock."""
        if (size := path.stat().st_size) == 0 and path.is_file():
            return cls(0, ())
        with (
            open(path, "rb", opener=regular) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
            ThreadPoolExecutor(_num_threads()) as threads,
        ):

            def crc(start: int) -> int:
                with content[start : start + BLOCK] as block:
                    return zlib.crc32(block)

            return cls(size, tuple(threads.map(crc, range(0, size, BLOCK))))


def _num_threads() -> int:
    """Returns this rank's part of the cores."""
    return max(1, (os.cpu_count() or 1) // ranks_of_machine())


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint into ``folder``, and renames this folder to ``final`` once all ranks have written.

    Args:
        content: what checkpoint.json holds besides the checksums, as JSON values.
    """

    def __init__(self, folder: Path, final: Path, content: Mapping[str, object]) -> None:
        super().__init__(folder)
        self.folder, self.final, self.content = folder, final, content

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's tensors, and adds a result with the checksum of each file."""
        results = super().write_data(plan, planner).wait()
        for name in sorted({result.storage_data.relative_path for result in results}):
            checksum = FileSum.of(self.folder / name)
            results.append(WriteResult(MetadataIndex(name), checksum.num_bytes, checksum))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint, on rank 0, after all ranks have written."""
        sums, places = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, FileSum):
                sums[result.index.fqn] = result.storage_data
            else:
                places[result.index] = result.storage_data
        write_synced(self.folder / TENSORS, json.dumps(_describe_tensors(metadata, places)))
        sums[TENSORS] = FileSum.of(self.folder / TENSORS)
        files = {name: [checksum.num_bytes, *checksum.crc32] for name, checksum in sums.items()}
        write_manifest(self.folder, {**self.content, "files": files})
        os.rename(self.folder, self.final)
        sync_folder(self.final.parent)


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint, only from ``files``, which must have been verified."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self.metadata = _read_tensors(folder, files)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


def clean(folder: Path, run: str) -> list[int]:
    """Returns the steps of the checkpoints in a folder, ascending, and deletes partial ones of this run.

    Raises:
        UserError: only damaged checkpoints are left, or something else has the name of a checkpoint, which
            the run may need later.
    """
    steps = []
    for path in sorted(folder.iterdir()):
        if re.fullmatch(rf"step-\d+\.{run}\.partial", path.name):
            shutil.rmtree(path)
            logger.info("removed %s: its run was interrupted", path)
        elif match := CHECKPOINT.fullmatch(path.name):
            if not any((path / name).is_file() for name in (MANIFEST, TENSORS)):
                raise UserError(
                    f"{path}: expected a checkpoint of this version of titan_tree, which contains "
                    f"{MANIFEST}; move it to another place, or choose another folder"
                )
            steps.append(int(match[1]))
    if not steps and any(folder.glob("step-*.damaged*")):
        raise none_intact(folder)  # the run must not silently start over
    return sorted(steps)


def none_intact(folder: Path) -> UserError:
    """Returns the error for a folder in which only damaged checkpoints are left."""
    return UserError(
        f"{folder}: none of its checkpoints is intact; restore one, or start again in another folder"
    )


def own_steps(folder: Path, run: str) -> list[int]:
    """Returns the steps of the checkpoints that a run has written, ascending."""
    steps = []
    for path in folder.glob("step-*"):
        if match := CHECKPOINT.fullmatch(path.name):
            try:
                if read_manifest(path).get("run") == run:
                    steps.append(int(match[1]))
            except DamagedCheckpointError:
                continue  # it may belong to another run
    return sorted(steps)


def write_manifest(folder: Path, content: Mapping[str, object]) -> None:
    """Writes checkpoint.json with a checksum of itself."""
    text = json.dumps(content, indent=1)
    write_synced(folder / MANIFEST, json.dumps({"crc32": zlib.crc32(text.encode())}) + "\n" + text + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of checkpoint.json.

    Raises:
        DamagedCheckpointError: it is missing, or not as it was written.
    """
    path = folder / MANIFEST
    try:
        with open(path, "rb", opener=regular) as file:
            first, _, text = file.read().partition(b"\n")
        checksum = json.loads(first)["crc32"]
        if zlib.crc32(text.removesuffix(b"\n")) != checksum:
            raise DamagedCheckpointError(f"{path}: its checksum is wrong")
        content = dict(json.loads(text))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpointError(f"{path}: is not what titan_tree writes") from None
    return content


def read_verified(folder: Path, step: int, part: int, parts: int) -> dict[str, Any]:
    """Returns the content of checkpoint.json after ``verify``.

    Raises:
        DamagedCheckpointError: the checkpoint is not as it was written, or of another step.
    """
    content = read_manifest(folder)
    try:
        if content["step"] != step:
            raise DamagedCheckpointError(f"{folder / MANIFEST}: is of step {content['step']}")
        verify(folder, content["files"], part, parts)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpointError(f"{folder / MANIFEST}: is not what titan_tree writes") from None
    return content


def verify(folder: Path, files: Mapping[str, list[int]], part: int = 0, parts: int = 1) -> None:
    """Compares every ``parts``-th file with its checksum, beginning with number ``part``.

    Raises:
        DamagedCheckpointError: a file is missing or differs.
    """
    for name, (num_bytes, *crc32) in list(files.items())[part::parts]:
        path = folder / name
        if path.parent != folder:
            raise DamagedCheckpointError(f"{folder / MANIFEST}: names a file outside of its folder: {name}")
        try:
            file_sum = FileSum.of(path)
        except OSError as error:
            raise unreadable(path, error) from None
        if file_sum.num_bytes != num_bytes:
            raise DamagedCheckpointError(f"{path}: {file_sum.num_bytes:,} bytes instead of {num_bytes:,}")
        if file_sum.crc32 != tuple(crc32):
            raise DamagedCheckpointError(f"{path}: its checksum is wrong")


def unreadable(path: Path, error: OSError) -> DamagedCheckpointError | UserError:
    """Returns the error for a file that cannot be read: it is damaged, or the file system refuses for now."""
    if error.errno in DAMAGE:
        return DamagedCheckpointError(f"{path}: {error.strerror}")
    return UserError(f"{path}: cannot be read: {error.strerror}; make it readable, then run the same command")


def write_synced(path: Path, text: str) -> None:
    """Writes a text file and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names of a folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe_tensors(
    metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> dict[str, list[Sequence[object]]]:
    """Returns {name: [dtype, shape, [[offsets, shape, file, first byte, number of bytes] of each chunk]]}."""
    described = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name  # all other state is in checkpoint.json
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            chunks.append([chunk.offsets, chunk.sizes, place.relative_path, place.offset, place.length])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        described[name] = [dtype, tensor.size, chunks]
    return described


def _read_tensors(folder: Path, files: Collection[str]) -> Metadata:
    """The inverse of ``_describe_tensors``. All tensors must lie in ``files``."""
    tensors: dict[str, STORAGE_TYPES] = {}
    places = {}
    if TENSORS not in files:
        raise DamagedCheckpointError(f"{folder / MANIFEST}: has no checksum of {TENSORS}")
    for name, (dtype, size, chunks) in json.loads((folder / TENSORS).read_text()).items():
        tensors[name] = TensorStorageMetadata(
            TensorProperties(getattr(torch, dtype)),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape, *_ in chunks],
        )
        for offsets, _, file, start, length in chunks:
            if file not in files:
                raise DamagedCheckpointError(f"{folder / TENSORS}: names a file without a checksum: {file}")
            places[MetadataIndex(name, offsets)] = _StorageInfo(file, start, length)
    return Metadata(tensors, storage_data=places)
