"""The Anthropic SDK speaks the Messages API with the server, and Claude Code's requests are read."""

from typing import Any

import anthropic
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
from titan_tree.serve.dialects import DIALECTS

BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
ANSWERS: list[dict[str, Any]] = [
    *TEXTS,
    {"content": "", "tool_calls": [call("Bash", '{"command": "ls", "n": 1.0}')]},
    {
        "content": "I look.",
        "reasoning_content": "Two folders.",
        "tool_calls": [call("Bash", '{"command": "ls a"}'), call("Bash", "{}"), call("Bash", "")],
    },
    {"content": ""},
]


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{url}/s/task", api_key="any", max_retries=0)


def whole(client: anthropic.Anthropic, **body: Any) -> Any:
    return client.messages.create(model="policy", max_tokens=64, **body)


def streamed(client: anthropic.Anthropic, **body: Any) -> Any:
    with client.messages.stream(model="policy", max_tokens=64, **body) as stream:
        return stream.get_final_message()


@for_each("answer, ask", [(answer, ask) for answer in ANSWERS for ask in (whole, streamed)])
def test_what_a_client_sends_back_is_what_the_model_wrote(answer: Any, ask: Any) -> None:
    recorder = ScriptedRecorder(answer)
    with serving(recorder) as url, client_of(url) as client:
        message = ask(client, messages=[USER], tools=[BASH], system="Be brief.")
        uses = [block for block in message.content if block.type == "tool_use"]
        assert all(block.signature for block in message.content if block.type == "thinking")
        assert message.stop_reason == ("tool_use" if uses else "end_turn")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "a b"} for use in uses]
        following = [*results, {"type": "text", "text": "Go on"}]
        sent = {"role": "assistant", "content": message.to_dict()["content"]}
        whole(client, messages=[USER, sent, {"role": "user", "content": following}])
    assert [turn.request.max_tokens for turn in recorder.turns] == [64, 64]
    system, function = {"role": "system", "content": "Be brief."}, recorder.turns[0].request.tools
    assert recorder.turns[0].request.messages == [system, USER]
    assert function == [
        {
            "type": "function",
            "function": {
                "name": "Bash",
                "description": "Runs a command.",
                "parameters": BASH["input_schema"],
            },
        }
    ]
    results = [{"role": "tool", "content": "a b", "name": "Bash"}] * len(uses)
    assert_read(recorder.turns[-1].request, USER, answer, *results, {"role": "user", "content": "Go on"})


@for_each("ask", [whole, streamed])
def test_arguments_that_are_no_object_become_text(ask: Any) -> None:
    broken = '{"command": "ls'
    answer = {"content": "I look.", "tool_calls": [call("Bash", broken), call("Bash", '{"command": "ls"}')]}
    with serving(ScriptedRecorder(answer)) as url, client_of(url) as client:
        message = ask(client, messages=[USER], tools=[BASH])
    text, use = message.content
    assert text.text == (f'I look.\n<tool_call>\n{{"name": "Bash", "arguments": {broken}}}\n</tool_call>')
    assert (use.name, use.input) == ("Bash", {"command": "ls"})


def test_an_answer_that_is_cut_off() -> None:
    with serving(ScriptedRecorder(finish="length")) as url, client_of(url) as client:
        assert whole(client, messages=[USER]).stop_reason == "max_tokens"
        assert streamed(client, messages=[USER]).stop_reason == "max_tokens"


def test_tokens_are_counted_without_a_turn() -> None:
    recorder = ScriptedRecorder()
    with serving(recorder) as url, client_of(url) as client:
        assert client.messages.count_tokens(model="policy", messages=[USER]).input_tokens == 5  # type: ignore
        assert [model.id for model in client.models.list()] == ["policy"]
    assert not recorder.turns


def test_images_of_users_and_tools() -> None:
    recorder = ScriptedRecorder()
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    image = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "x", "name": "Look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    with serving(recorder) as url, client_of(url) as client:
        whole(
            client,
            messages=[
                {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
        )
    read = {"type": "image", "image": f"data:image/png;base64,{PIXEL}"}
    user, _, tool = recorder.turns[0].request.messages
    assert user["content"] == [read, {"type": "text", "text": "What is it?"}]
    assert tool["content"] == [read]


def test_a_request_of_claude_code() -> None:
    """Its fields as version 2.1 sends them, with shorter texts."""
    body = {
        "model": "policy",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\nWork.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Run it."}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I run it.", "signature": "a0"},
                    {"type": "text", "text": "Running."},
                    {"type": "tool_use", "id": "call_a00", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_a00",
                        "content": "a b",
                        "is_error": False,
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
            },
            {"role": "system", "content": "The user sent a message."},
        ],
        "tools": [
            {**BASH, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "metadata": {"user_id": '{"session_id": "1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    request = DIALECTS["messages"].request(body)
    assert request.ignored == ("tool web_search",)
    assert request.max_tokens == 32000
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["Bash"]
    answer = {
        "content": "Running.",
        "reasoning_content": "I run it.",
        "tool_calls": [call("Bash", '{"command": "ls"}')],
    }
    assert_read(
        request,
        {
            "role": "system",
            "content": "x-anthropic-billing-header: cc_version=2.1.197;You are Claude Code.\nWork.",
        },
        {"role": "user", "content": "<reminder>\nRun it."},
        answer,
        {"role": "tool", "content": "a b", "name": "Bash"},
        {"role": "system", "content": "The user sent a message."},
    )


@for_each(
    "body, error",
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice: this server supports 'auto' or 'none'"),
        ({"tool_choice": {"type": "tool", "name": "Bash"}}, "tool_choice: this server supports"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format: this server supports",
        ),
        ({"output_format": {"type": "json_schema"}}, "output_format: this server supports no such field"),
        (
            {"messages": [USER, {"role": "assistant", "content": "Hi"}]},
            "messages: the last one is of the assistant",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "got a part of type 'document'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role: expected user or assistant, got 'tool'"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/secret.png"}}
                        ],
                    }
                ]
            },
            "expected an image as data:image",
        ),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\]: name: expected a string, got None"),
    ],
)
def test_what_the_server_cannot_do_is_refused(body: Any, error: str) -> None:
    with serving(ScriptedRecorder()) as url, client_of(url) as client:
        asked = {"model": "policy", "max_tokens": 9, "messages": [USER]} | body
        with pytest.raises(anthropic.BadRequestError, match=error) as caught:
            client.post("/v1/messages", body=asked, cast_to=object)
    assert caught.value.body["type"] == "error"  # type: ignore
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore


@for_each("ask", [whole, streamed])
def test_the_recorder_may_refuse(ask: Any) -> None:
    with (
        serving(ScriptedRecorder(REFUSED)) as url,
        client_of(url) as client,
        pytest.raises(anthropic.BadRequestError, match="40 tokens; expected at most 32"),
    ):
        ask(client, messages=[USER])
