"""Readers: files, formats and damaged files, and how a new format is added."""

import codecs
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.datasets import tree_dataset
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import READERS, Reader, find_files, read_records
from titan_tree.data.readers.row_reader import RowReader
from titan_tree.errors import UserError, printable


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def read(files, **options):
    return [placed for file in find_files(files) for placed in read_records(file, **options)]


def test_json_lines_are_records_with_file_and_line(tmp_path):
    file = write(tmp_path / "a.jsonl", {"tokens": [1]}, " ", {"tokens": [2]})
    expected = [(f"{file}:1", {"tokens": [1]}), (f"{file}:3", {"tokens": [2]})]
    assert read([file]) == read([file], format="jsonl") == expected


def test_gzip_files_and_globs_are_read_in_order(tmp_path):
    lines = [json.dumps({"tokens": [n]}).encode() + b"\n" for n in range(4)]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:2])))
    (tmp_path / "a.data").write_bytes(gzip.compress(b"".join(lines[2:])))  # gzip is recognized by content

    def order(*files):
        return [record["tokens"][0] for _, record in read(files)]

    assert order(str(tmp_path / "b.jsonl.gz"), str(tmp_path / "a.data")) == [0, 1, 2, 3]
    assert order(str(tmp_path / "*")) == [2, 3, 0, 1]
    assert order(str(tmp_path / "b.jsonl.gz")) == [0, 1]


def test_files_are_opened_through_the_callback(tmp_path):
    """The progress bar of titan-tree inspect depends on it."""
    plain = write(tmp_path / "a.jsonl", {"tokens": [1]})
    zipped = str(tmp_path / "b.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"tokens": [2]}'))
    opened = []

    def open_file(file):
        opened.append(file)
        return open(file, "rb")

    assert [record for _, record in read([plain, zipped], open_file=open_file)] == [
        {"tokens": [1]},
        {"tokens": [2]},
    ]
    assert opened == [plain, zipped]


class DialogueReader(RowReader):
    """Turns of two speakers, who alternate."""

    def recognizes_row(self, row):
        return "dialogue" in row

    def convert(self, row):
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(row["dialogue"])]}


@pytest.fixture
def dialogue(monkeypatch):
    monkeypatch.setattr(READERS, "_entries", READERS._entries | {"dialogue": DialogueReader})


@pytest.mark.usefixtures("dialogue")
@pytest.mark.parametrize("format", ["auto", "dialogue"])
def test_a_new_format_is_one_class_and_one_registration(tmp_path, format):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    foreign = write(tmp_path / "a", {"dialogue": ["hi", "yo"]})
    assert read([foreign], format=format) == [(f"{foreign}:1", {"messages": messages})]
    zipped = tmp_path / "a.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    assert read([str(zipped)], format=format) == [(f"{zipped}:1", {"messages": messages})]
    ((tree,),) = next(
        iter(tree_dataset(foreign, TreeTokenizer.byte_level(), format=format, global_batch_groups=1))
    )
    assert tree.tokens.tolist() == TreeTokenizer.byte_level().samples(messages)[0].tokens.tolist()


@pytest.mark.usefixtures("dialogue")
def test_a_reader_that_returns_no_record_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(DialogueReader, "convert", lambda self, row: None)
    foreign = write(tmp_path / "a", {"dialogue": ["hi"]})
    with pytest.raises(UserError, match=r"a:1: DialogueReader\.convert: expected a dict, got NoneType"):
        read([foreign])


@pytest.mark.usefixtures("dialogue")
def test_auto_recognizes_each_file_by_its_content(tmp_path):
    foreign = write(tmp_path / "a.jsonl", {"dialogue": ["hi"]})
    own = write(tmp_path / "b.jsonl", {"tokens": [1]})
    assert [list(record) for _, record in read([foreign, own])] == [["messages"], ["tokens"]]
    assert [list(record) for _, record in read([foreign, own], format="jsonl")] == [["dialogue"], ["tokens"]]


def test_an_unknown_format_is_an_error(tmp_path):
    file = write(tmp_path / "a", {"tokens": [1]})
    with pytest.raises(UserError, match="unknown data format 'json'; did you mean 'jsonl'"):
        read([file], format="json")


