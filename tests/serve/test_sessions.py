"""Sessions: prompts of calls are exact, forks have a cause, and each sampled token is trained once."""

import asyncio
import json
import random
import threading
from collections import Counter

import pytest

from tests.support.agents import TOOLS, USER, WORDS, ScriptedSampler, asked, follow, printed
from tests.support.conversations import tokenizers
from titan_tree.errors import UserError
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.serve import session as causes
from titan_tree.serve.request import Request
from titan_tree.serve.turn_text import read_turn
from titan_tree.tree.context import Completion
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.fixture(scope="module")
def chats():
    return {name: Chat(tokenizers(name)["qwen3"]) for name in ("chatml", "qwen3")}


def texts_of_calls(chat, session):
    return [chat.tokenizer.decode(call.prompt) for call in session.calls]


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_conversation_continues_the_ids_of_its_turns(chats, name):
    chat = chats[name]
    call = '<tool_call>\n{"name": "look", "arguments": {"at":"the four"}}\n</tool_call>'
    texts = [f"<think>\nuser says\n</think>\n\n hello\n{call}", "hello hello"]
    if name == "chatml":
        texts = [call, "hello hello"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat, texts)
    first = Request(messages=[USER], tools=TOOLS)
    (answer,) = asked(recorder, sampler, first)
    (tool_call,) = answer.message["tool_calls"]
    assert tool_call["function"] == {"name": "look", "arguments": '{"at":"the four"}'}
    result = {"role": "tool", "content": "3", "tool_call_id": tool_call["id"]}
    second = follow(first, answer, result)
    asked(recorder, sampler, second)
    session = recorder.take("a")
    assert texts_of_calls(chat, session) == [printed(chat, first), printed(chat, second)]
    (prompt, turn), (extended, last) = sampler.read
    assert extended[: len(prompt) + len(turn.tokens)] == prompt + turn.tokens
    assert chat.tokenizer.encode(chat.tokenizer.decode(turn.tokens)) != turn.tokens
    (path,) = session.paths()
    assert path.tokens == extended + last.tokens
    assert [t for t, m in zip(path.tokens, path.mask, strict=True) if m] == turn.tokens + last.tokens
    assert [x for x, m in zip(path.logprobs, path.mask, strict=True) if m] == turn.logprobs + last.logprobs
    assert path.starts == [len(prompt), len(extended)]
    assert not session.forks()


def test_thoughts_that_the_template_drops_fork_the_session_or_stay(chats):
    chat = chats["qwen3"]
    for mode in ("faithful", "append"):
        texts = ["<think>\nuser says\n</think>\n\nhello", "two"]
        sampler = ScriptedSampler(chat, texts)
        recorder = ModelRecorder(chat, RLConfig(), mode)
        first = Request(messages=[USER])
        (answer,) = asked(recorder, sampler, first)
        assert answer.message["reasoning_content"] == "user says"
        second = follow(first, answer, USER)
        asked(recorder, sampler, second)
        session = recorder.take("a")
        (prompt, turn), (following, last) = sampler.read
        if mode == "faithful":
            assert session.forks() == {causes.PRINTED: 1}
            assert texts_of_calls(chat, session)[1] == printed(chat, second)
            assert [path.tokens for path in session.paths()] == [
                prompt + turn.tokens,
                following + last.tokens,
            ]
        else:
            assert following[: len(prompt) + len(turn.tokens)] == prompt + turn.tokens
            rest = chat.tokenizer.decode(following[len(prompt) + len(turn.tokens) :])
            assert rest == "\n<|im_start|>user\nuser says hello<|im_end|>\n<|im_start|>assistant\n"
            assert len(session.paths()) == 1


def other(request, **changes):
    return Request(**{"messages": request.messages, "tools": request.tools} | changes)


SYSTEM = {"role": "system", "content": "x"}
FORKS = {
    causes.AGAIN: lambda r: r,
    causes.TOOLS: lambda r: other(r, tools=None),
    causes.SYSTEM: lambda r: other(r, messages=[SYSTEM | {"content": "y"}, *r.messages[1:]]),
    causes.NEW: lambda r: other(r, messages=[SYSTEM, {"role": "user", "content": "else"}]),
    causes.REWRITTEN: lambda r: other(r, messages=[*r.messages[:2], r.messages[2] | {"content": "no"}, USER]),
    causes.CHANGED: lambda r: other(r, messages=[*r.messages[:3], {"role": "user", "content": "else"}]),
    causes.CUT: lambda r: other(r, messages=[*r.messages[:2], USER]),
}


