"""Arguments keep the characters that the model wrote, and results stand in the order of their calls."""

import json

import pytest

from tests.support.cases import for_each
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError

ASK = {"role": "user", "content": "?"}
BYTES = TreeTokenizer.byte_level()
QWEN = TreeTokenizer.byte_level("qwen3")
AS_JSON = TreeTokenizer.byte_level(
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}"
    "{% endfor %}"
)
BY_NAME = TreeTokenizer.byte_level(
    "{% for m in messages %}{% for c in m.tool_calls %}{% for name, value in c.function.arguments | items %}"
    "<{{ name }}>{{ value }}</>{% endfor %}{% endfor %}{% endfor %}"
)
WITH_IDS = TreeTokenizer.byte_level("{% for m in messages %}{{ m.tool_call_id }}{{ m.content }};{% endfor %}")


def calling(*arguments, ids=None):
    functions = [{"name": "f", "arguments": text} for text in arguments]
    calls = [{"type": "function", "function": function} for function in functions]
    for call, name in zip(calls, ids or (), strict=False):
        call["id"] = name
    return {"role": "assistant", "content": "", "tool_calls": calls}


@for_each(
    "text",
    [
        '{"x": 1.10, "y": 1e5, "z":0.30000000000000000001}',
        '{"a":1}',
        '{"a": 1}',
        '{"city": "\\u00e9"}',
        '{"a": -0}',
        '{"a": ',
        '{ "a" : {"b": [1, 2.50]} }',
    ],
)
def test_arguments_given_as_text_keep_their_characters(text):
    for tokenizer in (BYTES, QWEN):
        assert f'"arguments": {text}}}\n</tool_call>' in tokenizer.render([ASK, calling(text)])
        (path,) = tokenizer.samples([ASK, calling(text)])
        assert f'"arguments": {text}}}\n</tool_call>' in tokenizer.decode(path.tokens)


def test_a_template_that_needs_an_object_gets_it():
    assert AS_JSON.render([ASK, calling('{"a":1,"b":[true,1.5]}')]) == '{"a": 1, "b": [true, 1.5]};'
    assert BY_NAME.render([ASK, calling('{"a":1,  "b":"c"}')]) == "<a>1</><b>c</>"
    for number, shown in (("1.10", "1.1"), ("1e5", "100000.0"), ("-0", "0"), ("0.30e0", "0.3")):
        for tokenizer in (AS_JSON, BY_NAME):
            with pytest.raises(UserError) as error:
                tokenizer.render([ASK, calling("{}"), ASK, calling(f'{{"x": {number}}}')])
            assert str(error.value) == (
                "messages[3].tool_calls[0].function.arguments: the chat template would print the number "
                f"{number} as {shown}; use a template that prints arguments given as text"
            )


@for_each("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_express_are_refused(value):
    nested = {"a": [{"b": value}]}
    message = f"tool_calls\\[0\\].function.arguments: expected finite numbers, got {value}"
    with pytest.raises(UserError, match=message):
        BYTES.render([ASK, calling(nested)])
    with pytest.raises(UserError, match=f"tools: expected finite numbers, got {value}"):
        BYTES.render([ASK], [{"default": value}])


def result(name, text):
    return {"role": "tool", "tool_call_id": name, "content": text}


def test_results_are_put_in_the_order_of_their_calls():
    call = calling("{}", "{}", ids="ab")
    ordered = [ASK, call, result("a", "A"), result("b", "B"), ASK]
    swapped = [ASK, call, result("b", "B"), result("a", "A"), ASK]
    assert BYTES.render(swapped) == BYTES.render(ordered)
    assert WITH_IDS.render(swapped) == "?;;bB;aA;?;"
    nameless = [ASK, calling("{}", "{}"), result("b", "B"), result("a", "A")]  # the calls have no ids
    assert BYTES.render(nameless).index("B") < BYTES.render(nameless).index("A")
    apart = [ASK, call, result("a", "A"), ASK, result("b", "B")]
    assert BYTES.render(apart).index("A") < BYTES.render(apart).index("B")


CALL = calling("{}", "{}", ids="ab")
EXPECTED = "expected the id of a call in the assistant's message before it, and one result per call"


@for_each(
    ("messages", "message"),
    [
        ([ASK, CALL, result("c", "C")], f"messages[2].tool_call_id: {EXPECTED} ('a', 'b'), got 'c'"),
        (
            [ASK, CALL, result("a", "A"), result("b", "B"), result("a", "A")],
            f"messages[4].tool_call_id: {EXPECTED} (no result), got 'a'",
        ),
        (
            [ASK, CALL, result("a", "A"), result("a", "A")],
            f"messages[3].tool_call_id: {EXPECTED} ('b'), got 'a'",
        ),
        (
            [ASK, CALL, result("b", "B")],
            "messages[2]: expected the results of all calls, because the chat template does not show their "
            "ids; 'a' has none",
        ),
    ],
)
def test_results_without_a_call_are_refused(messages, message):
    with pytest.raises(UserError) as error:
        BYTES.render(messages)
    assert str(error.value) == message


def test_results_whose_calls_are_not_in_the_messages_keep_their_order():
    """The calls may be in the text of an answer, or in the part of a history that an agent has left out."""
    as_text = {"role": "assistant", "content": "<call>a</call><call>b</call>"}
    for before in ([ASK], [ASK, as_text]):
        assert WITH_IDS.render([*before, result("b", "B"), result("a", "A")]).endswith("bB;aA;")
        assert "B" in BYTES.render([*before, result("b", "B"), result("a", "A")])


def test_the_text_of_reasoning_is_the_field_that_is_not_empty():
    says = {"role": "assistant", "content": "!"}
    want = BYTES.render([ASK, says | {"reasoning_content": "Hm"}])
    for fields in (
        {"reasoning_content": "", "reasoning": "Hm"},
        {"reasoning_content": None, "reasoning": "", "thinking": "Hm"},
        {"reasoning_content": "Hm", "reasoning": "Hm", "thinking": ""},
    ):
        assert BYTES.render([ASK, says | fields]) == want, json.dumps(fields)
    with pytest.raises(UserError, match=r"messages\[1\].reasoning: expected one text of reasoning, got two"):
        BYTES.render([ASK, says | {"reasoning_content": "Hm", "reasoning": "Oh"}])
