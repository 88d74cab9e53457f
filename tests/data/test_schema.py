"""The record schema is strict: nothing is dropped, guessed or converted silently."""

import base64
import io
import json
import os

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.datasets import REAL_DATA, sample_reader, tree_dataset
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.data.schema import KNOWN
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

BYTES = TreeTokenizer.byte_level()
ROW = {"tokens": [5, 6, 7]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def paths_of(tmp_path, *lines, **settings):
    """Returns the paths of each group of a file with these lines."""
    file = tmp_path / "rollouts.jsonl"
    text = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    file.write_bytes(b"".join(line + b"\n" for line in text))
    reader = sample_reader(file, BYTES, **settings)
    return [reader.paths(group) for group in reader.files.groups()]


def error_of(tmp_path, *lines, **settings):
    """Returns the error of a file without the file's name: "line: message"."""
    with pytest.raises(UserError) as error:
        paths_of(tmp_path, *lines, **settings)
    message = str(error.value)
    assert message.isprintable()
    assert message.startswith(f"{tmp_path}/rollouts.jsonl:")
    return message.removeprefix(f"{tmp_path}/rollouts.jsonl:")


@for_each(
    ("record", "message"),
    [
        (ROW | {"advantages": 1}, "advantages: unknown field; did you mean 'advantage'?"),
        (ROW | {"old_logprob": [0, -1, -2]}, "old_logprob: unknown field; did you mean 'old_logprobs'?"),
        (
            ROW | {"zzz": 1, "yyy": 1},
            "zzz, yyy: unknown fields of token ids. To ignore: data.ignore_fields='[",
        ),
        (ROW | {"labels": [-100, 6, 7]}, "labels: not read; give unpadded tokens and a loss_mask"),
        (ROW | {"tools": []}, "tools: not read here; only conversations have tools"),
        (CHAT | {"tool": []}, "tool: unknown field; did you mean 'tools'?"),
        ({"trajectories": [ROW], "weights": 1}, "weights: unknown field; did you mean 'weight'?"),
        ({"trajectories": [ROW], "reward": 1}, "reward: not read here; give each trajectory a reward"),
        ({"trajectories": [ROW | {"wieght": 1}]}, "trajectories[0]: wieght: unknown field; did you mean"),
        (
            {"messages": [{**CHAT["messages"][0], "nmae": "x"}]},
            "messages[*].nmae: unknown field; did you mean",
        ),
    ],
)
def test_an_unknown_field_is_an_error_that_names_the_nearest_one(tmp_path, record, message):
    error = error_of(tmp_path, ROW, record)
    assert error.startswith(f"2: {message}")
    assert error.endswith("""]'""")


def test_legacy_calls_are_refused_unless_the_reader_converts_them(tmp_path):
    legacy = {"messages": [CHAT["messages"][0], {"role": "assistant", "function_call": {"name": "f"}}]}
    error = error_of(tmp_path, legacy, format="jsonl")
    assert error == "1: messages[1].function_call: not read; give tool_calls, a list of calls"
    legacy["messages"][1]["function_call"]["arguments"] = "{}"
    assert len(paths_of(tmp_path, legacy)[0]) == 1


def test_fields_can_be_ignored(tmp_path):
    record = {"trajectories": [ROW | {"zzz": 1}], "yyy": 1, "xxx": None, "metadata": {"a": 1}}
    assert "yyy: unknown field" in error_of(tmp_path, record)
    for names in (["yyy", "zzz"], ["*"]):
        assert [len(paths) for paths in paths_of(tmp_path, record, ignore_fields=names)] == [1]
    grouped = {"trajectories": [ROW | {"group_id": 1}]}
    assert "trajectories[0]: group_id: not read here; a task is one group" in error_of(tmp_path, grouped)
    message = {"messages": [{"role": "assistant", "content": "b", "mood": 1}]}
    assert "messages[*].mood: unknown field of a message" in error_of(tmp_path, message)
    for name in ("mood", "messages[*].mood"):
        assert len(paths_of(tmp_path, message, ignore_fields=[name])[0]) == 1
    with pytest.raises(
        UserError, match=r"data.ignore_fields: 'advantage' is a field that is read; remove it"
    ):
        sample_reader("demo", ignore_fields=["advantage"])


def test_all_unknown_fields_of_a_file_are_in_one_message(tmp_path):
    """Fields that only later rows have, too; each further row names its own."""
    mood = {"messages": [{"role": "assistant", "content": "b", "mood": 1}]}
    rows = [CHAT | {"ts": 1}, CHAT | {"aaa": 1, "advantages": 1}, {"trajectories": [mood], "bbb": 1}, CHAT]
    error = error_of(tmp_path, *rows)
    assert error == (
        "2: aaa: unknown field of a conversation. advantages: unknown field; did you mean 'advantage'? bbb: "
        "unknown field of a task. messages[*].mood: unknown field of a message. To ignore: "
        """data.ignore_fields='["aaa", "advantages", "bbb", "mood"]'"""
    )
    reader = sample_reader(tmp_path / "rollouts.jsonl", BYTES)
    first, second, third, last = reader.files.groups()
    assert len(reader.paths(first)) == len(reader.paths(last)) == 1
    assert reader.fields.counts == {"ts": 1}
    for group, names in ((second, "bbb"), (second, "aaa"), (third, "bbb")):
        with pytest.raises(UserError, match=names):
            reader.paths(group)
    names = ["aaa", "advantages", "bbb", "mood"]
    assert len(paths_of(tmp_path, *rows, ignore_fields=names)) == 4


def test_fields_that_the_chat_template_reads_are_known(tmp_path):
    mood = "{% for m in messages %}{{ m.role }}{{ m.mood }}{{ m.content }}<|im_end|>{% endfor %}"
    message = {"role": "assistant", "content": "b", "mood": "sad"}
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps({"messages": [message]}))
    reader = sample_reader(file, TreeTokenizer.byte_level(mood))
    (group,) = reader.files.groups()
    assert len(reader.paths(group)) == 1


