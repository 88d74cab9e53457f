"""Checks the versions of packages, the host's memory, limits and compiler, and the GPUs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from titan_tree.cli.doctor import Finding, Subject, problem

PACKAGE = Path(__file__).parents[2]
PYPROJECT = PACKAGE.parent / "pyproject.toml"  # exists in a checkout
EXTRAS = (  # those of users; others are for tests
    *("data", "torchao", "flash", "lightning", "transformers", "trl", "wandb", "mlflow"),
)
MIB, GIB, TIB = 2**20, 2**30, 2**40
UNITS = {MIB: "MiB", GIB: "GiB", TIB: "TiB"}
MIN_MEMORY = 2 * GIB  # available host memory
MIN_DISK = GIB
MIN_SHARED = 32 * MIB  # free space of /dev/shm
MIN_SHARED_NCCL = GIB  # with several GPUs; NCCL's documentation advises this size
MIN_OPEN_FILES = 1024
MIN_CAPABILITY = (8, 0)  # bfloat16
MAX_USED = 0.1  # share of a GPU's memory that other programs may use,
ALLOWED = 2 * GIB  # or this much, for the desktop of a small GPU


def versions(subject: Subject) -> Iterator[Finding]:
    """Compares the versions of Python and of all packages with the ranges in pyproject.toml."""
    python, requirements = _requirements()
    yield _compare("python", platform.python_version(), python, "install a supported Python")
    yield Finding("titan_tree", f"{import_module('titan_tree').__version__} in {PACKAGE}")
    fitting, missing = [], []
    for requirement in requirements:
        name, version = requirement.name, _installed(requirement.name)
        if version is None and requirement.marker is not None:
            missing.append(name)
            continue
        fix = f"python -m pip install '{name}{requirement.specifier}'"
        finding = _compare(name, version, requirement.specifier, fix)
        if finding.ok:
            fitting.append(f"{name} {version}")
        else:
            yield finding
    yield Finding("packages", ", ".join(fitting))
    if missing:
        yield Finding("optional", f"not installed: {', '.join(missing)}", ok=None)


def _requirements() -> tuple[SpecifierSet, list[Requirement]]:
    """Returns the supported versions of Python, and all requirements. Those of an extra have a marker."""
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
        python, texts = project["requires-python"], list(project["dependencies"])
        for extra in EXTRAS:
            texts += [f'{text}; extra == "{extra}"' for text in project["optional-dependencies"][extra]]
    else:
        python = metadata.metadata("titan_tree")["Requires-Python"]
        texts = metadata.requires("titan_tree") or []
    return SpecifierSet(python), [r for r in map(Requirement, texts) if _is_for_users(r)]


def _is_for_users(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compare(name: str, version: str | None, supported: SpecifierSet, fix: str) -> Finding:
    if version is None:
        return problem(name, f"not installed; expected {supported}", fix)
    # Hardware vendors name their builds 2.11.0a0+..., which sorts before 2.11.
    ok = supported.contains(version, prereleases=True) or supported.contains(Version(version).base_version)
    return Finding(name, version) if ok else problem(name, f"{version}; expected {supported}", fix)


def machine(subject: Subject) -> Iterator[Finding]:
    """Checks the host's cores, memory, limits, compiler, and the disk that a run writes to."""
    num_gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    if cores < 2 * num_gpus:
        yield problem(
            "cores",
            f"{cores} for {num_gpus} GPUs; each needs one for training and one for its data",
            "give the job more cores, or ingest the data into a token store: titan-tree ingest --help",
        )
    else:
        yield Finding("cores", str(cores))
    fix = "stop other programs, or give the job more memory"
    yield _space("memory", *_memory(), MIN_MEMORY, fix)
    fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        needed = MIN_SHARED_NCCL if num_gpus > 1 else MIN_SHARED
        yield _space("/dev/shm", usage.free, usage.total, needed, fix)
    else:
        yield problem("/dev/shm", "missing; worker processes and NCCL need it", fix)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        fix = f"ulimit -n {MIN_OPEN_FILES}"
        yield problem("open files", f"at most {limit}; expected {MIN_OPEN_FILES}", fix)
    yield _compiler(num_gpus > 0 or (subject.config is not None and subject.config.training.compile))
    folder = existing(Path(subject.config.folder if subject.config else "."))
    usage = shutil.disk_usage(folder)
    fix = f"free some space in {folder}, or set folder to a path on another disk"
    yield _space("disk", usage.free, usage.total, MIN_DISK, fix)


def _space(name: str, free: float, total: float, needed: float, fix: str) -> Finding:
    text = f"{size_text(free)} free of {size_text(total)}"
    return Finding(name, text) if free >= needed else problem(name, text, fix)


def _memory() -> tuple[int, int]:
    """Returns the available and the total bytes of the host's memory, or those of the container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    limit_file, used_file = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit_file.is_file() and (limit := limit_file.read_text().strip()) != "max":
        free = int(limit) - int(used_file.read_text())
        if free < available:
            return free, int(limit)
    return available, total


def _compiler(is_needed: bool) -> Finding:
    """Looks for a C compiler. Triton compiles kernel launchers with it, and torch.compile code for CPUs."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path:
        return Finding("C compiler", path)
    text = f"none of {', '.join(names)} is on PATH"
    if not is_needed:
        return Finding("C compiler", f"{text}; only GPUs and training.compile need one", ok=None)
    return problem("C compiler", text, "apt-get install gcc g++, or set CC to the path of a C compiler")


def gpus(subject: Subject) -> Iterator[Finding]:
    """Checks each GPU and NCCL."""
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    if dist.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield problem("NCCL", "this torch is built without NCCL", "install torch from https://pytorch.org")


def _no_gpu() -> Finding:
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Finding("GPU", "none; training on a CPU works, but is slow", ok=None)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return problem(
        "GPU",
        f"{', '.join(devices)} exists, but torch {torch.__version__} with {cuda} cannot use it",
        "install a torch whose CUDA version nvidia-smi shows (https://pytorch.org/get-started), or update "
        f"the driver; check CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}",
    )


def _gpu(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    name, memory = f"GPU {index}", f"{size_text(free)} free of {size_text(total)}"
    text = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory}"
    if capability < MIN_CAPABILITY:
        return problem(name, f"{text}; bfloat16 needs 8.0", "training.dtype=float32, or another GPU")
    if total - free > max(MAX_USED * total, ALLOWED):
        fix = "stop the other programs that nvidia-smi lists, or choose GPUs with CUDA_VISIBLE_DEVICES"
        return problem(name, text, fix)
    return Finding(name, text)


def existing(folder: Path) -> Path:
    """Returns ``folder``, or the nearest path above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def size_text(num_bytes: float) -> str:
    """Returns the size with a unit, such as "5.3 MiB"."""
    unit = next((unit for unit in (TIB, GIB) if num_bytes >= unit), MIB)
    return f"{num_bytes / unit:,.1f} {UNITS[unit]}"
