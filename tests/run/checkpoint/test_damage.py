"""Damaged and crafted checkpoints: each is named, and the one before it is used or the run is refused."""

import errno
import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.cases import slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.errors import UserError
from titan_tree.run.checkpoint.storage import BLOCK, FileSum, read_manifest, write_manifest
from titan_tree.run.config import Config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("intact")
    train(tiny_config(folder, checkpoint__interval=2))
    return folder


def copied(run: Path, folder: Path) -> Config:
    """Copies the run and returns its configuration."""
    shutil.copytree(run, folder)
    config = tiny_config(run, checkpoint__interval=2)
    config.folder = str(folder / "run")
    return config


def flip(path: Path, seed: int = 0) -> None:
    draw = random.Random(seed)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes checkpoint.json and gives it a correct checksum, as an attacker would."""
    content = read_manifest(checkpoint)
    change(content)
    write_manifest(checkpoint, content)


def forge_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a file and gives it a correct checksum."""
    (checkpoint / name).write_bytes(content)
    checksum = FileSum.of(checkpoint / name)
    forge(checkpoint, lambda m: m["files"].update({name: [checksum.num_bytes, *checksum.crc32]}))


def forge_tensor(checkpoint: Path, name: str) -> None:
    """Writes a NaN into a tensor."""
    _, _, ((*_, file, start, length),) = json.loads((checkpoint / "tensors.json").read_text())[name]
    content = bytearray((checkpoint / file).read_bytes())
    tensor = torch.load(io.BytesIO(content[start : start + length]), weights_only=True)
    values = tensor.numpy().tobytes()
    at = content.index(values, start)
    content[at : at + 4] = np.float32(np.nan).tobytes()
    forge_file(checkpoint, file, bytes(content))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit of the tensors": lambda c: flip(c / "__0_0.distcp", 1),
    "bit of the index": lambda c: flip(c / "tensors.json", 2),
    "bit of the manifest": lambda c: flip(c / "checkpoint.json", 3),
    "first line of the manifest": lambda c: (c / "checkpoint.json").write_text("[]\n{}"),
    "short tensors": lambda c: (c / "__0_0.distcp").write_bytes((c / "__0_0.distcp").read_bytes()[:-1]),
    "no tensors": lambda c: (c / "__0_0.distcp").unlink(),
    "empty tensors": lambda c: (c / "__0_0.distcp").write_bytes(b""),
    "empty manifest": lambda c: (c / "checkpoint.json").write_bytes(b""),
    "no manifest": lambda c: (c / "checkpoint.json").unlink(),
    "manifest of another step": lambda c: shutil.copy(c.parent / "step-2" / "checkpoint.json", c),
    "no index": lambda c: (c / "tensors.json").unlink(),
    "forged: deep index": lambda c: forge_file(c, "tensors.json", b"[" * 100_000),
    "forged: wrong index": lambda c: forge_file(c, "tensors.json", b'{"model.norm.weight": [1, 2]}'),
    "forged: other tensors": lambda c: forge_file(c, "tensors.json", b"{}"),
    "forged: no tensors": lambda c: forge_file(c, "__0_0.distcp", b"nothing"),
    "forged: missing key": lambda c: forge(c, lambda m: m.pop("data")),
    "forged: no position": lambda c: forge(c, lambda m: m.update(data={"epoch": "x"})),
    "forged: wrong type": lambda c: forge(c, lambda m: m.update(files=[1, 2])),
    "forged: other folder": lambda c: forge(c, lambda m: m["files"].update({"../../config.toml": [1, 2]})),
    "forged: configuration": lambda c: forge(c, lambda m: m.update(config=[])),
    "forged: no files": lambda c: forge(c, lambda m: m.update(files={})),
    "forged: infinite position": lambda c: forge(c, lambda m: m["data"].update(group=1e999)),
    "forged: long name": lambda c: forge(c, lambda m: m["files"].update({"a" * 300: [1, 2]})),
    "forged: empty FIFO": lambda c: (os.mkfifo(c / "f"), forge(c, lambda m: m["files"].update(f=[0]))),
    "FIFO": lambda c: ((c / "checkpoint.json").unlink(), os.mkfifo(c / "checkpoint.json")),
    "forged: NaN in the optimizer": lambda c: forge_tensor(c, "optimizer.state.norm.weight.exp_avg"),
}


EVERYDAY = ("bit of the tensors", "bit of the manifest", "forged: wrong type", "forged: NaN in the optimizer")


