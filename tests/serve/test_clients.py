"""Clients by the libraries of OpenAI and Anthropic: what is recorded is what the model read and wrote."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from unicodedata import normalize

import anthropic
import openai
import pytest

from tests.support.agents import TOOLS, WORDS, ScriptedSampler, printed
from tests.support.cases import for_each
from tests.support.conversations import tokenizers
from tests.support.scripted_recorder import wait_until
from tests.support.sdk_clients import APIS, Clients
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.serve import agent_server
from titan_tree.serve import session as causes
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.request import Request
from titan_tree.serve.session_files import CALLS, ROWS
from titan_tree.serve.settings import ServeConfig

SERVER_ERRORS = (openai.InternalServerError, anthropic.InternalServerError)
TIMEOUTS = (openai.APITimeoutError, anthropic.APITimeoutError)
CLIENT_ERRORS = (openai.APIError, anthropic.APIError)
SYSTEM = {"role": "system", "content": "Be brief."}
ARGUMENTS = (
    '{"at": "the four"}', '{"at":"x"}', '{ "at" : "\\u00e9\\n" }', '{"at": "日本", "n": 1.50}',
    '{"n":1e3,"at":"<tool_call>"}', "{}", '{"at": {"b": [1, null, true]}}', '{"at":\n"x"}',
)  # fmt: skip
SPACES = ("", " ", "\n", "\n\n", "  \n")


@pytest.fixture(scope="module")
def chats():
    return {name: Chat(tokenizers(name)["qwen3"]) for name in ("chatml", "qwen3")}


@pytest.fixture(scope="module")
def clients():
    clients = Clients()
    yield clients
    clients.close()


def turn_of(draw):
    """Returns a turn that chatml prints for some message."""
    text = "".join(draw.choices(WORDS, k=draw.randint(0, 3)))
    text = draw.choice(SPACES) + text + draw.choice(SPACES)
    thought = draw.choice(("", "", "user says", " x ", "\n", "a\n\nb\n"))
    if draw.random() < 0.5:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {draw.choice(ARGUMENTS)}}}\n</tool_call>'
        for _ in range(draw.choice((0, 0, 1, 1, 2)))
    ]
    if calls and text and not text.endswith("\n\n"):
        text += "\n"
    return text + "\n".join(calls)


class Model(ScriptedSampler):
    """Writes turns of ``turn_of``, and keeps what it read and wrote by the seeds of calls."""

    def __init__(self, chat, write=turn_of):
        super().__init__(chat)
        self.write, self.by_seed = write, {}

    def sample(self, contexts, max_tokens, stops, seeds):
        self.texts = [self.write(random.Random(seed)) for seed in seeds]
        turns = super().sample(contexts, max_tokens, stops, seeds)
        for seed, context, turn in zip(seeds, contexts, turns, strict=True):
            assert seed not in self.by_seed
            self.by_seed[seed] = (list(context), turn)
        return turns

    def of(self, name):
        """Returns what it read and wrote in a session, in the order of the calls."""
        seeds = [random.Random(f"/{name}/{number}").getrandbits(62) for number in range(1000)]
        return [self.by_seed[seed] for seed in seeds if seed in self.by_seed]


@contextmanager
def serving(recorder, sampler) -> Iterator[str]:
    """Yields the URL of a server, behind which a sampler runs."""
    server, until = AgentServer(recorder, ServeConfig(port=0), "policy"), threading.Event()
    url = server.start()
    thread = threading.Thread(target=recorder.run, args=(sampler, until))
    thread.start()
    try:
        yield url
    finally:
        until.set()
        thread.join()
        server.close()


def following(draw, message):
    """Returns what an agent answers to a turn."""
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "content": draw.choice(WORDS), "tool_call_id": c["id"]} for c in calls]
    if not results or draw.random() < 0.2:
        results.append({"role": "user", "content": draw.choice(WORDS)})
    return results


def assert_same(message, recorded):
    """A client has accumulated what is recorded. Anthropic's API has arguments as objects."""
    assert message["content"] == (recorded["content"] or "")
    assert message.get("reasoning_content", "") == recorded.get("reasoning_content", "")
    got, want = message.get("tool_calls", []), recorded.get("tool_calls", [])
    assert [(c["id"], c["function"]["name"]) for c in got] == [(c["id"], c["function"]["name"]) for c in want]
    for one, other in zip(got, want, strict=True):
        mine, its = one["function"]["arguments"], other["function"]["arguments"]
        assert json.loads(mine) == json.loads(its)
        assert message.get("sent", "c")[0] == "messages" or mine == its


