"""A server that was killed at any moment loses no turn that it wrote, and writes each row once."""

import asyncio
import json
import random
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.agents import TOOLS, USER, ScriptedSampler, asked, follow
from tests.support.conversations import tokenizers
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.errors import UserError
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.serve.request import Request
from titan_tree.serve.session_files import CALLS, ROWS
from titan_tree.tree.context import Completion

NAMES = ("task.0", "task.1", "other.0")


@pytest.fixture(scope="module")
def chat():
    return Chat(tokenizers("qwen3")["qwen3"])


class WithExperts(ScriptedSampler):
    def sample(self, contexts, max_tokens, stops, seeds):
        turns = super().sample(contexts, max_tokens, stops, seeds)
        return [
            turn._replace(
                experts=np.full((len(context) + len(turn.tokens) - 1, 2, 1), len(turn.tokens), np.int16),
                sampling_mask=[[token, token + 1] for token in turn.tokens],
            )
            for context, turn in zip(contexts, turns, strict=True)
        ]


def recorded(chat, folder, steps=9):
    """Returns a recorder with three sessions of some calls, the first of which has ended."""
    draw = random.Random(0)
    recorder, sampler = ModelRecorder(chat, RLConfig(), folder=folder), WithExperts(chat)
    open_requests = {name: [Request(messages=[USER], tools=TOOLS)] for name in NAMES}
    for step in range(steps):
        name = NAMES[step % 3]
        request = draw.choice(open_requests[name])
        (answer,) = asked(recorder, sampler, request, session=name)
        results = [
            {"role": "tool", "content": "3", "tool_call_id": call["id"]}
            for call in answer.message.get("tool_calls", ())
        ]
        open_requests[name].append(follow(request, answer, *(results or [USER])))
    recorder.end(NAMES[0], 1.0)
    return recorder


def calls_of(session):
    return [
        (
            call.number,
            call.prompt,
            call.fork,
            call.keys,
            call.roles,
            call.turn.tokens,
            call.turn.logprobs,
            call.answer,
        )
        for call in session.calls
    ]


def test_a_killed_server_finds_its_sessions_again(chat, tmp_path):
    recorder = recorded(chat, tmp_path / "whole")
    want = {name: calls_of(recorder._sessions[name].session) for name in NAMES[1:]}
    content = (tmp_path / "whole" / CALLS).read_bytes()
    draw = random.Random(1)
    for size in sorted({len(content), *(draw.randrange(len(content)) for _ in range(50))}):
        folder = tmp_path / f"{size}"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / CALLS).write_bytes(content[:size])
        if size < len(content):  # rows are written after the line that says that their session ended
            (folder / ROWS).unlink()
        again = ModelRecorder(chat, RLConfig(), folder=folder)
        lines = [json.loads(line) for line in content[:size].splitlines()[: content[:size].count(b"\n")]]
        for name in NAMES[1:]:
            number = sum(line["session"] == name for line in lines)
            found = again.take(name)
            assert (calls_of(found) if found else []) == want[name][:number]
        first = [line for line in lines if line["session"] == NAMES[0]]
        assert (again.take(NAMES[0]) is None) == (not first or "reward" in first[-1])
        again.close()


def test_rows_that_a_killed_server_did_not_write_are_written_at_its_start(chat, tmp_path):
    recorded(chat, tmp_path / "whole")
    content = (tmp_path / "whole" / ROWS).read_bytes()
    assert content.count(b"\n") > 1
    for size in (0, 1, content.index(b"\n"), content.index(b"\n") + 1, len(content) - 1, len(content)):
        folder = tmp_path / f"{size}"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / ROWS).write_bytes(content[:size])
        for _ in range(2):
            ModelRecorder(chat, RLConfig(), folder=folder)
            assert (folder / ROWS).read_bytes() == content


