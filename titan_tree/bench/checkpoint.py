"""What do the checksums of a checkpoint cost?

titan-tree bench checkpoint --gigabytes 7 --folder /disk/of/real/runs

It writes random fp32 tensors as a run writes its checkpoints. The disk decides how long a save takes, so the
folder should be on the disk of real runs.

| column    | meaning                                                                                  |
|-----------|------------------------------------------------------------------------------------------|
| save s    | a whole save: copying to the host, writing, waiting for the disk, checksums, renaming    |
| crc s     | the checksums in it                                                                      |
| share     | crc s / save s                                                                           |
| verify s  | verifying the checkpoint, as a resume does before it reads                               |
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from titan_tree.bench.record import Row, add_rounds
from titan_tree.bench.steps import process_group
from titan_tree.run.checkpoint.storage import CheckpointWriter, FileSum, read_manifest, verify

KEYS = ("GB",)
RATIOS = ()
QUICK = ("--gigabytes", "0.001", "--rounds", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    add("--folder", type=Path, default=Path("outputs/bench/checkpoint"), help="it is deleted afterwards")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns one row."""
    with process_group() as (_, device):
        row = measure(args, device)
    shutil.rmtree(args.folder)
    return [row]


def measure(args: argparse.Namespace, device: torch.device) -> Row:
    """Returns the row. Writes checkpoints into ``args.folder``."""
    numbers = int(args.gigabytes * 1e9 / 4 / 16)
    tensors = {f"tensor {i}": torch.randn(numbers, device=device) for i in range(16)}
    shutil.rmtree(args.folder, ignore_errors=True)
    saves, checksums, verifications = [], [], []
    for number in range(args.rounds):
        unfinished, final = args.folder / "partial", args.folder / f"step-{number}"
        unfinished.mkdir(parents=True)
        spent: list[float] = []
        with patch.object(FileSum, "of", partial(_timed, FileSum.of, spent)):
            writer = CheckpointWriter(unfinished, final, {})
            saves.append(_seconds(partial(dcp.save, tensors, storage_writer=writer)))
        checksums.append(sum(spent))
        files = read_manifest(final)["files"]
        verifications.append(_seconds(partial(verify, final, files)))
    return {
        "GB": args.gigabytes,
        "save s": f"{median(saves):.2f}",
        "crc s": f"{median(checksums):.3f}",
        "share": f"{median(checksums) / median(saves):.1%}",
        "verify s": f"{median(verifications):.2f}",
    }


def _timed(function: Callable[[Path], FileSum], spent: list[float], path: Path) -> FileSum:
    """Calls ``function`` and appends its seconds to ``spent``."""
    started = time.perf_counter()
    result = function(path)
    spent.append(time.perf_counter() - started)
    return result


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
