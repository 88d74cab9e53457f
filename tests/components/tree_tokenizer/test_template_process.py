"""TemplateProcess: values cross the pipe unchanged, and the process never outlives its owner or a limit."""

import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.plain_samples import plain_environment
from tests.support.trip import TRIP
from titan_tree.components.tree_tokenizer import TreeTokenizer, sandbox
from titan_tree.components.tree_tokenizer.template_process import PROCESS, TemplateProcess
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.errors import UserError
from titan_tree.signals import SIGNALS

# Shows the types, the order of keys, and every digit.
SHOW = """{{ tools }}|{{ add_generation_prompt }}|{{ extra }}|{{ note is none }}{{ missing is defined }}
{%- for m in messages %}{{ m }}{{ m | tojson }}{{ m.missing is defined }}{{ m.none is none }}{% endfor %}"""
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=60.0)
    yield process
    process.stop()


def value(draw: random.Random, depth: int = 3) -> Any:
    """Returns a value as JSON, TOML or Python gives it."""
    kinds = ("scalar", "scalar", "text", "list", "tuple", "dict") if depth else ("scalar", "text")
    match draw.choice(kinds):
        case "scalar":
            number = draw.uniform(-1, 1) * 10.0 ** draw.randrange(-320, 300)
            integer = draw.randrange(-(2**300), 2**300)
            return draw.choice((None, True, False, number, -0.0, math.inf, math.nan, 5e-324, integer, 0))
        case "text":
            return "".join(
                draw.choice('a\0\n"\\é漢😀\ud83d\ude00\udfff\ufdd0\u2028\x7f')
                for _ in range(draw.randrange(6))
            )
        case "list":
            return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
        case "tuple":
            return tuple(value(draw, depth - 1) for _ in range(draw.randrange(4)))
    return {draw.choice((value(draw, 0), "none", "b", "a")): value(draw, depth - 1) for _ in range(4)}


def test_a_text_of_the_process_equals_one_of_this_process():
    template, plain = ChatTemplate(SHOW, "(text)"), plain_environment().from_string(SHOW)
    draw = random.Random(0)
    for _ in range(25):
        messages = [{"x": value(draw)} for _ in range(6)]
        for message in messages:
            message |= {draw.choice(("none", "a", "z")): value(draw)}
        tools = draw.choice((None, [], [{"x": value(draw)}]))
        variables = {"extra": value(draw), "note": draw.choice((None, 0))}
        prefixes = [(draw.randrange(7), draw.random() < 0.5) for _ in range(5)]
        expected = [
            plain.render(
                messages=messages[:count], tools=tools or None, add_generation_prompt=prompt, **variables
            )
            for count, prompt in prefixes
        ]
        assert list(template.prefixes(messages, tools, prefixes, variables)) == expected
        assert template.render(messages, tools, True, variables) == plain.render(
            messages=messages, tools=tools or None, add_generation_prompt=True, **variables
        )


def test_the_shared_length_is_that_of_the_common_beginning():
    draw = random.Random(0)
    for _ in range(2000):
        before, text = ("".join(draw.choices("aab", k=draw.randrange(9))) for _ in range(2))
        equal = [before[:n] == text[:n] for n in range(1, min(len(before), len(text)) + 1)]
        assert sandbox.shared_length(before, text) == sum(equal)


def test_texts_before_an_error_are_given_first():
    template = ChatTemplate("{{ 6 // (3 - messages | length) }}", "(text)")
    texts = template.prefixes([{}] * 4, None, [(1, False), (2, False), (3, False), (0, False)], {})
    assert [next(texts), next(texts)] == ["3", "6"]
    with pytest.raises(UserError, match=r"^chat template \(text\): ZeroDivisionError"):
        next(texts)


def test_a_value_that_no_other_process_can_have_is_refused():
    with pytest.raises(UserError, match=r"^chat template \(text\): .*pickle") as error:
        TreeTokenizer.byte_level("{{ now() }}").render(TRIP, now=lambda: 3)
    assert str(error.value).isprintable()


def test_threads_and_forks_share_no_answer(process: TemplateProcess):
    source = "{{ messages[0] * 1000 }}"

    def ask(number: int) -> bool:
        answer = process.request("render", source, [f"{number} "], None, [(1, False)], {})
        return answer.results == [[0, f"{number} " * 1000]]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(60)))
    template = ChatTemplate(source, "(text)")
    before = PROCESS._process
    context = multiprocessing.get_context("fork")
    texts = context.Queue()
    fork = context.Process(target=lambda: texts.put(template.render(["b"], None, False, {})))
    fork.start()
    assert texts.get(timeout=60) == "b" * 1000
    fork.join()
    assert template.render(["a"], None, False, {}) == "a" * 1000
    assert PROCESS._process is before


def test_a_template_is_pickled_without_its_process():
    template = ChatTemplate("{{ messages[0].a }}", "(text)", {"bos_token": "<s>"})
    copy = pickle.loads(pickle.dumps(template))
    assert vars(copy) == vars(template)
    assert copy.render([{"a": "b"}], None, False, {}) == "b"


def test_the_process_ignores_signals_that_end_a_run_and_starts_again_after_others(process: TemplateProcess):
    def text() -> str:
        return process.request("render", "{{ messages[0] }}", ["a"], None, [(1, False)], {}).results[0][1]

    assert text() == "a"
    child = process._process
    assert child is not None
    for number in SIGNALS:
        os.kill(child.pid, number)
    assert text() == "a"
    assert process._process is child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert text() == "a"
    assert process._process is not child


def test_the_process_inherits_no_secret(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    process.request("describe", "a")
    assert process._process is not None
    variables = Path(f"/proc/{process._process.pid}/environ").read_bytes()
    assert b"TZ=UTC" in variables
    assert b"secret" not in variables


def test_an_interrupted_request_leaves_no_answer_behind(process: TemplateProcess):
    """A signal handler that raises ends the process. Otherwise the next request would get its answer."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            process.request("render", ENDLESS, [], None, [(0, False)], {})
    finally:
        signal.signal(signal.SIGALRM, earlier)
    assert process.request("render", "a", [], None, [(0, False)], {}).results == [[0, "a"]]


START = f"""
import threading, time
import titan_tree.signals as signals
from titan_tree.components.tree_tokenizer.template_process import PROCESS

signals.REPEAT_S = 0.01
PROCESS.request("describe", "a")
print(PROCESS._process.pid, flush=True)

def report():
    clock = (~PROCESS._process.pid << 3) | 2  # as clock_getcpuclockid(3) counts
    while time.clock_gettime(clock) < 0.3:
        time.sleep(0.01)
    print("ready", flush=True)

def render():
    threading.Thread(target=report).start()
    with signals.Signals():
        PROCESS.request("render", {ENDLESS!r}, [], None, [(0, False)], {{}})
"""


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("action", "numbers"),
    [
        ("print('ready', flush=True); time.sleep(60)", [signal.SIGKILL]),
        ("render()", [signal.SIGKILL]),
        ("render()", [signal.SIGTERM, signal.SIGTERM]),
        ("render()", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_the_process_ends_with_its_parent_also_while_it_renders(action: str, numbers: list[signal.Signals]):
    """A second signal ends a run at once while it waits for a hostile template."""
    command = [sys.executable, "-c", START + action]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"ready\n"
        for number in numbers:
            assert parent.poll() is None
            parent.send_signal(number)
            time.sleep(0.3)
        status = parent.wait(60)
    assert status == (-signal.SIGKILL if numbers == [signal.SIGKILL] else 128 + numbers[0])
    deadline = time.monotonic() + 10  # the process may take 60 seconds of CPU time
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