def test_a_session_may_have_the_name_of_one_that_ended(chat, tmp_path):
    """Its turns are kept, and its rows have other ids."""
    recorder, sampler = recorded(chat, tmp_path), WithExperts(chat)
    asked(recorder, sampler, Request(messages=[USER]), session=NAMES[0])
    want = calls_of(recorder._sessions[NAMES[0]].session)
    again = ModelRecorder(chat, RLConfig(), folder=tmp_path)
    assert calls_of(again._sessions[NAMES[0]].session) == want
    again.close()
    ids = [json.loads(line)["id"] for line in (tmp_path / ROWS).read_text().splitlines()]
    number = len([each for each in ids if each.startswith(NAMES[0])])
    assert number > 1
    assert {f"{NAMES[0]}/{index}" for index in range(number)} <= set(ids)
    assert len(set(ids)) == len(ids)


def test_a_session_that_lost_a_call_gives_its_number_to_no_other_one(chat, tmp_path):
    """Of two calls at once, the server writes the second one, and is killed."""
    recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)

    async def ask(recorder, *numbers):
        tasks = [
            asyncio.create_task(
                recorder.turn("a", Request(messages=[USER]), digest=str(number), is_retry=False)
            )
            for number in numbers
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [recorder._waiting.get() for _ in tasks]
        waiting[-1].result.set_result(Completion([5, chat.ends[0]], [-1.0, -1.0]))
        await tasks[-1]
        for task in tasks:
            task.cancel()

    for numbers in ((0, 1), (2,)):
        recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)
        asyncio.run(ask(recorder, *numbers))
    numbers = [json.loads(line)["number"] for line in (tmp_path / CALLS).read_text().splitlines()]
    assert numbers == [1, 2]


def test_rows_do_not_depend_on_a_restart(chat, tmp_path):
    """Of two calls at once, the second one ends first. The server is killed when it has written one row."""
    recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)

    async def ask():
        tasks = []
        for number in range(2):
            turn = recorder.turn("a", Request(messages=[USER]), digest=str(number), is_retry=False)
            tasks.append(asyncio.create_task(turn))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [recorder._waiting.get() for _ in tasks]
        for number in (1, 0):
            waiting[number].result.set_result(Completion([5 + number, chat.ends[0]], [-1.0, -1.0]))
            await tasks[number]

    asyncio.run(ask())
    recorder.end("a", 1.0)
    content = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(content[: content.index(b"\n") + 1])
    ModelRecorder(chat, RLConfig(), folder=tmp_path).close()
    assert (tmp_path / ROWS).read_bytes() == content


