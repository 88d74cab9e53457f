"""Token stores, which `titan-tree ingest` writes (data/token_store.py): one record per group."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.token_store import MAGIC, STORED, TokenStore


class TokenStoreReader(Reader):
    """Yields the groups of a store. A record has the group's id, and a StoredGroup, which reads the tree."""

    def recognizes(self, source: Source) -> bool:
        return source.head.startswith(MAGIC)

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        store = TokenStore(source.path)
        for number, (id, group) in enumerate(zip(store.ids, store, strict=True), start=1):
            yield f"{source.path}: group {number}", {"id": id, STORED: group}
