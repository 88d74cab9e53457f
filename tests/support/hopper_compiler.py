"""Compiles kernels for Hopper on a machine without a GPU, and reports what ptxas says about them.

Compiling all kernels takes more than a minute. Their reports are therefore recorded in hopper_reports.json,
each with a fingerprint of the code and of Triton's version. A test compiles kernels only if the fingerprint
has changed. After a change to a kernel, record the new reports:

    python -m tests.support.hopper_compiler
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
MODULES = (
    "tests.components.tree_attention.test_hopper_builds",
    "tests.components.tree_attention.test_triton_builds",
    "tests.components.recurrence.test_hopper_builds",
    "tests.components.recurrence.test_kda_builds",
)
RECORD = Path(__file__).with_name("hopper_reports.json")
SHARED_MEMORY = 227 * 1024  # bytes that one block can use on Hopper
Report = list[dict[str, Any]]  # one entry per compiled kernel


class HopperDriver:
    """Replaces Triton's driver by one that reports a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(*names: str, gluon: bool = True) -> None:
    """Makes every later launch in this process compile its kernel instead of running it.

    Each new kernel prints one line of JSON: its name, bytes of shared memory, registers per thread, bytes of
    spilled registers, warnings, and the constants called ``names``. Warnings are ptxas's that it serializes
    products, and the mbarriers of ``_lost_barriers``.

    Args:
        gluon: compile Gluon kernels, or else Triton kernels. Launches of the others do nothing.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if kernel.is_gluon() != gluon:
            return
        with contextlib.redirect_stdout(io.StringIO()) as log:  # ptxas's log; empty if already compiled
            compiled = run(kernel, *args, grid=grid, warmup=True, **constants)
        if spills := re.findall(r"(\d+) bytes spill stores", log.getvalue()):
            result = {"kernel": kernel.__name__} | {name.lower(): constants.get(name) for name in names}
            result |= {
                "shared": compiled.metadata.shared,
                "registers": int(re.findall(r"Used (\d+) registers", log.getvalue())[0]),
                "spills": sum(map(int, spills)),
                # C7519 only says where ptxas adds an instruction
                "warnings": re.findall(r".*C75(?!19)\d\d.*", log.getvalue())
                + _lost_barriers(compiled.asm["ttgir"]),
            }
            print(json.dumps(result))

    driver.set_active(HopperDriver())
    JITFunction.run = compile_only


def _lost_barriers(ttgir: str) -> list[str]:
    """Returns the mbarriers, one by one, in whose memory Triton may put other data while they are valid.

    A barrier must be invalidated, unless groups share it and the kernel returns right after they end. The GPU
    may still write the state of a valid barrier (see ``components/rings.py``).
    """
    kept = set(re.findall(r"ttng\.inval_barrier (%[\w#]+)", ttgir))
    groups = r"^( *)(?:\S+ = )?ttg\.warp_specialize\(([^)]*)\).*?^\1\} : [^\n]*\n *(\S+)"
    for _, captures, following in re.findall(groups, ttgir, re.MULTILINE | re.DOTALL):
        if following == "tt.return":
            kept.update(re.findall(r"%[\w#]+", captures))
    whole = dict(re.findall(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)", ttgir))
    barriers = re.findall(r"ttng\.init_barrier (%[\w#]+)", ttgir)
    return [f"mbarrier {x} is not invalidated" for x in barriers if kept.isdisjoint((x, whole.get(x)))]


def compiled_by(module: str, sources: Sequence[str], *arguments: Any) -> Report:
    """Returns the output of ``compile_launches`` in a new process that calls ``module.compile_kernels``.

    A process of its own is needed because this one may run Triton's interpreter, which cannot compile.

    Args:
        module: a module of tests.
        sources: files and folders of titan_tree that the kernels depend on. The report is taken from the
            record if neither their code nor that of ``module`` has changed.
        arguments: of ``compile_kernels``.
    """
    fingerprint = _fingerprint(module, sources)
    recorded = json.loads(RECORD.read_text()).get(_name(module, arguments), {})
    return recorded["report"] if recorded.get("fingerprint") == fingerprint else _compile(module, arguments)


def _compile(module: str, arguments: tuple[Any, ...]) -> Report:
    with tempfile.TemporaryDirectory() as cache:  # ptxas reports nothing about a kernel from a cache
        environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        command = [sys.executable, "-c", f"import {module} as m; m.compile_kernels(*{arguments!r})"]
        child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def _fingerprint(module: str, sources: Sequence[str]) -> str:
    """Returns a hash of Triton's version and of all code that the kernels depend on, without its prose."""
    files = [ROOT / f"{module.replace('.', '/')}.py"]
    for source in sources:
        path = ROOT / "titan_tree" / source
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    code = [importlib.metadata.version("triton")]
    for file in files:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        code += [file.name, repr(_fields(tree))]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def _fields(node: Any) -> Any:
    """Returns a syntax tree as nested lists. Fields that a version of Python adds are empty, and left out.

    The outputs of ``ast.dump`` and ``ast.unparse`` depend on the version of Python.
    """
    if isinstance(node, ast.AST):
        found = [(name, _fields(value)) for name, value in ast.iter_fields(node)]
        return [type(node).__name__, *((name, value) for name, value in found if value not in (None, []))]
    return [_fields(value) for value in node] if isinstance(node, list) else node


def _name(module: str, arguments: tuple[Any, ...]) -> str:
    return " ".join(map(str, (module, *arguments)))


def record() -> None:
    """Compiles all kernels and records their reports."""
    reports = {}
    for module in MODULES:
        test = importlib.import_module(module)
        for case in test.BUILDS:
            report = _compile(module, (case,))
            reports[_name(module, (case,))] = {
                "fingerprint": _fingerprint(module, test.SOURCES),
                "report": report,
            }
    RECORD.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    record()
