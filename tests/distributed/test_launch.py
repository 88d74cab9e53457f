"""Wrong variables of torchrun, foreign programs and late ranks end a start with one line."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch.distributed as dist

from titan_tree.distributed import launch
from titan_tree.distributed.launch import Launch, ranks_of_machine
from titan_tree.errors import UserError

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_variables_of_torchrun() -> None:
    assert Launch.of(GOOD) == Launch(1, 2, 1, "localhost", 29500)
    assert Launch.of({}) is None
    assert Launch.of({"MASTER_ADDR": "localhost", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "5"}, "RANK: expected an integer from 0 to 1 (WORLD_SIZE - 1), got '5'"),
        ({"RANK": "-1"}, "RANK: expected an integer from 0 to 1 (WORLD_SIZE - 1), got '-1'"),
        (
            {"RANK": None},
            "RANK: expected a value, because other variables of torchrun are set, got none besides ",
        ),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: expected a value, "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected an integer from 1, got '0'"),
        ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE: expected an integer from 1, got "),
        (
            {"LOCAL_RANK": "x"},
            "LOCAL_RANK: expected an integer from 0 to 1 (RANK), got 'x'",
        ),
        (
            {"LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK: expected an integer from 0 to 0 (the ranks of a machine - 1), ",
        ),
        ({"RANK": "0"}, "LOCAL_RANK: expected an integer from 0 to 0 (RANK), got"),
        (
            {"LOCAL_WORLD_SIZE": "3"},
            "LOCAL_WORLD_SIZE: expected an integer from 1 to 2 (WORLD_SIZE), got '3'",
        ),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: expected a value, "),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR: expected a value, "),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT: expected an integer from 1 to 65535, got 'abc'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: expected an integer from 1 to 65535, got '65536'"),
    ],
)
def test_wrong_variables(changes: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in (GOOD | changes).items() if value is not None}
    with pytest.raises(UserError, match="^" + re.escape(f"environment variable {message}")):
        Launch.of(variables)


def test_a_wrong_number_of_ranks_on_a_machine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_of_machine(3) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "abc")
    with pytest.raises(
        UserError, match=r"^environment variable LOCAL_WORLD_SIZE: expected an integer from 1"
    ):
        ranks_of_machine()


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Accepts connections on a port, and sends ``answer``, or stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = []

        def serve() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    accepted.append(listener.accept()[0])
                    accepted[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for connection in accepted:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_foreign_server_on_the_port_is_one_line(
    answer: bytes, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = join_alone(rank, answer, monkeypatch)
    assert message.startswith(
        f"rank {rank}: cannot meet the other ranks at MASTER_ADDR:MASTER_PORT = 127.0.0.1:"
    )
    assert message.endswith(
        "; expected all 2 ranks within 0.5 s (parallel.timeout_s), and no other program on this port; "
        "to train alone, unset RANK and WORLD_SIZE"
    )


def join_alone(rank: int, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the error of a rank that joins at a foreign server, after at most a few seconds."""
    monkeypatch.setattr(launch, "JOIN_S", 0.0)
    monkeypatch.setattr(launch, "ANSWER_S", 0.1)
    with server(answer) as port:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables = GOOD | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        started = time.monotonic()
        own = Launch.of(variables)
        assert own is not None
        with pytest.raises(UserError) as error:
            own.join(0.5)
        assert time.monotonic() - started < 10
    return str(error.value)


def test_missing_ranks_and_another_number_of_ranks_are_named() -> None:
    shared = dist.HashStore()
    with pytest.raises(dist.DistStoreError, match="rank 1 has not started"):
        start(0, shared, 0.3)
    shared.set("ranks", "dead")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(start, 0, shared, 1.0)
        with pytest.raises(UserError, match="WORLD_SIZE: expected 2, as on rank 0, got 3"):
            Launch(1, 3, 1, "", 1)._store_of_this_start(shared, time.monotonic() + 20)
        with pytest.raises(dist.DistStoreError, match="not all ranks have started"):
            first.result()


def start(rank: int, shared: dist.Store, timeout_s: float) -> dist.Store:
    return Launch(rank, 2, rank, "", 1)._store_of_this_start(shared, time.monotonic() + timeout_s)


def test_restarted_ranks_do_not_use_the_keys_of_dead_ones() -> None:
    """In the first start, rank 1 dies before rank 0 has seen it. Later, rank 1 comes before rank 0."""
    shared = dist.HashStore()
    shared.set("rank 1", "dead")
    with pytest.raises(dist.DistStoreError, match="not all ranks have started"):
        start(0, shared, 0.3)

    def start_all(*ranks: int) -> list[str]:
        with ThreadPoolExecutor() as pool:
            stores = []
            for rank in ranks:
                stores.append(pool.submit(start, rank, shared, 30.0))
                time.sleep(0.3)
        for rank, store in enumerate(stores):
            store.result().set(f"address {rank}", str(ranks))
        return [store.result().get("address 0").decode() for store in stores]

    assert start_all(1, 0) == ["(1, 0)"] * 2
    assert start_all(0, 1) == ["(0, 1)"] * 2


@pytest.mark.slow
def test_a_rank_alone_prints_no_stack() -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    script = (
        "from titan_tree.cli import main, train\n"
        "from titan_tree.cli.run_process import exit_process, start\n"
        "from titan_tree.run.config import Config\n"
        "def meet(args):\n"
        "    start(args, Config)\n"
        "    from titan_tree.distributed import launch\n"
        "    launch.JOIN_S = 1\n"
        "    launch.Launch.of().join(1)\n"
        "train.run = meet\n"
        "exit_process(lambda: main(['train', 'demo']))"
    )
    env = os.environ | GOOD | {"MASTER_PORT": str(port)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "titan-tree: error: rank 1: cannot meet the other ranks at MASTER_ADDR:MASTER_PORT = "
        f"localhost:{port}: nothing there answers as torch's store does; expected all 2 ranks within 1 s "
        "(parallel.timeout_s), and no other program on this port; to train alone, unset RANK and WORLD_SIZE\n"
    )
