"""TokenStore: stored trees equal those of the samples; damaged, foreign and existing files are refused."""

import dataclasses
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.oracle import random_groups
from titan_tree.data.token_store import TokenStore, write_store
from titan_tree.data.tree_bytes import ALIGNMENT
from titan_tree.errors import UserError
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree


def assert_equal(ours: Any, theirs: Any, name: str) -> None:
    if isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, name)
    elif isinstance(theirs, tuple):
        assert type(ours) is type(theirs), name
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other, name)
    else:
        assert ours == theirs, name


def assert_same_tree(ours: TokenTree, theirs: TokenTree) -> None:
    for field in dataclasses.fields(TokenTree):
        if field.name in ("paths", "routed_experts"):
            continue
        assert_equal(getattr(ours, field.name), getattr(theirs, field.name), field.name)
    for path, expected in zip(ours.paths, theirs.paths, strict=True):
        for field in dataclasses.fields(TokenPath):
            assert_equal(getattr(path, field.name), getattr(expected, field.name), field.name)


def with_fields(paths: list[TokenPath], draw: random.Random) -> list[TokenPath]:
    """Returns the paths with all fields, some of them missing in some paths."""
    made = []
    for number, path in enumerate(paths):
        n = len(path)
        fields: dict[str, Any] = {name: [-draw.random() for _ in range(n)] for name in PER_TOKEN}
        fields["advantage"] = draw.random()
        if number % 2 and n > 1:
            fields["routed_experts"] = [[[draw.randrange(4)], [draw.randrange(4)]] for _ in range(n - 1)]
            fields["ref_logprobs"] = None
            fields["sampling_mask"] = [
                [9, int(token)] if draw.random() < 0.7 else None for token in path.tokens
            ]
            fields["teacher_topk"] = [{9: -3, int(token): -draw.random() - 1} for token in path.tokens]
            fields["teacher"] = f"teacher {number}"
        mask = [draw.choice([0, 1, 0.5]) for _ in range(n)]
        made.append(TokenPath(path.tokens, mask, draw.random(), id=f"é{number}\n", **fields))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_stored_trees_equal_those_of_the_samples(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    groups = [(f"group {i}", list(paths)) for i, paths in enumerate(random_groups(seed))]
    groups += [("all fields", with_fields(groups[0][1], draw)), ("one token", [TokenPath([5])] * 2)]
    written = write_store(tmp_path / "store", groups, {"made": ["of", 1]})
    store = pickle.loads(pickle.dumps(TokenStore(tmp_path / "store")))
    assert store.header["made"] == ["of", 1]
    assert store.ids == [id for id, _ in groups]
    for (_, paths), stored, row, sizes in zip(groups, store, store.table, written, strict=True):
        expected = TokenTree.from_paths(paths)
        assert_same_tree(stored.tree(), expected)
        assert sizes == (stats := expected.stats)
        assert (row["n_tree"], row["n_flat"], row["n_paths"]) == (stats.n_tree, stats.n_flat, stats.n_paths)
        assert row["offset"] % ALIGNMENT == 0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    file = tmp_path / "store"
    write_store(file, [("a", [TokenPath([1, 2, 3])]), ("b", [TokenPath([1, 4])])], {})
    return file


def test_flipped_bits_are_noticed(store: Path) -> None:
    whole = store.read_bytes()
    trees = [stored.tree() for stored in TokenStore(store)]
    errors = []
    for byte in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << byte % 8
        store.write_bytes(damaged)
        try:
            for ours, theirs in zip(TokenStore(store), trees, strict=True):
                assert_same_tree(ours.tree(), theirs)
        except UserError as error:
            errors.append(str(error))
    assert len(errors) > len(whole) / 10  # the other bytes are padding
    assert all(error.startswith(f"{store}: ") for error in errors)


@pytest.mark.parametrize("size", [0, 1, 27, 64, -1])
def test_a_truncated_store_is_refused(store: Path, size: int) -> None:
    store.write_bytes(store.read_bytes()[:size])
    with pytest.raises(UserError, match="incomplete or damaged; copy or ingest it again"):
        TokenStore(store)


def test_two_joined_stores_are_refused(store: Path) -> None:
    store.write_bytes(store.read_bytes() * 2)
    with pytest.raises(UserError, match="incomplete or damaged; copy or ingest it again"):
        TokenStore(store)


def test_a_store_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_tree.data.token_store.VERSION", 9)
    write_store(tmp_path / "store", [("a", [TokenPath([1])])], {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="expected a token store of version 1, got version 9"):
        TokenStore(tmp_path / "store")


def test_an_existing_file_stays_as_it_is(store: Path) -> None:
    before = store.read_bytes()
    with pytest.raises(UserError, match="this file exists; name another one"):
        write_store(store, [], {})
    assert store.read_bytes() == before


def test_nothing_remains_of_a_store_that_was_not_finished(tmp_path: Path) -> None:
    def groups() -> Any:
        yield "a", [TokenPath([1])]
        raise UserError("bad line")

    with pytest.raises(UserError, match="bad line"):
        write_store(tmp_path / "store", groups(), {})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for name, reason in ((Path("file/store"), "Not a directory"), (Path("x" * 300), "File name too long")):
        with pytest.raises(UserError, match=f"cannot be written: {reason}"):
            write_store(tmp_path / name, groups(), {})


def test_a_store_that_another_process_wrote_meanwhile_stays(tmp_path: Path) -> None:
    def groups() -> Any:
        yield "a", [TokenPath([1])]
        (tmp_path / "store").write_text("another")

    with pytest.raises(UserError, match="this file exists; name another one"):
        write_store(tmp_path / "store", groups(), {})
    assert [file.read_text() for file in tmp_path.iterdir()] == ["another"]


def test_records_of_different_models_are_refused(tmp_path: Path) -> None:
    paths = [TokenPath([1], routed_experts=experts) for experts in ([[[0]]], [[[0, 1]]])]
    with pytest.raises(
        UserError, match=r"path \?: routed_experts: expected as many layers.* \(1, 1\) and \(1, 2\)"
    ):
        write_store(tmp_path / "store", [("a", paths)], {})
