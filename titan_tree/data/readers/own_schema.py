"""The reader of titan_tree's own records, ``data.format = "jsonl"``: each row is a record already."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Reader, Record, Source


class OwnSchemaReader(Reader):
    """Reads records of titan_tree's own schema (data/schema.py) as they are: ``data.format = "jsonl"``.

    It is the format of a file that no other reader recognizes. A file with ``messages`` in its first rows is
    read by ``OpenAIChatReader``, which accepts the fields of this schema, too.
    """

    def recognizes(self, source: Source) -> bool:
        """Returns True: this is the default format, and the errors of its records say what is wrong."""
        return True

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        yield from source.rows()
