"""Programs play rollouts: their files, addresses, rewards and limits, and the paths of what they said."""

import io
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.agents import ScriptedSampler
from tests.support.cases import for_each
from tests.support.conversations import tokenizers
from tests.support.rl_runs import rows, tiny
from titan_tree import TreeTokenizer
from titan_tree.data import advantages
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import ADVANTAGES, DataConfig
from titan_tree.errors import UserError
from titan_tree.rl.agents import MODEL, TaskFile, filled, grader, play_agents, rollout_of
from titan_tree.rl.environment import ENVIRONMENTS, AgentTask, Demonstrator
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat, Rollout, token_paths
from titan_tree.rl.run import run
from titan_tree.rl.sampler import InterruptedSampling
from titan_tree.rl.settings import AgentConfig, RLConfig, RLRunConfig
from titan_tree.rl.trainer import RLTrainer, check_settings
from titan_tree.run.metrics import builtin_loggers
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.session import SessionPath
from titan_tree.serve.session_files import rows as session_rows
from titan_tree.serve.settings import ServeConfig
from titan_tree.tree.context import Completion, Context

CHAT = Chat(tokenizers("qwen3")["qwen3"])

# Has a conversation of {0} calls of the model, and writes the last answer.
CALLS = """
import json, os, urllib.request
messages = []
for call in range({0}):
    messages.append({{"role": "user", "content": "hi"}})
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({{"model": os.environ["OPENAI_MODEL"], "messages": messages}}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers)).read().decode()
    messages.append(json.loads(answer)["choices"][0]["message"])
open("answer.txt", "w").write(answer)
"""


def path(tokens: Sequence[int], mask: list[int], logprobs: list[float], **more: Any) -> SessionPath:
    """Returns a path whose turns do not touch."""
    starts = [at for at, (before, now) in enumerate(pairwise([0, *mask])) if now > before]
    fields: dict[str, Any] = {"experts": None, "kept": [()] * len(tokens), "is_cut_off": False} | more
    return SessionPath(tokens=Context(tokens), mask=mask, logprobs=logprobs, starts=starts, **fields)


def exits_well(folder: Path, status: int) -> float:
    return float(status == 0)


def agent(code: str, **more: Any) -> AgentTask:
    return AgentTask(**{"command": [sys.executable, "-c", code], "reward": exits_well} | more)


def scripted(*texts: str) -> ScriptedSampler:
    return ScriptedSampler(CHAT, texts or ["Hello."] * 10)


def served() -> tuple[AgentServer, ModelRecorder]:
    recorder = ModelRecorder(CHAT, RLConfig())
    return AgentServer(recorder, ServeConfig(port=0), MODEL, "a secret of the house"), recorder


def play(*tasks: AgentTask, sampler: Any = None, concurrency: int = 4, **more: Any) -> list[Rollout]:
    named = [(f"task-{i}", task) for i, task in enumerate(tasks)]
    try:
        return play_agents(named, *served(), sampler or scripted(), concurrency=concurrency, **more)
    finally:
        assert "titan_tree agents" not in {thread.name for thread in threading.enumerate()}  # it is closed


def test_a_program_plays_a_rollout(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}

    def reward(folder: Path, status: int) -> float:
        shown.update({file.name: file.read_text() for file in folder.iterdir() if file.is_file()})
        shown["folder"], shown["status"] = folder, status
        return 0.75

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "given").write_text("x")
    task = agent(
        CALLS.format(3) + "exit(4)", reward=reward, folder=tmp_path / "data", files={"task.json": "{}"}
    )
    sampler = scripted("1", "2", "3")
    (rollout,) = play(task, sampler=sampler)
    assert [shown[name] for name in ("given", "task.json", "status")] == ["x", "{}", 4]
    answer = json.loads(shown["answer.txt"])
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (MODEL, "3")
    assert not shown["folder"].exists()
    last, turn = sampler.read[-1]
    want = Rollout(tokens=Context(last + turn.tokens), reward=0.75)
    want.mask, want.logprobs = [0] * len(want.tokens), [0.0] * len(want.tokens)
    want.kept = [()] * len(want.tokens)
    for context, turn in sampler.read:
        part = slice(len(context), len(context) + len(turn.tokens))
        assert want.tokens[: part.stop] == context + turn.tokens
        want.starts.append(part.start)
        want.mask[part], want.logprobs[part] = [1] * len(turn.tokens), turn.logprobs
    assert len(want.starts) == 3
    assert rollout == want


