"""Hostile snapshots: each one is refused in one line, before memory is allocated for what it claims."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.snapshots import edit_config
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained

BRACKETS = "[" * 100_000
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the folders of a snapshot in several shards, and of one in a single file."""
    folder = tmp_path_factory.mktemp("hf")
    model = build_model("qwen3", "debug", num_hidden_layers=2)
    save_pretrained(model, folder / "shards", max_shard_bytes=30_000)
    save_pretrained(model, folder / "one")
    return folder


@pytest.fixture
def shards(written, tmp_path):
    return shutil.copytree(written / "shards", tmp_path / "s")


@pytest.fixture
def one(written, tmp_path):
    return shutil.copytree(written / "one", tmp_path / "s")


@pytest.mark.parametrize(
    "content", ["", "3", "null", "[]", "{", "\0", BRACKETS, '{"a":' * 100_000, "9" * 5000]
)
@pytest.mark.parametrize("name", ["config.json", INDEX, "router_biases.json"])
def test_json_of_another_kind_is_refused(shards, name, content):
    (shards / name).write_text(content)
    assert name in refusal(shards)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "router_biases.json"])
def test_a_fifo_is_refused_without_waiting(one, name):
    (one / name).unlink(missing_ok=True)
    os.mkfifo(one / name)
    assert "regular file, got a FIFO" in (text := refusal(one)) or "found neither" in text


def test_a_byte_order_mark_is_skipped(one):
    file = one / "config.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert load_pretrained(one).config


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_files_that_are_no_text_are_refused(shards, name):
    (shards / name).write_bytes(b'{"a": "\xff"}')
    assert f"{name}: expected UTF-8 text" in refusal(shards)
    (shards / name).unlink()
    (shards / name).mkdir()
    assert "expected" in refusal(shards) or "cannot be read" in refusal(shards)
    (shards / name).rmdir()
    with (shards / name).open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    assert "expected at most 134,217,728 bytes of JSON" in refusal(shards)


@pytest.mark.parametrize("weight_map", [3, [], {}, None, "x", [["a", "b"]]])
def test_a_weight_map_of_another_type_is_refused(shards, weight_map):
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "expected a table weight_map" in refusal(shards)


FILES = [
    3,
    None,
    [],
    {},
    "",
    ".",
    "..",
    "../x.safetensors",
    "/etc/passwd",
    "/x.safetensors",
    "a/x.safetensors",
]
FILES += ["..\\x", "x.bin", "pytorch_model.bin", "x.pt", "a\0.safetensors", "none.safetensors", "\ud800"]


@pytest.mark.parametrize("file", FILES)
def test_an_index_names_safetensors_files_of_its_folder_only(shards, file):
    shutil.copy(next(shards.glob("*.safetensors")), shards.parent / "x.safetensors")
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"][NAME] = file
    (shards / INDEX).write_text(json.dumps(index))
    refusal(shards)


def test_links_of_the_cache_are_followed(one):
    """Hugging Face's cache has snapshots/REVISION/FILE -> ../../blobs/HASH."""
    blob = one.parent / "blob"
    (one / WEIGHTS).rename(blob)
    (one / WEIGHTS).symlink_to("../blob")
    load_pretrained(one)
    blob.unlink()
    assert "expected model.safetensors" in refusal(one)


def test_two_sets_of_weights_are_refused(written, shards):
    shutil.copy(written / "one" / WEIGHTS, shards)
    assert refusal(shards) == f"{shards}: expected {WEIGHTS}, or {INDEX} with its files; remove one of them"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_by_name(one, name):
    (one / WEIGHTS).rename(one / name)
    assert f"found only {name}, a pickle" in refusal(one)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(one, value, dtype):
    weights = load_file(one / WEIGHTS)
    weights[NAME] = weights[NAME].to(dtype)
    weights[NAME][3, 5] = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    save_file(weights, one / WEIGHTS)
    assert f"{NAME}: expected finite weights" in refusal(one)


