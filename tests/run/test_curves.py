"""The demos' recorded loss curves: a refactoring changes no digit of them.

    python -m tests.update --curves     # records them anew, after a change of numbers that is meant

The digits depend on torch and on the model of the CPU, which decides which kernels run. Where they are not
those of the recording, only the first steps are compared, within rounding.
"""

import csv
import json
import platform
import re
from pathlib import Path

import pytest
import torch

from tests.support.tiny_run import read_metrics
from titan_tree import load_config
from titan_tree.cli import main

CURVES = Path(__file__).parent / "curves"
DEMOS = ("demo", "demo_qwen3_5", "demo_qwen3_moe")


def cpu_model() -> str:
    """Vendor, family and model of the CPU, and torch's instructions: "AuthenticAMD 25 1, AVX2"."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (.*)$", text, re.MULTILINE)[:3]
    return f"{' '.join(found) or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


MACHINE = {"torch": torch.__version__.partition("+")[0], "cpu": cpu_model()}


def recorded(name: str) -> list[dict[str, str]]:
    with (CURVES / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def trained(name: str, folder: Path, *overrides: str) -> list[dict[str, str]]:
    options = [f"folder={folder}", "metrics.loggers=[csv]", "checkpoint.interval=0", *overrides]
    assert main(["train", name, *options]) == 0
    return read_metrics(load_config(name, options))


def assert_same_curve(rows: list[dict[str, str]], expected: list[dict[str, str]]) -> None:
    if json.loads((CURVES / "machine.json").read_text()) == MACHINE:
        assert rows == expected[: len(rows)]
        return
    for row, other in zip(rows[:5], expected, strict=False):
        assert row.keys() == other.keys()
        assert {k: float(v) for k, v in row.items()} == pytest.approx(
            {k: float(v) for k, v in other.items()}, rel=1e-3
        )


def test_the_first_steps_of_the_demo_are_those_of_the_recorded_curve(tmp_path: Path) -> None:
    """The warm-up takes five steps, so their learning rates do not depend on the length of the run."""
    rows = trained("demo", tmp_path, "training.steps=5")
    assert len(rows) == 5
    assert_same_curve(rows, recorded("demo"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_the_demos_repeat_their_recorded_curves(name: str, tmp_path: Path) -> None:
    rows = trained(name, tmp_path)
    assert len(rows) == len(recorded(name))
    assert_same_curve(rows, recorded(name))


if __name__ == "__main__":
    for name in DEMOS:
        rows = trained(name, Path("outputs/curves") / name)
        with (CURVES / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (CURVES / "machine.json").write_text(json.dumps(MACHINE) + "\n")
