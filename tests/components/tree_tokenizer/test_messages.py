"""Messages: several spellings become one form; unusual values stay, and malformed ones are errors."""

import copy

import numpy as np
import pytest

from tests.support.cases import for_each
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.errors import UserError


def test_both_spellings_of_messages_become_one_form():
    simple = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "reasoning_content": None,
            "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        },
        {"role": "tool", "content": None, "tool_call_id": "1"},
        {"role": "assistant", "content": "é", "reasoning_content": "r"},
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    openai = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "é"}],
            "reasoning": "r",
            "tool_calls": None,
        },
    ]
    before = copy.deepcopy((simple, openai))
    normal = normalize_messages(simple, "messages")
    assert normal == [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": "é", "reasoning_content": "r"},
    ]
    spelled = normalize_messages(openai, "messages")
    assert spelled[3].pop("reasoning") == "r"  # fields that a template may read are kept
    assert spelled == normal
    assert normalize_messages(normal, "messages") == normal
    assert (simple, openai) == before


def test_arguments_that_are_not_a_json_object_stay_text():
    nested = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    unusual = ("NaN", "-Infinity", "1e999", "9" * 4400, '"\\ud83d"')  # json.loads reads most of them
    broken = ('{"a": ', "[1]", "7", nested, "[" * 1100, '{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 1}}')
    for raw in (*broken, *(f'{{"a": {value}}}' for value in unusual)):
        (message,) = normalize_messages(
            [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": raw}}]}],
            "m",
        )
        assert message["tool_calls"] == [
            {"type": "function", "id": "x", "function": {"name": "f", "arguments": raw}}
        ]


def test_a_name_beside_function_that_is_the_same_is_read_once():
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = normalize_messages(call(**function, function=function), "m")
    read = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert messages[1]["tool_calls"] == [read]
    assert normalize_messages(messages, "m") == messages


def test_python_objects_in_messages_cause_one_line_errors_or_none():
    """Messages need not come from JSON."""
    tokenizer = TreeTokenizer.byte_level("{{ messages | tojson }}")
    said = {"role": "assistant", "content": "", 1: None, None: 2}
    assert tokenizer.render([said]) == '[{"role": "assistant", "content": "", "1": null, "null": 2}]'
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value, error in (
        ({(1, 2): 3}, "TypeError: keys must be str, int"),
        ({1, 2}, "TypeError: Object of type set is not JSON serializable"),
        (10**5000, "ValueError: Exceeds the limit"),
        (deep, "RecursionError: "),
    ):
        for messages, tools in (([{**said, "x": value}], None), ([said], [{"x": value}])):
            with pytest.raises(UserError) as caught:
                TreeTokenizer.byte_level("{{ messages | tojson }}{{ tools | tojson }}").render(
                    messages, tools
                )
            assert str(caught.value).startswith(f"chat template (text): {error}")
            assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"messages: expected a non-empty list of messages, got \{'a': "):
        tokenizer.render({"a": deep})
    with pytest.raises(UserError, match=r"tools: expected a list .*, got \[\["):
        tokenizer.render([said], deep)
    with pytest.raises(UserError, match=r"chat template \(text\): expected Unicode text, got a lone surr"):
        tokenizer.render([{**said, "name": "\ud83d"}])


def call(**fields) -> list:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [fields]}]


NOT_A_LIST = ": expected a non-empty list of messages, got "
ROLE = "[0].role: expected one of system, user, assistant, tool, got "
CONTENT = "[0].content: expected a string or a list of text parts, got "
ASSISTANT_ONLY = ": expected only on assistant messages, got it on role 'user'"
CALL = "[1].tool_calls[0]"
MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url")
PARTS = '[0].content[0]: expected {"type": "text", "text": str} or {"type": "image", "image": path}, got '
LIST_PART = {"role": "user", "content": [{"type": ["image"]}]}
SURROGATE = "expected Unicode text, got a lone surrogate in 'a\\ud83d!'"
THINKING_USER = {"role": "user", "content": "", "reasoning": "r"}
CALLING_USER = {"role": "user", "content": "", "tool_calls": [{}]}


@for_each(
    ("messages", "message"),
    [
        ([], f"{NOT_A_LIST}[]"),
        ({"role": "user"}, f"{NOT_A_LIST}{{'role': 'user'}}"),
        (["hi"], "[0]: expected an object with role and content, got 'hi'"),
        ([{"content": "hi"}], f"{ROLE}None"),
        ([{"role": "bot", "content": "hi"}], f"{ROLE}'bot'"),
        ([{"role": "user"}], f"{CONTENT}None"),
        ([{"role": "tool", "content": {"a": 1}}], f"{CONTENT}{{'a': 1}}"),
        *(
            ([{"role": "user", "content": [{"type": kind}]}], f"{PARTS}{{'type': '{kind}'}}")
            for kind in MEDIA
        ),
        ([LIST_PART], f"{PARTS}{{'type': ['image']}}"),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}],
            "[0].content[0]: expected no image of an assistant; remove the sample",
        ),
        ([{"role": "user", "content": "a\ud83d!"}], f"[0].content: {SURROGATE}"),
        ([{"role": "user", "content": [{"type": "text", "text": "a\ud83d!"}]}], f"[0].content: {SURROGATE}"),
        ([{"role": "assistant", "reasoning": "a\ud83d!"}], f"[0].reasoning: {SURROGATE}"),
        (call(name="a\ud83d!", arguments={}), f"{CALL}.name: {SURROGATE}"),
        (call(name="f", arguments="a\ud83d!"), f"{CALL}.arguments: {SURROGATE}"),
        ([{"role": 10**5000}], f"{ROLE}a value of type int"),
        ([{"role": np.array(["user"] * 2)}], f"{ROLE}array(['user', 'user'], dtype='<U4')"),
        ([{"role": "assistant", "tool_calls": "f()"}], "[0].tool_calls: expected a list, got 'f()'"),
        ([{"role": "assistant", "tool_calls": ""}], "[0].tool_calls: expected a list, got ''"),
        ([THINKING_USER], f"[0].reasoning{ASSISTANT_ONLY}"),
        ([{"role": "assistant", "thinking": 1}], "[0].thinking: expected a string, got 1"),
        ([CALLING_USER], f"[0].tool_calls{ASSISTANT_ONLY}"),
        (call(arguments={}), f"{CALL}.name: expected a string, got None"),
        (call(name="f"), f"{CALL}.arguments: expected an object or its JSON text, got None"),
        (call(function="f"), f"{CALL}.function: expected an object with name and arguments, got 'f'"),
        (call(function={"name": 1}), f"{CALL}.function.name: expected a string, got 1"),
        (call(id=[1], name="f", arguments={}), f"{CALL}.id: expected a string or an integer, got [1]"),
        ([{"role": "tool", "tool_call_id": {}}], "[0].tool_call_id: expected a string or an integer, got {}"),
        *(
            (
                call(**{field: "g"}, function={"name": "f", "arguments": {}}),
                f"{CALL}.function.{field}: expected it once, got another one beside function; remove one",
            )
            for field in ("name", "arguments")
        ),
        (
            [{"role": "assistant", "function_call": {}}],
            "[0].function_call: not read; give tool_calls, a list of calls",
        ),
        (
            [{"role": "assistant", "refusal": "no"}],
            "[0].refusal: not read; give the text of the refusal as content",
        ),
    ],
)
def test_malformed_messages_are_errors_with_their_place(messages, message):
    with pytest.raises(UserError) as error:
        normalize_messages(messages, "here")
    assert str(error.value) == f"here{message}"
