"""The code in README.md and docs/ runs, prints what the pages show, and names files and keys that exist.

A comment ``<!-- not run: reason -->`` above a block excludes it. NOT_RUN counts such blocks.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import titan_tree.registry
from tests.support.markdown import Block, anchors, blocks, links
from titan_tree.cli import main as titan_tree_command
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config import DataConfig
from titan_tree.config.toml import load_config
from titan_tree.data.sample_reader import SampleReader
from titan_tree.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = 0

NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def selected(language: str) -> list[pytest.ParameterSet]:
    """The pages with blocks of a language that are run, as parameters."""
    found = [page for page in PAGES if any(b.language == language and not b.not_run for b in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


def of_language(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language and not block.not_run]


@pytest.fixture
def clean_registries() -> Iterator[None]:
    """Removes what a page registers, so that it does not exist in other tests."""
    registries = [value for value in vars(titan_tree.registry).values() if isinstance(value, Registry)]
    entries = [dict(registry._entries) for registry in registries]
    yield
    for registry, before in zip(registries, entries, strict=True):
        registry._entries = before


@pytest.mark.parametrize("page", selected("python"))
@pytest.mark.usefixtures("clean_registries")
def test_python_blocks_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page share one namespace. ``__name__`` is not "__main__": no block starts a training."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    for block in of_language(page, "python"):
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(code, vars(module))
        if block.output is not None:
            assert_same_output(stdout.getvalue(), block.output)


@pytest.mark.parametrize("page", selected("bash"))
def test_bash_blocks_name_files_and_options_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``titan-tree`` runs. Other commands are checked only: their configuration, their keys, their options."""
    monkeypatch.chdir(tmp_path)
    for block in of_language(page, "bash"):
        for command in commands(block.code):
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                check_command(command)
            if block.output is not None:
                assert_same_output(stdout.getvalue(), block.output)


@pytest.mark.parametrize("page", selected("toml"))
def test_toml_blocks_are_valid_configurations(page: Path, tmp_path: Path) -> None:
    for block in of_language(page, "toml"):
        table = tomllib.loads(block.code)
        file = tmp_path / "config.toml"
        file.write_text(block.code)
        missing = [] if "files" in table.get("data", {}) else ["data.files=demo"]
        if not {"flavor", "hf_path"} & table.get("model", {}).keys():
            missing.append("model.flavor=debug")
        load_config(file, missing)


@pytest.mark.parametrize("page", selected("json"))
def test_json_blocks_are_records_that_the_reader_accepts(page: Path, tmp_path: Path) -> None:
    for block in of_language(page, "json"):
        file = tmp_path / "records.jsonl"
        file.write_text(block.code)
        reader = SampleReader(DataConfig(files=[str(file)]), TreeTokenizer.byte_level())
        assert all(reader.paths(group) for group in reader.groups())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_to_files_and_headings_that_exist(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_no_block_is_excluded_by_accident() -> None:
    excluded = [f"{page}:{block.line}" for page in PAGES for block in blocks(page) if block.not_run]
    assert len(excluded) == NOT_RUN, excluded


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command, without variables that are set in front of it."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            yield words


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "titan-tree":
        assert titan_tree_command(arguments) == 0
    elif "titan_tree.train" in words:
        check_training(words[words.index("titan_tree.train") + 1 :])
    elif program.endswith("scripts/train.sh") and arguments:
        check_training(["--config", *arguments])
    elif program in ("python", "python3") and not arguments[0].startswith("-"):
        check_script(ROOT / arguments[0], arguments[1:])
    elif program.endswith("scripts/test.sh"):
        for path in arguments:
            assert not path.startswith("tests/") or (ROOT / path).exists(), path
    elif program.startswith(("./", "scripts/", ".ci/")):
        assert (ROOT / program).exists(), program


def check_training(arguments: list[str]) -> None:
    assert arguments[0] == "--config", arguments
    load_config(ROOT / arguments[1], arguments[2:])


def check_script(script: Path, arguments: list[str]) -> None:
    """The script exists and mentions every option."""
    source = script.read_text()
    if script.parent.name == "benchmark":
        source += (script.parent / "common.py").read_text()
    for option in arguments:
        assert not option.startswith("--") or f'"{option}"' in source, f"{script}: {option}"


def assert_same_output(printed: str, shown: str) -> None:
    """Compares text and integers exactly, and decimal fractions up to rounding."""
    lines = [[line.rstrip() for line in text.strip("\n").splitlines()] for text in (printed, shown)]
    texts = [NUMBER.sub("0.0", "\n".join(text)) for text in lines]
    assert texts[0] == texts[1], f"printed:\n{printed}\nshown:\n{shown}"
    numbers = [map(float, NUMBER.findall("\n".join(text))) for text in lines]
    for got, expected in zip(*numbers, strict=True):
        assert math.isclose(got, expected, rel_tol=2e-3, abs_tol=2e-3), f"printed:\n{printed}\nshown:\n{shown}"
