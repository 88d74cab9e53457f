"""Rows that a reader converts in a particular way."""

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import TOKEN_ROWS, write_document, write_lines
from tests.support.rows import ANSWER, ASK, NUL, RULES, SAYS, chat, request
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError


def convert(tmp_path, format, row):
    ((_, record),) = read_records(write_lines(tmp_path / "f", [row]), format)
    return record


CHAT = {
    "custom tool": (
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": "x"}}],
        },
    ),
    "refusal": (
        {"role": "assistant", "content": NUL, "refusal": "no", "audio": NUL, "weight": 0},
        {"role": "assistant", "content": "no", "weight": 0},
    ),
    "developer": ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
    "null call": ({**ANSWER, "function_call": NUL, "tool_calls": NUL}, {**ANSWER, "tool_calls": NUL}),
}


@pytest.mark.parametrize(("message", "converted"), CHAT.values(), ids=CHAT)
def test_chat_messages_are_converted(tmp_path, message, converted):
    record = convert(
        tmp_path, "openai_chat", {"messages": [ASK, message], "temperature": 0.5, "logprobs": True}
    )
    assert record == {"messages": [ASK, converted], "temperature": 0.5}


@pytest.mark.parametrize(("temperature", "kept"), [(0, {}), (0.0, {}), (0.5, {"temperature": 0.5})])
def test_greedy_answers_have_no_temperature(tmp_path, temperature, kept):
    asked, choices = chat(ASK, temperature=temperature), {"choices": [{"message": ANSWER}]}
    items = {"input": [ASK], "temperature": temperature}
    rows = [
        ("openai_chat", asked | {"messages": [ASK, ANSWER]}),
        ("openai_chat", asked | choices),
        ("openai_chat", {"request": asked, "response": choices}),
        ("openai_responses", {"request": items, "response": {"output": [SAYS]}}),
        ("anthropic", {"request": asked, "response": {"content": "!"}}),
    ]
    for format, row in rows:
        assert convert(tmp_path, format, row) == {"messages": [ASK, ANSWER], **kept}


def test_numbers_that_share_a_name_with_a_parameter_are_kept(tmp_path):
    row = {"messages": [ASK, ANSWER], "logprobs": [-1.0], "model": "m", "system": NUL}
    assert convert(tmp_path, "auto", row) == {"messages": [ASK, ANSWER], "logprobs": [-1.0]}


def test_several_choices_become_trajectories(tmp_path, caplog):
    choices = [{"message": {**ANSWER, "content": text}} for text in "ab"]
    row = {"request": {"messages": [ASK, ANSWER, ASK], "n": 2}, "response": {"choices": choices}}
    record = convert(tmp_path, "openai_chat", row)
    ends = [trajectory["messages"][-1]["content"] for trajectory in record["trajectories"]]
    assert ends == ["a", "b"]
    assert [len(trajectory["messages"]) for trajectory in record["trajectories"]] == [4, 4]
    assert "the assistant turns in prompts are context" in caplog.text


def logged_calls(format):
    """Calls of two tasks: the first turn of two samples each, a second turn, and a call with a group_id."""
    other = {"role": "user", "content": "other"}

    def call(*messages, **fields):
        if format == "openai_chat":
            asked, answer = {"messages": [RULES, *messages]}, {"choices": [{"message": ANSWER}]}
        elif format == "openai_chat, merged":
            return {"messages": [RULES, *messages], "choices": [{"message": ANSWER}], **fields}
        elif format == "openai_responses":
            asked, answer = {"instructions": "s", "input": list(messages)}, {"output": [SAYS]}
        else:
            asked, answer = {"system": "s", "messages": list(messages)}, {"content": "!"}
        return {"request": asked, "response": answer, **fields}

    return [call(ASK), call(other), call(ASK, ANSWER, other), call(other), call(ASK), call(ASK, group_id="g")]


@for_each("format", ["openai_chat", "openai_chat, merged", "openai_responses", "anthropic"])
def test_calls_that_begin_alike_form_a_group(tmp_path, caplog, format):
    file = write_lines(tmp_path / format, logged_calls(format))
    reader = sample_reader(file, format=format.split(",")[0])
    lines = {
        group.id: [place.rpartition(":")[2] for place, _ in group.records] for group in reader.files.groups()
    }
    assert lines == {"g": ["6"], f"{file}:1": ["1", "3", "5"], f"{file}:2": ["2", "4"]}
    assert (
        f"{file}: 5 calls without group_id form 2 groups, by their messages up to the first one of the user; "
        "to group otherwise, give each call a group_id"
    ) in caplog.messages