def test_a_program_cannot_end_its_session() -> None:
    end = """
try:
    urllib.request.urlopen(urllib.request.Request(url.replace("v1/chat/completions", "end"), b"{}", headers))
except urllib.error.HTTPError as error:
    exit(error.code)
"""
    statuses: list[int] = []
    program = agent(CALLS.format(1) + end, reward=lambda folder, status: statuses.append(status) or 1)
    (rollout,) = play(program)
    assert (statuses, rollout.reward, len(rollout.starts)) == ([401 % 256], 1.0, 1)


def test_words_in_braces_are_replaced() -> None:
    code = 'import sys; open("words", "w").write(" ".join(sys.argv[1:]) + os.environ["A"] + os.environ["B"])'
    words: list[str] = []

    def reward(folder: Path, status: int) -> float:
        words.append((folder / "words").read_text())
        return 0.0

    task = agent(CALLS.format(1) + code, reward=reward)
    task.command = [*task.command[:2], task.command[2].replace("{", "{{"), "{url}", "{key}"]
    task.command[2] = task.command[2].replace("{{", "{")
    task.environment = {**task.environment, "A": "{model}{openai_url}", "B": "{other} {}"}
    play(task)
    key = served()[0].key("task-0")
    assert re.fullmatch(rf"(http://127\.0\.0\.1:\d+/s/task-0) {key}policy\1/v1\{{other\}} \{{\}}", words[0])


def test_rollouts_have_the_order_of_their_tasks_whatever_ends_first() -> None:
    tasks = [
        agent(f"import time; time.sleep({0.3 if i == 0 else 0})\n" + CALLS.format(i + 1)) for i in range(4)
    ]
    for concurrency in (1, 4, 9):
        ended: list[int] = []
        rollouts = play(*tasks, concurrency=concurrency, show=ended.append)
        assert (ended, ended[-1]) == (sorted(ended), 4)
        assert [len(rollout.starts) for rollout in rollouts] == [1, 2, 3, 4]
    assert play() == []


def test_no_more_programs_run_at_once_than_configured(tmp_path: Path) -> None:
    now, most = 0, 0
    lock = threading.Lock()

    class Counted(AgentTask):
        def __getattribute__(self, name: str) -> Any:
            nonlocal now, most
            if name == "folder":  # is read when a program is about to start
                with lock:
                    now += 1
                    most = max(most, now)
            return super().__getattribute__(name)

    def reward(folder: Path, status: int) -> float:
        nonlocal now
        with lock:
            now -= 1
        return 0.0

    command = [sys.executable, "-c", CALLS.format(1)]
    play(*[Counted(command=command, reward=reward) for _ in range(6)], concurrency=2)
    assert (now, most) == (0, 2)


def test_a_program_that_the_time_limit_kills_is_cut_off_without_a_reward() -> None:
    late = agent(CALLS.format(1) + "import time; time.sleep(100)", time_limit_s=1.5)
    cut, ended = play(late, agent(CALLS.format(1), reward=lambda folder, status: -2))
    assert (cut.reward, cut.is_cut_off, len(cut.starts)) == (0.0, True, 1)
    assert (ended.reward, ended.is_cut_off) == (-2.0, False)


@for_each(
    "task, message",
    [
        (
            agent("print('no key', 5); exit(3)"),
            r"task-0: expected calls of the model, got none in \d.* \(exit, ",
        ),
        (agent("print('no key'); exit(3)"), r"status 3\) from .*, which printed: no key"),
        (AgentTask(command=["nothing"], reward=exits_well), "printed: cannot start nothing: No such file"),
        (agent(CALLS.format(1), reward=lambda *_: float("nan")), "a finite number as reward, got nan"),
        (agent(CALLS.format(1), reward=lambda *_: "1"), "a finite number as reward, got '1'"),
        (agent(CALLS.format(1), reward=lambda *_: 1 / 0), r"reward \(exit status 0\): .*ZeroDivisionError"),
        (agent("", folder=Path("/none")), "task-0: cannot make the working folder of its program: .*'/none'"),
    ],
)
def test_a_broken_task_is_an_error_and_ends_the_others(task: AgentTask, message: str) -> None:
    started = time.monotonic()
    endless = agent(CALLS.format(1) + "import time; time.sleep(100)")
    tasks = [task] if "calls of" in message or "printed" in message else [task, endless]
    with pytest.raises(UserError, match=message):
        play(*tasks)
    assert time.monotonic() - started < 30