def assert_exact(sampler, name, session):
    """The calls are what the sampler read and wrote, and each sampled token is trained in one path."""
    read = sampler.of(name)
    assert [(list(call.prompt), call.turn) for call in session.calls] == read
    for call in session.calls:
        if call.parent is None:
            assert call.fork or call.number == 0
        else:
            before = [*call.parent.prompt, *call.parent.turn.tokens]
            assert call.prompt[: len(before)] == before
    trained = Counter()
    for path in session.paths():
        assert len(path.tokens) == len(path.mask) == len(path.logprobs)
        stops = []
        for start in path.starts:
            stops.append(next((i for i in range(start, len(path.mask)) if not path.mask[i]), len(path.mask)))
            part = slice(start, stops[-1])
            trained[tuple(path.tokens[:start]), tuple(path.tokens[part]), tuple(path.logprobs[part])] += 1
        assert sum(path.mask) == sum(stops) - sum(path.starts)
        assert not any(x for x, m in zip(path.logprobs, path.mask, strict=True) if not m)
    assert trained == Counter((tuple(p), tuple(turn.tokens), tuple(turn.logprobs)) for p, turn in read)


def converse(draw, clients, recorder, url, name, turns, apis=APIS):
    """An agent without edits. Each turn is by an API of ``apis``, streamed or not."""
    messages = [*draw.choice(([], [SYSTEM])), {"role": "user", "content": draw.choice(WORDS)}]
    tools = draw.choice((None, TOOLS))
    for _ in range(turns):
        message = clients.ask(
            f"{url}/s/{name}", draw.choice(apis), messages, tools,
            stream=draw.random() < 0.5, max_tokens=draw.choice((None, None, None, 12)),
        )  # fmt: skip
        assert_same(message, recorder.session(name).calls[-1].answer.message)
        messages = [*messages, message, *following(draw, message)]


def at_once(number, agent):
    """Runs ``agent(name, random numbers)`` for a number of sessions at once. Returns their names."""
    names = [f"task.{index}" for index in range(number)]
    with ThreadPoolExecutor(number) as pool:
        for done in [pool.submit(agent, name, random.Random(name)) for name in names]:
            done.result()
    return names


@pytest.mark.parametrize("apis", [*((api,) for api in APIS), APIS], ids="-".join)
@pytest.mark.parametrize("number", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_conversations_without_edits_never_fork(chats, clients, apis, number):
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), Model(chat)
    with serving(recorder, sampler) as url:
        names = at_once(number, lambda name, draw: converse(draw, clients, recorder, url, name, 4, apis))
    for name in names:
        session = recorder.session(name)
        assert not session.forks(), texts(chat, session)
        assert len(session.calls) == 4
        assert len(session.paths()) == 1
        assert_exact(sampler, name, session)


def texts(chat, session):
    return [chat.tokenizer.decode(call.tokens) for call in session.calls]


NOT_PRINTED = {  # turns that chatml prints for no message, or that an API cannot express
    "white space in the frame of a call": (
        APIS, '<tool_call>\n{"name":"look","arguments": {}}\n</tool_call>'
    ),
    "no line feed before a call": (APIS, 'x<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'),
    "a line feed after a call": (APIS, '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'),
}  # fmt: skip


