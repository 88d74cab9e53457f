"""titan_tree's own schema (data/schema.py), one record per row."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.readers.rows import rows


class OwnSchemaReader(Reader):
    """Reads records as they are. ``data.format = "jsonl"`` selects it, also for arrays and Parquet files."""

    def recognizes(self, source: Source) -> bool:
        """Returns True: this is the default format, and the errors of its records say what is wrong."""
        return True

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        yield from rows(source)
