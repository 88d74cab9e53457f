"""Formats: every reader gives the paths that the same tasks give in titan_tree's own schema."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from rich.progress import Progress

from tests.support import formats
from tests.support.datasets import REAL_DATA, sample_reader
from tests.support.formats import Task, write_dataset, write_document, write_lines, write_parquet
from tests.support.sessions import CLAUDE, CODEX, OPENHANDS, PI
from tests.support.traces import BRANCHES, EPISODES, GYM, GYM_CALLS, LIGHTNING, TRACE, TRIAL
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import (
    DEFAULT_FORMAT,
    READERS,
    SIGNATURES,
    Source,
    read_records,
    recognized_formats,
)
from titan_tree.data.token_store import write_store
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree

BYTES = TreeTokenizer.byte_level()

# What each data format can express of the tasks, and how to write them.
TASKS = {
    "openai_chat": (formats.own, formats.openai_chat),
    "openai_responses": (formats.own, formats.openai_responses),
    "anthropic": (formats.own, formats.anthropic),
    "sharegpt": (formats.only_text_or_calls, formats.sharegpt),
    "tree": (formats.own, formats.message_trees),
}
SESSIONS = {"claude_code": CLAUDE, "codex": CODEX, "pi": PI}
DOCUMENTS = {
    "tau_bench": (formats.without_tools, formats.tau_bench),
    "tau2_bench": (formats.own, formats.tau2_bench),
}


def tasks_of(name: str) -> list[Task]:
    if name == "demo":
        return formats.demo_tasks(3)
    if not REAL_DATA.is_dir():
        pytest.skip("needs the real rollouts")
    tasks = formats.real_tasks(name, 2)
    return [{**task, "trajectories": task["trajectories"][:2]} for task in tasks]


def paths_by_group(file: str, turns: str = "each", format: str = "auto"):
    """Returns (group id, its paths) in order."""
    reader = sample_reader(file, BYTES, format=format, sample={"turns": turns})
    return [(group.id, reader.paths(group)) for group in reader.files.groups()]


def contents(groups):
    """Returns per group the sorted (tokens, mask) of paths, and N_flat and N_tree of its tree."""
    result = {}
    for name, paths in groups:
        stats = TokenTree.from_paths(paths).stats
        listed = sorted((path.tokens.tolist(), path.loss_mask.tolist()) for path in paths)
        result[name] = (stats.n_flat, stats.n_tree, listed)
    return result


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns the contents of tasks in titan_tree's own schema, each computed once."""
    known = {}

    def compute(data: str, reduce, turns: str):
        key = (data, reduce, turns)
        if key not in known:
            file = write_lines(tmp_path_factory.mktemp("own") / "own.jsonl", reduce(tasks_of(data)))
            known[key] = contents(paths_by_group(file, turns, "jsonl"))
        return known[key]

    return compute


DATA = [
    ("demo", "each"),
    ("tau_airline", "whole"),
    ("toolbench_dfsdt", "whole"),
    ("webdancer_think", "whole"),
]


@pytest.mark.parametrize(("data", "turns"), DATA)
@pytest.mark.parametrize("format", TASKS)
def test_a_format_gives_the_paths_of_the_own_schema(tmp_path, expected, format, data, turns):
    reduce, write = TASKS[format]
    records = write(tasks_of(data))
    wanted = expected(data, reduce, turns)
    assert contents(paths_by_group(write_lines(tmp_path / "lines", records), turns)) == wanted
    assert contents(paths_by_group(write_document(tmp_path / "array", records), turns, format)) == wanted


@pytest.mark.parametrize(("data", "turns"), DATA[:2])
@pytest.mark.parametrize("format", DOCUMENTS)
def test_a_result_file_gives_the_paths_of_the_own_schema(tmp_path, expected, format, data, turns):
    reduce, write = DOCUMENTS[format]
    wanted = expected(data, reduce, turns)
    for indent in (None, 2):
        file = write_document(tmp_path / "results.json", write(tasks_of(data)), indent)
        assert contents(paths_by_group(file, turns)) == wanted
    first, *_ = next(iter(sample_reader(file).files.groups())).records
    assert first[1]["reward"] == tasks_of(data)[0]["trajectories"][0]["reward"]