@for_each("api, turn", [(api, turn) for apis, turn in NOT_PRINTED.values() for api in apis])
def test_turns_that_no_message_prints_fork_with_their_cause(api, turn, chats, clients):
    chat = chats["chatml"]
    recorder, sampler = ModelRecorder(chat, RLConfig()), Model(chat, lambda draw: turn)
    with serving(recorder, sampler) as url:
        first = [{"role": "user", "content": "x"}]
        message = clients.ask(f"{url}/s/a", api, first, TOOLS)
        clients.ask(f"{url}/s/a", api, [*first, message, *following(random.Random(0), message)], TOOLS)
    assert recorder.session("a").forks() == {causes.PRINTED: 1}


class Editor:
    """An agent that edits its history in random ways.

    Attributes:
        printed: what the template prints for the messages of each answer, by the answer's id.
    """

    def __init__(self, draw, clients, recorder, url, name):
        self.draw, self.clients, self.recorder = draw, clients, recorder
        self.url, self.name, self.printed = url, name, {}
        self.asked = []  # each request with the answer's id

    def ask(self, messages, tools):
        draw = self.draw
        options = {"stream": draw.random() < 0.5, "max_tokens": draw.choice((None, None, 12))}
        return self.send(draw.choice(APIS), messages, tools, options)

    def send(self, api, messages, tools, options):
        """Returns the answer, whose arguments are those that the model wrote."""
        message = self.clients.ask(f"{self.url}/s/{self.name}", api, messages, tools, **options)
        recorded = self.recorded(message)
        assert_same(message, recorded)
        plain = [{k: v for k, v in each.items() if k not in ("sent", "id")} for each in messages]
        request = Request(messages=normalize_messages(plain, "sent"), tools=tools)
        self.printed[message["id"]] = printed(self.recorder.chat, request)
        self.asked.append((api, messages, tools, options, message["id"]))
        return message | ({"tool_calls": recorded["tool_calls"]} if "tool_calls" in recorded else {})

    def recorded(self, message):
        calls = self.recorder.session(self.name).calls
        (answer,) = [c.answer for c in calls if c.answer and c.answer.id == message["id"]]
        return answer.message

    def retry(self):
        """The library tries again: it gets the same answer, or that of an equal request."""
        *request, options, _ = self.draw.choice(self.asked)
        again = self.clients.ask(f"{self.url}/s/{self.name}", *request, **options, retries=1)
        equal = [identifier for *other, identifier in self.asked if other == [*request, options]]
        assert again["id"] in equal
        assert_same(again, self.recorded(again))

    def edited(self, messages):
        """Returns messages of which one is changed, or some are left out."""
        messages, draw = list(messages), self.draw
        kind = draw.choice(("content", "thoughts", "arguments", "cut", "system"))
        if kind == "system":
            rest = messages[messages[0]["role"] == "system" :]
            return [{"role": "system", "content": draw.choice(WORDS)}, *rest]
        if kind == "cut":
            starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
            return messages[draw.choice(starts) :]
        at = draw.randrange(len(messages))
        message = {k: v for k, v in messages[at].items() if k != "sent"}
        if kind == "thoughts":
            message.pop("reasoning_content", None)
        elif kind == "arguments" and "tool_calls" in message:
            function = {"name": "look", "arguments": '{"at": "changed"}'}
            message["tool_calls"] = [call | {"function": function} for call in message["tool_calls"]]
        else:
            message["content"] += "!"
        return [*messages[:at], message, *messages[at + 1 :]]

    def play(self, turns):
        draw = self.draw
        histories = [[*draw.choice(([], [SYSTEM])), {"role": "user", "content": draw.choice(WORDS)}]]
        tools = draw.choice((None, TOOLS))
        for _ in range(turns):
            messages, shown = draw.choice(histories[-3:]), tools if draw.random() < 0.9 else None
            if draw.random() < 0.3:
                messages = self.edited(messages)
            if draw.random() < 0.2:  # agents of one session at once
                with ThreadPoolExecutor(2) as pool:
                    others = [pool.submit(Editor.ask, self, messages, shown) for _ in range(2)]
                    answers = [other.result() for other in others]
            else:
                answers = [self.ask(messages, shown)]
            if draw.random() < 0.3:
                self.retry()
            histories += [[*messages, answer, *following(draw, answer)] for answer in answers]


