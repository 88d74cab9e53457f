"""What the ranks of a run must agree on before they exchange weights: code, packages, settings and files."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from titan_tree.config.plugins import imported_plugins
from titan_tree.data.readers import DEMO, find_files
from titan_tree.distributed.agreement import check_agreement
from titan_tree.distributed.collectives import call_on_all_ranks, world_size
from titan_tree.errors import UserError
from titan_tree.models.hf.snapshot_files import fingerprint_files
from titan_tree.run.checkpoint.changes import flat, matches
from titan_tree.run.config import Config

# These keys hold paths, which may differ between machines. Their files must be equal.
PATHS = (
    *("data.files", "validation.files", "data.tokenizer", "data.template"),
    *("model.hf_path", "lora.adapter"),
)
# These keys may differ: only one rank, or each for itself, uses them.
LOCAL = (
    *("folder", "data.workers", "checkpoint.folder", "checkpoint.keep", "metrics.loggers"),
    "profiler.",
)
PACKAGES = ("torch", "transformers", "tokenizers", "jinja2")
WHOLE_BYTES = 256e6  # files of a key that are compared as a whole; larger ones are compared by samples


def check_ranks(config: Config) -> None:
    """Compares what this rank runs and reads with the other ranks. Collective.

    Raises:
        UserError: ranks differ, or a file is missing. All ranks raise it.
    """
    if world_size() > 1:
        check_agreement(call_on_all_ranks(lambda: dict(_facts(config))), "start")


def _facts(config: Config) -> Iterator[tuple[str, str]]:
    package = Path(__file__).parents[1]
    yield "the code of titan_tree", _content([package])
    for plugin in imported_plugins():
        if file := getattr(sys.modules.get(plugin), "__file__", None):
            path = Path(file)
            files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
            yield f"the code of {plugin}", _content(files)
    for name in PACKAGES:
        yield f"the version of {name}", _version(name)
    for key, value in flat(asdict(config)):
        if key not in PATHS:
            if not matches(key, LOCAL):
                yield key, str(value)
            continue
        names = value if isinstance(value, list) else [] if value is None else [str(value)]
        paths = find_files(names) if key.endswith(".files") and names else names
        for number, path in enumerate(paths):
            where = f"{key}[{number}]" if isinstance(value, list) else key
            is_path = path != DEMO and Path(path).exists()  # otherwise, it is a name such as "chatml"
            yield where, _content([Path(path)]) if is_path else str(path)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _content(paths: Sequence[Path]) -> str:
    """Returns the size and a checksum of files, and of all files of folders except hidden ones."""
    try:
        files = [file for path in paths for file in _files(path)]
        size = sum(file.stat().st_size for file in files)
        checksum = fingerprint_files(files) if size > WHOLE_BYTES else _whole(files)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return f"{size:,} bytes, checksum {checksum}"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = ((file, file.relative_to(path).parts) for file in sorted(path.rglob("*")) if file.is_file())
    return [
        file for file, parts in inside if not any(part.startswith((".", "__pycache__")) for part in parts)
    ]


def _whole(files: Iterable[Path]) -> str:
    checksum = 0
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
