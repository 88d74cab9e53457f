"""Data and tokenizer files that expand to much more than they are: refused in one line, in bounded memory."""

import gzip
import json
import resource

import pytest
import zstandard

from tests.support.cases import for_each
from titan_tree.components.tree_tokenizer import TreeTokenizer, vocabulary
from titan_tree.data.readers import containers, decompress, read_records
from titan_tree.errors import UserError

MB = 1 << 20


@pytest.fixture
def bomb(tmp_path):
    """Returns a function that writes a compressed file of the content, repeated."""

    def write(kind, content, times):
        file = tmp_path / f"a.jsonl.{kind}"
        if kind == "gz":
            with gzip.open(file, "wb", compresslevel=9) as stream:
                for _ in range(times):
                    stream.write(content)
        else:
            with zstandard.open(file, "wb") as stream:
                for _ in range(times):
                    stream.write(content)
        return str(file)

    return write


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("content", [b" " * MB, b"[" * MB, b'{"a": "' + b"x" * MB])
def test_a_decompression_bomb_is_refused_in_one_line(bomb, monkeypatch, kind, content):
    monkeypatch.setattr(decompress, "FREE_BYTES", 4 * MB)
    monkeypatch.setattr(containers, "MAX_LINE_BYTES", 12 * MB)
    file = bomb(kind, content, 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        list(read_records(file))
    assert str(error.value).startswith(file)
    assert str(error.value).isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_a_line_without_end_is_refused_with_its_number(bomb, monkeypatch):
    monkeypatch.setattr(containers, "MAX_LINE_BYTES", 1000)
    file = bomb("gz", b'{"tokens": [1]}\n' + b"x" * 2000, 1)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz:2: expected at most 1,000 bytes per line"):
        list(read_records(file))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_real_data_of_a_high_ratio_is_read(bomb, monkeypatch, kind):
    monkeypatch.setattr(decompress, "FREE_BYTES", MB // 4)
    line = json.dumps({"tokens": list(range(5000)) * 2}).encode() + b"\n"
    file = bomb(kind, line, 50)
    assert len(list(read_records(file))) == 50
    with open(file, "rb") as raw:
        assert len(line) * 50 > 20 * len(raw.read())


@pytest.mark.parametrize("name", ["a.tiktoken.gz", "tokenizer.json"])
def test_a_tokenizer_bomb_is_refused_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(vocabulary, "MAX_BYTES", MB)
    (tmp_path / name).write_bytes(gzip.compress(b" " * (8 * MB)))
    with pytest.raises(UserError, match="expected at most 1,048,576 bytes of a tokenizer") as error:
        TreeTokenizer.load(tmp_path / name if name.endswith("gz") else tmp_path, "chatml")
    assert str(tmp_path / name) in str(error.value)


@for_each("value", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[1, " + "9" * 5000 + "]"])
@for_each("field", ["tokens", "weight", "reward", "id"])
def test_deep_brackets_and_giant_integers_are_refused_with_file_and_line(tmp_path, value, field):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"tokens": [1, 2]}}\n{{"tokens": [1, 2], "{field}": {value}}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: ") as error:
        list(read_records(str(file)))
    assert str(error.value).isprintable()
