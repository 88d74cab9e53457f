"""TokenStore: the token trees of a data set in one memory-mapped file, so that training need not tokenize.

    magic | group | group | ... | footer | trailer

A group is the token tree of its samples, as NumPy arrays behind a line of JSON that names them. The footer
holds the *header* and the groups' ids, a line of JSON each, and a table with a row per group. The header says
what the groups were made of: the source files, the tokenizer and the settings. Checksums (CRC-32) protect
each group and the footer.

Trees share prefixes, so a store is much smaller than its samples: tau-bench's 25.5 million tokens take 6 MB.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

MAGIC = b"TITANTOK"
VERSION = 1
TRAILER = struct.Struct("<QQI8s")  # footer's offset, size and checksum, magic
GROUP = np.dtype([(name, "<u8") for name in ("offset", "size", "crc", "n_tree", "n_flat", "n_paths")])
TREE_ARRAYS = (
    "tokens",
    "node_offsets",
    "node_parent",
    "node_depth",
    "node_subtree_end",
    "node_paths",
    "path_node",
)
PATH_FIELDS = tuple(field.name for field in dataclasses.fields(TokenPath) if field.name != "tokens")
STORED = "stored"  # the field of a record that holds a StoredGroup; no file can contain one
ALIGNMENT = 64  # bytes; of every array


class TokenStore:
    """A store opened for reading. It can be pickled: a copy in another process maps the file again.

    Args:
        file: its path.

    Attributes:
        header: what the store was made of, as ``write_store`` got it, and "version".
        ids: of the groups.
        checksum: of the whole content.
        table: [groups] of dtype ``GROUP``: the place and the sizes of each group.

    Raises:
        UserError: the file is not a complete store of this version.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = str(file)
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        offset, size, crc, magic = TRAILER.unpack(self._map[-TRAILER.size :].rjust(TRAILER.size, b"\0"))
        footer = self._map[offset : offset + size] if magic == MAGIC else b""
        self.checksum = crc  # of the footer, which holds the checksums of the groups
        if magic != MAGIC or zlib.crc32(footer) != crc:
            raise UserError(f"{file}: this token store is incomplete or damaged; copy or ingest it again")
        header, ids, table = footer.split(b"\n", 2)
        self.header: dict[str, Any] = json.loads(header)
        if self.header["version"] != VERSION:
            raise UserError(
                f"{file}: expected a token store of version {VERSION}, got version {self.header['version']}; "
                "ingest its sources again"
            )
        self.ids: list[str] = json.loads(ids)
        self.table = np.frombuffer(table, GROUP)

    def __reduce__(self) -> tuple[type[TokenStore], tuple[str]]:
        return TokenStore, (self.file,)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[StoredGroup]:
        """Iterates over the groups in the order of the sources."""
        return (StoredGroup(self, index) for index in range(len(self)))

    def read(self, index: int) -> tuple[dict[str, Any], memoryview]:
        """Returns the JSON of a group, and the bytes of its arrays.

        Raises:
            UserError: the checksum does not match.
        """
        row = self.table[index]
        content = memoryview(self._map)[int(row["offset"]) : int(row["offset"] + row["size"])]
        if zlib.crc32(content) != row["crc"]:
            raise UserError(f"{self.file}: group {index + 1} is damaged; copy or ingest the store again")
        (length,) = struct.unpack_from("<Q", content)
        return json.loads(bytes(content[8 : 8 + length])), content[_aligned(8 + length) :]


@dataclass(frozen=True)
class StoredGroup:
    """A group of a store. ``tree`` reads it."""

    store: TokenStore
    index: int

    @property
    def num_paths(self) -> int:
        return int(self.store.table["n_paths"][self.index])

    def tree(self) -> TokenTree:
        """Returns the tree of the group's samples. It equals ``TokenTree.from_paths`` of them."""
        description, content = self.store.read(self.index)
        arrays = {name: _array(content, place) for name, place in description["arrays"].items()}
        tree: dict[str, Any] = {name: arrays.pop(name) for name in TREE_ARRAYS}
        path_index, path_offsets = _path_index(tree)
        flat = tree["tokens"][path_index]
        fields = {"tokens": np.split(flat, path_offsets[1:-1])}
        for name in PATH_FIELDS:
            fields[name] = _decode(name, description["fields"][name], arrays, path_offsets)
        paths = [_trusted_path(values) for values in zip(*fields.values(), strict=True)]
        return TokenTree(**tree, paths=tuple(paths), path_index=path_index, path_offsets=path_offsets)


def is_store(file: Path) -> bool:
    """Returns whether a file begins as a token store does."""
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def write_store(
    file: str | Path, groups: Iterable[tuple[str, Sequence[TokenPath]]], header: Mapping[str, Any]
) -> np.ndarray:
    """Writes a store. The file appears under its name only when it is complete.

    Args:
        file: the store to write; it must not exist.
        groups: (id, samples) of each group.
        header: what the groups were made of, as JSON values.

    Returns:
        The table of the store, see ``TokenStore``.

    Raises:
        UserError: the file exists or cannot be written.
    """
    path, partial = Path(file), Path(f"{file}.{os.getpid()}.tmp")
    ids, rows = [], []
    try:
        _refuse_existing(path)
        with open(partial, "wb") as out:
            out.write(MAGIC)
            for id, paths in groups:
                tree = TokenTree.from_paths(paths)
                _align(out)
                content = _encode_group(tree)
                ids.append(id)
                stats = tree.stats
                sizes = stats.n_tree, stats.n_flat, stats.n_paths
                rows.append((out.tell(), len(content), zlib.crc32(content), *sizes))
                out.write(content)
            _align(out)
            table = np.array(rows, GROUP)
            lines = json.dumps({**header, "version": VERSION}), json.dumps(ids), ""
            footer = "\n".join(lines).encode() + table.tobytes()
            trailer = TRAILER.pack(out.tell(), len(footer), zlib.crc32(footer), MAGIC)
            out.write(footer + trailer)
            out.flush()
            os.fsync(out.fileno())
        _refuse_existing(path)  # another process may have written it meanwhile
        partial.rename(path)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it has its final name already, or was never made
            partial.unlink()
    return table


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path}: expected a new file, but it exists; remove it or choose another name")


