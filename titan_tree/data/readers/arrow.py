"""Parquet files, and folders of Arrow files that ``datasets.Dataset.save_to_disk`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_tree.data.readers import Place, Record, Source
from titan_tree.errors import UserError

BATCH_ROWS = 64  # rows that are converted to Python objects at once


def is_arrow(source: Source) -> bool:
    """Returns whether the source is a Parquet file or a folder."""
    return source.is_folder or source.head.startswith(b"PAR1")


def arrow_rows(source: Source, batch_rows: int = BATCH_ROWS) -> Iterator[tuple[Place, Record]]:
    """Yields the rows, each with its place, "path:row 0" and so on.

    Arrow stores the union of the fields of all rows, and fills those that a row lacks with null. Nulls inside
    of structs are therefore removed; nulls in lists of numbers stay.

    Raises:
        UserError: pyarrow is missing, the folder holds no data set, or a file is damaged or compressed.
    """
    pyarrow = _pyarrow()
    if not source.is_folder and source.compression:
        raise UserError(f"{source.path}: a Parquet file must not be compressed as a whole; decompress it")
    batches = _folder_batches(source) if source.is_folder else _parquet_batches(source, batch_rows)
    number = 0
    try:
        for batch in batches:
            names = batch.schema.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{source.path}: {twice}: the column appears twice; rename one")
            for start in range(0, batch.num_rows, batch_rows):
                for row in batch.slice(start, batch_rows).to_pylist():
                    yield f"{source.path}:row {number}", {name: _without_nulls(row[name]) for name in row}
                    number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{source.path}: damaged file after row {number} ({reason}); copy it again") from None


def _parquet_batches(source: Source, batch_rows: int) -> Iterator[Any]:
    import pyarrow.parquet

    with source.open() as file:
        yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=batch_rows)


def _folder_batches(source: Source) -> Iterator[Any]:
    """Yields the record batches of the files that the folder's state.json lists, in its order."""
    import pyarrow.ipc

    folder = Path(source.path)
    for name in _data_files(folder):
        with source.open_file(str(folder / name)) as file:
            yield from pyarrow.ipc.open_stream(file)


def _data_files(folder: Path) -> list[str]:
    if (splits := folder / "dataset_dict.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise UserError(f"{splits}: the data set has several splits ({names}); set data.files to one of them")
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(
            f"{folder}: expected a file, or a folder that datasets.save_to_disk wrote; "
            "name the files of a folder with a pattern such as folder/*.jsonl"
        )
    try:
        return [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f'{state}: expected {{"_data_files": [{{"filename": str}}]}}; save the data set again'
        ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [_without_nulls(item) for item in value]
    return value


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            "reading Parquet and Arrow files needs the package pyarrow; run pip install 'titan_tree[data]'"
        ) from None
    return pyarrow.lib
