"""Token stores, which `titan-tree ingest` writes (data/token_store.py): one record per group."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.token_store import MAGIC, STORED, StoredGroup, TokenStore


class TokenStoreReader(Reader):
    """Yields the groups of a store. A record has the group's id, and a StoredGroup, which reads the tree."""

    def recognizes(self, source: Source) -> bool:
        return source.head.startswith(MAGIC)

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        store = TokenStore(source.path)
        for index, id in enumerate(store.ids):
            yield f"{source.path}: group {index + 1}", {"id": id, STORED: StoredGroup(store, index)}