def test_a_signal_ends_all_programs() -> None:
    started = time.monotonic()
    with pytest.raises(InterruptedSampling):
        play(agent("import time; time.sleep(100)"), is_interrupted=lambda: time.monotonic() > started + 0.5)
    assert time.monotonic() - started < 30


def test_an_error_of_the_sampler_ends_all_programs() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the sampler")

    with pytest.raises(RuntimeError, match="the sampler"):
        play(
            agent(CALLS.format(1)),
            agent("import time; time.sleep(100)"),
            sampler=SimpleNamespace(sample=fail),
        )


def test_a_rollout_has_a_context_for_each_path() -> None:
    # The second path shares the first turn, which counts in the first path alone.
    experts = np.zeros((5, 1, 2), np.int16)
    first = path([7, 1, 0, 7, 2], [0, 1, 1, 0, 1], [0, -1, -2, 0, -3])
    second = path(
        [7, 1, 0, 8, 3, 0], [0, 0, 0, 0, 1, 1], [0, -1, -2, 0, -4, -5], kept=[(), (), (), (), (3,), (0, 5)]
    )
    rollout = rollout_of([first, second], 1.0, is_cut_off=False)
    assert rollout.tokens == [*first.tokens, *second.tokens]
    assert rollout.mask == [*first.mask, *second.mask]
    assert rollout.logprobs == [*first.logprobs, *second.logprobs]
    assert rollout.kept == [*first.kept, *second.kept]
    assert (rollout.starts, rollout.contexts, rollout.experts) == ([1, 4, 9], [0, 5], [])
    recorded = path([7, 1, 0], [0, 1, 1], [0, -1, -2], experts=experts)
    assert rollout_of([recorded], 1.0, is_cut_off=False).experts == [experts]
    with pytest.raises(UserError, match="expected experts of all calls, or of none"):
        rollout_of([recorded, second], 1.0, is_cut_off=False)
    other = rollout_of([path([7, 4, 0], [0, 1, 1], [0, -1, -1])], 0.0, is_cut_off=False)
    paths = token_paths([rollout, other], "t", "group", {})
    assert [each.id for each in paths] == ["t/0/0", "t/0/1", "t/1"]
    for each, mask in zip(paths, (first.mask, second.mask, [0, 1, 1]), strict=True):
        assert each.loss_mask.tolist() == mask
        assert each.advantage is not None
        assert (each.advantage[each.loss_mask > 0] * (-1 if each.id == "t/1" else 1) > 0).all()


# Two rollouts share the conversation [9], and all three the first turn behind [7].
PLAYED = [
    (1.0, [path([7, 1, 0, 7, 2], [0, 1, 1, 0, 1], [0, -1, -2, 0, -3]),
           path([7, 1, 0, 8, 3, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, -4, -5])]),
    (0.0, [path([7, 1, 0, 7, 5], [0, 1, 1, 0, 1], [0, -1, -2, 0, -3]), path([9, 4], [0, 1], [0, -1])]),
    (0.5, [path([9, 4], [0, 1], [0, -1]), path([7, 1, 0, 8, 6], [0, 1, 1, 0, 1], [0, -1, -2, 0, -4])]),
]  # fmt: skip