def test_unreadable_files_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl: no such file"):
        read([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(UserError, match="no such file"):
        read([str(tmp_path / "*.none")])
    with pytest.raises(UserError, match="got none"):
        read([])
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: expected a file, or a folder that datasets"):
        list(read_records(str(tmp_path / "folder")))
    empty = write(tmp_path / "empty", " ")
    with pytest.raises(UserError, match="empty: expected at least one record in the format jsonl, got none"):
        read([empty])
    latin = tmp_path / "latin"
    latin.write_bytes(b'{"id": "\xe9", "tokens": [1]}\n')
    with pytest.raises(UserError, match="latin:1: expected UTF-8"):
        read([str(latin)])


def test_links_that_a_pattern_would_follow_again_and_again_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("g")
    os.symlink("../g", "g/loop")
    with pytest.raises(
        UserError, match=r"^g/loop: a link to a folder around it, which g/\*\*/x would follow"
    ):
        find_files(["g/**/x"])
    with pytest.raises(UserError, match=r"g/loop: a link to a folder around it"):
        find_files(["[g]/**/x"])
    os.unlink("g/loop")
    os.mkdir("h")
    (tmp_path / "h" / "x").write_text("")
    os.symlink("../h", "g/link")
    assert find_files(["g/**/x"]) == ["g/link/x"]


def test_names_that_lead_to_no_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    (tmp_path / "t.csv").write_text("a,b\n")
    (tmp_path / "my.toml").touch()
    os.symlink("nowhere", "broken")
    os.symlink("loop", "loop")
    reasons = {
        "fifo": "cannot be read: expected a regular file, got a FIFO; write its content to a file",
        "/dev/zero": "cannot be read: expected a regular file, got a device",
        "broken": "the link leads to no file",
        "b*": "the link leads to no file",
        "loop": "cannot be read: Too many levels of symbolic links",
        "a" * 300: "cannot be read: File name too long",
        "a\0b": "cannot be read: embedded null byte",
        "x\udce9\x1b\n*": f"no such file in {tmp_path}",
        "-": "no such file; write what is piped to a file, and name that",
        "hf://datasets/a/b": "no such file; download it, and name that file",
        "fifp": "no such file; did you mean fifo?",
        "a,b": "no such file; separate several files by spaces, or in a configuration as a list: "
        "[a.jsonl, b.jsonl]",
    }
    for name, reason in reasons.items():
        for format in ("auto", "jsonl"):
            with pytest.raises(UserError) as error:
                read([name], format=format)
            # Python 3.14 names a null byte otherwise.
            message = str(error.value).replace("stat: embedded null character in path", "embedded null byte")
            assert message == f"{printable('broken' if name == 'b*' else name)}: {reason}"
    with pytest.raises(
        UserError, match=r"t\.csv: expected JSON Lines, JSON or Parquet, got a table as text; "
    ):
        read(["t.csv"])
    with pytest.raises(
        UserError, match=r"^my\.toml: expected data, got a configuration; give its data\.files$"
    ):
        read(["my.toml"])


def test_a_name_that_is_not_unicode_is_read(tmp_path):
    file = write(tmp_path / "x\udce9\x1b\n", {"tokens": [1]})
    assert read([str(tmp_path / "*")]) == [(f"{file}:1", {"tokens": [1]})]


@pytest.mark.parametrize("text", ['[\n{"tokens": [1]}\n]', '{"tokens": [1]}\n', '{\n"tokens": [1]}'])
def test_a_byte_order_mark_is_skipped_in_utf_8_and_refused_in_others(tmp_path, text):
    file = tmp_path / "file"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(text, encoding=encoding)
        assert [record for _, record in read([str(file)])] == [{"tokens": [1]}]
    for encoding in ("utf-16", "utf-32"):
        file.write_text(text, encoding=encoding)
        with pytest.raises(
            UserError, match=r"file:1: expected UTF-8 text: invalid start byte at byte 1; .*iconv"
        ):
            read([str(file)])


@pytest.mark.parametrize("text", ['{"tokens": [1]\n}', '{"tokens"\n: [1]}', '{"tokens": [1]\n\n, "id": "a"}'])
def test_a_document_may_go_on_where_a_line_begins(tmp_path, text):
    (tmp_path / "file").write_text(text)
    assert [record for _, record in read([str(tmp_path / "file")])] == [json.loads(text)]


@pytest.mark.parametrize("content", [b"", b"\n", codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\r\n"])
def test_a_file_without_a_line_is_named(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=r"file: expected at least one record in the format jsonl, got none"):
        read([str(tmp_path / "file")])


@pytest.mark.parametrize("damage", ["truncated", "wrong checksum"])
def test_a_damaged_gzip_file_is_an_error(tmp_path, damage):
    r = np.random.default_rng(0)
    data = gzip.compress(
        "".join(json.dumps({"tokens": r.integers(0, 9, 50).tolist()}) + "\n" for _ in range(99)).encode()
    )
    file = tmp_path / "f.gz"
    file.write_bytes(data[: len(data) // 2] if damage == "truncated" else data[:-8] + b"\0" * 8)
    with pytest.raises(UserError, match=r"f.gz:\d+: damaged gzip file"):
        read([str(file)])


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_list_of_messages_is_one_conversation(tmp_path):
    files = {
        "one line": json.dumps(MESSAGES),
        "a document": json.dumps(MESSAGES, indent=1),
        "a message per line": "[" + ",\n".join(map(json.dumps, MESSAGES)) + "]",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read([str(tmp_path / name)]) == [(f"{tmp_path}/{name}", {"messages": MESSAGES})]
    lines = write(tmp_path / "lines", MESSAGES, MESSAGES)
    assert read([lines]) == [(f"{lines}:{n}", {"messages": MESSAGES}) for n in (1, 2)]
    for number, indent in enumerate((None, 1)):
        both = tmp_path / f"both{number}"
        both.write_text(json.dumps([MESSAGES, MESSAGES], indent=indent))
        assert read([str(both)]) == [(f"{both}:[{n}]", {"messages": MESSAGES}) for n in (0, 1)]
    with pytest.raises(UserError, match=r"expected one JSON object per line, got list"):
        read([write(tmp_path / "other", {"messages": MESSAGES}, [1])])


def test_columns_of_the_type_json_are_parsed(tmp_path):
    """As datasets stores Json() and List(Json()); null in a value stays, as the model wrote it."""
    import pyarrow
    import pyarrow.parquet

    def as_json(*texts):
        return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))

    texts = [json.dumps(m | {"x": None}) for m in MESSAGES]
    messages = pyarrow.ListArray.from_arrays([0, 2], as_json(*texts))
    nested = pyarrow.StructArray.from_arrays([as_json("[1]"), pyarrow.array(["[2]"])], ["tools", "name"])
    table = pyarrow.table({"messages": messages, "nested": nested})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ((_, record),) = read([str(tmp_path / "a.parquet")])
    assert record == {
        "messages": [m | {"x": None} for m in MESSAGES],
        "nested": {"tools": [1], "name": "[2]"},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Access denied", r"begins with 'Access denied'; download it again"),
        ("<html>", "it is a web page or XML"),
        ("version https://git-lfs.github.com/spec/v1", "it is a pointer of Git LFS"),
    ],
)
def test_what_is_named_parquet_and_is_not_is_named(tmp_path, content, message):
    (tmp_path / "x.parquet").write_text(content)
    with pytest.raises(UserError, match=r"x.parquet: expected a Parquet file.*" + message):
        read([str(tmp_path / "x.parquet")])


def test_a_session_of_gemini_is_refused_by_name(tmp_path):
    head = {"sessionId": "s", "projectHash": "h", "startTime": "t"}
    for rows in (
        [head, {"id": "1", "type": "user", "content": "a"}],
        [head | {"messages": [{"type": "user"}]}],
    ):
        with pytest.raises(
            UserError, match="f: a session of Gemini CLI, which is not read; write its messages"
        ):
            read([write(tmp_path / "f", *rows)])


def test_an_id_that_appears_twice_is_named_once(tmp_path, caplog):
    rows = [{"id": name, "messages": MESSAGES} for name in ("a", "b", "a", "b")]
    dataset = tree_dataset([write(tmp_path / "f", *rows)], TreeTokenizer.byte_level())
    assert len(list(dataset.reader.files.groups())) == 4
    (line,) = [r.message for r in caplog.records if "appeared before" in r.message]
    assert line.startswith(f"{tmp_path}/f:3: the id 'a' appeared before")


class Abstract(RowReader):
    """Lacks ``convert``."""


def reader(function, recognizes=lambda self, source: True):
    return type("Mine", (Reader,), {"records": function, "recognizes": recognizes})


def exits(self, source):
    yield f"{source.path}:1", {"tokens": [1]}
    raise SystemExit(0)


def opens(self, source):
    yield from Path(f"{source.path}.missing").read_text()


KEYED = r"data format 'mine' \(data\.format\)(, called with \(source\))?: "


@pytest.mark.parametrize("format", ["mine", "auto"])
@for_each(
    "mine, message",
    [
        (Abstract, rf"^{KEYED}TypeError: Can't instantiate abstract class Abstract"),
        (reader(lambda self: iter(())), rf"^{KEYED}TypeError: .* takes 1 positional argument"),
        (reader(lambda self, source: None), rf"^{KEYED}TypeError: 'NoneType' object is not iterable"),
        (reader(lambda self, source: iter([])), "expected at least one record in the format mine, got none"),
        (
            reader(lambda self, source: iter([{"tokens": [1]}])),
            "data.format: 'mine': expected .place, record",
        ),
        (reader(exits), rf"^{KEYED}.*\.py:\d+: SystemExit: 0"),
        (reader(opens), r"a\.jsonl: cannot be read: No such file"),
    ],
)
def test_a_reader_of_ones_own_that_fails_is_one_line(tmp_path, mine, message, format):
    file = write(tmp_path / "a.jsonl", {"unknown": 1})
    with READERS.registered("mine", mine):
        if format == "auto":
            mine.recognizes_row = lambda self, row: True
        with pytest.raises(
            UserError, match=message.replace(r" \(data\.format\): ", r" \(data\.format\).*: ")
        ):
            list(read([file], format=format))


def test_what_recognizes_a_file_is_named_if_it_fails(tmp_path):
    file, mine = write(tmp_path / "a.jsonl", {"unknown": 1}), reader(exits, lambda self: True)
    expected = r"^data format 'mine' .*, called with \(source\): TypeError: .*takes 1"
    with READERS.registered("mine", mine), pytest.raises(UserError, match=expected):
        read([file])
