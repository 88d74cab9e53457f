"""TokenStore: the token trees of a data set in one memory-mapped file, so that training need not tokenize.

    magic | group | group | ... | footer | trailer

A group is the token tree of its samples (tree_bytes.py). The footer holds the *header* and the groups' ids, a
line of JSON each, and a table with a row per group. The header says what the groups were made of: the source
files, the tokenizer and the settings. Checksums (CRC-32) protect each group and the footer.

Trees share prefixes, so a store is much smaller than its samples: tau-bench's 25.5 million tokens take 6 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config.files import new_output, regular
from titan_tree.data.readers import Reader, Record, Source
from titan_tree.data.tree_bytes import padding, tree_from_bytes, tree_to_bytes
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, TreeStats

if TYPE_CHECKING:
    from titan_tree.data.settings import DataConfig

MAGIC = b"TITANTOK"
VERSION = 1
TRAILER = struct.Struct("<QQI8s")  # footer's offset, size and checksum, magic
GROUP = np.dtype([(name, "<u8") for name in ("offset", "size", "crc", "n_tree", "n_flat", "n_paths")])
STORED = "stored"  # the field of a record that holds a StoredGroup; no file can contain one


class TokenStore:
    """A store opened for reading. It can be pickled: a copy in another process maps the file again.

    Args:
        file: path of the store.

    Attributes:
        header: what the store was made of, as ``write_store`` got it, and "version".
        ids: the ids of the groups, in their order.
        checksum: CRC-32 of the footer, which holds the checksums of all groups.
        table: [groups] of dtype ``GROUP``: the offset and the sizes of each group.

    Raises:
        UserError: the file is not a complete store of this version.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = str(file)
        with open(file, "rb", opener=regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        offset, size, crc, magic = TRAILER.unpack(self._map[-TRAILER.size :].rjust(TRAILER.size, b"\0"))
        footer = self._map[offset : offset + size] if magic == MAGIC else b""
        self.checksum = crc
        ends_here = offset + size + TRAILER.size == len(self._map)
        if magic != MAGIC or not ends_here or zlib.crc32(footer) != crc:
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

    def read(self, index: int) -> memoryview:
        """Returns the bytes of a group, see ``tree_to_bytes``.

        Raises:
            UserError: the checksum does not match.
        """
        row = self.table[index]
        content = memoryview(self._map)[int(row["offset"]) : int(row["offset"] + row["size"])]
        if zlib.crc32(content) != row["crc"]:
            raise UserError(f"{self.file}: group {index + 1} is damaged; copy or ingest the store again")
        return content

    def check_made_for(self, config: DataConfig, tokenizer: TreeTokenizer | None) -> None:
        """Raises UserError if the configuration asks for other samples than the store holds."""
        header = self.header
        defaults = TreeTokenizer.samples.__kwdefaults__ or {}
        if config.sample and defaults | config.sample != defaults | header["sample"]:
            raise UserError(
                f"{self.file}: made with data.sample = {header['sample']}, but it is now {config.sample}; "
                "remove data.sample, or ingest the sources again"
            )
        estimator = config.advantage, dict(config.advantage_options)
        stored = header["advantage"], header.get("advantage_options", {})
        if config.advantage != "given" and estimator != stored:
            raise UserError(
                f"{self.file}: made without the advantages of data.advantage = {config.advantage!r} and its "
                f"options; ingest the sources again with data.advantage={config.advantage}, or set 'given' "
                "to use those that the store holds"
            )
        if tokenizer is not None and header["tokenizer"] not in (None, tokenizer.fingerprint()):
            raise UserError(
                f"{self.file}: made with another tokenizer or chat template ({header['tokenizer_name']}) "
                "than that of this run; ingest the sources again with this one"
            )


@dataclass(frozen=True)
class StoredGroup:
    """A group of a store. ``tree`` reads it."""

    store: TokenStore
    index: int

    @property
    def num_paths(self) -> int:
        return int(self.store.table["n_paths"][self.index])

    @property
    def checksum(self) -> int:
        return int(self.store.table["crc"][self.index])

    def tree(self) -> TokenTree:
        """Returns the tree of the group's samples. It equals ``TokenTree.from_paths`` of them."""
        return tree_from_bytes(self.store.read(self.index))


class TokenStoreReader(Reader):
    """Yields the groups of a store. A record has the group's id, and a StoredGroup, which reads the tree."""

    def recognizes(self, source: Source) -> bool:
        return source.head.startswith(MAGIC)

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        store = TokenStore(source.path)
        for number, (id, group) in enumerate(zip(store.ids, store, strict=True), start=1):
            yield f"{source.path}: group {number}", {"id": id, STORED: group}


def is_store(file: Path) -> bool:
    """Returns whether a file begins as a token store does."""
    with open(file, "rb", opener=regular) as opened:
        return opened.read(len(MAGIC)) == MAGIC


def write_store(
    file: str | Path,
    groups: Iterable[tuple[str, Sequence[TokenPath]]],
    header: Mapping[str, object],
    inputs: Iterable[str] = (),
    force: bool = False,
) -> list[TreeStats]:
    """Writes a store. The file appears under its name only when it is complete.

    Args:
        file: the store to write.
        groups: (id, samples) of each group.
        header: what the groups were made of, as JSON values.
        inputs, force: see ``check_output``.

    Returns:
        The sizes of the tree of each group.

    Raises:
        UserError: the file exists or cannot be written.
    """
    ids, rows, all_stats = [], [], []
    with new_output(file, None, inputs, force) as partial, open(partial, "wb") as out:
        out.write(MAGIC)
        for id, paths in groups:
            tree = TokenTree.from_paths(paths)
            _align(out)
            content = tree_to_bytes(tree)
            ids.append(id)
            all_stats.append(stats := tree.stats)
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
    return all_stats


def _align(out: BinaryIO) -> None:
    out.write(padding(out.tell()))