@for_each("estimator", [name for name in ADVANTAGES if ADVANTAGES[name] is getattr(advantages, name, None)])
def test_rollouts_are_trained_like_their_saved_rows(estimator: str, tmp_path: Path) -> None:
    rollouts = [rollout_of(paths, reward, is_cut_off=False) for reward, paths in PLAYED]
    saved: list[Any] = []
    for i, (reward, paths) in enumerate(PLAYED):
        session: Any = SimpleNamespace(paths=lambda paths=paths: paths)
        saved += session_rows(session, f"task.{i}", reward)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    reader = SampleReader(DataConfig(files=[str(tmp_path / "rows.jsonl")], advantage=estimator))
    ((*read,),) = map(reader.paths, reader.files.groups())
    played = token_paths(rollouts, "task", estimator, {})
    for own, other in zip(played, read, strict=True):
        for field in ("tokens", "loss_mask", "advantage"):
            assert np.array_equal(getattr(own, field), getattr(other, field)), field
        assert np.array_equal(own.old_logprobs, np.nan_to_num(other.rollout_logprobs))
        assert (own.weight, own.rollout_tokens) == (other.weight, other.rollout_tokens)
    if estimator == "spo":  # V([9]) = 0.25, V([7]) = V(7, 1, 0, 7) = 0.5, V(7, 1, 0, 8) = 0.75
        assert [each.advantage[-1] for each in played if each.advantage is not None] == [
            0.5, 0.25, -0.5, 0.0, 0.0, -0.25
        ]  # fmt: skip


def test_the_three_kinds_of_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graders_zq.py").write_text(
        "def grade(task, folder, status):\n    return task['n'] + status\n"
    )
    exits, file, function = map(grader, ("exit", "file:score.txt", "graders_zq:grade"))
    assert [exits({}, tmp_path, status) for status in (0, 1, -9)] == [1.0, 0.0, 0.0]
    assert function({"n": 2}, tmp_path, 3) == 5
    assert file({}, tmp_path, 1) == 0.0
    with pytest.raises(
        UserError, match=r"expected a number in score\.txt with exit status 0: .*No such file"
    ):
        file({}, tmp_path, 0)
    (tmp_path / "score.txt").write_text(" 0.25\n")
    assert file({}, tmp_path, 0) == file({}, tmp_path, 1) == 0.25
    (tmp_path / "score.txt").write_text("good")
    with pytest.raises(UserError, match="could not convert"):
        file({}, tmp_path, 0)
    (tmp_path / "score.txt").unlink()
    os.mkfifo(tmp_path / "score.txt")
    with pytest.raises(UserError, match="expected a regular file, got a FIFO"):
        file({}, tmp_path, 0)
    with pytest.raises(UserError, match="there is no module 'nobody'"):
        grader("nobody:grade")


def test_a_file_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": 1, "text": "ä"}\n\n{"id": 2, "text": "b"}\n')
    config = AgentConfig(
        command=["run", "{id}", "a {text}{url}"], tasks=str(file), folder=str(tmp_path), time_limit_s=5
    )
    environment = TaskFile(config)
    tasks = [environment.task(random.Random(i)) for i in range(20)]
    assert {tuple(task.command) for task in tasks} == {("run", "1", "a ä{url}"), ("run", "2", "a b{url}")}
    for task in tasks:
        assert json.loads(task.files["task.json"])["id"] == int(task.command[1])
        assert (task.folder, task.time_limit_s, task.reward(tmp_path, 0)) == (tmp_path, 5, 1.0)
    assert filled("{a} {b}", {"a": "{b}", "b": 1}) == "{b} 1"


@for_each(
    "settings, message",
    [
        ({}, 'rl.agent.command and rl.agent.tasks: expected both with the environment "agent"'),
        ({"command": ["a"]}, "rl.agent.command and rl.agent.tasks: expected both"),
        ({"command": ["a"], "tasks": "none.jsonl"}, "rl.agent.tasks: none.jsonl: No such file"),
        (
            {"command": ["a", "{name}"], "tasks": "tasks"},
            "rl.agent.command: expected a field of tasks in braces, or one of url, openai_url, key, model",
        ),
        ({"command": ["a"], "tasks": "empty"}, "rl.agent.tasks: empty: expected tasks, got an empty file"),
        ({"command": ["a"], "tasks": "list"}, "list:1: expected one JSON object per line, got int"),
        ({"command": "a b"}, "rl.agent.command: expected a list in which every item is text, got 'a b'"),
        ({"command": [1]}, "rl.agent.command: expected a list"),
        ({"reward": "file"}, 'rl.agent.reward: expected "exit", "file:NAME" or "module:function", got'),
        ({"concurrency": 0}, "rl.agent.concurrency: expected at least 1, got 0"),
    ],
)
def test_wrong_settings(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "list").write_text("3\n")
    (tmp_path / "tasks").write_text('{"id": 1}\n')
    with pytest.raises(UserError, match=re.escape(message)):
        TaskFile(AgentConfig(**settings))


