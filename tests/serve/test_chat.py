"""The OpenAI SDK speaks Chat Completions with the server."""

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

NEXT = {"role": "user", "content": "Go on"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ANSWERS: list[dict[str, Any]] = [
    *TEXTS,
    {"content": "", "tool_calls": [call("weather", '{"city": "Bern"}')]},
    {
        "content": "I look.",
        "reasoning_content": "Two cities.",
        "tool_calls": [call("weather", '{"city":  "Bern"}'), call("weather", '{"city": "Köln')],
    },
    {"content": ""},
]


def whole(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(model="policy", **body).choices[0].message


def streamed(client: openai.OpenAI, **body: Any) -> Any:
    """Returns the message that chunks add up to, in the way of agents."""
    with client.chat.completions.stream(model="policy", **body) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


@for_each("answer, ask", [(answer, ask) for answer in ANSWERS for ask in (whole, streamed)])
def test_what_a_client_sends_back_is_what_the_model_wrote(answer: Any, ask: Any) -> None:
    recorder = ScriptedRecorder(answer)
    with serving(recorder) as url, client_of(url) as client:
        message = ask(client, messages=[USER], tools=[WEATHER])
        assert (message.content or "") == answer["content"]
        results = [
            {"role": "tool", "tool_call_id": item.id, "content": "Sunny"} for item in message.tool_calls or ()
        ]
        sent = message.to_dict(exclude_none=True) if ask is whole else message.model_dump(exclude_none=True)
        for each in sent.get("tool_calls") or ():  # the SDK adds them, and its own API refuses them
            each["function"].pop("parsed_arguments", None)
            each.pop("index", None)
        sent.pop("parsed", None)
        whole(client, messages=[USER, sent, *results, NEXT])
    tool = {"role": "tool", "content": "Sunny"}
    assert_read(recorder.turns[-1].request, USER, answer, *[tool] * len(results), NEXT)
    assert recorder.turns[0].request.tools == [WEATHER]
    assert recorder.turns[1].request.tools is None


def test_usage_ids_and_reasons() -> None:
    recorder = ScriptedRecorder({"content": "", "tool_calls": [call("weather", "{}")]})
    with serving(recorder) as url, client_of(url) as client:
        body: Any = {"model": "policy", "messages": [USER]}
        answer = client.chat.completions.create(**body)
        chunks = list(
            client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        )
        recorder.finish = "length"
        cut = client.chat.completions.create(**body, max_completion_tokens=5)
    assert (answer.id, answer.model, answer.choices[0].finish_reason) == (
        "chatcmpl-a0",
        "policy",
        "tool_calls",
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        11,
        7,
        18,
    )
    assert chunks[-1].usage == answer.usage
    assert {chunk.id for chunk in chunks} == {"chatcmpl-a1"}
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["tool_calls"]
    assert cut.choices[0].finish_reason == "length"
    assert recorder.turns[-1].request.max_tokens == 5


def test_images_and_developers() -> None:
    recorder = ScriptedRecorder()
    url_of_image = f"data:image/png;base64,{PIXEL}"
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url_of_image, "detail": "low"}},
    ]
    with serving(recorder) as url, client_of(url) as client:
        whole(
            client,
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": content}],
        )
    assert recorder.turns[0].request.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "image": url_of_image}],
        },
    ]


def test_fields_without_effect_are_named() -> None:
    recorder = ScriptedRecorder()
    custom: Any = {"type": "custom", "custom": {"name": "patch"}}
    with serving(recorder) as url, client_of(url) as client:
        whole(
            client,
            messages=[USER],
            temperature=1,
            top_p=1,
            n=1,
            tool_choice="auto",
            logprobs=False,
            user="me",
        )
        whole(
            client,
            messages=[USER],
            temperature=0.7,
            seed=0,
            stop=["END"],
            logprobs=True,
            tool_choice="none",
            tools=[custom],
            extra_body={"top_k": 20},
        )
    assert recorder.turns[0].request.ignored == ()
    assert sorted(recorder.turns[1].request.ignored) == [
        "logprobs = True",
        "seed = 0",
        "stop = ['END']",
        "temperature = 0.7",
        "tool custom",
        "tool_choice = 'none'",
        "top_k = 20",
    ]


@for_each(
    "body, error",
    [
        ({"n": 2}, "n: this server supports 1, got 2; leave it out"),
        ({"tool_choice": "required"}, "tool_choice: this server supports 'auto' or 'none', got 'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice: this server"),
        ({"response_format": {"type": "json_object"}}, "response_format: this server supports 'text', got {"),
        ({"modalities": ["text", "audio"]}, r"modalities: this server supports \['text'\], got"),
        ({"functions": [{"name": "f"}]}, "functions: this server supports no such field"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"max_tokens": "9"}, "max_tokens: expected a number of tokens, got '9'"),
        ({"stream_options": 1}, "stream_options: expected an object, got 1"),
        ({"tools": [1]}, r"tools\[0\]: expected an object, got 1"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: expected an object with a name, got None"),
        ({"messages": []}, "messages: expected a non-empty list of messages"),
        ({"messages": "Hi"}, "messages: expected a list of messages, got 'Hi'"),
        ({"messages": [{"role": "critic", "content": ""}]}, r"messages\[0\].role: expected one of system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            r"messages\[0\].content\[0\]: got a part of type 'input_audio'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:"}}]}
                ]
            },
            r"messages\[0\].content\[0\]: got a part of type 'video_url'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/x"}}]}
                ]
            },
            r"messages\[0\].content: expected an image as data:image/...;base64,..., got '/etc/x'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "file:///etc/x"}]}]},
            r"messages\[0\].content: expected an image as data:",
        ),
    ],
)
def test_what_the_server_cannot_do_is_refused(body: Any, error: str) -> None:
    with serving(ScriptedRecorder()) as url, client_of(url) as client:
        asked = {"messages": [USER]} | body
        with pytest.raises(openai.BadRequestError, match=error) as caught:
            client.post("/chat/completions", body={"model": "policy", **asked}, cast_to=object)
    assert caught.value.type == "invalid_request_error"
    assert "\n" not in caught.value.message


@for_each("stream", [False, True])
def test_the_recorder_may_refuse(stream: bool) -> None:
    with (
        serving(ScriptedRecorder(REFUSED)) as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match="40 tokens; expected at most 32"),
    ):
        client.chat.completions.create(model="policy", messages=[USER], stream=stream)  # type: ignore
