"""Several torchrun agents train as one process, and recover from lost ranks and machines.

Each agent stands for a machine. All run on this host and find each other through a store of the test.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.processes import TIMEOUT
from tests.support.same_run import assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.run.config import Config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("machines"),
]

ROOT = Path(__file__).parents[2]
NUM_MACHINES = 2
OPTIONS: dict[str, Any] = {"optimizer__eps": 1e-3, "training__steps": 5, "checkpoint__interval": 2}

# The training command. One fault happens after step 3, unless the file "happened" exists.
SCRIPT = """
import os, signal, sys, time
from titan_tree.cli import main
from titan_tree.run.trainer import Trainer

fault, is_last_machine = os.environ["FAULT"], os.environ["MACHINE"] == "1"
train_step = Trainer.train_step

def step_with_fault(trainer, inputs):
    train_step(trainer, inputs)
    if trainer.progress.step != 3:
        return
    if fault == "signal":
        os.kill(os.getppid(), signal.SIGUSR1)
        while not trainer.stopping.signals.received:
            time.sleep(0.01)
    elif is_last_machine:
        open("happened", "w").close()
        if fault == "machine":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "rank":  # wait, as NCCL does, until torchrun ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1000)

if fault and not os.path.exists("happened"):
    Trainer.train_step = step_with_fault
    if os.environ["WORLD_SIZE"] == "1":  # with --nnodes=1:2, until the other machine comes
        time.sleep(1000)
os._exit(main(sys.argv[1:]))
"""


class Machines:
    """A run on two machines in ``folder``.

    Args:
        fault: "rank", "machine", "signal" or "" for none, see ``SCRIPT``.
        nnodes: numbers of machines, as for torchrun.
    """

    def __init__(self, folder: Path, fault: str = "", nnodes: str = "2") -> None:
        self.config = tiny_config(folder, **OPTIONS)
        self.folder, self.fault, self.nnodes = folder, fault, nnodes
        (folder / "script.py").write_text(SCRIPT)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
        self.agents: dict[int, subprocess.Popen] = {}

    def start(self, machine: int) -> None:
        """Starts torchrun on a machine."""
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in OPTIONS.items()]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nnodes}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}", "--rdzv-id=test"),
            *("--rdzv-conf=is_host=false,last_call_timeout=1", "--local-addr=127.0.0.1", "--max-restarts=3"),
            *("--signals-to-handle=SIGTERM,SIGUSR1", "script.py", "train", "config.toml", *overrides),
        ]
        variables = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "FAULT": self.fault,
            "MACHINE": str(machine),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/parallelism.md says why
        }
        with self.output(machine).open("a") as output:
            self.agents[machine] = subprocess.Popen(
                command, env=os.environ | variables, stdout=output, stderr=output, cwd=self.folder
            )

    def output(self, machine: int) -> Path:
        return self.folder / f"output{machine}"

    def wait(self, machine: int, status: int = 0) -> str:
        """Waits until torchrun ends with an exit status, and returns what the machine has written."""
        ended = self.agents[machine].wait(TIMEOUT.total_seconds())
        output = self.output(machine).read_text()
        assert ended == status, output
        return output


@contextmanager
def two_machines(folder: Path, fault: str = "", nnodes: str = "2") -> Iterator[Machines]:
    """Starts a run on two machines, and stops what is left of it at the end."""
    machines = Machines(folder, fault, nnodes)
    try:
        for machine in range(NUM_MACHINES):
            machines.start(machine)
        yield machines
    finally:
        for agent in machines.agents.values():
            agent.terminate()  # it also stops its ranks


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run on two machines without a fault."""
    with two_machines(tmp_path_factory.mktemp("whole")) as machines:
        for machine in range(NUM_MACHINES):
            machines.wait(machine)
    return machines.config


def test_two_machines_train_as_one_process(whole: Config, tmp_path: Path) -> None:
    assert len(list((Path(whole.folder) / "checkpoints" / "step-5").glob("__*_0.distcp"))) == 2
    assert_same_run(whole, train(tiny_config(tmp_path, **OPTIONS)))


def test_all_machines_restart_after_a_rank_was_killed(whole: Config, tmp_path: Path) -> None:
    """Only one machine counts the restart: the other one stops its rank, which waits for the killed one."""
    with two_machines(tmp_path, "rank") as machines:
        outputs = [machines.wait(machine) for machine in range(NUM_MACHINES)]
    assert "resumed from" in "".join(outputs)
    assert read_metrics(machines.config) == read_metrics(whole)


def test_a_machine_that_is_started_again_rejoins(whole: Config, tmp_path: Path) -> None:
    with two_machines(tmp_path, "machine") as machines:
        machines.wait(1, status=-9)
        machines.start(1)
        outputs = [machines.wait(machine) for machine in range(NUM_MACHINES)]
    assert re.search(r"resumed from .*step-2[\s\S]* on 2 x cpu", "".join(outputs))
    assert read_metrics(machines.config) == read_metrics(whole)


def test_the_other_machine_goes_on_alone(whole: Config, tmp_path: Path) -> None:
    """With ``--nnodes=1:2``, a run needs no second machine."""
    with two_machines(tmp_path, "machine", nnodes="1:2") as machines:
        machines.wait(1, status=-9)
        output = machines.wait(0)
    assert re.search(r"resumed from .*step-2[\s\S]* on 1 x cpu", output)
    for alone, both in zip(read_metrics(machines.config), read_metrics(whole), strict=True):
        assert float(alone["loss"]) == pytest.approx(float(both["loss"]), rel=1e-5)


def test_a_signal_to_torchrun_writes_a_checkpoint(whole: Config, tmp_path: Path) -> None:
    with two_machines(tmp_path, "signal") as machines:
        outputs = [machines.wait(machine, status=1) for machine in range(NUM_MACHINES)]
        assert "SIGUSR1: the run ended after step 3; the same command continues from" in "".join(outputs)
        machines.fault = ""
        for machine in range(NUM_MACHINES):
            machines.start(machine)
        outputs = [machines.wait(machine) for machine in range(NUM_MACHINES)]
    assert re.search("resumed from .*step-3", "".join(outputs))
    assert read_metrics(machines.config) == read_metrics(whole)
