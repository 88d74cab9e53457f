"""The OpenAI SDK speaks Responses with the server, and requests of Codex are read."""

import json
from typing import Any

import openai
import pytest

from tests.support.cases import for_each
from tests.support.scripted_recorder import (
    PIXEL,
    REFUSED,
    TEXTS,
    USER,
    ScriptedRecorder,
    assert_read,
    call,
    serving,
)
from tests.support.sdk_clients import client_of
from titan_tree.serve.dialects import DIALECTS

SHELL = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TEXT = '*** Begin Patch\n*** Delete File: "a"\n*** End Patch é\n' * 4
ANSWERS: list[dict[str, Any]] = [
    *TEXTS,
    {"content": "", "tool_calls": [call("shell", '{"cmd": "ls"}'), call("shell", '{"cmd":"ls')]},
    {
        "content": "",
        "reasoning_content": "A patch.",
        "tool_calls": [call("apply_patch", json.dumps({"input": TEXT}, ensure_ascii=False))],
    },
    {  # calls of a custom tool otherwise than its schema says
        "content": "I patch.",
        "tool_calls": [
            call("apply_patch", '{"patch": "x"}'),
            call("apply_patch", '{"input": "x", "more": 1}'),
            call("apply_patch", '{"input": 1}'),
            call("apply_patch", "x"),
        ],
    },
]


def whole(client: openai.OpenAI, **body: Any) -> Any:
    return client.responses.create(model="policy", **body)


def streamed(client: openai.OpenAI, **body: Any) -> Any:
    """Returns the last event's response, after all pieces before it have been compared with it."""
    pieces: dict[str, str] = {}
    with client.responses.stream(model="policy", **body) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            if event.type.endswith(".delta"):
                pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
            last = event
    assert last.type in ("response.completed", "response.incomplete")
    for item in last.response.output:
        text = item.content[0].text if getattr(item, "content", None) else None
        assert pieces[item.id] == (text or getattr(item, "arguments", None) or item.input)
    return last.response


@for_each("answer, ask", [(answer, ask) for answer in ANSWERS for ask in (whole, streamed)])
def test_what_a_client_sends_back_is_what_the_model_wrote(answer: Any, ask: Any) -> None:
    recorder = ScriptedRecorder(answer)
    with serving(recorder) as url, client_of(url) as client:
        response = ask(client, input=[USER], tools=[SHELL, PATCH], instructions="Be brief.")
        assert (response.status, response.output_text) == ("completed", answer["content"])
        assert (response.usage.input_tokens, response.usage.output_tokens) == (11, 7)
        items: list[Any] = [item.to_dict() for item in response.output]
        for item in items:  # the SDK's own
            for each in (item, *(item.get("content") or ())):
                each.pop("parsed", None)
                each.pop("parsed_arguments", None)
        outputs = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "Done"}
            for item in items
            if "call_id" in item
        ]
        whole(
            client, input=[USER, *items, *outputs, USER], store=False, include=["reasoning.encrypted_content"]
        )
    results = [
        {"role": "tool", "content": "Done", "name": item["function"]["name"]}
        for item in answer.get("tool_calls", ())
    ]
    assert_read(recorder.turns[-1].request, USER, answer, *results, USER)
    first = recorder.turns[0].request
    assert first.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert first.ignored == ("format of tool apply_patch",)
    assert [tool["function"] for tool in first.tools or ()] == [
        {"name": "shell", "parameters": SHELL["parameters"]},
        {
            "name": "apply_patch",
            "description": "Edits files.",
            "parameters": {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            },
        },
    ]


def test_a_call_of_a_custom_tool_has_free_text() -> None:
    with serving(ScriptedRecorder(ANSWERS[4], ANSWERS[5])) as url, client_of(url) as client:
        _, custom = whole(client, input="Patch", tools=[PATCH]).output
        _, *wrong = whole(client, input="Patch", tools=[PATCH]).output
    assert (custom.type, custom.input) == ("custom_tool_call", TEXT)
    texts = ['{"patch": "x"}', '{"input": "x", "more": 1}', '{"input": 1}', "x"]
    assert [(item.type, item.arguments) for item in wrong] == [("function_call", text) for text in texts]


@for_each("ask", [whole, streamed])
def test_an_answer_that_is_cut_off(ask: Any) -> None:
    recorder = ScriptedRecorder({"content": "One two"}, finish="length")
    with serving(recorder) as url, client_of(url) as client:
        response = ask(client, input="Count", max_output_tokens=16)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        items = [item.to_dict() for item in response.output]
        whole(client, input=[{"role": "user", "content": "Count"}, *items, USER])
    assert recorder.turns[0].request.max_tokens == 16
    assert recorder.turns[1].request.messages[1] == {"role": "assistant", "content": "One two"}


def test_images() -> None:
    recorder = ScriptedRecorder()
    source = f"data:image/png;base64,{PIXEL}"
    image = {"type": "input_image", "image_url": source, "detail": "auto"}
    with serving(recorder) as url, client_of(url) as client:
        whole(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}])
    assert recorder.turns[0].request.messages[0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image", "image": source},
    ]


def test_a_request_of_codex() -> None:
    """Its fields as version 0.171 sends them, with shorter texts."""
    body = {
        "model": "policy",
        "instructions": "",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You are Codex."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run it."}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I run it."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Running."}],
            },
            {"type": "function_call", "name": "exec", "arguments": '{"cmd":"ls"}', "call_id": "call_a00"},
            {"type": "function_call_output", "call_id": "call_a00", "output": "a b"},
        ],
        "tools": [
            {**SHELL, "name": "exec"},
            {"type": "namespace", "name": "multi_agent_v1", "tools": [SHELL]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    request = DIALECTS["responses"].request(body)
    assert request.ignored == ("tool multi_agent_v1", "tool web_search")
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["exec"]
    answer = {
        "content": "Running.",
        "reasoning_content": "I run it.",
        "tool_calls": [call("exec", '{"cmd":"ls"}')],
    }
    assert_read(
        request,
        {"role": "system", "content": "You are Codex."},
        {"role": "user", "content": "Run it."},
        answer,
        {"role": "tool", "content": "a b", "name": "exec"},
    )


@for_each(
    "body, error",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: expected the items of the earlier"),
        ({"conversation": "c"}, "conversation: expected the items"),
        ({"background": True}, "background: this server supports False, got True"),
        ({"prompt": {"id": "x"}}, "prompt: this server supports no such field"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: this server supports 'text'"),
        ({"text": "short"}, "text: expected an object, got 'short'"),
        ({"tool_choice": {"type": "function", "name": "shell"}}, "tool_choice: this server supports"),
        ({"input": [{"type": "web_search_call"}]}, "items of type 'web_search_call' are not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference' are not"),
        ({"input": [1]}, r"input\[0\]: expected an item, got 1"),
        ({"input": None}, "messages: expected a non-empty list"),
        ({"tools": [{"type": "custom"}]}, r"tools\[0\]: name: expected a string, got None"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "got a part of type 'input_file'",
        ),
    ],
)
def test_what_the_server_cannot_do_is_refused(body: Any, error: str) -> None:
    with (
        serving(ScriptedRecorder()) as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match=error),
    ):
        client.post("/responses", body={"model": "policy", "input": "Hi"} | body, cast_to=object)


@for_each("stream", [False, True])
def test_the_recorder_may_refuse(stream: bool) -> None:
    with (
        serving(ScriptedRecorder(REFUSED)) as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match="40 tokens; expected at most 32"),
    ):
        client.responses.create(model="policy", input="Hi", stream=stream)