@for_each(
    ("fields", "message"),
    [
        ({"weight": "1"}, "weight: expected a number, got '1'"),
        ({"weight": True}, "weight: expected a number, got True"),
        ({"weight": [1]}, "weight: expected a number from 0 to 1e12, got [1]"),
        ({"advantage": True}, "advantage: expected a number, got True"),
        ({"advantage": [0, "1", 2]}, "advantage[1]: expected a number, got '1'"),
        ({"advantage": 10**310}, "advantage: expected numbers up to 1e12, got an integer of"),
        ({"loss_mask": [0, 1, "1"]}, "loss_mask[2]: expected a number, got '1'"),
        ({"loss_mask": [0, None, 1]}, "loss_mask[1]: expected a number, got None"),
        ({"loss_mask": [0, 1]}, "loss_mask: expected 3 entries, one per token, got 2"),
        ({"loss_mask": "011"}, "loss_mask: expected a number, got '011'"),
        ({"old_logprobs": [0, "-1", -2]}, "old_logprobs[1]: expected a number, got '-1'"),
        ({"old_logprobs": [0, -1]}, "old_logprobs: expected 3 entries, one per token, got 2; if entry t"),
        (
            {"shifted_old_logprobs": [0, -1, -2]},
            "shifted_old_logprobs: expected 2 entries, one per token aft",
        ),
        ({"temperature": 0}, "temperature: expected a number > 0 and up to 1e12, got 0"),
        ({"policy_version": 1.0}, "policy_version: expected an integer, got 1.0"),
        ({"group_id": True}, "group_id: expected a string or an integer, got True"),
        ({"id": "x" * 513}, "id: expected at most 512 characters, got 513; shorten it"),
        ({"id": [1]}, "id: expected a string or an integer, got [1]"),
        ({"rollout_id": {}}, "rollout_id: expected a string or an integer, got {}"),
        ({"tokens": ["5", 6, 7]}, "tokens[0]: expected an integer, got '5'"),
        ({"tokens": [5, False, 7]}, "tokens[1]: expected an integer, got False"),
        ({"tokens": [5, 10**310, 7]}, "tokens: expected ids from 0 to 2**31 - 1, got 1000"),
        (
            {"routed_experts": "AAA"},
            "routed_experts: expected base64 of a .npy file of integers, got Incorrect",
        ),
    ],
)
def test_no_value_is_converted_to_a_number(tmp_path, fields, message):
    assert error_of(tmp_path, ROW, ROW | fields).startswith(f"2: {message}")


def test_truncated_arrays_are_refused(tmp_path):
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.int16).reshape(3, 1, 2))
    whole = file.getvalue()

    def row(content):
        return ROW | {"routed_experts": base64.b64encode(content).decode()}

    ((path,),) = paths_of(tmp_path, row(whole))
    assert path.routed_experts.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    for length in range(len(whole)):
        assert error_of(tmp_path, row(whole[:length])).startswith(
            "1: routed_experts: expected base64 of a .npy"
        )
    huge = whole.replace(b"(3, 1, 2)", b"(9**99,) ")
    assert error_of(tmp_path, row(huge)).startswith("1: routed_experts: expected base64 of a .npy")


