"""The scripts that start a run on several machines are valid, and so are the options that they pass."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from titan_tree.run.config import load_config

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "scripts" / "launch" / "slurm.sh"
KUBERNETES = ROOT / "scripts" / "launch" / "kubernetes.yaml"

# What Slurm sets for a job.
JOB = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[3-4]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}


def check_torchrun(words: list[str]) -> Any:
    """Checks the configuration that torchrun passes to the training, and returns torchrun's options."""
    assert words[0] == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert options.module
    assert options.training_script == "titan_tree"
    command, config, *overrides = options.training_script_args
    assert command == "train"
    load_config(ROOT / config, overrides)
    assert options.rdzv_backend == "c10d"
    assert int(options.max_restarts) > 0
    return options


def test_slurm_script_starts_torchrun_on_each_machine(tmp_path: Path) -> None:
    """Runs it with an ``srun`` that prints its arguments, and an ``scontrol`` that lists two machines."""
    for name, body in {"srun": 'printf "%q " "$@"', "scontrol": 'printf "gpu3\\ngpu4\\n"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    arguments = ["train_configs/qwen3_8b.toml", "model.hf_path=a folder", "data.files=demo"]
    env = os.environ | JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", SLURM, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    words = shlex.split(run.stdout)
    start = words.index("torchrun")
    assert words[:start] == ["--cpus-per-task=64", "--kill-on-bad-exit=1"]
    options = check_torchrun(words[start:])
    assert (options.nnodes, options.nproc_per_node) == ("2", "8")
    assert options.rdzv_endpoint == "gpu3:24567"
    assert "model.hf_path=a folder" in options.training_script_args


def test_slurm_signal_reaches_the_ranks() -> None:
    """torchrun must handle the signal that the script orders, or it ends without telling its ranks."""
    text = SLURM.read_text()
    (number,) = re.findall(r"^#SBATCH --signal=(\w+)@", text, re.M)
    (handled,) = re.findall(r"--signals-to-handle=(\S+)", text)
    assert {f"SIG{number}", "SIGTERM"} <= set(handled.split(","))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", SLURM], check=True)


def test_kubernetes_pods_find_each_other() -> None:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]

    # Pod 0 gets the name NAME-0.SUBDOMAIN only with these settings.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert spec["completionMode"] == "Indexed"

    bash, dash_c, script = container["command"]
    assert (bash, dash_c) == ("bash", "-c")
    for index, is_host in (("0", "true"), ("1", "false")):
        fake = 'torchrun() { printf "%q " "$@"; }\n' + script.replace("exec torchrun", "torchrun")
        env = os.environ | {"JOB_COMPLETION_INDEX": index}
        run = subprocess.run(["bash", "-euc", fake], env=env, capture_output=True, text=True, check=True)
        options = check_torchrun(["torchrun", *shlex.split(run.stdout)])
        assert f"is_host={is_host}," in options.rdzv_conf
        assert options.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
        assert int(options.nnodes) == spec["completions"] == spec["parallelism"]
        assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy requires


@pytest.mark.parametrize("text", [SLURM.read_text(), KUBERNETES.read_text()], ids=["slurm", "kubernetes"])
def test_machines_can_rejoin(text: str) -> None:
    assert re.search(r'TORCH_DISABLE_SHARE_RDZV_TCP_STORE(=|\s+value: ")1\b', text)