@pytest.mark.parametrize("cause", FORKS)
def test_forks_have_a_cause_and_train_no_token_twice(chats, cause):
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat)
    first = Request(messages=[SYSTEM, USER], tools=TOOLS)
    (answer,) = asked(recorder, sampler, first)
    second = follow(first, answer, USER)
    asked(recorder, sampler, second)
    assert not recorder._open("a").session.forks()
    asked(recorder, sampler, FORKS[cause](second))
    session = recorder.take("a")
    got = session.forks()
    assert got == ({causes.BESIDE: 1} if cause == causes.CHANGED else {cause: 1})
    assert_exact(chat, sampler, session)


def assert_exact(chat, sampler, session):
    """The paths hold what the sampler read and wrote, and each sampled token is trained once."""
    assert [(call.prompt, call.turn) for call in session.calls] == sampler.read
    paths = session.paths()
    read = {tuple(prompt + turn.tokens) for prompt, turn in sampler.read}
    assert {tuple(path.tokens) for path in paths} <= read
    starts_of = {tuple(path.tokens[:n]) for path in paths for n in range(len(path.tokens) + 1)}
    assert read <= starts_of
    trained = Counter()
    for path in paths:
        for start in path.starts:
            trained[tuple(path.tokens[:start])] += 1
    assert trained == Counter(tuple(prompt) for prompt, _ in sampler.read)
    assert sum(sum(path.mask) for path in paths) == sum(len(turn.tokens) for _, turn in sampler.read)
    tree = TokenTree.from_paths([TokenPath(path.tokens, path.mask) for path in paths])
    assert len(tree) <= sum(len(path.tokens) for path in paths)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@pytest.mark.parametrize("seed", range(10))
def test_random_histories_are_exact(chats, name, seed):
    """Clients continue, ask again, edit, drop thoughts and cut. In order, each text is what is printed."""
    draw, chat = random.Random(seed), chats[name]
    limits = RLConfig(max_turn_tokens=draw.choice((40, 400)))
    recorder, sampler = ModelRecorder(chat, limits), ScriptedSampler(chat)
    requests = [Request(messages=[USER], tools=draw.choice((None, TOOLS)))]
    sent = []
    for _ in range(8):
        request = draw.choice(requests[-3:])
        (answer,) = asked(recorder, sampler, request)
        sent.append(request)
        message = json.loads(json.dumps(answer.message))
        if draw.random() < 0.2:
            message.pop("reasoning_content", None)
        if draw.random() < 0.2:
            message["content"] = message["content"].strip() + "!"
        results = [
            {"role": "tool", "content": draw.choice(WORDS), "tool_call_id": call["id"]}
            for call in message.get("tool_calls", ())
        ]
        following = results or [{"role": "user", "content": draw.choice(WORDS)}]
        requests.append(other(request, messages=[*request.messages, message, *following]))
    session = recorder.take("a")
    assert texts_of_calls(chat, session) == [printed(chat, request) for request in sent]
    assert_exact(chat, sampler, session)


def test_a_retry_gets_the_answer_of_the_first_attempt(chats):
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat)
    until = threading.Event()

    async def ask():
        request = Request(messages=[USER])
        first = asyncio.create_task(recorder.turn("a", request, digest="d", is_retry=False))
        await asyncio.sleep(0)
        both = await asyncio.gather(first, recorder.turn("a", request, digest="d", is_retry=True))
        again = await recorder.turn("a", request, digest="d", is_retry=True)
        new = await recorder.turn("a", request, digest="d", is_retry=False)
        until.set()
        return [*both, again, new]

    thread = threading.Thread(target=recorder.run, args=(sampler, until))
    thread.start()
    first, *retried, new = asyncio.run(ask())
    thread.join()
    assert retried == [first, first]
    assert new != first
    assert len(sampler.read) == 2


def test_a_context_without_room_for_a_turn_is_refused(chats):
    recorder = ModelRecorder(chats["chatml"], RLConfig(max_rollout_tokens=10))
    request = Request(messages=[USER])
    size = recorder.count("a", request)
    with pytest.raises(UserError, match=f"fewer than rl.max_rollout_tokens = 10 tokens, got {size}"):
        asyncio.run(recorder.turn("a", request, digest="", is_retry=False))
    assert recorder.take("a").calls == []


def test_fields_without_effect_are_logged_once(chats, caplog):
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat)
    for value in ("0.5", "0.7"):
        asked(recorder, sampler, Request(messages=[USER], ignored=(f"temperature = {value}", "tool search")))
    assert [record.message for record in caplog.records] == [
        "requests: temperature = 0.5 has no effect on turns (docs/agents.md)",
        "requests: tool search has no effect on turns (docs/agents.md)",
    ]


def shown(url):
    image = {"type": "image", "image": url}
    return {"role": "user", "content": [{"type": "text", "text": "see"}, image]}