@for_each(
    ("line", "message"),
    [
        (
            b'{"tokens": [1], "weight": 2, "weight": 3}',
            "weight: expected every key once, got it 2 times in one",
        ),
        (b'{"tokens": [1], "weight": NaN}', "weight: expected a finite number, got NaN"),
        (
            b'{"trajectories": [{"tokens": [1, -Infinity]}]}',
            "trajectories[0].tokens[1]: expected a finite number",
        ),
        (
            rb'{"tokens": [1], "id": "a\ud800b"}',
            r"id: expected Unicode text, got a lone surrogate in 'a\ud800b'",
        ),
        (rb'{"tokens": [1], "\udfff": 1}', r"\udfff: expected Unicode text, got a lone surrogate"),
        (
            b'{"tokens": [1], "id": "\xed\xa0\x80"}',
            "expected UTF-8 text: invalid continuation byte at byte 24; if it is Latin-1, convert",
        ),
        (b'{"tokens": [1], "weight": 1e999}', "weight: expected a finite number, got one beyond 1.8e308"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"a": [-1e999]}}]}]}',
            "messages[0].tool_calls[0].arguments.a[0]: expected a finite number, got one beyond 1.8e308",
        ),
        (b'{"tokens": [1], "a": 1' + b"0" * 320 + b".5}", "a: expected a finite number, got one beyond"),
        (
            b'{"tokens": [1], "id": 1, ' + b", ".join(b'"%d": 0' % i for i in range(30_000)) + b', "7": 1}',
            "7: expected every key once, got it 2 times in one object",
        ),
        (b'{"tokens": [1], "weight": 1e40}', "weight: expected a number from 0 to 1e12, got 1e+40"),
        (
            b'{"tokens": [1, 2], "advantage": [0, 1e38]}',
            "advantage: expected numbers from -1e12 to 1e12, got 9.9",
        ),
        (b'{"tokens": [1, 2], "loss_mask": [0, 1e40]}', "loss_mask: expected numbers up to 1e12, got 1e+40"),
        (b'{"tokens": [1]', "broken JSON at character 15: Expecting ',' delimiter; it ends too early"),
        (
            b'{"id": "a',
            "broken JSON at character 8: Unterminated string; it ends too early: write it again, or",
        ),
        (
            b'{"tokens": [1]} {}',
            "broken JSON at character 17: Extra data; write one value per line, or a list of all",
        ),
        (
            b'{"tokens": [1]}\r{}\r',
            "broken JSON at character 17: Extra data; its lines end in carriage returns: tr '\\r' '\\n'",
        ),
        (
            b'{"tokens": [1]}\f{}',
            "broken JSON at character 16: Extra data; write one value per line, or a list of all; the "
            "character U+000C there is no line break",
        ),
        (
            b'\f{"tokens": [1]}',
            "broken JSON at character 1: Expecting value; remove the character U+000C",
        ),
        (
            b'{"id": "a\tb"}',
            "broken JSON at character 10: Invalid control character; escape the character U+0009",
        ),
        (b"BZh91AY&SY\xff", "expected UTF-8 text: invalid start byte at byte 11; it is bzip2: unpack it"),
        (
            b"\xfd7zXZ",
            "expected UTF-8 text: invalid start byte at byte 1; it is xz: unpack it",
        ),
        (
            b'\x1e{"tokens": [1]}',
            "broken JSON at character 1: Expecting value; it is a JSON text sequence: tr -d '\\036' <",
        ),
        (
            '{"a": 1}'.encode("utf-16-le"),
            "broken JSON at character 2: Expecting property name enclosed in double quotes; it is UTF-16: "
            "convert it with iconv -f UTF-16LE -t UTF-8",
        ),
        (
            '{"a": "\u00c4"}'.encode("utf-16-be"),
            "expected UTF-8 text: invalid continuation byte at byte 16; it is UTF-16: convert it with",
        ),
        (
            b"{'tokens': [1]}",
            "broken JSON at character 2: Expecting property name enclosed in double quotes; "
            "JSON has double quotes: write it with json.dumps, not str",
        ),
        (
            b"id,reward",
            "broken JSON at character 1: Expecting value; expected an object in {} or a list in []",
        ),
        (
            b"<!DOCTYPE html>",
            "broken JSON at character 1: Expecting value; it is a web page or XML: download the data",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "broken JSON at character 1: Expecting value; it is a pointer of Git LFS: git lfs pull",
        ),
        (
            b"rows.jsonl\0\0000644",
            "broken JSON at character 1: Expecting value; it is binary, such as a tar archive: unpack it",
        ),
        (
            b"PK\x03\x04\xff",
            "expected UTF-8 text: invalid start byte at byte 5; it is a zip archive: unpack it",
        ),
        (b'{"id": "\\u001b[31m", "\\u001b[2J": 1}', r"expected one of the fields trajectories, messages"),
        (b'{"tokens": [1], "\\u001b[2J\\r\\n": 1}', r"\x1b[2J\r\n: unknown field"),
        (
            b'{"tokens": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            "broken JSON: brackets are nested too deeply",
        ),
        (b'{"tokens": ' + b"[" * 500 + b"]" * 500 + b"}", "tokens[0]: expected an integer, got [[[[...]]]]"),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "messages[0]: expected an object"),
    ],
)
def test_json_is_strict(tmp_path, line, message):
    assert error_of(tmp_path, ROW, line).startswith(f"2: {message}")


