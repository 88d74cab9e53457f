"""An opener for files that users and their data name, and a writer of the files that a command makes.

A name may lead to a FIFO, which blocks a program until somebody writes into it, or to a device, which may
never end. The same holds for a file that a run expects in its own folder. What a command writes may have the
name of a file that somebody still needs.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from titan_tree.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO; write its content to a file",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular(path: str, flags: int) -> int:
    """Opens a regular file, or the null device, which is empty. It never waits.

    >>> with open(os.devnull, "rb", opener=regular) as file:
    ...     file.read()
    b''

    Raises:
        OSError: as ``open``; or the errno ENXIO, if the file is something else, such as a FIFO.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in KINDS and path != os.devnull:  # ``open`` itself refuses folders
        os.close(descriptor)
        raise OSError(errno.ENXIO, f"expected a regular file, got {KINDS[kind]}", path)
    return descriptor


def check_output(
    path: str | Path, marker: str, inputs: Iterable[str | Path] = (), force: bool = False
) -> None:
    """Refuses to write a file that a command must not write. Symbolic links are followed.

    Args:
        path: the file to write: a new one, an empty one, or one that the command wrote earlier.
        marker: text near the beginning of every file that the command writes.
        inputs: what the command reads, also if it is no file. ``path`` must be none of these.
        force: accept a file of other origin.

    Raises:
        UserError: ``path`` is an input, a file of other origin, no regular file, or in no folder.
    """
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir():
        folder = os.path.dirname(path) or "."
        raise UserError(f"{path}: there is no folder {folder}; make it, or name a file in another one")
    if not file.exists():
        return
    if not file.is_file():
        kind = "a folder" if file.is_dir() else KINDS.get(stat.S_IFMT(file.stat().st_mode), "a socket")
        raise UserError(f"{path}: expected the name of a file to write, got {kind.partition(';')[0]}")
    for read in inputs:
        if os.path.exists(read) and file.samefile(read):
            raise UserError(f"{path}: the command reads this file; name another one to write")
    try:
        with open(file, "rb", opener=regular) as earlier:
            start = earlier.read(4096)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; name another file to write") from None
    if start and marker.encode() not in start and not force:
        raise UserError(
            f"{path}: this file exists, and the command did not write it; name another one, or replace it "
            "with --force"
        )


def write_output(
    path: str | Path, text: str, marker: str, inputs: Iterable[str | Path] = (), force: bool = False
) -> None:
    """Writes a text file whole or not at all: an earlier one stays until the new one is complete.

    Args:
        path, marker, inputs, force: see ``check_output``.
        text: the content, which contains ``marker``.

    Raises:
        UserError: as ``check_output``; or the file cannot be written.
    """
    assert marker in text[:4096]
    check_output(path, marker, inputs, force)
    file = Path(os.path.realpath(path))
    part = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        try:
            part.write_text(text, encoding="utf-8", errors="replace")  # names of files may hold other bytes
            if file.exists():
                shutil.copymode(file, part)
            os.replace(part, file)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; name a file in another folder"
        ) from None
