"""The user's code that a configuration names: where it is found, what it registers, and how it fails."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from titan_tree.config.toml import dump_config, load_config
from titan_tree.errors import UserError
from titan_tree.plugins import import_plugins
from titan_tree.registry import LOSSES, METRICS

PARTS = """
from titan_tree.registry import METRICS

METRICS.register("answer", lambda report: {"answer": 42.0})


def focal(logprobs, pairs, gamma=2.0):
    return -((1 - logprobs.exp()) ** gamma) * logprobs
"""
RUN = ("model.flavor=debug", "data.files=demo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a package of the user's own. What it registers is forgotten afterwards."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text('plugins = ["own.parts"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with METRICS.registered("unused", "os"):
        yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] in ("own", "other")]:
        del sys.modules[module]


def test_plugins_and_names_of_own_code_are_imported_from_the_current_directory(folder: Path) -> None:
    config = load_config("run.toml", [*RUN, "loss.name=own.parts:focal", "loss.options.gamma=1.0"])
    assert "answer" in list(METRICS)
    assert LOSSES["own.parts:focal"] is sys.modules["own.parts"].focal
    assert "own.parts:focal" not in list(LOSSES)
    Path("again.toml").write_text(dump_config(config))
    assert load_config("again.toml") == config
    assert sys.path[-1] == str(folder)  # last: it hides no installed package


FAULTS = {
    "missing": ("", "other", "there is no module 'other' among the installed packages or in the current "
                "directory {folder}; install it, or start the command in the folder that contains it"),
    "syntax": ("def f(:\n", "own.bad",
               "cannot import own.bad: {folder}/own/bad.py:1: SyntaxError: invalid syntax"),
    "raises": ("\nimport json\njson.loads('x')\n", "own.bad", "cannot import own.bad: {folder}/own/bad.py:3: "
               "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    "exits": ("raise SystemExit(0)\n", "own.bad",
              "cannot import own.bad: {folder}/own/bad.py:1: SystemExit: 0"),
    "imports": ("import absent_package\n", "own.bad", "cannot import own.bad: {folder}/own/bad.py:1: "
                "ModuleNotFoundError: No module named 'absent_package'"),
    "replaces": ("from titan_tree.registry import LOSSES\nLOSSES.register('sft', print)\n", "own.bad",
                 "cannot import own.bad: {folder}/own/bad.py:2: UserError: loss 'sft' is registered by "
                 "titan_tree already; choose another name, or pass replace=True to register"),
    "file": ("", "own/bad.py",
             "expected the dotted name of a module, such as my_package.parts, got 'own/bad.py'"),
}  # fmt: skip


@for_each(("code", "module", "message"), list(FAULTS.values()))
def test_a_plugin_that_cannot_be_imported_is_one_line(
    folder: Path, code: str, module: str, message: str
) -> None:
    (folder / "own" / "bad.py").write_text(code)
    with pytest.raises(UserError) as error:
        load_config("run.toml", [*RUN, f"plugins=[{module}]"])
    assert str(error.value) == f"argument 'plugins=[{module}]': plugins: {message.format(folder=folder)}"


def test_two_plugins_cannot_register_one_name(folder: Path) -> None:
    (folder / "other.py").write_text(PARTS)
    import_plugins(["own.parts"])
    with pytest.raises(UserError, match=r"metric 'answer' is registered by own\.parts already"):
        import_plugins(["other"])


def test_an_unknown_attribute_lists_those_of_the_module(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config("run.toml", [*RUN, "loss.name=own.parts:focla"])
    assert str(error.value) == (
        "argument 'loss.name=own.parts:focla': loss.name: "
        f"unknown attribute of {folder}/own/parts.py 'focla'; did you mean 'focal'? (known: METRICS, focal)"
    )


@pytest.mark.slow
def test_the_ordinary_command_trains_with_plugins_in_worker_processes(folder: Path) -> None:
    (folder / "own" / "data.py").write_text(
        "from titan_tree.data.readers.own_schema import OwnSchemaReader\n"
        "from titan_tree.registry import ADVANTAGES\n"
        "ADVANTAGES.register('ones', lambda turns: turns.per_path([1.0 for reward in turns.rewards]))\n"
    )
    command = [sys.executable, "-m", "titan_tree.train", "--config", "run.toml", *RUN]
    command += ["plugins=[own.parts, own.data]", "data.advantage=ones", "loss.name=own.parts:focal"]
    command += ["data.tokenizer=byte", "data.workers=1", "data.global_batch_groups=1", "training.steps=1"]
    command += ["lr_scheduler.warmup_steps=0", "metrics.loggers=[csv]", "folder=out", "checkpoint.interval=0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    header, row = (line.split(",") for line in Path("out/metrics.csv").read_text().splitlines())
    assert float(dict(zip(header, row, strict=True))["answer"]) == 42