@pytest.mark.parametrize(("data", "turns"), DATA)
def test_an_swe_agent_run_gives_the_paths_of_the_own_schema(tmp_path, data, turns):
    task = formats.without_tools(tasks_of(data))[0]
    run = task["trajectories"][0]
    own = write_lines(tmp_path / "own.jsonl", [{"id": "run", "trajectories": [run]}])
    file = write_document(tmp_path / "run.traj", formats.swe_agent(run))
    assert contents(paths_by_group(file, turns)) == contents(paths_by_group(own, turns))


@pytest.mark.parametrize("write", [write_lines, write_document, write_parquet, write_dataset])
@pytest.mark.parametrize("convert", [formats.token_rows, formats.token_trees])
def test_token_formats_give_the_same_paths_from_every_container(tmp_path, convert, write):
    own = write_lines(tmp_path / "own.jsonl", formats.demo_tasks(2))
    groups = paths_by_group(own, "each")
    file = write(tmp_path / "converted", convert(groups))
    assert contents(paths_by_group(file)) == contents(groups)


@pytest.mark.parametrize("write", [write_parquet, write_dataset])
@pytest.mark.parametrize("as_text", [True, False])
def test_messages_in_parquet_may_be_json_text(tmp_path, expected, write, as_text):
    records = formats.openai_chat(tasks_of("demo"))
    if as_text:
        records = [r | {name: json.dumps(r[name]) for name in ("messages", "functions")} for r in records]
    else:
        for message in (message for record in records for message in record["messages"]):
            if message["role"] == "user":
                message["content"] = message["content"][0]["text"]  # a column has one type
    file = write(tmp_path / "rows", records)
    assert contents(paths_by_group(file)) == expected("demo", formats.own, "each")


def test_every_format_is_recognized_by_one_reader_only(tmp_path):
    tasks = formats.demo_tasks(2)
    groups = paths_by_group(write_lines(tmp_path / "own.jsonl", tasks))
    files = {name: write_lines(tmp_path / name, write(tasks)) for name, (_, write) in TASKS.items()}
    files |= {name: write_document(tmp_path / name, write(tasks)) for name, (_, write) in DOCUMENTS.items()}
    files["swe_agent"] = write_document(tmp_path / "swe", formats.swe_agent(tasks[0]["trajectories"][0]))
    files["token_rows"] = write_lines(tmp_path / "rows", formats.token_rows(groups))
    files["token_store"] = str(tmp_path / "store")
    write_store(files["token_store"], groups, {})
    files["alpaca"] = write_lines(tmp_path / "alpaca", [{"instruction": "a", "input": "", "output": "b"}])
    files |= {name: write_lines(tmp_path / name, lines) for name, lines in SESSIONS.items()}
    files["openhands"] = write_document(tmp_path / "openhands", {"history": OPENHANDS})
    others = {
        "anthropic": {"messages": [{"role": "user", "content": "?"}], "system": "s"},
        "openai_responses": {"request": {"input": "?"}, "response": {"output": []}},
        "openai_chat": {"messages": [{"role": "user", "content": "?"}]},
        "token_rows": {"input_ids": [1, 2], "labels": [-100, 2]},
        "verifiers": TRACE,
        "nemo_gym": GYM,
        "agent_lightning": LIGHTNING,
        "nemo_gym_capture": GYM_CALLS[0],
        "agentcore": EPISODES[0],
        "skyrl_capture": BRANCHES[0],
        "harbor": TRIAL,
    }
    names = [name for name in READERS if name != DEFAULT_FORMAT]
    assert files.keys() <= set(names)  # all formats of titan_tree itself
    more = [(name, write_lines(tmp_path / f"{name}.more", [row])) for name, row in others.items()]
    more += [(None, str(tmp_path / "own.jsonl")), (None, write_lines(tmp_path / "t", [{"tokens": [1, 2]}]))]
    for expected_name, file in [*files.items(), *more]:
        claimed = [name for name in names if READERS[name]().recognizes(Source(file))]
        assert claimed == ([] if expected_name is None else [expected_name]), (file, claimed)
        assert list(recognized_formats(Source(file))) == claimed  # by their keys, too
    assert SIGNATURES.keys() == set(names) - {"token_store"}