def test_a_loss_mask_may_be_boolean(tmp_path):
    for mask in ([False, True, True], [0, True, 1]):
        file = tmp_path / "f.jsonl"
        file.write_text(json.dumps({"tokens": [5, 6, 7], "loss_mask": mask}))
        reader = sample_reader(file)
        (group,) = reader.files.groups()
        assert reader.paths(group)[0].loss_mask.tolist() == [0, 1, 1]


def test_surrogate_pairs_and_the_words_nan_and_infinity_are_text():
    text = rb'{"a": ["\ud83d\ude42", "NaN, Infinity", "\\ud800"]}'
    assert parse_json(text, "f:1") == {"a": ["\U0001f642", "NaN, Infinity", r"\ud800"]}


def test_warnings_escape_control_characters_of_ids(tmp_path, caplog):
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(ROW | {"id": "\x1b[2J\n", "routed_experts": [[[0, 1]]]}))
    next(iter(tree_dataset(file, global_batch_groups=1)))
    (record,) = caplog.records
    assert record.getMessage().startswith(r"path \x1b[2J\n has routed_experts, which data.replay")


def test_one_file_is_not_read_twice(tmp_path):
    file, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps(ROW))
    os.symlink(file, link)
    for names in ([str(file), str(file)], [str(file), f"{tmp_path}/./a*"], [str(tmp_path / "*.jsonl")]):
        with pytest.raises(
            UserError, match=r"data.files names this file twice, also as .*a.jsonl; remove one"
        ):
            sample_reader(names)
    with pytest.raises(UserError, match=r"demo: data.files names this file twice"):
        sample_reader(["demo", "demo"])


def test_token_records_carry_every_field(tmp_path):
    fields = {
        "loss_mask": [0, 0, 1],
        "old_logprobs": [None, None, -1],
        "shifted_ref_logprobs": [None, -2],
        "rollout_logprobs": [0, -1, -3],
        "advantage": [0, 1, 2],
        "policy_version": [3, 3, 4],
        "sampling_mask": [None, None, [5, *ROW["tokens"][1:]]],
        "teacher_topk": [None, None, {"5": {"logprob": -2.5, "rank": 3}, "6": -1.25, "7": {"logprob": -1}}],
        "teacher": "large",
        "temperature": 0.7,
        "weight": 2,
        "preference": "chosen",
        "pair": "a",
    }
    ((path,),) = paths_of(tmp_path, ROW | fields)
    own = {"id": path.id, "rollout": f"{path.id}#0", "pair": f"{path.id}/a"}
    want = TokenPath(ROW["tokens"], rollout_tokens=1, **fields | own)
    for name in TokenPath.__slots__:
        np.testing.assert_array_equal(getattr(path, name), getattr(want, name), err_msg=name)
    assert [values.tolist() for values in path.teacher_topk] == [[0, 0, 3], [5, 6, 7], [-2.5, -1.25, -1]]
    documented = KNOWN["token ids"] - set(fields) - {"tokens", "input_ids", "routed_experts", "images"}
    names = {"group_id", "id", "rollout_id", "reward", "finish_reason"}
    assert documented - names == {"ref_logprobs", "shifted_old_logprobs", "shifted_rollout_logprobs"}