def _encode_group(tree: TokenTree) -> bytes:
    """Returns a group's JSON and arrays: the tree, and the fields of its paths."""
    sizes = {path.routed_experts.shape[1:]: path for path in tree.paths if path.routed_experts is not None}
    if len(sizes) > 1:
        raise UserError(
            f"path {list(sizes.values())[1].id or '?'}: routed_experts: expected as many layers, and experts "
            f"per token, as in the other paths of its group, got {' and '.join(map(str, sizes))}"
        )
    arrays = {name: getattr(tree, name) for name in TREE_ARRAYS}
    fields = {
        name: _encode(name, [getattr(path, name) for path in tree.paths], arrays) for name in PATH_FIELDS
    }
    places, offset = {}, 0
    for name, array in arrays.items():
        places[name] = [array.dtype.str, array.shape, offset]
        offset = _aligned(offset + array.nbytes)
    line = json.dumps({"fields": fields, "arrays": places}).encode()
    out = bytearray(struct.pack("<Q", len(line)) + line)
    for array in arrays.values():
        out += bytes(-len(out) % ALIGNMENT)
        out += np.ascontiguousarray(array).tobytes()
    return bytes(out)


# How the values of a field are stored, one value per path: "none" (all None), "values" (strings or numbers,
# in JSON), "dense" (arrays, one after another) or "runs" (arrays with one number per token that repeats).


def _encode(name: str, values: list[Any], arrays: dict[str, np.ndarray]) -> Any:
    """Adds the arrays that a field needs, and returns its description for ``_decode``."""
    given = [value for value in values if value is not None]
    if not given:
        return {"kind": "none"}
    if not isinstance(given[0], np.ndarray):
        return {"kind": "values", "values": values}
    missing = [index for index, value in enumerate(values) if value is None]
    lengths = np.array([len(value) for value in given])
    flat = np.concatenate(given)
    runs = _run_starts(flat, lengths) if flat.ndim == 1 else None
    if runs is None or 2 * len(runs) > len(flat):
        arrays[f"{name}.dense"] = flat
        return {"kind": "dense", "missing": missing}
    arrays[f"{name}.runs"] = flat[runs]
    arrays[f"{name}.lengths"] = np.diff(runs, append=len(flat)).astype(np.int32)
    return {"kind": "runs", "missing": missing}


def _decode(
    name: str, description: dict[str, Any], arrays: dict[str, np.ndarray], path_offsets: np.ndarray
) -> list[Any]:
    """Returns the values of a field, one per path."""
    num_paths = len(path_offsets) - 1
    if description["kind"] == "none":
        return [None] * num_paths
    if description["kind"] == "values":
        return description["values"]
    if description["kind"] == "dense":
        flat = arrays[f"{name}.dense"]
    else:
        flat = np.repeat(arrays[f"{name}.runs"], arrays[f"{name}.lengths"])
    if not (missing := set(description["missing"])):
        return np.split(flat, path_offsets[1:-1])
    lengths = np.diff(path_offsets)
    given = [index for index in range(num_paths) if index not in missing]
    values: list[Any] = [None] * num_paths
    for index, value in zip(given, np.split(flat, np.cumsum(lengths[given])[:-1]), strict=True):
        values[index] = value
    return values


def _run_starts(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns where runs of equal values start. Equal values have equal bits. No run spans two paths."""
    bits = flat.view(f"u{flat.itemsize}")
    starts = np.flatnonzero(np.diff(bits, prepend=bits[:1] + 1))
    return np.union1d(starts, np.cumsum(lengths)[:-1])


def _path_index(tree: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``path_index`` and ``path_offsets`` of a TokenTree from its nodes."""
    offsets, parents = tree["node_offsets"].tolist(), tree["node_parent"].tolist()
    of_node: list[np.ndarray] = []  # the tokens from the root to the end of each node
    for node, parent in enumerate(parents):
        own = np.arange(offsets[node], offsets[node + 1], dtype=np.int32)
        of_node.append(own if parent < 0 else np.concatenate([of_node[parent], own]))
    indices = [of_node[node] for node in tree["path_node"].tolist()]
    path_offsets = np.concatenate([[0], np.cumsum([len(index) for index in indices])])
    return np.concatenate(indices), path_offsets


def _trusted_path(values: tuple[Any, ...]) -> TokenPath:
    """Returns a path of values that a TokenPath had before: they need no checks."""
    path = object.__new__(TokenPath)
    for name, value in zip(("tokens", *PATH_FIELDS), values, strict=True):
        setattr(path, name, value)
    return path


def _array(content: memoryview, place: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, offset = place
    count = int(np.prod(shape))
    return np.frombuffer(content, dtype, count, offset).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _align(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % ALIGNMENT))
