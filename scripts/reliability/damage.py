"""Damages a checkpoint, then starts the command that wrote it again.

The command must name the damaged file and continue from the previous checkpoint with the same losses. It may
refuse in one line if no checkpoint is intact, or if the folder contains something else with the name of a
checkpoint. A crafted pickle must not be executed.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training import INTERVAL, STEPS, Run, check, reference
from training import prepare as prepare

TRIALS = 100
NEWEST = STEPS - INTERVAL  # the step of the newest checkpoint when the damage is done


@dataclass
class Damage:
    """What was done to a checkpoint folder.

    Attributes:
        names: paths inside the folder. The command must print one of them, unless there are none.
        may_refuse: whether the command may refuse instead of falling back to an older checkpoint.
        added: a file or folder that is not from the run and must not be deleted.
    """

    what: str
    names: list[str]
    may_refuse: bool = False
    added: Path | None = None


class Command:
    """An object that runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Damages a copy of the reference run that lacks its last checkpoint. Returns what was done."""
    run = Run(folder / "run")
    shutil.copytree(reference(work).folder, run.folder)
    shutil.rmtree(run.checkpoints / f"step-{STEPS}")
    damage = DAMAGES[kind](run, draw)
    with run.start() as processes:
        status, text = processes.wait()[0], processes.text()
    check(not (folder / "PWNED").exists(), f"{damage.what}: a crafted file ran a command")
    processes.check_no_traceback()
    check(damage.added is None or damage.added.exists(), f"{damage.what}: it has vanished")
    named = not damage.names or any(name in text for name in damage.names)
    if status == 2:
        line = processes.refusal()
        check(damage.may_refuse, f"{damage.what}: refused, although an older checkpoint is intact: {line}")
        check(named, f"{damage.what}: the refusal names none of {damage.names}: {line}")
        return f"{damage.what}; refused: {line}"
    check(status == 0, f"{damage.what}: exit status {status}: {text[-300:]!r}")
    check(named, f"{damage.what}: loaded without naming any of {damage.names}")
    run.check_equals(reference(work))
    return f"{damage.what}; fell back"


def _files(run: Run, step: int = NEWEST) -> list[Path]:
    """Returns the files of a checkpoint."""
    return sorted(path for path in (run.checkpoints / f"step-{step}").rglob("*") if path.is_file())


def _name(run: Run, path: Path) -> str:
    return str(path.relative_to(run.checkpoints))


def _flip(path: Path, draw: random.Random) -> int:
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def flip_bit(run: Run, draw: random.Random) -> Damage:
    """Flips one bit of one file."""
    path = draw.choice([path for path in _files(run) if path.stat().st_size])
    return Damage(f"bit {_flip(path, draw)} of {_name(run, path)} flipped", [_name(run, path)])


def truncate(run: Run, draw: random.Random) -> Damage:
    """Cuts off the end of a file, or all of it."""
    path = draw.choice([path for path in _files(run) if path.stat().st_size])
    size = draw.choice((0, draw.randrange(path.stat().st_size)))
    os.truncate(path, size)
    return Damage(f"{_name(run, path)} truncated to {size} bytes", [_name(run, path)])


def delete(run: Run, draw: random.Random) -> Damage:
    """Deletes a file."""
    path = draw.choice(_files(run))
    path.unlink()
    return Damage(f"{_name(run, path)} deleted", [f"step-{NEWEST}"])


def swap(run: Run, draw: random.Random) -> Damage:
    """Swaps two files of a checkpoint, or a file with that of an older checkpoint."""
    files = _files(run)
    path = draw.choice(files)
    others = [other for other in (*files, *_files(run, NEWEST - INTERVAL)) if other != path]
    differ = [other for other in others if other.read_bytes() != path.read_bytes()]
    other = draw.choice(differ)
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return Damage(
        f"{_name(run, path)} and {_name(run, other)} swapped", [_name(run, path), _name(run, other)]
    )


def craft_pickle(run: Run, draw: random.Random) -> Damage:
    """Puts a pickle that runs a command in place of a file, or where old checkpoints had a pickle."""
    path = draw.choice([run.checkpoints / f"step-{NEWEST}" / ".metadata", *_files(run)])
    existed = path.exists()
    path.write_bytes(pickle.dumps(Command(f"touch {run.folder.parent}/PWNED")))
    return Damage(f"{_name(run, path)} replaced by a crafted pickle", [_name(run, path)] if existed else [])


def damage_all(run: Run, draw: random.Random) -> Damage:
    """Flips a bit in every checkpoint."""
    paths = []
    for step in range(INTERVAL, STEPS, INTERVAL):
        paths.append(draw.choice([path for path in _files(run, step) if path.stat().st_size]))
        _flip(paths[-1], draw)
    return Damage("a bit flipped in every checkpoint", [_name(run, p) for p in paths], may_refuse=True)


def strange_name(run: Run, draw: random.Random) -> Damage:
    """Adds a file or a folder whose name looks like that of a checkpoint."""
    name = draw.choice(("step-99", "step-5", "step-090", "step-1e3", "step-", "step-99999999999999999999"))
    path = run.checkpoints / name
    if draw.random() < 0.5:
        path.mkdir()
    else:
        path.write_text("mine\n")
    kind = "folder" if path.is_dir() else "file"
    return Damage(f"a {kind} {name} added", [], may_refuse=True, added=path)


def damage_text(run: Run, draw: random.Random) -> Damage:
    """Damages a JSON file, or a number of metrics.csv."""
    files = [
        run.folder / "metrics.csv",
        *run.checkpoints.glob("*.json"),
        *run.checkpoints.glob("step-*/*.json"),
    ]
    path = draw.choice(sorted(files))
    text = path.read_text()
    if path.suffix == ".csv":
        path.write_text(text.replace("\n2,", draw.choice(("\nx,", "\n\x00,", "\n2.5,", f"\n{'9' * 5000},"))))
    else:
        path.write_text(draw.choice((text[: len(text) // 2], "[" * 100_000, "[]", "null", "")))
    if path.parent.parent == run.checkpoints and path.parent.name != f"step-{NEWEST}":
        return Damage(f"{_name(run, path)} damaged", [])  # an older checkpoint, which is not read
    # Only the newest checkpoint has an older one to fall back to.
    return Damage(f"{path.name} damaged", [path.name], may_refuse=path.parent.name != f"step-{NEWEST}")


DAMAGES: dict[str, Callable[[Run, random.Random], Damage]] = {
    "bit flip": flip_bit,
    "truncated or empty file": truncate,
    "deleted file": delete,
    "swapped files": swap,
    "crafted pickle": craft_pickle,
    "every checkpoint damaged": damage_all,
    "strange name": strange_name,
    "damaged text": damage_text,
}
KINDS = ("bit flip", "bit flip", *DAMAGES)