@pytest.mark.parametrize("number", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "mode"), [("chatml", "faithful"), ("qwen3", "faithful"), ("qwen3", "append")]
)
def test_edited_conversations_are_exact(chats, clients, name, mode, number):
    chat = chats[name]
    recorder, sampler = ModelRecorder(chat, RLConfig(), mode), Model(chat)
    editors = []

    def play(name, draw):
        editors.append(Editor(draw, clients, recorder, url, name))
        editors[-1].play(5)

    with serving(recorder, sampler) as url:
        at_once(number, play)
    forks = Counter()
    for editor in editors:
        session = recorder.session(editor.name)
        assert_exact(sampler, editor.name, session)
        assert {call.answer.id for call in session.calls} == set(editor.printed)
        forks += session.forks()
        if mode == "faithful":
            for call in session.calls:
                got = chat.tokenizer.decode(call.prompt)
                assert normalize("NFC", got) == normalize("NFC", editor.printed[call.answer.id])
    assert len(forks) >= 4


class Broken(Model):
    """Fails from its call of this number."""

    def __init__(self, chat, number):
        super().__init__(chat)
        self.left = number

    def sample(self, *args):
        if self.left == 0:
            raise RuntimeError("the GPU is gone")
        self.left -= 1
        return super().sample(*args)


@for_each("api, stream", [(api, stream) for api in APIS for stream in (False, True)])
def test_a_sampler_that_fails_ends_the_run_and_records_nothing(api, stream, chats, clients, tmp_path):
    chat = chats["chatml"]
    recorder, until = ModelRecorder(chat, RLConfig(), folder=tmp_path), threading.Event()
    first = [{"role": "user", "content": "x"}]
    server = AgentServer(recorder, ServeConfig(port=0), "policy")
    with closing(server), ThreadPoolExecutor(1) as pool:
        url = server.start()
        run = pool.submit(recorder.run, Broken(chat, 1), until)
        message = clients.ask(f"{url}/s/a", api, first, None, stream)
        for name in ("a", "b"):
            if name == "b":
                run = pool.submit(recorder.run, Broken(chat, 0), until)
            with pytest.raises(
                SERVER_ERRORS, match="internal error; the log of the server says more"
            ) as error:
                clients.ask(f"{url}/s/{name}", api, [*first, message, *first], None, stream)
            assert error.value.status_code == 500
            assert type(error.value).__module__.startswith("anthropic" if api == "messages" else "openai")
            with pytest.raises(RuntimeError, match="the GPU is gone"):
                run.result()
    assert [call.answer.id for call in recorder.session("a").calls] == [message["id"]]
    again = ModelRecorder(chat, RLConfig(), folder=tmp_path)
    assert [call.answer.id for call in again.take("a").calls] == [message["id"]]
    assert again.take("b") is None


class Held(Model):
    """Waits for an event before it writes."""

    def __init__(self, chat):
        super().__init__(chat)
        self.begun, self.may_write = threading.Event(), threading.Event()

    def sample(self, *args):
        self.begun.set()
        assert self.may_write.wait(20)
        return super().sample(*args)