READ_CHAT = """
import sys
from titan_tree.data.readers import read_records
print(len(list(read_records(sys.argv[1]))))
print(*sorted(name.partition(".data.readers.")[2] for name in sys.modules if ".data.readers." in name))
"""


def test_a_chat_file_imports_no_reader_of_another_format(tmp_path):
    """The readers of Anthropic's messages, of logs and of token ids share parts with that of OpenAI's."""
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "?"}]}])
    printed = subprocess.run(
        [sys.executable, "-c", READ_CHAT, file], check=True, capture_output=True, text=True
    ).stdout
    assert printed == (
        "1\nanthropic chat containers decompress openai_chat row_reader sampled strict_json text_rows "
        "token_rows\n"
    )


def test_an_ambiguous_file_names_the_candidates(tmp_path):
    file = write_lines(tmp_path / "f", [{"conversations": [], "instruction": "a", "output": "b"}])
    with pytest.raises(
        UserError, match=r"f: several readers recognize this file: sharegpt, alpaca; set data"
    ):
        list(read_records(file))


def test_the_beginning_of_a_long_document_suffices_to_recognize_it(tmp_path):
    messages = [{"role": "user", "content": "x, ] } " * 100_000}, {"role": "assistant", "content": "y"}]
    file = write_document(tmp_path / "f", [{"system": "s", "messages": messages}])
    assert [name for name in READERS if READERS[name]().recognizes(Source(file))] == ["jsonl", "anthropic"]


def test_zstandard_files_are_read_and_damage_is_an_error(tmp_path):
    lines = [json.dumps({"tokens": [n, n + 1] * 50}).encode() + b"\n" for n in range(2000)]
    frames = b"".join(zstandard.compress(b"".join(part)) for part in (lines[:1000], lines[1000:]))
    frames = b"\x50\x2a\x4d\x18\4\0\0\0size" + frames  # a frame without data, as pzstd writes it
    file = tmp_path / "f.zst"
    file.write_bytes(frames)
    assert [record["tokens"][0] for _, record in read_records(str(file))] == list(range(2000))
    file.write_bytes(frames[:-20])
    with pytest.raises(UserError, match=r"f.zst:\d+: damaged zstd file after this record \(the file ended"):
        list(read_records(str(file)))
    file.write_bytes(frames[:5] + bytes(100))
    with pytest.raises(UserError, match=r"f.zst: damaged zstd file"):
        list(read_records(str(file)))


@pytest.mark.parametrize("package", ["pyarrow", "zstandard"])
def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path, monkeypatch, package):
    file = tmp_path / "f"
    file.write_bytes(zstandard.compress(b"{}") if package == "zstandard" else b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"needs the package {package}; run pip install 'titan_tree\[data\]'"
    ):
        list(read_records(str(file)))


def test_a_progress_bar_can_wrap_every_container(tmp_path):
    records = formats.chat_text(formats.demo_tasks(1))
    plain = write_lines(tmp_path / "lines", records)
    packed = tmp_path / "lines.zst"
    packed.write_bytes(zstandard.compress(Path(plain).read_bytes()))
    files = [plain, packed, write_parquet(tmp_path / "p", records), write_dataset(tmp_path / "d", records)]
    with Progress(disable=True) as progress:
        for file in files:
            read = read_records(str(file), open_file=lambda name: progress.open(name, "rb"))
            assert [record["id"] for _, record in read] == [record["id"] for record in records]