def test_calls_that_begin_differently_stay_lines(tmp_path, caplog):
    answer = {"choices": [{"message": ANSWER}, {"message": ANSWER}]}
    system = [{"role": "system", "content": text} for text in "ab"]
    rows = [{"request": {"messages": [first, ASK]}, "response": answer} for first in system]
    no_calls = {"messages": [ASK, ANSWER]}, {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]}
    no_calls = *no_calls, {"tokens": [1, 2]}, {"trajectories": []}
    rows += [row | {"output": "a column of the user"} for row in no_calls] * 2 + [no_calls[0]] * 2
    records = [record for _, record in read_records(write_lines(tmp_path / "f", rows))]
    assert not any("group_id" in record for record in records)
    assert [len(record.get("trajectories", [])) for record in records] == [*[0, 2, 0, 0] * 2, 0, 0, 2, 2]
    assert "calls without group_id" not in caplog.text


def test_a_schema_for_the_answer_is_named_once(tmp_path, caplog):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    rows = {
        "openai_chat": chat(ASK, ANSWER, response_format=schema),
        "openai_responses": {"input": [ASK], "output": [SAYS], "text": {"format": schema}},
        "anthropic": chat(ASK, ANSWER, system="s", output_config={"format": schema}),
    }
    for format, row in rows.items():
        file = write_lines(tmp_path / format, [row, row])
        assert len(list(read_records(file, format))) == 2
        assert caplog.text.count(f"{format}: some requests have a schema for their answer") == 1
    convert(tmp_path, "openai_chat", chat(ASK, ANSWER, response_format={"type": "text"}))
    assert caplog.text.count("some requests") == 3


def test_a_restricted_choice_of_tools_is_named_once(tmp_path, caplog):
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f"}}
    for number, choice in enumerate(("none", "required", named)):
        file = write_lines(tmp_path / f"{number}", [chat(ASK, ANSWER, tools=tools, tool_choice=choice)] * 2)
        assert len(list(read_records(file))) == 2
        assert caplog.text.count("some requests restrict the choice of tools (tool_choice)") == number + 1
    for row in (chat(ASK, ANSWER, tools=tools, tool_choice="auto"), chat(ASK, ANSWER, tool_choice="none")):
        convert(tmp_path, "openai_chat", row)
    assert caplog.text.count("some requests") == 3


THINKS = """{% for m in messages %}{{ m.role }}{{ enable_thinking if m.role == 'assistant' }}:
{{- m.content }}<|im_end|>
{% endfor %}{{ 'assistant' ~ enable_thinking ~ ':' if add_generation_prompt }}"""


def test_a_row_has_template_variables_of_its_own(tmp_path, caplog):
    tokenizer = TreeTokenizer.byte_level(THINKS)
    rows = [chat(ASK, ANSWER, chat_template_kwargs={"enable_thinking": value}) for value in (True, False)]
    asked = chat(ASK, chat_template_kwargs={"enable_thinking": 3})
    rows += [{"request": asked, "response": {"choices": [{"message": ANSWER}]}}, chat(ASK, ANSWER)]
    reader = sample_reader(write_lines(tmp_path / "f", rows), tokenizer, sample={"enable_thinking": 4})
    texts = [tokenizer.decode(path.tokens) for group in reader.files.groups() for path in reader.paths(group)]
    values = [text.partition("assistant")[2].partition(":")[0] for text in texts]
    assert values == ["True", "False", "4", "3"]  # calls come last
    row = chat(ASK, ANSWER, chat_template_kwargs={"enable_thinkin": True})
    reader = sample_reader(write_lines(tmp_path / "g", [row]), tokenizer, sample={"enable_thinking": 4})
    for group in reader.files.groups():
        reader.paths(group)
    assert "chat_template_kwargs: the template reads no variable 'enable_thinkin'" in caplog.text
    row = chat(ASK, ANSWER, chat_template_kwargs={"documents": ["D"], "add_generation_prompt": True})
    reader = sample_reader(
        write_lines(tmp_path / "i", [row]), TreeTokenizer.byte_level("{{ documents }}" + THINKS)
    )
    (path,) = reader.paths(next(reader.files.groups()))
    assert tokenizer.decode(path.tokens).startswith("['D']")
    assert "the template reads no variable 'add_generation_prompt', so it has no effect" in caplog.text
    for wrong in ([], {"turns": "last"}):
        row = chat(ASK, ANSWER, chat_template_kwargs=wrong)
        reader = sample_reader(write_lines(tmp_path / "h", [row]), tokenizer)
        with pytest.raises(UserError, match="chat_template_kwargs: expected an object of template variables"):
            reader.paths(next(reader.files.groups()))


