"""ResumableFile: what an interrupted process left is continued, or refused in one line."""

import os
import random
import zlib
from pathlib import Path

import pytest

from titan_tree.errors import UserError
from titan_tree.scoring.resumable_file import ResumableFile


def interrupted(path: Path) -> ResumableFile:
    """Returns a file of which one round of two lines is complete."""
    file = ResumableFile(path)
    file.folder.mkdir()
    assert file.open({"field": "x"}) is None
    file.append(["a\n", "b\n"], {"groups": 2})
    return file


def test_a_process_continues_after_the_last_round(tmp_path: Path) -> None:
    with (interrupted(tmp_path / "out").folder / "content").open("a") as content:
        content.write("half of a li")
    file = ResumableFile(tmp_path / "out")
    assert file.open({"field": "x"}) == {"groups": 2}
    file.append(["c\n"], {"groups": 3})
    file.finish()
    assert (tmp_path / "out").read_text() == "a\nb\nc\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state = interrupted(tmp_path / "out").folder / "state.json"
    whole, draw = state.read_bytes(), random.Random(0)
    for bit in draw.sample(range(8 * len(whole)), 100):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        state.write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"state\.json: damaged; remove the folder .*out\.partial, and start"
        ):
            ResumableFile(tmp_path / "out").open({"field": "x"})
    for content in (b"", b"[]", b"{}", whole[:-1]):
        state.write_bytes(content)
        with pytest.raises(UserError, match=r"state\.json: damaged"):
            ResumableFile(tmp_path / "out").open({"field": "x"})


def test_a_state_of_another_program_is_refused_and_permissions_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("earlier")
    out.chmod(0o640)
    file = interrupted(tmp_path / "new")
    for text in (b"[1]", b"{}", b'{"description": 1, "bytes": 4, "progress": null}'):
        (file.folder / "state.json").write_bytes(b"%d\n%s" % (zlib.crc32(text), text))
        with pytest.raises(UserError, match=r"state\.json: damaged"):
            file.open({"field": "x"})
    file = ResumableFile(out, force=True)
    file.folder.mkdir()
    file.open({})
    file.append(["a\n"], {})
    file.finish()
    assert (out.read_text(), out.stat().st_mode & 0o777) == ("a\n", 0o640)


def test_a_fifo_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out").folder
    for name, message in (("content", "expected 4 bytes or more"), ("state.json", "got a FIFO")):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=message):
            ResumableFile(tmp_path / "out").open({"field": "x"})


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_path_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected the name of a new file"):
        ResumableFile(Path(name))


def test_a_link_in_place_of_the_content_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out").folder
    (folder / "content").rename(tmp_path / "mine")
    (folder / "content").symlink_to(tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    with pytest.raises(UserError, match=r"content: expected a file, got a link; remove the folder"):
        ResumableFile(tmp_path / "out").open({"field": "x"})
    assert (tmp_path / "mine").read_bytes() == before