@for_each("api, stream", [(api, stream) for api in APIS for stream in (False, True)])
def test_a_client_that_leaves_gets_its_turn_at_the_next_try(api, stream, chats, clients):
    """Also if the model has not written it by then."""
    chat = chats["chatml"]
    first = [{"role": "user", "content": "x"}]
    for is_written in (False, True):
        recorder, sampler = ModelRecorder(chat, RLConfig()), Held(chat)
        with serving(recorder, sampler) as url, ThreadPoolExecutor(1) as pool:
            with pytest.raises(TIMEOUTS):
                clients.ask(f"{url}/s/a", api, first, None, stream, timeout=0.1)
            assert sampler.begun.wait(20)
            if is_written:
                sampler.may_write.set()
                wait_until(lambda recorder=recorder: recorder.session("a").calls[0].answer)
            asked = pool.submit(clients.ask, f"{url}/s/a", api, first, None, stream, retries=1)
            sampler.may_write.set()
            (call,) = recorder.session("a").calls
            assert asked.result()["id"] == call.answer.id
            assert len(sampler.of("a")) == 1


class Slow(Broken):
    def sample(self, *args):
        time.sleep(random.random() * 0.02)
        return super().sample(*args)


@pytest.mark.parametrize("moments", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_no_turn_that_a_client_has_received_is_lost(chats, clients, moments, tmp_path, monkeypatch):
    """Servers are killed, closed, or lose their sampler at random moments, and are started again."""
    monkeypatch.setattr(agent_server, "STOP_S", 0.1)
    chat, draw, stopped = chats["chatml"], random.Random(0), threading.Event()
    state: dict[str, Any] = {"url": None}
    received = []

    def agent(name, draw):
        messages = first = [{"role": "user", "content": draw.choice(WORDS)}]
        attempt, api, stream = 0, "chat", False
        while not stopped.is_set():
            if attempt == 0:
                api, stream = draw.choice(APIS), draw.random() < 0.5
            try:
                message = clients.ask(
                    f"{state['url']}/s/{name}", api, messages, TOOLS, stream,
                    retries=attempt, timeout=draw.choice((20.0, 20.0, 0.05)),
                )  # fmt: skip
            except CLIENT_ERRORS:
                attempt += 1
                time.sleep(0.01)
                continue
            attempt = 0
            received.append((name, message))
            messages = [*messages, message, *following(draw, message)] if len(messages) < 12 else first

    def serve(kind):
        recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)
        server, until = AgentServer(recorder, ServeConfig(port=0), "policy"), threading.Event()
        state["url"] = server.start()
        sampler = Slow(chat, draw.randrange(6) if kind == "sampler" else -1)
        run = runs.submit(recorder.run, sampler, until)
        if kind == "sampler":
            wait_until(run.done)
        else:
            time.sleep(0.1 + draw.random() * 0.2)
        if draw.random() < 0.5:
            until.set()
        server.close()
        until.set()
        assert (run.exception() is None) == (kind != "sampler")
        if kind == "close":
            recorder.close()

    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(1) as runs:
        state["url"] = "http://127.0.0.1:1"
        agents = [pool.submit(agent, f"task.{i}", random.Random(i)) for i in range(4)]
        try:
            for number in range(moments):
                serve(("kill", "sampler", "close", "kill")[number % 4])
        finally:
            stopped.set()
        for each in agents:
            each.result()
    ModelRecorder(chat, RLConfig(), folder=tmp_path).close()
    lines = [json.loads(line) for line in (tmp_path / CALLS).read_text().splitlines()]
    turns = [line for line in lines if "turn" in line]
    answers = {(line["session"], line["answer"]["id"]): line["answer"]["message"] for line in turns}
    assert len(answers) == len(turns)
    for name, message in received:
        assert_same(message, answers[name, message["id"]])
    assert len(received) > moments
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    trained = Counter(
        (row["rollout_id"], token, x)
        for row in rows
        for token, x in zip(row["tokens"], row["rollout_logprobs"], strict=True)
        if x is not None
    )
    assert trained == Counter(
        (line["session"], token, x)
        for line in turns
        for token, x in zip(line["turn"], line["logprobs"], strict=True)
    )
