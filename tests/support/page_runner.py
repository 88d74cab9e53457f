"""Runs the code blocks of a documentation page, in order, in the current folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

import titan_tree.cli
from tests.support.agents import USER, ScriptedSampler, asked
from tests.support.isolation import REGISTRIES
from tests.support.markdown import Block, blocks
from titan_tree.cli import bench
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config.toml import load_tables
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.integrations.lightning_settings import LightningRunConfig
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLRunConfig
from titan_tree.run.config import load_config
from titan_tree.run.trainer import Trainer
from titan_tree.serve.request import Request

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
PAGES = [*ROOT_PAGES, ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "toml", "json")


def runnable_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in LANGUAGES and not block.not_run]


def run_page(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs all blocks of a page and yields each with what it printed.

    - python: runs as a script with the argument ``--help``. All blocks share one namespace. A first line
      ``# name.py`` saves the block as a module instead.
    - bash: ``titan-tree`` runs, but no benchmark. It trains only if the page shows the
      output, with a tiny model in place of a snapshot, and records scripted sessions instead of serving.
      ``echo`` feeds it. Other commands do not run either, but their files, configuration keys and options are
      checked.
    - toml: must be a valid configuration. A first line ``# name.toml`` saves it for later blocks.
    - json: must be records that the reader accepts.
    """
    for folder in ("train_configs", "scripts", "tests"):
        Path(folder).symlink_to(ROOT / folder)
    with _namespace() as namespace:
        for block in runnable_blocks(page):
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.code)):
                    Path(name[1]).write_text(block.code)
                elif block.language == "python":
                    code = "\n" * (block.line - 1) + block.code  # tracebacks show the page's lines
                    _run_script(compile(code, str(page), "exec", dont_inherit=True), namespace)
                elif block.language == "bash":
                    for command in _commands(block.code):
                        if command[:2] == ["titan-tree", "train"] and block.output is not None:
                            _train(command[2], command[3:])
                        else:
                            _check_command(command)
                elif block.language == "toml":
                    _check_config(block.code)
                else:
                    _check_records(block.code)
            yield block, stdout.getvalue()


def _run_script(code: CodeType, namespace: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["page.py", "--help"])
        patch.setitem(namespace, "__name__", "__main__")
        try:
            exec(code, namespace)
        except SystemExit as end:  # the command of the script printed its help
            if end.code:
                raise


@contextmanager
def _namespace() -> Iterator[dict[str, Any]]:
    """Provides the namespace of a page, and removes what the page registers."""
    registries = REGISTRIES
    entries = [dict(registry._entries) for registry in registries]
    module = sys.modules["page"] = ModuleType("page")  # dataclasses look up their module
    try:
        yield vars(module)
    finally:
        del sys.modules["page"]
        for registry, before in zip(registries, entries, strict=True):
            registry._entries = before


def _check_config(text: str) -> None:
    table = tomllib.loads(text)
    name = re.match(r"# (\w+\.toml)\n", text)
    file = Path(name[1] if name else "block.toml")
    file.write_text(text)
    has_model = {"flavor", "hf_path"} & table.get("model", {}).keys()
    overrides = [] if has_model else ["model.flavor=debug"]
    if "rl" in table:
        load_tables(RLRunConfig, file, overrides)
        return
    if "files" not in table.get("data", {}):
        overrides.append("data.files=demo")
    if "lightning" in table:
        load_tables(LightningRunConfig, file, overrides)
    else:
        load_config(file, overrides)


def _check_records(text: str) -> None:
    Path("block.jsonl").write_text(text)
    reader = SampleReader(DataConfig(files=["block.jsonl"]), TreeTokenizer.byte_level())
    for group in reader.files.groups():
        assert reader.paths(group)


def _commands(code: str) -> Iterator[list[str]]:
    """Yields the words of each command, without variables that are set in front of it."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            yield words


def _check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "echo" and "|" in arguments:
        end = arguments.index("|")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(" ".join(arguments[:end]) + "\n"))
            _check_command(arguments[end + 1 :])
    elif program == "titan-tree" and arguments[0] == "bench" and len(arguments) > 1:
        _check_benchmark("titan_tree.cli.bench", *arguments[1:])
    elif "benchmarks" in arguments:  # of python -m, or of torchrun
        _check_benchmark("benchmarks", *arguments[arguments.index("benchmarks") + 1 :])
    elif program == "titan-tree" and arguments[0] in ("train", "rl"):
        _check_run(arguments)
    elif program == "titan-tree" and arguments[0] == "serve":
        _record(load_tables(RLRunConfig, arguments[1], arguments[2:]))
    elif program == "titan-tree":
        if arguments[0] == "config":
            arguments = ["qwen3:debug" if word.startswith("/models/") else word for word in arguments]
        assert titan_tree.cli.main(arguments) == 0, words
    elif "titan_tree" in words:
        module = words[words.index("titan_tree") + 1 :]
        if module[0] in ("train", "rl"):
            _check_run(module)
        else:
            titan_tree.cli.parse(module)
    elif program.endswith("scripts/train.sh") and arguments:
        load_config(arguments[0], arguments[1:])
    elif program.endswith("scripts/test.sh"):
        for path in arguments:
            assert not path.startswith("tests/") or Path(path).exists(), words
    elif program in ("python", "python3") and not arguments[0].startswith("-"):
        _check_script(ROOT / arguments[0], arguments[1:])
    elif program.startswith(("./", "scripts/", ".ci/")):
        assert (ROOT / program).exists(), words


def _check_benchmark(package: str, name: str, *options: str) -> None:
    if not name.startswith("-"):
        bench.parse(import_module(f"{package}.{name}"), name, options)


def _record(config: RLRunConfig) -> None:
    """Writes the rows of two sessions, whose turns a script samples."""
    chat = Chat(TreeTokenizer.byte_level("qwen3"))
    recorder = ModelRecorder(chat, config.rl, folder=Path(config.folder))
    for reward, session in enumerate(("task7.0", "task7.1")):
        asked(recorder, ScriptedSampler(chat), Request(messages=[USER]), session=session)
        recorder.end(session, float(reward))


def _check_run(arguments: list[str]) -> None:
    """Checks the configuration of a run, as its command does before it starts torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", lambda *_: titan_tree.cli.Parser().exit())
        patch.setattr("titan_tree.run.config.require_inputs", lambda config: None)  # the reader's own files
        patch.setattr(logging.getLogger("titan_tree"), "handlers", [])
        assert titan_tree.cli.main([*arguments, "--nproc", "2"]) == 0, arguments


def _train(config: str, overrides: list[str]) -> None:
    """Trains in this process, and prints what the run logs."""
    logger, handler = logging.getLogger("titan_tree"), logging.StreamHandler(sys.stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "handlers", [handler])
        patch.setattr(logger, "level", logging.INFO)
        trainer = Trainer(load_config(config, overrides))
        trainer.train()
        trainer.close()


def _check_script(script: Path, arguments: list[str]) -> None:
    """Checks that the script exists and mentions every option."""
    source = script.read_text()
    for argument in arguments:
        assert not argument.startswith("--") or f'"{argument}"' in source, f"{script}: {argument}"
