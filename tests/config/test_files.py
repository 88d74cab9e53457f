"""The opener for files that users name, and the writer of what a command makes."""

import errno
import os
import resource
import socket
from pathlib import Path

import pytest

from titan_tree.config.files import check_folder, regular, write_output
from titan_tree.errors import UserError


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


def test_an_output_replaces_what_the_command_wrote_and_nothing_else(tmp_path: Path) -> None:
    page, link = tmp_path / "page", tmp_path / "link"
    link.symlink_to(page)
    write_output(link, "made by: 1", "made by")
    page.chmod(0o640)
    write_output(link, "made by: 2", "made by")
    assert link.is_symlink()
    assert (page.read_text(), page.stat().st_mode & 0o777) == ("made by: 2", 0o640)
    (tmp_path / "empty").touch()
    write_output(tmp_path / "empty", "made by: 3", "made by")

    notes, hard = tmp_path / "notes", tmp_path / "hard"
    notes.write_text("mine")
    hard.hardlink_to(notes)
    link.unlink()
    link.symlink_to(notes)
    for path in (notes, link, hard):
        with pytest.raises(UserError, match=f"^{path}: this file exists, and the command did not write it"):
            write_output(path, "made by: 4", "made by")
        with pytest.raises(UserError, match=f"^{path}: the command reads this file"):
            write_output(path, "made by: 4", "made by", ["missing", notes], force=True)
    assert notes.read_text() == "mine"
    write_output(link, "made by: 4", "made by", force=True)
    assert notes.read_text() == "made by: 4"
    assert sorted(os.listdir(tmp_path)) == ["empty", "hard", "link", "notes", "page"]


def test_an_output_is_a_regular_file_in_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, message in (
        (tmp_path / "fifo", "expected the name of a file to write, got a FIFO"),
        (tmp_path, "expected the name of a file to write, got a folder"),
        (Path("/dev/null"), "expected the name of a file to write, got a device"),
        (tmp_path / "fifo" / "page", "cannot be written: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        with pytest.raises(UserError, match=f"^{path}: {message}"):
            write_output(path, "made by", "made by", force=True)
    write_output(tmp_path / "new" / "page", "text")
    assert (tmp_path / "new" / "page").read_text() == "text"


def test_force_replaces_no_file_of_an_input_folder(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "model" / "weights"
    write_output(weights, "1")
    with pytest.raises(UserError, match="this file exists; name another one, or replace it with --force"):
        write_output(weights, "2")
    with pytest.raises(UserError, match="the command reads this file"):
        write_output(weights, "2", inputs=[tmp_path / "model"], force=True)
    assert weights.read_text() == "1"
    write_output(weights, "2", force=True)
    assert weights.read_text() == "2"


def test_a_full_disk_leaves_the_earlier_output(tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_output(page, "made by: 1", "made by")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # stands for a full disk
    try:
        with pytest.raises(UserError, match=f"^{page}: cannot be written: File too large; free some space"):
            write_output(page, "made by: 2" * 1000, "made by")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert page.read_text() == "made by: 1"
    assert os.listdir(tmp_path) == ["page"]


def test_the_name_of_a_folder_and_a_link_that_leads_to_itself_are_no_outputs(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, kind in (
        (f"{tmp_path}/new/", "a folder"),
        (tmp_path / "loop", "a link that leads to itself"),
    ):
        with pytest.raises(UserError, match=f"expected the name of a file to write, got {kind}"):
            write_output(path, "text", force=True)
    assert os.listdir(tmp_path) == ["loop"]


def test_a_folder_that_exists_is_written_only_on_request(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "file"
    (run / "step-1").mkdir(parents=True)
    (run / "hf").mkdir()
    file.touch()
    (tmp_path / "link").symlink_to(run / "step-1")
    read = [run / "step-1", run / "config.toml"]
    check_folder(tmp_path / "new" / "out", read)
    check_folder(run / "hf", read, force=True)
    reads = "the command reads files in this folder; name another one to write"
    below = f"expected the name of a folder, but {file} is a file; give another name"
    for path, force, message in (
        (run / "hf", False, "this folder exists; name another one, or replace it with --force"),
        (file, True, below),
        (file / "a" / "out", True, below),
        (run, True, reads),
        (tmp_path / "link", True, reads),
    ):
        with pytest.raises(UserError) as error:
            check_folder(path, read, force)
        assert str(error.value) == f"{path}: {message}"