def test_tasks_pass_the_fields_of_paths_on(tmp_path):
    task = {
        "trajectories": [ROW, CHAT | {"temperature": 2}],
        "temperature": 0.5,
        "policy_version": 7,
        "tools": [],
    }
    ((row, chat),) = paths_of(tmp_path, task)
    assert (row.temperature, chat.temperature) == (0.5, 2)
    assert row.policy_version.tolist() == [7] * 3
    assert set(chat.policy_version.tolist()) == {7}
    assert error_of(tmp_path, CHAT | {"policy_version": [1]}).startswith(
        "1: policy_version: expected one number for a conversation, got a list"
    )


def test_the_samples_of_a_rollout_share_their_tokens(tmp_path):
    turns = [*CHAT["messages"], *CHAT["messages"]]
    rows = [
        {"group_id": "g", "messages": turns},  # two turns of one token and the end-of-turn token
        {"group_id": "g", "tokens": [1, 2, 3], "rollout_id": "r"},
        {"group_id": "g", "tokens": [1, 4], "loss_mask": [1, 0.5]},
        {"group_id": "g", "tokens": [1, 5], "rollout_id": "r"},
        {"group_id": "h", "tokens": [1, 5], "rollout_id": "r"},  # of another group: another rollout
    ]
    groups = paths_of(tmp_path, *rows)
    assert [[path.rollout_tokens for path in paths] for paths in groups] == [[4, 4, 3, 0.5, 3], [1]]


def test_a_record_chooses_its_turns(tmp_path):
    turns = [*CHAT["messages"], *CHAT["messages"], *CHAT["messages"]]
    task = {
        "id": "t",
        "turns": "last",
        "trajectories": [{"messages": turns}, ROW, {"messages": turns, "turns": "each"}],
    }
    records = [{"id": name, "messages": turns, "turns": name} for name in ("each", "last", "whole", None)]
    groups = paths_of(
        tmp_path, *records[:3], {"id": "none", "messages": turns}, task, sample={"turns": "last"}
    )
    counts = [3, 1, 1, 1, 1 + 1 + 3]
    assert [len(paths) for paths in groups] == counts
    reader = sample_reader(tmp_path / "rollouts.jsonl", BYTES, sample={"turns": "last"})
    assert reader.files.sizes() == ((5,), sum(counts))
    each, last, whole, *_ = groups
    assert last[0].tokens.tolist() == each[2].tokens.tolist()
    assert last[0].loss_mask.tolist() == each[2].loss_mask.tolist()
    assert whole[0].loss_tokens == sum(path.loss_tokens for path in each)
    assert (
        error_of(tmp_path, CHAT | {"turns": "first"})
        == "1: turns: expected one of each, last, whole, got 'first'"
    )
    assert error_of(tmp_path, ROW | {"turns": "last"}).startswith(
        "1: turns: not read here; only conversations"
    )


def test_turns_of_weight_0_make_no_samples(tmp_path):
    def chat(*weights):
        turns = [
            {"role": "assistant", "content": "b"} | ({} if w is None else {"weight": w}) for w in weights
        ]
        return {"messages": [message for turn in turns for message in (CHAT["messages"][0], turn)], "id": "c"}

    ((first, third),) = paths_of(tmp_path, chat(None, 0, 1))
    assert (first.id, third.id) == ("c/1", "c/3")
    assert sample_reader(tmp_path / "rollouts.jsonl", BYTES).files.sizes() == ((1,), 2)
    plain = paths_of(tmp_path, chat(None, None, None))[0][2]
    assert third.tokens.tolist() == plain.tokens.tolist()  # the turn is still read as context
    assert len(paths_of(tmp_path, chat(0, 1), sample={"turns": "last"})[0]) == 1
    assert "at least one assistant turn to train on, got 1 answer with weight 0" in error_of(
        tmp_path, chat(1, 0), sample={"turns": "last"}
    )
    assert "weight 0 is not supported by turns = 'whole'" in error_of(
        tmp_path, chat(1, 0), sample={"turns": "whole"}
    )
    assert error_of(tmp_path, chat(0.5)).startswith(
        "1: messages[1].weight: expected 0 (no sample of this turn)"
    )
    user = {"messages": [{"role": "user", "content": "a", "weight": 0}, CHAT["messages"][1]]}
    assert error_of(tmp_path, user).startswith("1: messages[0].weight: expected only on assistant messages")


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
@pytest.mark.parametrize("name", ["tau_airline", "toolbench_dfsdt", "webdancer_think"])
def test_real_files_have_no_unknown_fields(name):
    reader = sample_reader(REAL_DATA / f"{name}.jsonl.gz", BYTES, sample={"turns": "last"})
    assert (
        sum(len(reader.paths(group)) for group, _ in zip(reader.files.groups(), range(3), strict=False)) >= 3
    )
