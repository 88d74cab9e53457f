"""The opener for files that users name: regular files only, and it never waits."""

import errno
import os
import socket
from pathlib import Path

import pytest

from titan_tree.config.files import regular


def test_regular_files_are_read_and_written(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    with open(file, "w", opener=regular) as opened:
        opened.write("text")
    link.symlink_to(file)
    with open(link, opener=regular) as opened:
        assert opened.read() == "text"
    assert file.stat().st_mode & 0o111 == 0
    with open(os.devnull, "rb", opener=regular) as opened:
        assert opened.read() == b""


@pytest.mark.parametrize("mode", ["rb", "wb", "a+"])
def test_a_fifo_a_socket_and_a_device_are_refused_without_waiting(tmp_path: Path, mode: str) -> None:
    fifo, address = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        for path in (fifo, address, Path("/dev/zero")):
            with pytest.raises(OSError, match=rf"\[Errno {errno.ENXIO}\]"), open(path, mode, opener=regular):
                pass
    with pytest.raises(IsADirectoryError), open(tmp_path, mode, opener=regular):
        pass