def test_text_parts_wait_for_the_tokenizer_and_are_named_once(tmp_path, caplog):
    parts = [{"type": "text", "text": text} for text in "ab"]
    rows = {
        "openai_chat": chat({**ASK, "content": parts}, ANSWER),
        "openai_responses": {
            "input": [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}],
            "output": [SAYS],
        },
        "anthropic": chat({**ASK, "content": parts}, ANSWER, system="s"),
    }
    for format, row in rows.items():
        assert {"role": "user", "content": parts} in convert(tmp_path, format, row)["messages"]
    reader = sample_reader(write_lines(tmp_path / "g", [rows["openai_chat"]] * 2), TreeTokenizer.byte_level())
    for group in reader.files.groups():
        (path,) = reader.paths(group)
        assert "<|im_start|>user\na\nb<|im_end|>" in TreeTokenizer.byte_level().decode(path.tokens)
    assert caplog.text.count("content in several text parts") == 1


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
TEXT = {"type": "text", "text": "!"}
# Rows whose history has two assistant turns, and the ids of the samples that the answer makes.
CALLS = {
    "openai_chat": (
        request(ASK, ANSWER, ASK, ANSWER, ASK) | {"response": {"choices": [{"message": ANSWER}]}},
        "1",
    ),
    "prompt and completion": (
        {"prompt": [ASK, ANSWER, ANSWER, ASK], "completion": [ANSWER, ASK, ANSWER]},
        "34",
    ),
    "anthropic": (request(ASK, ANSWER, ASK, ANSWER, ASK) | {"response": {"content": [TEXT]}}, "1"),
    "anthropic, two messages": (
        request(ASK, ANSWER, ASK, ANSWER, ASK) | {"response": {"content": [USE, TEXT]}},
        "34",
    ),
    "openai_responses": ({"input": [ASK, SAYS, ASK, SAYS, ASK], "output": [SAYS, CALL]}, "1"),
    "openai_responses, two messages": ({"input": [ASK, SAYS, ASK, SAYS, ASK], "output": [CALL, SAYS]}, "34"),
}


@pytest.mark.parametrize(("row", "turns"), CALLS.values(), ids=CALLS)
def test_of_a_call_with_its_history_only_the_answer_is_trained(tmp_path, row, turns):
    tokenizer = TreeTokenizer.byte_level()
    reader = sample_reader(write_lines(tmp_path / "f", [{"id": "x"} | row]), tokenizer)
    (paths,) = map(reader.paths, reader.files.groups())
    assert [path.id for path in paths] == [f"x/{turn}" for turn in turns]
    assert reader.files.sizes().samples == len(turns)
    for path in paths:
        is_whole = path.id == paths[-1].id or "prompt" in row  # the answer goes on after the other messages
        assert tokenizer.decode(path.tokens[path.loss_mask > 0]).count("<|im_end|>") == is_whole
        assert tokenizer.decode(path.tokens).count("<|im_start|>assistant") >= 3  # the history is context


def test_interleaved_blocks_become_several_assistant_messages(tmp_path, caplog):
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "a"},
        {"type": "thinking", "thinking": "b"},
        {"type": "text", "text": "c"},
        {"type": "text", "text": "d"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"type": "text", "text": "e"},
    ]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}
    user = {"role": "user", "content": [result, {"type": "text", "text": "u"}]}
    record = convert(
        tmp_path, "anthropic", {"messages": [ASK, {"role": "assistant", "content": blocks}, user]}
    )
    called = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
    assert record["messages"][1:] == [
        {"role": "assistant", "content": "cd", "reasoning_content": "a\nb", "tool_calls": [called]}
        | {"finish_reason": "continued"},
        {"role": "assistant", "content": "e"},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        {"role": "user", "content": "u"},
    ]
    assert "some thoughts are encrypted" in caplog.text


def test_request_and_response_of_responses(tmp_path):
    output = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": "b"},
    ]
    row = {"request": {"input": "?", "instructions": "s"}, "response": {"output": output}, "reward": 1.0}
    assert convert(tmp_path, "auto", row) == {
        "reward": 1.0,
        "messages": [
            {"role": "system", "content": "s"},
            ASK,
            {"role": "assistant", "content": "a", "reasoning_content": "r", "finish_reason": "continued"},
            {"role": "assistant", "content": "b"},
        ],
    }