class Calls:
    """A program makes one or two calls, and no two rewards are equal."""

    def __init__(self) -> None:
        self.number = itertools.count(1)

    def task(self, draw: random.Random) -> AgentTask:
        calls = CALLS.format(draw.randint(1, 2))
        return agent(calls, reward=lambda folder, status: 1 / next(self.number))


def agents(folder: Path, *overrides: str) -> RLRunConfig:
    shared = ("rl.branches=0", "rl.advantage=group", "training.steps=2", "data.global_batch_groups=1")
    return tiny(folder, "rl.environment=calls", *shared, *overrides)


@pytest.fixture
def _calls() -> Iterator[None]:
    with ENVIRONMENTS.registered("calls", Calls):
        yield


@pytest.mark.usefixtures("_calls")
def test_a_run_trains_on_rollouts_of_programs(tmp_path: Path) -> None:
    """Over the real server."""
    trainer = RLTrainer(agents(tmp_path))
    assert trainer.environment.__class__ is Calls
    trainer.train()
    trainer.close()
    metrics = rows(tmp_path)
    assert [float(row["rollouts"]) for row in metrics] == [3, 3]
    assert all(0 < float(row["reward"]) <= 1 and float(row["sampled_tokens"]) >= 3 for row in metrics)
    assert all(float(row["grad_norm"]) > 1e-3 for row in metrics)


@pytest.mark.usefixtures("_calls")
def test_a_bar_in_the_terminal_counts_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal)
        monkeypatch.setattr(builtin_loggers, "get_console", lambda console=console: console)
        trainer = RLTrainer(agents(tmp_path / f"{is_terminal}", "metrics.loggers=[console]"))
        assert trainer.loggers
        with trainer.loggers:  # below the bar of the steps
            trainer.sample(["task"], 3)
        trainer.close()
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert bool(re.search(r"training .*0/2.*\nprograms .*[0-3]/3", shown)) == is_terminal
        assert bool(shown) == is_terminal


@pytest.mark.usefixtures("_calls")
@for_each("key, value", [("branches", 2), ("async_steps", 1)])
def test_programs_neither_branch_nor_run_ahead(key: str, value: int, tmp_path: Path) -> None:
    class Remote(DeskClerk):
        def update(self, *_: object) -> None: ...

        def close(self) -> None: ...

    expected = rf"rl\.{key}: expected 0 with rl\.environment = '%s', whose .*, got {value}; set"
    config = agents(tmp_path, "rl.advantage=spo", f"rl.{key}={value}")
    with pytest.raises(UserError, match=expected % "calls"):
        check_settings(config, Remote())
    with ENVIRONMENTS.registered("made", lambda: Calls()):  # its class is not known before it has been made
        config = agents(tmp_path, "rl.advantage=spo", f"rl.{key}={value}", "rl.environment=made")
        with pytest.raises(UserError, match=expected % "made"):
            RLTrainer(config, Remote())


def test_an_environment_has_episodes_or_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_zq.py").write_text("class Agents:\n    task = 1\n\n\nclass Nothing:\n    pass\n")
    assert tiny(tmp_path, "rl.environment=wrong_zq:Agents").rl.environment == "wrong_zq:Agents"
    with pytest.raises(UserError, match="Nothing'>, which has no episode or task"):
        tiny(tmp_path, "rl.environment=wrong_zq:Nothing")


def test_run_is_the_entry_of_a_file_of_tasks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.agent\.command and rl\.agent\.tasks: expected both"):
        run(agents(tmp_path, "rl.environment=agent"))


def test_demonstrations_call_the_tool_of_the_agent() -> None:
    pytest.importorskip("openai")
    from examples.agent_desk import AgentDesk

    task = AgentDesk().task(random.Random(3))
    counts = json.loads(task.files["task.json"])["counts"]
    for question, calls, *results, answer in AgentDesk().demonstrations(random.Random(3)):
        assert question["content"] == json.loads(task.files["task.json"])["question"]
        named = [call["arguments"]["thing"] for call in calls["tool_calls"]]
        assert [result["content"] for result in results] == [str(counts[thing]) for thing in named]
        assert answer["content"].isdigit()
        text = TreeTokenizer.load("byte").render([question, calls], task.tools)
        assert (
            f'<tool_call>\n{{"name": "count", "arguments": {{"thing": "{named[1]}"}}}}\n</tool_call>' in text
        )