@pytest.mark.parametrize("name", slow_except(EVERYDAY, DAMAGE))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tmp_path / "copy"
    config = copied(run, folder)
    expected = read_metrics(config)
    damaged = folder / "run" / "checkpoints" / "step-4"
    DAMAGE[name](damaged)
    with caplog.at_level("INFO", "titan_tree"):
        trainer = train(config)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    print(warnings)
    (warning,) = warnings
    assert str(damaged) in warning
    assert f"moved to {damaged}.damaged" in warning
    assert "\n" not in warning
    assert trainer.optimizer_step.good_steps == 2  # steps 3 and 4, after the checkpoint of step 2
    assert read_metrics(config) == expected


def test_nothing_is_resumed_if_no_checkpoint_is_intact(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    config = copied(run, folder)
    for step in (2, 4):
        flip(folder / "run" / "checkpoints" / f"step-{step}" / "__0_0.distcp", step)
    for _ in range(2):  # the same command again does not silently start over
        with pytest.raises(UserError, match="none of its checkpoints is intact"):
            train(config)


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_called_damaged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copied(run, tmp_path / "copy")

    def refuse(path: Path) -> FileSum:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FileSum, "of", refuse)
    with pytest.raises(UserError, match=r"distcp: cannot be read: Permission denied"):
        train(config)
    assert (Path(config.folder) / "checkpoints" / "step-4").is_dir()


@pytest.mark.slow
def test_tensors_in_another_dtype_are_refused_and_stay(run: Path, tmp_path: Path) -> None:
    config = copied(run, tmp_path / "copy")
    checkpoint = Path(config.folder) / "checkpoints" / "step-4"
    index = json.loads((checkpoint / "tensors.json").read_text())
    index["model.norm.weight"][0] = "bfloat16"
    forge_file(checkpoint, "tensors.json", json.dumps(index).encode())
    expected = "step-4: model.norm.weight: expected torch.float32 as in this run, got torch.bfloat16; restore"
    with pytest.raises(UserError, match=expected):
        train(config)
    assert checkpoint.is_dir()


@pytest.mark.parametrize("function", ["load", "FileSystemReader.read_data"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), dist.DistNetworkError("lost")])
def test_a_failure_that_says_nothing_about_the_checkpoint_passes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, function: str
) -> None:
    config = copied(run, tmp_path / "copy")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(f"torch.distributed.checkpoint.{function}", fail)
    with pytest.raises(type(error)):
        train(config)
    assert (Path(config.folder) / "checkpoints" / "step-4").is_dir()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "checkpoint.json"])
def test_no_code_of_a_checkpoint_runs(run: Path, tmp_path: Path, file: str) -> None:
    folder, touched = tmp_path / "copy", tmp_path / "touched"
    config = copied(run, folder)
    checkpoint = folder / "run" / "checkpoints" / "step-4"
    if file == "__0_0.distcp":
        torch.save(Payload(touched), tmp_path / "crafted")
        crafted = (tmp_path / "crafted").read_bytes()
        index = json.loads((checkpoint / "tensors.json").read_text())
        for _, _, chunks in index.values():
            for chunk in chunks:
                chunk[3:] = [0, len(crafted)]
        forge_file(checkpoint, file, crafted)
        forge_file(checkpoint, "tensors.json", json.dumps(index).encode())
    else:
        (checkpoint / file).write_bytes(pickle.dumps(Payload(touched)))
    train(config)
    assert not touched.exists()
    pickle.loads(pickle.dumps(Payload(touched)))  # it would work
    assert touched.exists()


def test_a_checksum_covers_every_block(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(2 * BLOCK + 5)
    zeros = zlib.crc32(bytes(BLOCK))
    assert FileSum.of(file) == FileSum(2 * BLOCK + 5, (zeros, zeros, zlib.crc32(bytes(5))))


@pytest.mark.slow
def test_all_ranks_use_the_checkpoint_before(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    run_ranks(damage_and_resume, 2, tmp_path, num_groups=2)


def damage_and_resume(rank: int, ports: list[int], folder: Path) -> None:
    config = tiny_config(folder, checkpoint__interval=2)
    with as_rank(rank, 2, ports[0]):
        train(config)
    if rank == 0:
        flip(Path(config.folder) / "checkpoints" / "step-4" / "__1_0.distcp")
    with as_rank(rank, 2, ports[1]):
        assert train(config).optimizer_step.good_steps == 2
