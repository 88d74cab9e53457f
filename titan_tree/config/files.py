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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_tree.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO; write its content to a file",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
NO_OUTPUTS = KINDS | {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link that leads to itself"}


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
    path: str | Path, marker: str | None = None, inputs: Iterable[str | Path] = (), force: bool = False
) -> None:
    """Refuses to write a file that a command must not write. Symbolic links are followed.

    Args:
        path: the file to write: a new one, an empty one, or one that the command wrote earlier.
        marker: text near the beginning of every file that the command writes and may replace. None: there is
            no such file.
        inputs: files that the command reads, and folders of which it reads files. None of them is replaced.
        force: replace a file of other origin.

    Raises:
        UserError: ``path`` is an input, a file of other origin, or no regular file.
    """
    file = Path(os.path.realpath(path))
    names_folder = str(path).endswith("/")  # also a new one
    try:
        mode = stat.S_IFDIR if names_folder else os.lstat(file).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; give another name") from None
    if not stat.S_ISREG(mode):
        kind = NO_OUTPUTS.get(stat.S_IFMT(mode), "a socket")
        raise UserError(f"{path}: expected the name of a file to write, got {kind.partition(';')[0]}")
    read = {_identity(name) for name in inputs if os.path.exists(name)}
    is_input = _identity(file) in read
    try:
        with open(file, "rb", opener=regular) as earlier:
            start = earlier.read(4096)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; name another file to write") from None
    if start and (marker is None or marker.encode() not in start):
        is_input |= any(_identity(folder) in read for folder in file.parents)
        if not is_input and not force:
            origin = "" if marker is None else ", and the command did not write it"
            raise UserError(f"{path}: this file exists{origin}; name another one, or replace it with --force")
    if is_input:
        raise UserError(f"{path}: the command reads this file; name another one to write")


def check_folder(path: str | Path, inputs: Iterable[str | Path] = (), force: bool = False) -> Path:
    """Returns the real path of a folder that a command may write, with ``force`` also one that exists.

    Raises:
        UserError: it exists, lies below a file, or contains one of the ``inputs`` or lies in one.
    """
    folder = Path(os.path.realpath(path))
    found = next(above for above in (folder, *folder.parents) if os.path.lexists(above))
    if not found.is_dir():
        raise UserError(f"{path}: expected the name of a folder, but {found} is a file; give another name")
    read = [Path(os.path.realpath(name)) for name in inputs] if found == folder else []
    if any(folder.is_relative_to(name) or name.is_relative_to(folder) for name in read):
        raise UserError(f"{path}: the command reads files in this folder; name another one to write")
    if found == folder and not force:
        raise UserError(f"{path}: this folder exists; name another one, or replace it with --force")
    return folder


def _identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


@contextmanager
def new_output(
    path: str | Path, marker: str | None = None, inputs: Iterable[str | Path] = (), force: bool = False
) -> Iterator[Path]:
    """Yields a temporary path, which gets the name ``path`` if the ``with`` statement has written all of it.

    An earlier file stays until then. Missing folders are made.

    Args:
        path, marker, inputs, force: see ``check_output``.

    Raises:
        UserError: as ``check_output``; or the file cannot be written.
    """
    inputs = list(inputs)
    file = Path(os.path.realpath(path))
    part = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        check_output(path, marker, inputs, force)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            check_output(path, marker, inputs, force)  # another process may have written it meanwhile
            if file.exists():
                shutil.copymode(file, part)
            os.replace(part, file)
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path}: cannot be written: {reason}; free some space, or name a file in another folder"
        ) from None


def write_output(
    path: str | Path,
    text: str,
    marker: str | None = None,
    inputs: Iterable[str | Path] = (),
    force: bool = False,
) -> None:
    """Writes a text file whole or not at all, see ``new_output``. The text contains ``marker``."""
    assert marker is None or marker in text[:4096]
    with new_output(path, marker, inputs, force) as part:
        part.write_text(text, encoding="utf-8", errors="replace")  # names of files may hold other bytes
