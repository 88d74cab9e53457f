"""Starts two ranks of which one differs: in its files, settings, code or variables, or it does not come.

Both ranks must end with one line that names the difference, before a step is trained, and without a
traceback. Ranks wait at most for the longer of ``parallel.timeout_s`` and half a minute.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from training import GRACE_S, OPTIONS, ROOT, STEPS, Run, check, preload

TRIALS = 24
JOIN_S = 30  # launch.py: the least time that a rank waits for the others
LINES = {  # a part of the line, by kind
    "other data": "differ in data.files[0] (rank 0: ",
    "other groups": "differ in the groups that they have read",
    "other size": "differ in model.overrides.hidden_size (rank 0: ",
    "other template": "differ in data.template (rank 0: ",
    "other tokenizer": "differ in data.tokenizer (rank 0: ",
    "other config": "differ in optimizer.lr (rank 0: ",
    "other code": "differ in the code of titan_tree (rank 0: ",
    "silent port": "no other program on this port",
    "HTTP port": "no other program on this port",
    "late rank": "rank 0: cannot meet the other ranks at MASTER_ADDR:MASTER_PORT = 127.0.0.1:",
    "bad variable": "error: environment variable ",
    "changed file": "it has changed since this command began to read it",
}
KINDS = tuple(LINES)
VARIABLES = {
    "RANK": ("x", "2", "-1"),
    "WORLD_SIZE": ("", "0", "two"),
    "LOCAL_RANK": ("", "7"),
    "MASTER_ADDR": ("",),
    "MASTER_PORT": ("", "abc", "0", "70000"),
}


def prepare(work: Path) -> None:
    preload()


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Starts the ranks, and returns the line of one that has found the difference."""
    with ExitStack() as open_ports:
        in_child = _difference(kind, draw, folder, open_ports)
        options = (
            "data.files=" + str(folder / "data.jsonl"),
            "data.template=" + str(folder / "template.jinja"),
        )
        run = Run(folder / "run", 2, "demo", OPTIONS + options)
        awaited = [0] if kind == "late rank" else [0, 1]
        started = time.monotonic()
        with run.start(in_child) as processes:
            if kind == "changed file":
                run.wait_for_step(1, processes)
                _write(folder, folder / "data.jsonl", "3")
            statuses = processes.wait(awaited, JOIN_S + 3 * GRACE_S)
        seconds = time.monotonic() - started
    processes.check_no_traceback()
    check(statuses == [2] * len(awaited), f"exit statuses {statuses}: {processes.text()[-300:]!r}")
    check(run.step() < STEPS and (kind == "changed file" or not run.step()), "steps were trained")
    lines = [line for line in processes.text().splitlines() if LINES[kind] in line]
    check(lines, f"no line contains {LINES[kind]!r}: {processes.text()[-300:]!r}")
    return f"after {seconds:.1f} s: {lines[0]}"


def _difference(kind: str, draw: random.Random, folder: Path, open_ports: ExitStack) -> Callable[[int], None]:
    """Writes the files of a trial. Returns a function that makes one rank differ."""
    from titan_tree.run import rank_facts
    from titan_tree.run import trainer as module
    from titan_tree.run.config import Config

    _write(folder, folder / "data.jsonl", "2")
    _write(folder, folder / "other.jsonl", "3")
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "other.jinja").write_text("{% for m in messages %}{{ m.content}} {% endfor %}")
    odd = draw.randrange(2)
    port = 0
    if kind.endswith("port"):
        listener = open_ports.enter_context(socket.create_server(("127.0.0.1", 0)))
        port, odd = listener.getsockname()[1], 1  # rank 0 cannot serve it
        if kind == "HTTP port":
            _answer(listener)
    name = draw.choice(list(VARIABLES))
    value = draw.choice(VARIABLES[name])

    def change(config: Config) -> None:
        if kind in ("other data", "other groups"):
            config.data.files = [str(folder / "other.jsonl")]
        if kind == "other template":
            config.data.template = str(folder / "other.jinja")
        if kind == "other tokenizer":
            config.data.tokenizer = str(folder / "other.jinja")
        if kind == "other size":
            config.model.overrides["hidden_size"] = 64
        if kind == "other config":
            config.optimizer.lr *= 2

    def in_child(rank: int) -> None:
        if kind.endswith("port"):
            os.environ["MASTER_PORT"] = str(port)
        if kind == "bad variable":
            os.environ[name] = value
        if kind == "other groups":  # the check at the start does not see the files
            rank_facts._content = lambda paths: ""  # type: ignore[assignment]
        if rank != odd and not (kind == "late rank" and rank == 1):
            return
        if kind == "late rank":
            time.sleep(1000 * rank)
        if kind == "other code":
            copy = folder / "titan_tree"
            shutil.copytree(ROOT / "titan_tree", copy, ignore=shutil.ignore_patterns("__pycache__"))
            with (copy / "tree" / "paths.py").open("a") as file:
                file.write("\n")
            rank_facts.__file__ = str(copy / "run" / "rank_facts.py")
        build = module.Trainer.__init__

        def build_changed(self: module.Trainer, config: Config) -> None:
            change(config)
            build(self, config)

        module.Trainer.__init__ = build_changed  # type: ignore[method-assign]

    return in_child


def _write(folder: Path, path: Path, digit: str) -> None:
    """Writes conversations. Another digit makes another file of the same size."""
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{digit} + {number:03}?"},
                    {"role": "assistant", "content": "yes"},
                ]
            }
        )
        for number in range(40)
    ]
    path.write_text("".join(line + "\n" for line in lines))


def _answer(listener: socket.socket) -> None:
    """Answers each connection as a web server answers what it does not understand. Ends with the listener."""
    import threading

    def serve() -> None:
        connections = []
        while True:
            try:
                connections.append(listener.accept()[0])
                connections[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