def test_calls_of_custom_tools_have_arguments_of_plain_text(tmp_path):
    call = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "y"}
    record = convert(tmp_path, "auto", {"input": [ASK, call, result], "output": [SAYS]})
    (called,) = record["messages"][1]["tool_calls"]
    assert (called["id"], called["function"]) == ("1", {"name": "f", "arguments": "x"})
    assert record["messages"][2] == {"role": "tool", "content": "y", "tool_call_id": "1", "name": "f"}


def test_alpaca_with_history(tmp_path):
    row = {
        "instruction": "i",
        "input": "j",
        "output": "o",
        "system": "s",
        "history": [["q", "a"]],
        "text": "t",
    }
    messages = convert(tmp_path, "auto", row)["messages"]
    assert [m["content"] for m in messages] == ["s", "q", "a", "i\nj", "o"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]


@for_each(("row", "record"), TOKEN_ROWS.values())
def test_columns_of_the_frameworks(tmp_path, row, record):
    assert convert(tmp_path, "auto", row) == {"tokens": [1, 2, 3, 4, 5], **record}
    reader = sample_reader(str(tmp_path / "f"), ignore_fields=["kept"])
    ((path,),) = map(reader.paths, reader.files.groups())
    assert path.tokens.tolist() == [1, 2, 3, 4, 5]
    assert path.loss_mask.tolist() == record["loss_mask"]


def test_texts_of_a_tree_join_into_one_answer(tmp_path):
    nodes = [
        {"id": "c", "parent": "b", "text": " yes", "reward": 1.0},
        {"id": "a", "messages": [ASK]},
        {"id": "b", "parent": "a", "text": "Hm,", "sample": True, "weight": 0.5},
        {"id": "d", "parent": "b", "text": " no", "sample": False},
    ]
    record = convert(
        tmp_path, "auto", {"id": "t", "prompt": [{"role": "system", "content": "s"}], "nodes": nodes}
    )
    system = {"role": "system", "content": "s"}
    assert record == {
        "id": "t",
        "trajectories": [
            {
                "id": "c",
                "reward": 1.0,
                "messages": [system, ASK, {"role": "assistant", "content": "Hm, yes"}],
            },
            {"id": "b", "weight": 0.5, "messages": [system, ASK, {"role": "assistant", "content": "Hm,"}]},
        ],
    }


def test_tokens_of_a_tree_keep_their_values(tmp_path):
    nodes = [
        {"tokens": [1, 2], "loss_mask": 0},
        {"parent": 0, "tokens": [3], "rollout_logprobs": [-1.0], "advantage": 0.5},
    ]
    (trajectory,) = convert(tmp_path, "auto", {"nodes": nodes})["trajectories"]
    assert trajectory == {
        "id": "1",
        "tokens": [1, 2, 3],
        "loss_mask": [0, 0, 1],
        "rollout_logprobs": [NUL, NUL, -1.0],
        "advantage": [0, 0, 0.5],
    }


def test_results_of_benchmarks_keep_what_decides_the_training(tmp_path):
    kept = {"weight": 0.5, "temperature": 0.7, "finish_reason": "length"}
    row = {"task_id": 1, "trial": 0, "reward": 1.0, "info": {}, "traj": [ASK, ANSWER], "loss_mask": [1]}
    ((_, record),) = read_records(write_document(tmp_path / "tau", [row | kept]), "tau_bench")
    ids = {"group_id": "1", "id": "trial0", "reward": 1.0}
    assert record == {**ids, "messages": [ASK, ANSWER], "loss_mask": [1], **kept}
    choice = {"finish_reason": "length", "message": {"reasoning_content": "r"}}
    answers = [
        ANSWER | {"weight": 0, "reasoning_content": "r", "cost": 1.0},
        {"role": "tool", "tool_messages": [{"role": "tool", "id": "c", "content": "t", "error": False}]},
        ANSWER | {"raw_data": {"choices": [choice]}},
    ]
    simulation = {"id": "x", "task_id": "1", "messages": answers, "seed": 3, **kept}
    file = write_document(tmp_path / "tau2", {"simulations": [simulation]})
    ((_, record),) = read_records(file, "tau2_bench")
    assert record.pop("messages") == [
        ANSWER | {"weight": 0, "reasoning_content": "r"},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        ANSWER | {"reasoning_content": "r", "finish_reason": "length"},
    ]
    assert record == {"group_id": "1", "reward": None, **kept}