def test_messages_with_other_images_are_other_messages():
    assert causes._key(shown("data:image/png;base64,AAAA")) != causes._key(
        shown("data:image/png;base64,BBBB")
    )
    texts = [{"type": "text", "text": text} for text in ("see", "image")]
    assert causes._key(shown("image")) != causes._key({"role": "user", "content": texts})


def test_a_turn_that_was_cut_off_is_continued_in_both_modes(chats):
    chat = chats["chatml"]
    for mode in ("faithful", "append"):
        recorder = ModelRecorder(chat, RLConfig(), mode)
        sampler = ScriptedSampler(chat, ["hello", "user says hello", "two"])
        first = Request(messages=[USER])
        (answer,) = asked(recorder, sampler, first)
        second = follow(first, answer, USER)
        (cut,) = asked(recorder, sampler, Request(messages=second.messages, max_tokens=3))
        assert cut.finish == "length"
        asked(recorder, sampler, follow(second, cut, USER))
        session = recorder.take("a")
        assert not session.forks()
        assert len(session.paths()) == 1
        assert_exact(chat, sampler, session)


def test_a_retry_waits_for_the_newest_of_equal_requests(chats):
    chat = chats["chatml"]
    recorder = ModelRecorder(chat, RLConfig())

    async def ask():
        tasks = []
        for number, is_retry in enumerate((False, False, True)):
            turn = recorder.turn("a", Request(messages=[USER]), digest="d", is_retry=is_retry)
            tasks.append(asyncio.create_task(turn))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if number == 0:
                recorder._waiting.get().result.set_result(Completion([5, chat.ends[0]], [-1.0, -1.0]))
                await tasks[0]
        recorder._waiting.get().result.set_result(Completion([6, chat.ends[0]], [-1.0, -1.0]))
        return await asyncio.gather(*tasks)

    first, second, retried = asyncio.run(ask())
    assert retried == second != first


def test_counting_tokens_opens_no_session(chats):
    recorder = ModelRecorder(chats["chatml"], RLConfig())
    assert recorder.count("a", Request(messages=[USER])) > 0
    assert recorder.take("a") is None


BROKEN_CALLS = (
    '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
    '<tool_call>\n[{"name": "look", "arguments": {"at": "\\ud800"}}, {"name": "look"}]\n</tool_call>',
)


@pytest.mark.parametrize("text", BROKEN_CALLS)
def test_calls_that_no_text_can_hold_stay_text(chats, text, tmp_path):
    chat = chats["chatml"]
    recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)
    (answer,) = asked(recorder, ScriptedSampler(chat, [text]), Request(messages=[USER], tools=TOOLS))
    assert answer.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize("value", ["[" * 200_000, '"\\ud800"', "12x"])
@pytest.mark.parametrize("parameters", [{"properties": {"at": {"type": "integer"}}}, {"properties": []}, []])
def test_arguments_that_are_no_json_are_text(value, parameters):
    text = f"<tool_call>\n<function=look>\n<parameter=at>\n{value}\n</parameter>\n</function>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    (call,) = read_turn(text, tools, lambda message: None)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": value}


def test_the_first_turn_comes_first_even_if_its_path_ends_last(chats):
    """Otherwise its context for advantages would be what a sub-agent did later, in each rollout another."""
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat)
    first = Request(messages=[USER])
    (answer,) = asked(recorder, sampler, first)
    asked(recorder, sampler, Request(messages=[{"role": "user", "content": "sub-agent"}]))
    asked(recorder, sampler, follow(first, answer, USER))
    main, sub = recorder.take("a").paths()
    (root, _), (forked, _), (following, _) = sampler.read
    assert (main.starts, sub.starts) == ([len(root), len(following)], [len(forked)])


def test_arguments_that_a_client_changed_from_1_to_true_are_changed(chats):
    chat = chats["chatml"]
    text = '<tool_call>\n{"name": "look", "arguments": {"at": [{"x": 1}]}}\n</tool_call>'
    recorder, sampler = ModelRecorder(chat, RLConfig()), ScriptedSampler(chat, [text])
    first = Request(messages=[USER], tools=TOOLS)
    (answer,) = asked(recorder, sampler, first)
    (call,) = answer.message["tool_calls"]
    changed = call | {"function": {"name": "look", "arguments": '{"at": [{"x": true}]}'}}
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    messages = [USER, answer.message | {"tool_calls": [changed]}, result]
    asked(recorder, sampler, Request(messages=messages, tools=TOOLS))
    session = recorder.take("a")
    assert '{"x": true}' in texts_of_calls(chat, session)[1]
    assert session.forks() == {causes.REWRITTEN: 1}