def test_a_turn_of_a_session_that_ended_is_not_written(chat, tmp_path):
    recorder = ModelRecorder(chat, RLConfig(), folder=tmp_path)

    async def ask():
        task = asyncio.create_task(recorder.turn("a", Request(messages=[USER]), digest="", is_retry=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        recorder.end("a", 1.0)
        recorder._waiting.get().result.set_result(Completion([5, chat.ends[0]], [-1.0, -1.0]))
        await task

    with pytest.raises(UserError, match="session a: it ended while a turn was sampled"):
        asyncio.run(ask())
    assert len((tmp_path / CALLS).read_text().splitlines()) == 1
    assert ModelRecorder(chat, RLConfig(), folder=tmp_path).take("a") is None


def test_a_retry_after_a_restart_gets_the_recorded_answer(chat, tmp_path):
    recorder = recorded(chat, tmp_path)  # all requests have the digest "0"
    last = recorder._sessions[NAMES[1]].session.calls[-1]
    again = ModelRecorder(chat, RLConfig(), folder=tmp_path)
    request = Request(messages=[USER], tools=TOOLS)
    assert asyncio.run(again.turn(NAMES[1], request, digest="0", is_retry=True)) == last.answer


def test_rows_are_trained_as_they_were_sampled(chat, tmp_path):
    recorder = recorded(chat, tmp_path)
    sessions = {name: recorder._sessions[name].session for name in NAMES[1:]}
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert {row["rollout_id"]: row["group_id"] for row in rows} == {
        "task.0": "task", "task.1": "task", "other.0": "other"
    }  # fmt: skip
    assert {row["reward"] for row in rows} == {1.0, None}
    reader = SampleReader(DataConfig(files=[str(tmp_path / ROWS)]))
    read = {path.id: path for group in reader.files.groups() for path in reader.paths(group)}
    for name, session in sessions.items():
        own = [row for row in rows if row["rollout_id"] == name]
        for row, path in zip(own, session.paths(), strict=True):
            sample = read[f"{row['group_id']}/{row['id']}"]
            assert sample.tokens.tolist() == path.tokens
            assert sample.loss_mask.tolist() == path.mask
            trained = np.flatnonzero(path.mask)
            assert np.allclose(sample.rollout_logprobs[trained], np.array(path.logprobs)[trained])
            assert np.array_equal(sample.routed_experts[: len(path.experts)], path.experts)
            assert [bool(ids) for ids in row["sampling_mask"]] == [bool(m) for m in path.mask]


def test_a_file_of_another_program_is_refused(chat, tmp_path):
    (tmp_path / CALLS).write_text('{"messages": []}\n')
    with pytest.raises(UserError, match="expected a file of titan-tree serve"):
        ModelRecorder(chat, RLConfig(), folder=tmp_path)


def test_a_call_whose_parent_is_missing_is_refused(chat, tmp_path):
    recorded(chat, tmp_path).close()
    lines = (tmp_path / CALLS).read_text().splitlines(keepends=True)
    records = list(map(json.loads, lines))
    child = next(i for i, record in enumerate(records) if record.get("parent") is not None)
    name, parent = records[child]["session"], records[child]["parent"]
    lost = [(record["session"], record.get("number")) for record in records].index((name, parent))
    (tmp_path / CALLS).write_text("".join(lines[:lost] + lines[lost + 1 :]))
    expected = f":{child}: expected a call after call {parent} of session {name}, which is missing"
    with pytest.raises(UserError, match=expected):
        ModelRecorder(chat, RLConfig(), folder=tmp_path)


@contextmanager
def full_disk(file, room=20):
    """Lets files grow to a few bytes more than ``file`` has, so that a part of the next line is written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_only_what_it_refused(chat, tmp_path):
    """The client gets an error instead of the turn, which no later call continues."""
    recorder, sampler = ModelRecorder(chat, RLConfig(), folder=tmp_path), WithExperts(chat)
    request = Request(messages=[USER])
    (answer,) = asked(recorder, sampler, request)
    with full_disk(tmp_path / CALLS):
        asked(recorder, sampler, follow(request, answer, USER))
    before, opened = (tmp_path / CALLS).read_bytes(), recorder._sessions["a"]
    assert {*opened.session._by_text.values()} == {*opened.session.calls}
    assert list(opened.answers.values()) == [answer]
    again = follow(request, answer, USER)
    asked(recorder, sampler, again, follow(again, answer, USER))
    want = calls_of(recorder.session("a"))
    assert len(want) == 3
    assert (tmp_path / CALLS).read_bytes().startswith(before)
    assert calls_of(ModelRecorder(chat, RLConfig(), folder=tmp_path).session("a")) == want
    with full_disk(tmp_path / CALLS):  # which is longer than the rows
        recorder.end("a", 1.0)
    with full_disk(tmp_path / CALLS, room=1 << 10), pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_tree.serve.session_files.rows", lambda *_: [{"long": "x" * 10**6}])
        recorder.end("a", 1.0)
    assert (set(recorder.sessions), (tmp_path / ROWS).read_bytes()) == ({"a"}, b"")
    assert calls_of(ModelRecorder(chat, RLConfig(), folder=tmp_path).session("a")) == want
    recorder.end("a", 1.0)
    assert {json.loads(line)["reward"] for line in (tmp_path / ROWS).read_text().splitlines()} == {1.0}


def test_restored_sessions_are_open(chat, tmp_path):
    recorded(chat, tmp_path)
    assert set(ModelRecorder(chat, RLConfig(), folder=tmp_path).sessions) == set(NAMES[1:])
