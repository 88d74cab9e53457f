"""titan-tree train and rl: what they run, and the processes that they become."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from titan_tree import __version__, cli
from titan_tree.cli.run_process import start_torchrun

DEMO = str(Path(__file__).parents[2] / "train_configs" / "demo.toml")
RL_DEMO = DEMO.replace("demo", "rl_demo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the command lines that commands would become."""
    commands: list[list[str]] = []

    def execv(path: str, words: list[str]) -> None:
        commands.append([path, *words[1:]])
        raise cli.Finished(0)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "execv", execv)
    return commands


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["train", DEMO, "--a.b=1", "c=2"], "titan_tree.run.trainer"),
        (["train", DEMO, "--trainer", "lightning"], "titan_tree.integrations.lightning_command"),
        (["rl", RL_DEMO, "--nproc", "1", "c=2"], "titan_tree.rl.run"),
    ],
    ids=["train", "lightning", "rl"],
)
def test_one_process_trains_with_the_overrides(
    words: list[str], module: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_tree.run.config.require_inputs", lambda config: None)
    read: list[list[str]] = []
    trained: list[Any] = []

    def load_tables(tables: type, path: str, overrides: list[str]) -> type:
        read.append([path, *overrides])
        return tables

    class Trainer:
        def __init__(self, config: Any) -> None:
            trained.append(config)

        train = close = lambda self: None

    fake = SimpleNamespace(Trainer=Trainer, run=trained.append)
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr("titan_tree.config.toml.load_tables", load_tables)
    assert cli.main(words) == 0
    overrides = [word for word in words if "=" in word]
    assert [sorted(words) for words in read] == [sorted([words[1], *overrides])]
    tables = {"titan_tree.rl.run": "RLRunConfig", "titan_tree.run.trainer": "Config"}
    assert [table.__name__ for table in trained] == [tables.get(module, "LightningRunConfig")]
    assert started == []


@pytest.mark.parametrize(
    "words", [["train", DEMO], ["train", DEMO, "--trainer", "lightning"], ["rl", RL_DEMO]]
)
def test_several_processes_are_those_of_torchrun(
    words: list[str], started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "training.steps=7"]
    assert cli.main([*words[:2], "--nproc", "4", *words[2:]]) == 0
    ((_, safe_path, dash, launcher, *command),) = started
    assert (safe_path, dash, launcher) == ("-P", "-m", "torch.distributed.run")
    options = get_args_parser().parse_args(command)
    assert (options.standalone, options.nproc_per_node, options.module) == (True, "4", True)
    assert options.training_script == "titan_tree"
    assert options.training_script_args == words
    assert set(options.signals_to_handle.split(",")) >= {"SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"}

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    start_torchrun(cli.parse([*words, "--nproc", "4"]))
    assert len(started) == 1


def test_a_wrong_configuration_is_reported_once_before_torchrun_starts(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", DEMO, "optimizer.lr=fast", "--nproc", "8"]) == 2
    assert capsys.readouterr().err == (
        "titan-tree: error: argument 'optimizer.lr=fast': optimizer.lr: expected a number, got 'fast'\n"
    )
    missing = ["data.files=nothing.jsonl", "nothing.jsonl"], ["model.hf_path=a/b", "hf download a/b"]
    for word, says in missing:
        assert cli.main(["train", DEMO, "model.flavor=null", "--nproc", "8", "model.hf_path=.", word]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    assert started == []


@pytest.mark.parametrize("count", ["0", "two", "1001"])
def test_a_wrong_number_of_processes_is_one_line(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", DEMO, "--nproc", count]) == 2
    assert capsys.readouterr().err == (
        f"titan-tree: error: argument --nproc: expected an integer from 1 to 1,000, got {count!r}; "
        "titan-tree train --help lists the arguments\n"
    )


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"titan-tree {__version__}\n"
