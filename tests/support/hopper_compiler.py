"""Compiles Gluon kernels for Hopper on a machine without a GPU, and reports what ptxas says about them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024  # bytes that one block can use on Hopper


class HopperDriver:
    """Replaces Triton's driver by one that reports a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(*names: str) -> None:
    """Makes every later launch in this process compile its Gluon kernel instead of running it.

    Each new kernel prints one line of JSON: its name, bytes of shared memory, bytes of spilled registers,
    ptxas's warnings that it serializes products, and the constants called ``names``.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if not kernel.is_gluon():
            return
        with contextlib.redirect_stdout(io.StringIO()) as log:  # ptxas's log; empty if already compiled
            compiled = run(kernel, *args, grid=grid, warmup=True, **constants)
        if spills := re.findall(r"(\d+) bytes spill stores", log.getvalue()):
            result = {"kernel": kernel.__name__} | {name.lower(): constants.get(name) for name in names}
            result |= {
                "shared": compiled.metadata.shared,
                "spills": sum(map(int, spills)),
                "warnings": re.findall(r".*C75\d\d.*", log.getvalue()),
            }
            print(json.dumps(result))

    driver.set_active(HopperDriver())
    JITFunction.run = compile_only


def compiled_by(function: str, cache: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Returns the output of ``compile_launches`` in a new process that calls ``function`` ("module:name").

    A process of its own is needed because this one may run Triton's interpreter, which cannot compile.
    """
    module, name = function.split(":")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DUMP_PTXAS_LOG": "1"}
    command = [sys.executable, "-c", f"from {module} import {name}; {name}(*{arguments!r})"]
    root = Path(__file__).parents[2]
    child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]
