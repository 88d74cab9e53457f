"""An opener for files that users and their data name.

Such a name may lead to a FIFO, which blocks a program until somebody writes into it, or to a device, which
may never end. The same holds for a file that a run expects in its own folder.
"""

from __future__ import annotations

import errno
import os
import stat

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
