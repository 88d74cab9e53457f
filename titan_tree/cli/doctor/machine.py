"""Checks cores, memory, limits, the C compiler, and the free space of the disk that a run writes to."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from titan_tree.cli.doctor.finding import Finding, Subject, problem

MIB, GIB, TIB = 2**20, 2**30, 2**40
UNITS = {MIB: "MiB", GIB: "GiB", TIB: "TiB"}
MIN_MEMORY = 2 * GIB  # available host memory
MIN_DISK = GIB
MIN_SHARED = 32 * MIB  # of /dev/shm
MIN_SHARED_NCCL = GIB  # with several GPUs; NCCL's documentation advises this size
MIN_OPEN_FILES = 1024


def machine(subject: Subject) -> Iterator[Finding]:
    """Checks the host."""
    num_gpus = torch.cuda.device_count()
    yield _cores(num_gpus)
    yield _memory()
    yield _shared_memory(num_gpus)
    yield _open_files()
    yield _compiler(num_gpus > 0 or (subject.config is not None and subject.config.training.compile))
    yield _disk(Path(subject.config.folder if subject.config else "."))


def _cores(num_gpus: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2 * num_gpus:
        return problem(
            "cores",
            f"{cores} for {num_gpus} GPUs; each needs one for training and one for its data",
            "give the job more cores, or ingest the data into a token store: titan-tree ingest --help",
        )
    return Finding("cores", str(cores))


def _memory() -> Finding:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    text = f"{size_text(available)} available of {size_text(total)}"
    limit_file, used_file = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit_file.is_file() and (limit := limit_file.read_text().strip()) != "max":
        free = int(limit) - int(used_file.read_text())
        if free < available:
            available, text = (
                free,
                f"{size_text(free)} available of the {size_text(int(limit))} of this container",
            )
    if available < MIN_MEMORY:
        return problem("memory", text, "stop other programs, or give the job more memory")
    return Finding("memory", text)


def _shared_memory(num_gpus: int) -> Finding:
    needed = MIN_SHARED_NCCL if num_gpus > 1 else MIN_SHARED
    name, folder = "/dev/shm", Path("/dev/shm")
    fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
    if not folder.is_dir():
        return problem(name, "missing; worker processes and NCCL need it", fix)
    usage = shutil.disk_usage(folder)
    text = f"{size_text(usage.free)} free of {size_text(usage.total)}"
    return Finding(name, text) if usage.free >= needed else problem(name, text, fix)


def _open_files() -> Finding:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        enough = MIN_OPEN_FILES if hard < 0 else min(MIN_OPEN_FILES, hard)
        return problem("open files", f"at most {limit}; expected {MIN_OPEN_FILES}", f"ulimit -n {enough}")
    return Finding("open files", "no limit" if limit < 0 else f"at most {limit:,}")


def _compiler(is_needed: bool) -> Finding:
    """Looks for a C compiler. Triton compiles kernel launchers with it, and torch.compile code for CPUs."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    found = [path for name in names if (path := shutil.which(name))]
    if found:
        return Finding("C compiler", found[0])
    text = f"none of {', '.join(names)} is on PATH"
    if not is_needed:
        return Finding("C compiler", f"{text}; only GPUs and training.compile need one", ok=None)
    return problem("C compiler", text, "apt-get install gcc g++, or set CC to the path of a C compiler")


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(existing(folder)).free
    text = f"{size_text(free)} free in {existing(folder).absolute()}"
    if free < MIN_DISK:
        return problem("disk", text, "free some space, or set folder to a path on another disk")
    return Finding("disk", text)


def existing(folder: Path) -> Path:
    """Returns ``folder``, or the nearest path above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def size_text(num_bytes: float) -> str:
    """Returns the size with a unit, such as "5.3 MiB"."""
    unit = next((unit for unit in (TIB, GIB) if num_bytes >= unit), MIB)
    return f"{num_bytes / unit:,.1f} {UNITS[unit]}"
