"""titan-tree doctor: each problem is a line with its fix, and no error of a check is a traceback."""

import json
import re
import shutil
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import titan_tree.tree.batch
from tests.support.cases import exhaustive
from titan_tree.cli import doctor, main
from titan_tree.cli.doctor import machine, numerics
from titan_tree.tree.chunks import make_chunks
from titan_tree.tree.layout import TreeLayout

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def only(monkeypatch):
    """Returns a function that removes all sections but one."""
    return lambda section: monkeypatch.setattr(doctor, "CHECKS", {section: doctor.CHECKS[section]})


def problems(capsys, *arguments):
    """Runs ``doctor --json`` and returns {name: value and fix} of its problems."""
    status = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    findings = [finding for section in report["sections"].values() for finding in section]
    wrong = [finding for finding in findings if finding["ok"] is False]
    found = {finding["name"]: f"{finding['value']} {finding['fix']}" for finding in wrong}
    assert report["problems"] == len(wrong)
    assert status == (1 if found else 0)
    assert all(finding["value"].isprintable() for finding in findings)
    return found


@pytest.mark.slow
def test_a_sound_machine_has_no_problems_and_the_report_fits_80_columns(capsys, tmp_path):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in doctor.CHECKS] == list(doctor.CHECKS)
    assert "✗" not in out
    assert lines[-1] == "no problems"
    assert not list(tmp_path.iterdir())  # nothing is written


def test_a_package_outside_its_range_or_missing_is_a_problem_with_the_command_that_fixes_it(
    capsys, monkeypatch, only
):
    only("versions")
    assert problems(capsys) == {}
    versions = {"torch": "2.10.0", "triton": None, "torchao": "0.1", "wandb": None}
    installed = machine._installed
    monkeypatch.setattr(
        machine,
        "_installed",
        lambda name: versions.get(name, installed(name)) if name in versions else installed(name),
    )
    found = problems(capsys)
    assert found == {
        "torch": "2.10.0; expected <2.16,>=2.11 python -m pip install 'torch<2.16,>=2.11'",
        "triton": "not installed; expected >=3.6 python -m pip install 'triton>=3.6'",
        "torchao": "0.1; expected ==0.18.0 python -m pip install 'torchao==0.18.0'",
    }


def test_requirements_come_from_the_installed_package_if_there_is_no_checkout(capsys, monkeypatch, only):
    only("versions")
    monkeypatch.setattr(machine, "PYPROJECT", Path("missing.toml"))
    assert problems(capsys) == {}


def test_a_vendors_build_before_a_release_counts_as_the_release(monkeypatch):
    python, requirements = machine._requirements()
    torch_range = next(r.specifier for r in requirements if r.name == "torch")
    assert machine._compare("torch", "2.11.0a0+nv26.1", torch_range, "").ok
    assert not machine._compare("torch", "2.16.0", torch_range, "").ok
    assert not machine._compare("python", "3.10.4", python, "").ok


def test_a_check_that_raises_is_one_line(capsys, monkeypatch):
    def broken():
        yield doctor.Finding("first", "fine")
        raise RuntimeError("two\nlines \x1b[31m")

    module = types.SimpleNamespace(broken=broken)
    monkeypatch.setitem(sys.modules, "titan_tree.cli.doctor.broken", module)
    checks = {"broken": "broken:broken", "lost": "no_such_module:check"}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert re.search("✗ broken +failed with RuntimeError: two", captured.out)
    assert re.search("✗ lost +cannot be checked: No module named", captured.out)
    assert "2 problems" in captured.out
    assert "Traceback" not in captured.out + captured.err


def test_a_missing_package_is_a_problem_and_no_traceback():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'rich', 'yaml', 'packaging')); "
        "from titan_tree.cli import main; sys.exit(main(['doctor']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1, run.stderr
    assert not run.stderr
    text = " ".join(run.stdout.split())
    assert text.count("cannot be checked: ") == text.count("fix: python -m pip install -e .") == 4
    assert text.endswith("4 problems, marked ✗")


def test_a_configuration_is_left_to_the_run(capsys):
    assert main(["doctor", "--config", "my.toml", "training.steps=3"]) == 2
    says = "titan-tree: error: --config: removed; titan-tree train my.toml checks its configuration before"
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.slow
@pytest.mark.parametrize("family", exhaustive(["qwen3_moe"], ["qwen3", "qwen3_moe", "qwen3_5"]))
def test_the_self_test_fails_if_a_branch_sees_another_one(monkeypatch, family):
    """In bfloat16, whose rounding hides more than that of float32."""
    monkeypatch.setattr(numerics, "training_device", lambda: (CPU, torch.bfloat16))
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2} if family == "qwen3_5" else {}
    monkeypatch.setattr(numerics, "KERNEL_SIZES", {family: numerics.KERNEL_SIZES[family] | layers})
    (sound,) = numerics.self_test()
    assert sound.ok
    if family == "qwen3_5":  # states of the recurrent layers continue across branches
        wrong = lambda predecessor, *sizes: make_chunks(torch.arange(len(predecessor)).numpy() - 1, *sizes)  # noqa: E731
        monkeypatch.setattr(titan_tree.tree.batch, "make_chunks", wrong)
    else:
        mask = TreeLayout.dense_mask
        monkeypatch.setattr(TreeLayout, "dense_mask", lambda layout: torch.ones_like(mask(layout)).tril())
    (finding,) = numerics.self_test()
    assert finding.ok is False
    assert finding.fix


def test_the_self_test_fails_for_numbers_that_are_not_finite_and_for_kernels_that_crash(monkeypatch):
    results = iter([(float("nan"), 0.0, 1e-6), (0.0, float("nan"), 1e-6), (0.0, 0.0, float("nan"))])
    monkeypatch.setattr(numerics, "errors", lambda *arguments: next(results))
    assert [finding.ok for finding in numerics.self_test()] == [False, False, False]

    def crash(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(numerics, "errors", crash)
    findings = list(numerics.self_test())
    assert [finding.name for finding in findings] == list(numerics.KERNEL_SIZES)
    assert all(finding.value.endswith("illegal memory access was encountered") for finding in findings)


def test_a_gpu_that_is_in_use_or_too_old_is_a_problem(capsys, monkeypatch, only):
    only("machine")
    names = [("H200", 9, 0), ("H200", 9, 0), ("V100", 7, 0)]
    devices = [
        types.SimpleNamespace(name=name, major=major, minor=minor, uuid=f"u{i}")
        for i, (name, major, minor) in enumerate(names)
    ]
    free = [140e9, 20e9, 30e9]
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_properties": devices.__getitem__,
        "mem_get_info": lambda i: (free[i], 141e9 if i < 2 else 32e9),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**30, 2**30 - 4096, 4096))
    found = problems(capsys)
    assert set(found) == {"GPU 1", "GPU 2", "/dev/shm"}
    assert "--shm-size" in found["/dev/shm"]
    assert "18.6 GiB free of 131.3 GiB" in found["GPU 1"]
    assert "CUDA_VISIBLE_DEVICES" in found["GPU 1"]
    assert "bfloat16 needs 8.0" in found["GPU 2"]
