"""The files of a Hugging Face snapshot, opened and checked."""

from __future__ import annotations

import functools
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from titan_tree.config.files import regular
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import SNAPSHOT, UserError, missing_snapshot, shorten

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# titan_tree's own file, for what the published formats have no place for. It is not a safetensors file,
# because inference engines read all of those.
ROUTER_BIASES = "router_biases.json"
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a fingerprint, per file
MAX_JSON_BYTES = 1 << 27  # an index of a million tensors is smaller


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a snapshot. Raises UserError if the file is missing or damaged."""
    if not os.path.isdir(path.parent):
        raise UserError(f"{path.parent}: {missing_snapshot(path.parent, _kind(path))}")
    try:
        with open(path, "rb", opener=regular) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                raise UserError(f"{path}: expected at most {MAX_JSON_BYTES:,} bytes of JSON, got {size:,}")
            content = parse_json(file.read(), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_expected(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def _kind(path: Path) -> str:
    return "an adapter of PEFT" if path.name == ADAPTER_CONFIG else SNAPSHOT


def _expected(path: Path) -> str:
    """Returns what to name in place of a folder without this file."""
    if path.name == CONFIG and path.with_name(ADAPTER_CONFIG).is_file():
        return "this is an adapter: set lora.adapter to it, and model.hf_path to its base model"
    found = sorted(path.parent.glob(f"*/{path.name}"))
    hint = f"; did you mean {found[0].parent}?" if found else ""
    return f"expected {_kind(path)}{hint}"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning about a snapshot or an adapter once, although its files are read several times."""
    logger.warning(message)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a snapshot. Raises UserError if one of them is missing."""
    if (folder / WEIGHTS).is_file():
        if (folder / INDEX).is_file():
            named = read_json(folder / INDEX).get("weight_map")
            if not isinstance(named, dict) or set(map(str, named.values())) != {WEIGHTS}:
                raise UserError(
                    f"{folder}: expected {WEIGHTS}, or {INDEX} with its files; remove one of them"
                )
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
        what_exists = f"only {pickles[0]}, a pickle, which can run code; convert it" if pickles else "neither"
        raise UserError(f"{folder}: expected {WEIGHTS} or {INDEX}, found {what_exists}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX}: expected a table weight_map from tensor to file")
    for tensor, name in weight_map.items():
        # Hugging Face's cache has links in the folder, so a file may lie elsewhere, but no name may say so.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX}: {tensor:.60}: expected the name of a safetensors file in this folder, "
                f"got {shorten(name)}"
            )
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{file}: named in {INDEX}, but missing; complete the download")
    return files


def fingerprint(folder: Path) -> str:
    """Returns a checksum of a snapshot's weight files, see ``fingerprint_files``."""
    return fingerprint_files(weight_files(folder))


def fingerprint_files(files: Iterable[Path]) -> str:
    """Returns a checksum of the sizes of weight files, and of samples of their bytes.

    It reads at most 64 KiB of each file. Two snapshots of the same architecture differ in almost all bytes.
    """
    checksum = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(size * i // SAMPLES)
                checksum = zlib.crc32(opened.read(SAMPLE_BYTES), checksum)
        checksum = zlib.crc32(str(size).encode(), checksum)
    return f"{checksum:08x}"


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises UserError if it is damaged."""
    try:
        with open(file, "rb", opener=regular), safe_open(file, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error}); download it again") from None
