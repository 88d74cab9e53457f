"""titan-tree train and rl: the process that they become."""

import os
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from titan_tree import __version__, cli

DEMO = str(Path(__file__).parents[2] / "train_configs" / "demo.toml")
RL_DEMO = DEMO.replace("demo", "rl_demo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the command lines that commands would become."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: commands.append([path, *words[1:]]))
    return commands


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", DEMO], ["titan_tree.train", "--config", DEMO]),
        (["train", DEMO, "--trainer", "lightning"], ["titan_tree.lightning", "--config", DEMO]),
        (["rl", RL_DEMO, "--nproc", "1", "a=1"], ["titan_tree.rl", "--config", RL_DEMO, "a=1"]),
        (["train", DEMO, "--a.b=1", "c=2"], ["titan_tree.train", "--config", DEMO, "--a.b=1", "c=2"]),
    ],
    ids=["train", "lightning", "rl", "dashes"],
)
def test_one_process_is_the_module_itself(
    words: list[str], expected: list[str], started: list[list[str]]
) -> None:
    assert cli.main(words) == 0
    ((python, dash, *command),) = started
    assert (python, dash) == (sys.executable, "-m")
    assert sorted(command) == sorted(expected)
    assert command[:3] == expected[:3]


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["train", DEMO], "titan_tree.train"),
        (["train", DEMO, "--trainer", "lightning"], "titan_tree.lightning"),
        (["rl", RL_DEMO], "titan_tree.rl"),
    ],
    ids=["train", "lightning", "rl"],
)
def test_several_processes_are_those_of_torchrun(
    words: list[str], module: str, started: list[list[str]]
) -> None:
    assert cli.main([*words, "--nproc", "4", "training.steps=7"]) == 0
    ((_, dash, launcher, *command),) = started
    assert (dash, launcher) == ("-m", "torch.distributed.run")
    options = get_args_parser().parse_args(command)
    assert (options.standalone, options.nproc_per_node, options.module) == (True, "4", True)
    assert options.training_script == module
    assert options.training_script_args == ["--config", words[1], "training.steps=7"]
    assert set(options.signals_to_handle.split(",")) >= {"SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"}


def test_a_wrong_configuration_is_reported_once_before_torchrun_starts(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", DEMO, "optimizer.lr=fast", "--nproc", "8"]) == 2
    assert capsys.readouterr().err == (
        "titan-tree: error: argument 'optimizer.lr=fast': optimizer.lr: expected a number, got 'fast'\n"
    )
    assert started == []


@pytest.mark.parametrize("count", ["0", "two", "1001"])
def test_a_wrong_number_of_processes_is_one_line(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", DEMO, "--nproc", count])
    assert capsys.readouterr().err == (
        f"titan-tree train: error: argument --nproc: expected an integer from 1 to 1,000, got {count!r}; "
        "titan-tree train --help lists the arguments\n"
    )


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert (exit.value.code, capsys.readouterr().out) == (0, f"titan-tree {__version__}\n")
