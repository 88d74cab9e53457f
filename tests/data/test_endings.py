"""What is trained of an answer that the model did not end, in every format and with several templates."""

import argparse
import functools
import json

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_lines
from titan_tree.cli import inspect
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.errors import UserError

ASK = {"role": "user", "content": "?"}
SAYS = {"role": "assistant", "content": "Hel"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": "b'}}
# The ids of a text are not those of its parts; it ends in text that the template itself prints.
BEGINS = "{% for m in messages %}[{{ m.role }}]"
ENDS = "[/]\n{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
TRIMS = BEGINS + "{{ m.content | trim }}" + ENDS
PRINTS = BEGINS + "{{ m.tool_calls | tojson if m.tool_calls else m.content }}" + ENDS
END = "<|im_end|>"
tokenizer_with = functools.cache(TreeTokenizer.byte_level)


def trained(tmp_path, row, template="chatml", **settings):
    """Returns the text that the loss counts, one per sample."""
    tokenizer = tokenizer_with(template)
    reader = sample_reader(write_lines(tmp_path / "f", [row]), tokenizer, **settings)
    return [
        tokenizer.decode(path.tokens[path.loss_mask > 0])
        for g in reader.files.groups()
        for path in reader.paths(g)
    ]


def request(*messages, **fields):
    return {"messages": list(messages) or [ASK], **fields}


def choice(message, mark, **fields):
    return {
        "request": request(),
        "response": {"choices": [{"message": message, "finish_reason": mark, **fields}]},
    }


def claude(mark, *blocks, role="assistant"):
    return {"request": request(), "response": {"role": role, "content": list(blocks), "stop_reason": mark}}


TEXT = {"type": "text", "text": "Hel"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hel"}]}
CUT = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
FILTERED = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}


@for_each(
    ("row", "texts"),
    [
        (choice(SAYS, "stop"), [f"Hel{END}"]),
        (choice(SAYS, "length"), ["Hel"]),
        (choice(SAYS, "abort"), ["Hel"]),
        (choice(SAYS, "stop", stop_reason="\n\n"), ["Hel"]),  # vLLM: a stop string
        (choice(SAYS, "stop", stop_reason=151645), [f"Hel{END}"]),  # a stop token, which the model wrote
        (choice(SAYS, "MAX_TOKENS"), ["Hel"]),
        (choice(SAYS, "content_filter"), [""]),
        (choice(SAYS, "SAFETY"), [""]),
        (choice(SAYS | {"weight": 1}, "content_filter"), ["Hel"]),
        (choice({"role": "assistant", "content": None}, "length"), [""]),
        (choice(SAYS | {"content": "", "reasoning_content": "Hm"}, "length"), ["<think>\nHm"]),
        (
            choice(SAYS | {"content": None, "tool_calls": [CALL]}, "length"),
            ['<tool_call>\n{"name": "f", "arguments": {"a": "b'],
        ),
        (claude("end_turn", TEXT), [f"Hel{END}"]),
        (claude("max_tokens", TEXT), ["Hel"]),
        (claude("stop_sequence", TEXT), ["Hel"]),
        (claude("pause_turn", TEXT), ["Hel"]),
        (claude("refusal", TEXT), [""]),
        (request(ASK, SAYS | {"stop_reason": "max_tokens"}, system="s"), ["Hel"]),
        ({"input": "?", "output": [SAID], "status": "completed"}, [f"Hel{END}"]),
        ({"input": "?", "output": [SAID], **CUT}, ["Hel"]),
        ({"request": {"input": "?"}, "response": {"output": [SAID], **CUT}}, ["Hel"]),
        ({"request": {"input": "?"}, "response": {"output": [SAID], **FILTERED}}, [""]),
        ({"input": [ASK, SAID | {"status": "incomplete"}]}, ["Hel"]),
        ({"input": "?", "output": [SAID | {"status": "incomplete"}], **FILTERED}, [""]),
        ({"request": {"input": "?"}, "response": {"output": [], **CUT}}, [""]),
        (request(ASK, SAYS | {"finish_reason": "length"}), ["Hel"]),
        (request(ASK, SAYS, finish_reason="length"), ["Hel"]),
        (request(ASK, SAYS | {"finish_reason": "length"}, ASK, SAYS), ["Hel", f"Hel{END}"]),
        (request(ASK, SAYS | {"finish_reason": "length"}, ASK, SAYS, turns="whole"), [f"HelHel{END}"]),
        (request(ASK, SAYS | {"finish_reason": "refusal"}, ASK, SAYS, turns="whole"), [f"Hel{END}"]),
        (request(ASK, SAYS | {"finish_reason": "continued"}, SAYS), ["Hel", f"Hel{END}"]),
        ({"nodes": [{"messages": [ASK]}, {"parent": 0, "text": "Hel", "finish_reason": "length"}]}, ["Hel"]),
    ],
)
def test_only_what_the_model_wrote_is_trained(tmp_path, row, texts):
    assert trained(tmp_path, row) == texts


@pytest.mark.parametrize("template", ["qwen3", TRIMS])
def test_no_part_of_any_template_is_trained(tmp_path, template):
    think = "<think>\n\n</think>\n\n" if template == "qwen3" else ""
    for text in ("Hel", "Hel  \n", "a", "<", "[", "\n</th"):
        row = request(ASK, {"role": "assistant", "content": text, "finish_reason": "length"})
        (got,) = trained(tmp_path, row, template)
        assert got == think + (text.lstrip() if text.startswith("\n") else text)


def test_a_cut_off_call_ends_in_its_arguments(tmp_path):
    row = choice({"role": "assistant", "tool_calls": [CALL]}, "length")
    (got,) = trained(tmp_path, row, "qwen3")
    assert got.endswith('"arguments": {"a": "b')
    for arguments, template in (({"a": 1}, "chatml"), ('{"a', PRINTS)):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(UserError, match=r"messages\[1\].*cut off.* weight 0, or remove it$"):
            trained(tmp_path, choice({"role": "assistant", "tool_calls": [call]}, "length"), template)


def test_a_template_without_the_reasoning_cannot_show_where_it_was_cut_off(tmp_path):
    row = request(ASK, {"role": "assistant", "content": "", "reasoning": "Hm", "finish_reason": "length"})
    with pytest.raises(UserError, match=r"messages\[1\]: the chat template does not show where the answer"):
        trained(tmp_path, row, TRIMS)


IDS = {"prompt_ids": [1, 2], "completion_ids": [3, 4]}


@for_each(
    ("fields", "mask"),
    [
        ({"finish_reason": "length"}, [0, 0, 1, 1]),
        ({"truncated": True}, [0, 0, 1, 1]),
        ({"is_truncated": False, "stop_reason": "stop"}, [0, 0, 1, 1]),
        ({"status": "truncated", "truncated": True}, [0, 0, 1, 1]),
        ({"finish_reason": "content_filter"}, [0, 0, 0, 0]),
    ],
)
def test_ids_are_the_models_own(tmp_path, fields, mask):
    reader = sample_reader(write_lines(tmp_path / "f", [IDS | fields]))
    ((path,),) = map(reader.paths, reader.files.groups())
    np.testing.assert_array_equal(path.loss_mask, mask)


@for_each(
    ("row", "message"),
    [
        (
            choice(SAYS, "bored"),
            "response.choices[0].finish_reason: expected a known mark, got 'bored'; give",
        ),
        (claude("x", TEXT), "response.stop_reason: expected a known mark, got 'x'"),
        ({"input": "?", "output": [SAID], "status": 3}, "status: expected a known mark, got 3"),
        (request(ASK | {"finish_reason": "stop"}, SAYS), "messages[0].finish_reason: expected only on"),
        (request(ASK, SAYS, ASK, finish_reason="stop"), "finish_reason: expected a conversation that ends"),
        (
            choice(SAYS | {"finish_reason": "stop"}, "length"),
            "response.choices[0].finish_reason: expected 'stop', as in the message, got 'length'",
        ),
        (
            IDS | {"finish_reason": "stop", "truncated": True},
            "finish_reason and truncated: expected one ending of the response, got finished and cut",
        ),
        (
            {"trajectories": [request(ASK, SAYS)], "finish_reason": "stop"},
            "finish_reason: not read here; give each trajectory",
        ),
    ],
)
def test_unknown_and_contradicting_marks_are_refused(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        trained(tmp_path, row)
    assert message in str(error.value)


def test_marks_of_all_apis():
    for marks, how in (
        ("stop tool_calls function_call end_turn tool_use STOP COMPLETE completed eos_token", "finished"),
        ("length max_tokens MAX_TOKENS abort stop_sequence pause_turn truncated incomplete", "cut off"),
        ("content_filter refusal SAFETY RECITATION PROHIBITED_CONTENT", "filtered"),
    ):
        assert {ending(mark, "x") for mark in marks.split()} == {how}
    assert ending(None, "x") == "finished"


PREFILL = {"role": "assistant", "content": "The sum"}
REST = {"role": "assistant", "content": " is 2"}


@for_each(
    "row",
    [
        claude("end_turn", {"type": "text", "text": " is 2"}) | {"request": request(ASK, PREFILL)},
        choice(REST, "stop") | {"request": request(ASK, PREFILL, continue_final_message=True)},
        choice(REST, "stop") | {"request": request(ASK, PREFILL | {"prefix": True})},
        request(ASK, {"role": "assistant", "content": "The sum is 2", "prefill": "The sum"}),
    ],
)
def test_a_prefill_is_context_of_the_answer_that_continues_it(tmp_path, row):
    for template in ("chatml", "qwen3", TRIMS):
        tokenizer = tokenizer_with(template)
        reader = sample_reader(write_lines(tmp_path / "f", [row]), tokenizer)
        ((path,),) = map(reader.paths, reader.files.groups())
        whole = [ASK, {"role": "assistant", "content": "The sum is 2"}]
        assert tokenizer.decode(path.tokens) == tokenizer.render(whole)
        (got,) = trained(tmp_path, row, template)
        assert got == {TRIMS: " is 2[/]\n"}.get(template, f" is 2{END}")


@for_each(
    ("row", "message"),
    [
        (
            request(ASK, SAYS, SAYS),
            "messages[2]: expected another role after the assistant's message 1; join",
        ),
        (
            choice(REST, "stop") | {"request": request(ASK, PREFILL)},
            "messages[2]: expected another role after the assistant's message 1; join the two, or give",
        ),
        (
            choice(REST | {"reasoning": "x"}, "stop") | {"request": request(ASK, PREFILL | {"prefix": True})},
            "messages[1].prefill: expected the beginning of content, and no reasoning, got 'The sum'",
        ),
        (
            choice(REST, "stop")
            | {"request": request(ASK, PREFILL | {"prefix": True, "reasoning_content": "Hm"})},
            "request: expected only text of the assistant in the last message",
        ),
        (
            {"input": [ASK, SAYS], "status": "incomplete"},
            "status: expected the answer that did not end in output; move its items there",
        ),
        (
            request(ASK, SAYS | {"prefill": "x"}),
            "messages[1].prefill: expected the beginning of content, and no reasoning, got 'x'",
        ),
        (
            request(ASK, SAYS | {"content": ""}),
            "messages[1], the last: expected text, reasoning or tool calls in a trained answer, got none; ",
        ),
        (
            choice({"role": "assistant", "content": None}, "stop"),
            "messages[1], the last: expected text, reasoning or tool",
        ),
        (
            claude("end_turn"),
            "messages[1], the last: expected text, reasoning or tool calls in a trained answer, got none",
        ),
    ],
)
def test_unclear_and_empty_answers_are_refused(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        trained(tmp_path, row)
    assert message in str(error.value)


def test_neighbours_that_are_no_trained_answers_are_context(tmp_path):
    empty = {"role": "assistant", "content": "", "weight": 0}
    assert trained(tmp_path, request(ASK, empty, ASK, SAYS)) == [f"Hel{END}"]
    both = request(ASK, SAYS | {"finish_reason": "stop"}, SAYS)
    assert trained(tmp_path, both) == [f"Hel{END}"] * 2
    goes_on = request(ASK, SAYS | {"finish_reason": "continued"}, SAYS)
    assert trained(tmp_path, goes_on, PRINTS) == ["Hel", "Hel[/]\n"]


def test_inspect_counts_unfinished_answers(tmp_path, capsys):
    rows = [choice(SAYS, mark) for mark in ("length", "stop", "abort", "content_filter")]
    file = write_lines(tmp_path / "f", rows)
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    inspect.run(parser.parse_args([file]))
    assert (
        "answers: 2 cut off (trained without an end), 1 filtered (not trained unless their weight is 1)"
        in capsys.readouterr().out
    )
    inspect.run(parser.parse_args([file, "--json"]))
    assert json.loads(capsys.readouterr().out)["answers"] == {"cut_off": 2, "filtered": 1}


def test_marks_beside_the_usual_place_count(tmp_path):
    thought = {
        "type": "reasoning",
        "status": "incomplete",
        "summary": [{"type": "summary_text", "text": "Hm"}],
    }
    (got,) = trained(tmp_path, {"input": [ASK, thought]})
    assert END not in got
    row = choice(SAYS, None) | {"request": request(ASK)}
    row["response"]["choices"][0]["stop_reason"] = "max_tokens"
    assert trained(tmp_path, row) == ["Hel"]


THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "a"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": ["y"]}}]}


@for_each(
    ("template", "answer", "lost"),
    [
        ("qwen3", {**SAYS, "content": "a<think>b</think>c"}, "content: .* 'a'"),
        ("qwen3", {**SAYS, "content": "<think>a</think>b</think>c"}, "content: .* 'b'"),
        ("qwen3", {**SAYS, "content": "<think>a", "finish_reason": "length"}, "content: .* '<think>a'"),
        ("chatml", {**THOUGHT, "content": "<think>a</think>b"}, "content: .* '<think>a</think>b'"),
        (TRIMS, THOUGHT, "reasoning_content: .* 'a'"),
        (TRIMS, CALLS | {"content": "b"}, "tool_calls: .* 'y'"),
        (BEGINS + "{{ m.content | upper }}" + ENDS, SAYS, "content: .* 'Hel'"),
        (BEGINS + "{{ m.content }}{{ m.content }}" + ENDS, SAYS, "content: .* 'Hel'"),
        (PRINTS, CALLS | {"content": "b"}, "content: .* 'b'"),
    ],
)
def test_a_template_that_loses_what_the_model_wrote_is_refused(tmp_path, template, answer, lost):
    with pytest.raises(UserError, match=rf"messages\[1\]\.{lost}, which the model wrote"):
        trained(tmp_path, request(ASK, answer), template)


def test_a_thought_at_the_start_of_the_content_is_kept(tmp_path):
    content = "<think>a</think>b"
    answer = request(ASK, {"role": "assistant", "content": content})
    assert trained(tmp_path, answer, "qwen3") == [f"<think>\na\n</think>\n\nb{END}"]
    assert trained(tmp_path, answer) == [content + END]