class DeskClerk:
    """Samples right turns of the desk, as token ids."""

    def __init__(self) -> None:
        self.tokenizer = TreeTokenizer.load("byte")

    def sample(self, contexts: Any, limits: Any, stops: Any, seeds: Any) -> list[Completion]:
        turns = []
        for context in contexts:
            text = self.tokenizer.decode(context).rpartition("<|im_start|>user\n")[2]
            said = [int(number) for number in re.findall(r"<tool_response>\n(\d)\n", text)]
            call = '<tool_call>\n{{"name": "count", "arguments": {{"thing": "{}"}}}}\n</tool_call>'
            calls = [call.format(thing) for thing in text.partition("<|im_end|>")[0].split()]
            turn = [*self.tokenizer.encode(str(sum(said)) if said else "\n".join(calls)), stops[0]]
            turns.append(Completion(turn, [-0.1] * len(turn)))
        return turns


def test_the_agent_of_the_examples_solves_its_task(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    sizes = ("rl.max_turn_tokens=320", "rl.max_rollout_tokens=1024", "data.max_tokens=1024")
    config = agents(tmp_path, "rl.environment=examples.agent_desk:AgentDesk", *sizes)
    trainer = RLTrainer(config, DeskClerk())
    assert isinstance(trainer.environment, Demonstrator)
    groups = trainer.sample(["task", "other"], 2)
    assert [rollout.reward for group in groups for rollout in group] == [1.0] * 4
    long = f'<tool_call>\n{{"name": "count", "arguments": {{"thing": "{"x" * 230}"}}}}\n</tool_call>'
    for texts in (["no"], [long] * 2):  # the agent fails if the context is full
        trainer.sampler = ScriptedSampler(trainer.chat, texts)  # type: ignore[assignment]
        ((wrong,),) = trainer.sample(["task"], 1)
        assert (wrong.reward, len(wrong.starts)) == (0.0, len(texts))
    trainer.close()
    first, second = groups[0]
    assert (first.contexts, len(first.starts)) == ([0], 2)
    assert first.tokens == second.tokens
    sampled = [token for token, bit in zip(first.tokens, first.mask, strict=True) if bit]
    text, said = map(trainer.chat.tokenizer.decode, (first.tokens, sampled))
    calls, answer, _ = said.split("<|im_end|>")
    task = json.loads(trainer.environment.task(random.Random("task")).files["task.json"])
    counts = [str(task["counts"][thing]) for thing in task["question"].split()]
    assert re.findall(r"<tool_response>\n(\d+)\n", text) == counts
    assert calls.count("<tool_call>") == len(counts) == 2
    assert text.endswith(f"<|im_start|>assistant\n{answer}<|im_end|>")


@pytest.mark.slow
def test_the_bash_agent_of_the_examples_repairs_a_repository(tmp_path: Path) -> None:
    """A script takes the place of the model: it repairs the first repository, and gives up on the second."""
    pytest.importorskip("openai")
    add = {"issue": "add(1, 2) is -1", "files": {"add.py": "def add(a, b):\n    return a - b\n"}}
    add["test"] = f"{sys.executable} -c 'from add import add; assert add(1, 2) == 3'"
    (tmp_path / "tasks.jsonl").write_text(json.dumps(add) + "\n")
    agent = Path(__file__).parents[2] / "examples" / "agent_bash.py"
    settings = AgentConfig(command=[sys.executable, str(agent)], tasks=str(tmp_path / "tasks.jsonl"))
    task = TaskFile(settings).task(random.Random(0))
    for command, reward in (("sed -i 's/-/+/' add.py; cat add.py", 1.0), ("sleep 20 & exit 3", 0.0)):
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        sampler = scripted(f"<tool_call>\n{call}\n</tool_call>", "Done.")
        (rollout,) = play(task, sampler=sampler)
        (first, written), (second, last) = sampler.read
        assert (rollout.reward, rollout.contexts) == (reward, [0])
        assert second[: len(first) + len(written.tokens)] == first + written.tokens
        assert rollout.tokens == second + last.tokens
        said = CHAT.tokenizer.decode(second)
        assert ("return a + b" in said, "exit status 3" in said) == (reward == 1.0, reward == 0.0)
