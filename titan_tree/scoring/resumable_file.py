"""ResumableFile: a text file that is written in rounds, and survives a kill between any two instructions.

While it is written, the folder NAME.partial holds it as "content", beside state.json. A round appends and
synchronizes the content first. state.json then says how many bytes are complete; its first line is a
checksum. The next process cuts the content there and goes on, so nothing is lost or repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from titan_tree.config.files import check_output, regular
from titan_tree.errors import UserError


class ResumableFile:
    """Writes a file in rounds. The file appears under its name only when it is complete.

    Args:
        path, inputs, force: see ``check_output``.

    Attributes:
        folder: holds the file until it is complete. The caller locks it.

    Raises:
        UserError: the file exists. All methods: it cannot be written.
    """

    def __init__(self, path: Path, inputs: Iterable[str] = (), force: bool = False) -> None:
        if not path.name:
            raise UserError(f"{path}: expected the name of a new file")
        self.path, self.folder = path, path.with_name(f"{path.name}.partial")
        self._content, self._state = self.folder / "content", self.folder / "state.json"
        self._description: Mapping[str, object] = {}
        self._check = partial(check_output, path, None, list(inputs), force)
        self._check()

    def open(self, description: Mapping[str, object]) -> Any:
        """Starts or continues, and returns the progress that the last round stored; None at the start.

        Args:
            description: JSON values that decide the content.

        Raises:
            UserError: an earlier process had another description, or its content is damaged.
        """
        self._description = json.loads(json.dumps(description))
        size, progress = 0, None
        if self._state.exists():
            before, size, progress = self._read_state()
            differs = [key for key, value in self._description.items() if before.get(key) != value]
            if differs:
                raise UserError(
                    f"{self.folder}: an interrupted run had other settings or data ({', '.join(differs)}); "
                    "run it again with these, or remove the folder"
                )
            if not self._content.exists() or self._content.stat().st_size < size:
                raise UserError(
                    f"{self._content}: expected {size:,} bytes or more, because an interrupted run wrote "
                    "them; remove the folder, and start again"
                )
        if self._content.is_symlink():  # it would lead the text into another file
            raise UserError(
                f"{self._content}: expected a file, got a link; remove the folder, and start again"
            )
        with self._writing(), open(self._content, "ab", opener=regular) as file:
            file.truncate(size)
        return progress

    def _read_state(self) -> tuple[dict[str, object], int, Any]:
        """Returns the description, the number of complete bytes and the progress of the last round."""
        try:
            with open(self._state, "rb", opener=regular) as file:
                checksum, _, text = file.read().partition(b"\n")
            state = json.loads(text) if checksum == b"%d" % zlib.crc32(text) else {}
            return dict(state["description"]), int(state["bytes"]), state["progress"]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{self._state}: damaged; remove the folder {self.folder}, and start again"
            ) from None
        except OSError as error:
            raise UserError(f"{self._state}: cannot be read: {error.strerror}; fix this") from None

    def append(self, texts: Sequence[str], progress: object) -> None:
        """Adds a round. ``progress`` are JSON values that ``open`` returns to the next process."""
        with self._writing():
            with open(self._content, "ab", opener=regular) as file:
                file.writelines(text.encode() for text in texts)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            state = {"description": self._description, "progress": progress, "bytes": size}
            text = json.dumps(state)
            new = self._state.with_suffix(".tmp")
            with open(new, "w", opener=regular) as file_of_state:
                file_of_state.write(f"{zlib.crc32(text.encode())}\n{text}")
                file_of_state.flush()
                os.fsync(file_of_state.fileno())
            new.replace(self._state)

    def finish(self) -> None:
        """Gives the file its name, and removes the folder."""
        self._check()  # another process may have written it meanwhile
        with self._writing():
            target = os.path.realpath(self.path)
            if os.path.exists(target):
                shutil.copymode(target, self._content)
            self._content.replace(target)
            shutil.rmtree(self.folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"{self.path}: cannot be written: {reason}; fix this, and start the same command again"
            ) from None
