"""GPUs: their properties, their free memory, and whether they can exchange tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from titan_tree.cli.doctor.finding import Finding, Subject, problem
from titan_tree.cli.doctor.machine import GIB, size_text

MIN_CAPABILITY = (8, 0)  # bfloat16
MAX_USED = 0.1  # share of a GPU's memory that other programs may use,
ALLOWED = 2 * GIB  # or this much, for the desktop of a small GPU
TIMEOUT_S = 120  # of the all-reduce, including the start of its processes


def gpus(subject: Subject) -> Iterator[Finding]:
    """Checks each GPU, NCCL, and an all-reduce over all GPUs."""
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    drivers = {row[0] for row in _nvidia_smi("gpu", "driver_version")}
    yield Finding("driver", f"{', '.join(drivers) or 'unknown'}, CUDA {torch.version.cuda} in torch")
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)
    if not dist.is_nccl_available():
        yield problem("NCCL", "this torch is built without NCCL", "install torch from https://pytorch.org")
        return
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if torch.cuda.device_count() > 1:
        yield all_reduce(torch.cuda.device_count())


def _no_gpu() -> Finding:
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Finding("GPU", "none; training on a CPU works, but is slow", ok=None)
    if torch.version.cuda is None:
        fix = "install a torch with CUDA, see https://pytorch.org/get-started"
        return problem("GPU", f"{', '.join(devices)} exists, but torch {torch.__version__} has no CUDA", fix)
    return problem(
        "GPU",
        f"{', '.join(devices)} exists, but torch cannot use it with CUDA {torch.version.cuda}",
        "update the driver to one that nvidia-smi shows with this CUDA version; check CUDA_VISIBLE_DEVICES = "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}",
    )


def _gpu(index: int) -> Iterator[Finding]:
    name, properties = f"GPU {index}", torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    text = (
        f"{properties.name}, compute capability {capability[0]}.{capability[1]}, {size_text(free)} free of "
        f"{size_text(total)}"
    )
    if capability < MIN_CAPABILITY:
        yield problem(name, f"{text}; bfloat16 needs 8.0", "training.dtype=float32, or another GPU")
        return
    others = [
        f"{pid} ({memory} MiB)"
        for uuid, pid, memory in _nvidia_smi("compute-apps", "gpu_uuid,pid,used_memory")
        if uuid.removeprefix("GPU-") == str(properties.uuid) and pid != str(os.getpid())
    ]
    if total - free > max(MAX_USED * total, ALLOWED):
        used_by = f"processes {', '.join(others)}" if others else "programs that are not visible here"
        yield problem(
            name,
            f"{text}; the rest is used by {used_by}",
            "stop them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
        return
    yield Finding(name, f"{text}; also used by {', '.join(others)}" if others else text)


def all_reduce(num_ranks: int) -> Finding:
    """Sums a tensor over ``num_ranks`` processes. torchrun starts them as it starts a training run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(num_ranks), "-m", "titan_tree.cli.doctor.all_reduce"]
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, text=True, errors="replace", stdout=pipe, stderr=stdout) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.communicate()
            output = f"no answer for {TIMEOUT_S} s"
    lines = [line for line in output.splitlines() if line.startswith("all-reduce: ")]
    if process.returncode == 0 and lines:
        return Finding("all-reduce", lines[0].removeprefix("all-reduce: "))
    errors = [line.strip() for line in output.splitlines() if "Error" in line or "no answer" in line]
    return problem(
        "all-reduce",
        f"{num_ranks} ranks cannot exchange tensors: {errors[0][:200] if errors else 'no message'}",
        f"see the reason: NCCL_DEBUG=INFO {' '.join(command)}; in a virtual machine, try NCCL_P2P_DISABLE=1",
    )


def _nvidia_smi(kind: str, fields: str) -> list[list[str]]:
    """Returns the rows of a query. It is empty without nvidia-smi, which some containers lack."""
    command = ["nvidia-smi", f"--query-{kind}={fields}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [row for row in rows if len(row) == len(fields.split(","))]