def tensor(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = ["", "{", "[]", BRACKETS, "\xff\xfe", {"a": 3}]
HEADERS += [{"a": tensor([2], [0, 4])}, {"a": tensor([1], [0, 400])}, {"a": tensor([-1], [0, 4])}]
HEADERS += [{"a": tensor([2**62, 4], [0, 4])}, {"a": tensor([1], [0, 4]), "b": tensor([1], [0, 4])}]
HEADERS += [{"a": tensor([1], [0, 4], "X")}, {"a": tensor([1], [4, 0])}]


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_header_is_refused(one, header):
    content = (header if isinstance(header, str) else json.dumps(header)).encode("latin-1")
    (one / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content + b"1234")
    assert "not a complete safetensors file" in refusal(one)


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_impossible_length_is_refused(one, length):
    content = (one / WEIGHTS).read_bytes()
    (one / WEIGHTS).write_bytes(struct.pack("<Q", length) + content[8:])
    assert "not a complete safetensors file" in refusal(one)


@pytest.mark.parametrize("size", [0, 1, 8, 100, 1000])
def test_a_truncated_file_is_refused(one, size):
    (one / WEIGHTS).write_bytes((one / WEIGHTS).read_bytes()[:size])
    assert "not a complete safetensors file" in refusal(one)


VALUES = (0, -1, 10**9, 10**30, 1e300, float("nan"), "x", [], {}, [[]], {"a": 1}, True)


@pytest.mark.parametrize(
    "field", ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "head_dim"]
)
def test_impossible_values_are_refused(one, field):
    for value in VALUES:
        edit_config(one, **{field: value})
        refusal(one)


EMPTY = (0, [], {})  # as if the field was missing


@pytest.mark.parametrize(
    ("field", "accepted"),
    [
        ("architectures", EMPTY),
        ("layer_types", EMPTY),
        ("rope_parameters", EMPTY),
        ("rope_scaling", EMPTY),
    ],
)
def test_other_fields_of_a_wrong_type_are_refused(one, field, accepted):
    expected = load_pretrained(one).config
    for value in VALUES:
        edit_config(one, **{field: value})
        if value in accepted:
            assert load_pretrained(one).config == expected, value
        else:
            assert f"config.json: {field}: " in refusal(one, implementation="native"), value


@pytest.mark.parametrize("value", [None, float("nan"), 10**400, "1", True, []])
def test_router_biases_are_finite_numbers(tmp_path, value):
    model = build_model("qwen3_moe", "debug")
    model.experts.add_router_biases()
    save_pretrained(model, tmp_path / "s")
    path = tmp_path / "s" / "router_biases.json"
    biases = json.loads(path.read_text())
    next(iter(biases.values()))[0] = value
    path.write_text(json.dumps(biases))
    assert "finite number" in refusal(tmp_path / "s")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_exported_files_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_pretrained(build_model("qwen3", "debug"), tmp_path / "s")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "s").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


@pytest.mark.parametrize("content", ["", "3", "[]", "{", BRACKETS, '{"a":' * 100_000, "9" * 5000, "{}"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        TreeTokenizer.from_hf(tmp_path, "chatml")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("field", ["model", "added_tokens", "pre_tokenizer", "normalizer"])
def test_fields_of_a_tokenizer_of_wrong_types_are_refused(tmp_path, field):
    nested = {"type": "NFC"}
    for _ in range(300):
        nested = {"type": "Sequence", f"{field}s".replace("_", ""): [nested]}
    spec = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    for value in (3, "x", [3], [[]], {"type": []}, {"type": "Sequence"}, {"vocab": 3, "merges": 3}, nested):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {field: value}))
        with pytest.raises(UserError) as error:
            TreeTokenizer.from_hf(tmp_path, "chatml")
        assert str(error.value).isprintable()


def refusal(folder, **options):
    """Returns the message of the UserError that loading raises: one line that names the folder."""
    with pytest.raises(UserError) as error:
        load_pretrained(folder, **options)
    message = str(error.value)
    assert message.isprintable()
    assert str(folder) in message
    assert len(message) < 400 + len(str(folder))
    return message
