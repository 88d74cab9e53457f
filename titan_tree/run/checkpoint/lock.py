"""FolderLock, which admits one run at a time to a folder, and ``set_aside``, which renames earlier files."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, TextIO

from titan_tree.config.files import regular
from titan_tree.distributed.collectives import call_on_all_ranks_keep_rank0, call_on_rank_0
from titan_tree.errors import UserError, shorten

logger = logging.getLogger(__name__)

VISIBLE_S = 60.0  # after which all machines see a new file; NFS may serve an earlier state for this long


class FolderLock:
    """Locks a folder for as long as rank 0 lives, or until ``release``. Collective.

    The kernel releases the lock when the process ends in any way, so no lock is ever left behind. The locked
    file, run.lock, also holds an id, which later starts in the same folder share. A run deletes only folders
    with this id. On a file system that cannot lock, a warning takes the place of the lock.

    A process may lock a folder again, for example after an error in a notebook. The new lock replaces the
    old one.

    Attributes:
        run: the id, 8 hexadecimal digits.

    Raises:
        UserError: another process has locked the folder, or it cannot be written.
    """

    _held: ClassVar[dict[Path, FolderLock]] = {}  # the locks of this process

    def __init__(self, folder: Path) -> None:
        self._file: TextIO | None = None  # None except on rank 0
        self.run = call_on_rank_0(partial(self._acquire, folder))

    def _acquire(self, folder: Path) -> str:
        path = Path(os.path.realpath(folder)) / "run.lock"
        if path in self._held:
            self._held.pop(path).release()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+", encoding="utf-8", errors="replace", opener=regular)  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot be written: {error.strerror}; set folder, or checkpoint.folder"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another run uses this folder ({_owner(path)}); wait until it ends, stop it, or "
                "set another folder"
            ) from None
        except OSError as error:  # some network file systems cannot lock
            logger.warning(
                "%s: cannot be locked (%s); do not start a second run in this folder", path, error.strerror
            )
        run = _read(path).get("run") or secrets.token_hex(4)
        self._held[path], self._pid = self, os.getpid()
        owner = {"run": run, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            # Without a buffer, which Python would try to write again when it closes the file.
            os.truncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), f"{json.dumps(owner)}\n".encode())
            os.fsync(self._file.fileno())  # other machines read the id
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; free some space") from None
        return run

    def check_shared(self, folder: Path) -> None:
        """Checks that all ranks see the locked folder. Collective.

        Raises:
            UserError: a rank, probably on another machine, sees another folder or none under this path.
        """
        call_on_all_ranks_keep_rank0(partial(self._check_visible, folder))

    def _check_visible(self, folder: Path) -> None:
        deadline = time.monotonic() + VISIBLE_S
        while _read(folder / "run.lock").get("run") != self.run:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: {socket.gethostname()} does not see this folder of rank 0; all machines must "
                    "share it; set folder, or checkpoint.folder, to a file system that they share"
                )
            time.sleep(0.5)

    def release(self) -> None:
        """Unlocks the folder. The file stays: it holds the id of the run."""
        if self._file is None:
            return
        # Closing the file is not enough while a fork of this process lives. A fork does not hold the lock.
        if not self._file.closed and self._pid == os.getpid():
            with suppress(OSError):  # some network file systems cannot lock
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def set_aside(path: Path, ending: str) -> Path | None:
    """Renames a file or folder, so that another one can take its name and nothing is lost.

    Returns:
        The new name, such as step-9.damaged or step-9.damaged-2; None if there is no ``path``.
    """
    if not path.exists():
        return None
    moved, number = path.with_name(f"{path.name}.{ending}"), 1
    while moved.exists():
        number += 1
        moved = path.with_name(f"{path.name}.{ending}-{number}")
    return path.rename(moved)


def _read(path: Path) -> dict[str, str]:
    """Returns the content of a lock file, or {} if it is empty or damaged."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
            content = json.loads(file.read())
        return content if re.fullmatch("[0-9a-f]{8}", content["run"]) else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _owner(path: Path) -> str:
    owner = _read(path)
    return f"process {shorten(owner.get('pid'))} on {shorten(owner.get('host'))}" if owner else "unknown"
