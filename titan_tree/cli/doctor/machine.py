"""Checks the versions of packages, shared memory and the GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from titan_tree.cli.doctor import Finding, problem

PACKAGE = Path(__file__).parents[2]
PYPROJECT = PACKAGE.parent / "pyproject.toml"  # exists in a checkout
EXTRAS = (  # those of users; others are for tests
    *("data", "torchao", "flash", "lightning", "transformers", "trl", "wandb", "mlflow"),
)
GIB = 2**30
MIN_SHARED_NCCL = GIB  # free space of /dev/shm with several GPUs; NCCL's documentation advises this size
MIN_CAPABILITY = (8, 0)  # bfloat16
MAX_USED = 0.1  # share of a GPU's memory that other programs may use,
ALLOWED = 2 * GIB  # or this much, for the desktop of a small GPU


def versions() -> Iterator[Finding]:
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


def machine() -> Iterator[Finding]:
    """Checks each GPU, and the shared memory through which several of them exchange tensors."""
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        yield _gpu(index)
    if num_gpus > 1:
        free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
        text = f"{free / GIB:.1f} GiB free"
        fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
        yield Finding("/dev/shm", text) if free >= MIN_SHARED_NCCL else problem("/dev/shm", text, fix)


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
    name, memory = f"GPU {index}", f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    text = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory}"
    if capability < MIN_CAPABILITY:
        return problem(name, f"{text}; bfloat16 needs 8.0", "training.dtype=float32, or another GPU")
    if total - free > max(MAX_USED * total, ALLOWED):
        fix = "stop the other programs that nvidia-smi lists, or choose GPUs with CUDA_VISIBLE_DEVICES"
        return problem(name, text, fix)
    return Finding(name, text)
