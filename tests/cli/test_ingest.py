"""titan-tree ingest: training on the store sees the same trees in the same order as on the files."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cases import slow_except
from tests.support.datasets import tree_dataset
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data import demo
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.token_store import TokenStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with 12 tasks of the sample, and their store."""
    folder = tmp_path_factory.mktemp("ingest")
    lines = [json.dumps(record) + "\n" for record in islice(demo.records(), 12)]
    (folder / "shop.jsonl").write_text("".join(lines))
    arguments = ["--tokenizer", "byte", "data.sample.keep_reasoning=false", "data.advantage=group"]
    assert main(["ingest", str(folder / "shop.jsonl"), str(folder / "shop.store"), *arguments]) == 0
    return folder


def as_data(dataset: TreeDataset, steps: int) -> list[Any]:
    """Returns the next steps as plain data: trees, samples, and all of their fields."""
    return [
        [
            [tree.tokens.tolist(), tree.path_node.tolist()]
            + [
                (path.id, path.weight, path.loss_mask.tolist(), np.asarray(path.advantage).tolist())
                for path in tree.paths
            ]
            for micro in step
            for tree in micro
        ]
        for step in dataset.steps(steps)
    ]


@pytest.mark.parametrize(
    "settings",
    slow_except([{}], [{}, {"merge": "batch"}, {"layout": "flat"}, {"replay": "first"}]),
    ids=["group", "batch", "flat", "replay"],
)
def test_a_store_gives_the_trees_of_its_files_in_the_same_order(
    folder: Path, settings: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"global_batch_groups": 5, "shuffle_buffer": 4, "max_tokens": 4096, **settings}
    sample = {"keep_reasoning": False}
    tokenizer = TreeTokenizer.byte_level("chatml")
    files = tree_dataset(folder / "shop.jsonl", tokenizer, advantage="group", sample=sample, **options)
    for given in ({}, {"advantage": "group"}, {"sample": sample}):
        store = tree_dataset(folder / "shop.store", None if not given else tokenizer, **given, **options)
        assert as_data(store, 4) == as_data(files, 4)
        assert store.position() == files.position()
        assert store.reader.files.sizes() == files.reader.files.sizes()
        files.epoch = files.group = 0


def test_inspect_reads_a_store_as_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokenizer", "byte"]
    results = []
    for file, more in (("shop.jsonl", ["data.sample.keep_reasoning=false"]), ("shop.store", [])):
        for output in (
            ["--json"],
            ["--show", "shop-3/trial1/2"],
            ["--report", "shop-3"],
            ["data.merge=batch"],
        ):
            assert main(["inspect", str(folder / file), *options, *output, *more]) == 0
            results.append(re.sub(r", advantage [-.\d]+", "", capsys.readouterr().out))
    assert results[:4] == results[4:]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["ingest", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store, out = folder / "shop.jsonl", folder / "shop.store", tmp_path / "out"
    byte = ["--tokenizer", "byte"]
    assert "--tokenizer: conversations need the tokenizer" in error_of(capsys, source, out)
    assert "this file exists; name another one, or replace it with --force" in error_of(
        capsys, source, store, *byte
    )
    assert "this is a token store already" in error_of(capsys, store, out)
    assert "shop.store: this is a token store already" in error_of(capsys, source, store, out, *byte)
    clock = tmp_path / "clock.jinja"
    clock.write_text("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "set the variable date" in error_of(capsys, source, out, *byte, "--template", clock)
    assert "shop.jsonl:1" in error_of(capsys, source, out, *byte, "data.sample.turns=9")
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "template", "message"),
    [
        ({"sample": {"turns": "last"}}, "chatml", "made with data.sample = {'keep_reasoning': False}, but"),
        ({}, "qwen3", "made with another tokenizer or chat template (byte) than that of this run"),
    ],
)
def test_settings_that_differ_from_those_of_the_store_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], template: str, message: str
) -> None:
    sample = [f"{key}={value}" for key, value in settings.get("sample", {}).items()]
    arguments = ["--tokenizer", "byte", "--template", template, *(f"data.sample.{each}" for each in sample)]
    assert main(["inspect", str(folder / "shop.store"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_defaults_may_be_spelt_out(folder: Path) -> None:
    options = ["data.sample={keep_reasoning: false, turns: each}", "data.tokenizer=byte"]
    assert main(["inspect", str(folder / "shop.store"), *options]) == 0


def test_the_header_says_what_the_store_is_made_of(folder: Path) -> None:
    header = TokenStore(folder / "shop.store").header
    (source,) = header["sources"]
    assert source["file"] == str(folder / "shop.jsonl")
    assert source["bytes"] == (folder / "shop.jsonl").stat().st_size
    assert header["sample"] == {"keep_reasoning": False}
    assert header["tokenizer"] == TreeTokenizer.byte_level("chatml").fingerprint()
