"""Programs end with all of their descendants, within their limits, and see nothing of this process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from titan_tree.errors import UserError
from titan_tree.serve.process import TAIL, Ended, Limits, Processes

# Leaves a child, a grandchild that has lost its parent, and one in a session of its own.
FAMILY = """
sleep 100 & echo $! >> pids
(sleep 100 & echo $! >> pids)
setsid sh -c 'echo $$ >> pids; sleep 100 & echo $! >> pids; wait' &
until [ "$(wc -l < pids)" = 4 ]; do sleep 0.01; done
trap '' TERM INT HUP
"""


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as processes:
        yield processes


def run(runner: Processes, folder: Path, code: str, *, name: str = "sh", **limits: float) -> Ended:
    """Runs code of a shell, or of Python."""
    program = {"sh": "/bin/sh", "python": sys.executable}[name]
    folder.mkdir(exist_ok=True)
    changed = Limits()._replace(**limits)  # type: ignore[arg-type]
    return runner.run([program, "-c", code], folder, {}, changed, folder.with_suffix(".log"))


def is_alive(pid: int) -> bool:
    """Returns whether there is such a process, or its zombie."""
    return Path(f"/proc/{pid}").exists()


def pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_has_its_status_and_its_output(processes: Processes, tmp_path: Path) -> None:
    ended = run(processes, tmp_path / "a", "echo out; echo err >&2; cat; exit 3")  # stdin is empty
    assert (ended.status, ended.cause, ended.tail) == (3, "exit", "out\nerr\n")
    assert (tmp_path / "a.log").read_text() == ended.tail
    assert 0 < ended.seconds < 20
    assert run(processes, tmp_path / "b", "kill -9 $$").status == -9
    missing = processes.run(["no-such-program"], tmp_path / "b", {}, Limits(), tmp_path / "log")
    assert (missing.status, missing.tail) == (
        127,
        "cannot start no-such-program: No such file or directory\n",
    )


def test_no_shell_reads_the_command(processes: Processes, tmp_path: Path) -> None:
    words = ["$HOME", "a b", "*", "; exit 1", "--", "é"]
    ended = processes.run(["printf", "%s|", *words], tmp_path, {}, Limits(), tmp_path / "log")
    assert ended.tail == "".join(f"{word}|" for word in words)


def test_the_environment_has_nothing_of_the_parent(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    ended = processes.run(["env"], tmp_path, {"GIVEN": "x"}, Limits(), tmp_path / "log")
    variables = dict(line.split("=", 1) for line in ended.tail.splitlines())
    expected = {"HOME": str(tmp_path), "TMPDIR": f"{tmp_path}/tmp", "LANG": "C.UTF-8", "GIVEN": "x"}
    assert variables == expected | {"PATH": os.environ["PATH"]}
    assert (tmp_path / "tmp").is_dir()
    supervisor = "tr '\\0' '\\n' < /proc/$PPID/environ; pwd"
    shown = run(processes, tmp_path / "a", supervisor).tail
    assert "secret" not in shown
    assert shown.endswith(f"\n{tmp_path}/a\n")


def test_no_file_but_the_standard_streams_is_open(processes: Processes, tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"  # the last one lists
        assert run(processes, tmp_path / "a", code, name="python").tail == "0 1 2\n"


@for_each("end, cause", [("exit 0", "exit"), ("sleep 100", "time limit"), ("kill -STOP $$", "time limit")])
def test_no_descendant_survives_a_program(end: str, cause: str, tmp_path: Path) -> None:
    with Processes() as processes:
        ended = run(processes, tmp_path / "a", FAMILY + end, time_s=20 if cause == "exit" else 1.0)
    assert (ended.cause, ended.status) == (cause, 0 if cause == "exit" else -9)
    assert len(pids(tmp_path / "a")) == 4
    assert not [pid for pid in pids(tmp_path / "a") if is_alive(pid)]


def test_stop_ends_all_programs(tmp_path: Path) -> None:
    ended: list[Ended] = []
    folders = [tmp_path / str(i) for i in range(3)]
    with Processes() as processes:
        threads = [
            threading.Thread(
                target=lambda i=i: ended.append(run(processes, folders[i], f"{FAMILY} sleep 100"))
            )
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all((f / "pids").exists() and len(pids(f)) == 4 for f in folders))
        processes.stop()
        for thread in threads:
            thread.join()
        assert [each.cause for each in ended] == ["stop"] * 3
        assert not [pid for folder in folders for pid in pids(folder) if is_alive(pid)]
        assert run(processes, tmp_path / "later", "sleep 100").cause == "stop"


@for_each("number", [signal.SIGKILL, signal.SIGINT])
def test_no_program_survives_this_process(number: int, tmp_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also under nohup
        "from pathlib import Path; from titan_tree.serve.process import *\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with Processes() as processes:\n"
        f"    processes.run(['sh', '-c', {FAMILY!r} + 'sleep 100'], folder, {{}}, Limits(), folder / 'log')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 4)
    parent.send_signal(number)
    assert parent.wait(20) == -number
    wait_until(lambda: not [pid for pid in pids(tmp_path) if is_alive(pid)])


def test_orphans_are_no_zombies_while_their_program_runs(processes: Processes, tmp_path: Path) -> None:
    code = "for i in 1 2 3; do (true &); done; sleep 0.3; cat /proc/$PPID/task/$PPID/children"
    assert len(run(processes, tmp_path / "a", code).tail.split()) == 1  # the shell


def test_nothing_is_left_of_many_programs(tmp_path: Path) -> None:
    mine = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    open_files, children = len(os.listdir("/proc/self/fd")), mine.read_text()
    with Processes() as processes:
        for number in range(3):
            assert run(processes, tmp_path / str(number), "exit 0").status == 0
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert mine.read_text() == children


def test_the_output_is_bounded(processes: Processes, tmp_path: Path) -> None:
    code = "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo line $i of the output; done"
    ended = run(processes, tmp_path / "a", code, output_bytes=10_000)
    content = (tmp_path / "a.log").read_text()
    assert len(content) == 10_000
    assert content.endswith("line 4999 of the output\nline 5000 of the output\n")
    assert ended.tail == content[-TAIL:]
    endless = run(processes, tmp_path / "b", "yes", time_s=0.5, output_bytes=1000)
    assert (endless.cause, (tmp_path / "b.log").stat().st_size <= 1000) == ("time limit", True)


@for_each(
    "limits, code, status",
    [
        ({"cpu_s": 1}, "while True: pass", -signal.SIGKILL),
        (
            {"file_bytes": 1000},
            "open('big', 'wb', 0).write(bytes(2000)); open('big', 'ab', 0).write(b'a')",
            1,
        ),
        ({"open_files": 16}, "import os; [os.dup(0) for _ in range(20)]", 1),
    ],
)
def test_limits_bind(limits: dict[str, float], code: str, status: int, tmp_path: Path) -> None:
    with Processes() as processes:
        ended = run(processes, tmp_path / "a", code, name="python", **limits)
        unlimited = run(processes, tmp_path / "b", code, name="python", time_s=2.0)
    assert (ended.status, ended.cause) == (status, "exit"), ended.tail
    assert unlimited.status == (-9 if "cpu_s" in limits else 0), unlimited.tail


def test_limits_of_the_system_stay_if_they_are_lower(processes: Processes, tmp_path: Path) -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_NPROC), r.getrlimit(r.RLIMIT_CORE))"
    shown = run(processes, tmp_path / "a", code, name="python", processes=12_345).tail
    assert shown == "(12345, 12345) (0, 0)\n"
    assert run(processes, tmp_path / "b", "ulimit -n", open_files=2**40).tail != f"{2**40}\n"


def test_a_killed_supervisor_is_an_error(processes: Processes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'kill -9 \$PPID'.*ended with status -9; a program must not"):
        run(processes, tmp_path / "a", "kill -9 $PPID")
