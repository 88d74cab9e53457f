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
from tests.support.oracle import hf_model
from titan_tree.cli import doctor, main
from titan_tree.cli.doctor import machine, numerics
from titan_tree.tree.chunks import make_chunks
from titan_tree.tree.layout import TreeLayout

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "train_configs" / "demo.toml")
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
    assert main(["doctor", "--config", DEMO]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in doctor.CHECKS] == list(doctor.CHECKS)
    assert "✗" not in out
    assert lines[-1] == "no problems"
    assert not list(tmp_path.iterdir())  # nothing is written, not even the run's folder


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


def test_limits_of_the_machine_are_problems(capsys, monkeypatch, only):
    only("machine")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**30, 2**30 - 4096, 4096))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(machine, "MIN_MEMORY", 2**60)
    found = problems(capsys)
    assert set(found) == {"memory", "/dev/shm", "open files", "disk"}
    assert found["open files"] == "at most 256; expected 1024 ulimit -n 1024"
    assert "--shm-size" in found["/dev/shm"]


def test_a_missing_compiler_is_a_problem_only_if_something_is_compiled(capsys, monkeypatch, only):
    only("machine")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert problems(capsys) == {}
    assert "apt-get install gcc" in problems(capsys, "--config", DEMO, "training.compile=true")["C compiler"]


def test_a_check_that_raises_is_one_line(capsys, monkeypatch):
    def broken(subject):
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
        "import sys; sys.modules |= dict.fromkeys(('torch', 'rich', 'omegaconf', 'packaging')); "
        f"from titan_tree.cli import main; sys.exit(main(['doctor', '--config', {DEMO!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1, run.stderr
    assert not run.stderr
    text = " ".join(run.stdout.split())
    assert text.count("cannot be checked: ") == text.count("fix: python -m pip install -e .") == 6
    assert text.endswith("6 problems, marked ✗")


def test_settings_without_a_configuration_are_wrong_usage(capsys):
    assert main(["doctor", "training.steps=3"]) == 2
    assert "expected --config FILE.toml as well" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "name", "message"),
    [
        (["training.stepz=3"], "configuration", "did you mean 'training.steps'"),
        (["data.files=missing.jsonl"], "data", "missing.jsonl: no such file"),
        (["data.files=bad.jsonl"], "data", "bad.jsonl:1"),
        (["data.files=[demo, bad.jsonl]"], "data", "bad.jsonl:1"),
        (["validation.files=bad.jsonl"], "validation", "bad.jsonl:1"),
        (["data.tokenizer=nowhere"], "tokenizer", "nowhere"),
        (["loss.options.clip=1"], "components", "unknown option 'clip'"),
        (["model.flavor=9B"], "model", "unknown flavor of qwen3 '9B'"),
        (["model.flavor=null", "model.hf_path=snapshot"], "model", "missing tensors"),
        (["model.flavor=null", "model.hf_path=nowhere"], "model", "no such folder"),
        (["folder=bad.jsonl/run"], "folder", "bad.jsonl is not a writable folder"),
    ],
)
def test_problems_of_a_configuration_are_found_before_the_run(
    capsys, tmp_path, only, overrides, name, message
):
    only("configuration")
    (tmp_path / "bad.jsonl").write_text('{"tokns": [1, 2]}\n')
    if "snapshot" in str(overrides):
        hf_model(True, vocab_size=512, max_position_embeddings=32_768).save_pretrained(tmp_path / "snapshot")
        config = json.loads((tmp_path / "snapshot" / "config.json").read_text())
        config["num_hidden_layers"] += 1
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        (tmp_path / "snapshot" / "config.json").write_text(json.dumps(config))
    found = problems(capsys, "--config", DEMO, *overrides)
    assert list(found) == [name]
    assert message in found[name]


@pytest.mark.slow
def test_the_tables_of_every_command_are_checked(capsys, monkeypatch, only):
    only("configuration")
    rl_demo = str(ROOT / "train_configs" / "rl_demo.toml")
    assert problems(capsys, "--config", rl_demo) == {}
    found = problems(capsys, "--config", rl_demo, "rl.async_steps=1")
    assert list(found) == ["rl"]
    assert found["rl"].startswith("rl.async_steps: expected 0, because the sampler has no weights of its own")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "titan_tree.integrations.lightning", raising=False)
    found = problems(capsys, "--config", DEMO, "lightning.trainer.max_steps=1")
    assert list(found) == ["components"]
    assert "run pip install 'titan_tree[lightning]'" in found["components"]


def test_a_configuration_file_that_is_missing_is_a_problem(capsys, only):
    only("configuration")
    assert "unknown configuration file 'no.toml'" in problems(capsys, "--config", "no.toml")["configuration"]


def test_checkpoints_that_do_not_fit_on_the_disk_are_a_problem(capsys, monkeypatch, tmp_path, only):
    only("configuration")
    usage = namedtuple("usage", "total used free")
    size = 459_520 * 12  # bytes of a checkpoint: fp32 weights and both moments of AdamW
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, 3.5 * size))
    arguments = ["--config", DEMO, "folder=run"]
    assert "3 more fit" in problems(capsys, *arguments)["checkpoints"]  # keep = 3 needs four
    assert problems(capsys, *arguments, "checkpoint.keep=2") == {}
    assert problems(capsys, *arguments, "optimizer.name=adamw8bit") == {}
    assert "needs 4" in problems(capsys, *arguments, "checkpoint.keep=0")["checkpoints"]  # 80 steps, every 20
    assert problems(capsys, *arguments, "training.steps=60") == {}  # writes three
    (tmp_path / "run" / "checkpoints" / "step-20.damaged").mkdir(parents=True)
    assert "needs 4" in problems(capsys, *arguments)["checkpoints"]
    (tmp_path / "run" / "checkpoints" / "step-20").mkdir(parents=True)
    assert problems(capsys, *arguments) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", exhaustive(["qwen3_moe"], ["qwen3", "qwen3_moe", "qwen3_5"]))
def test_the_self_test_fails_if_a_branch_sees_another_one(monkeypatch, family):
    """In bfloat16, whose rounding hides more than that of float32."""
    monkeypatch.setattr(numerics, "training_device", lambda: (CPU, torch.bfloat16))
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2} if family == "qwen3_5" else {}
    monkeypatch.setattr(numerics, "KERNEL_SIZES", {family: numerics.KERNEL_SIZES[family] | layers})
    (sound,) = numerics.self_test(doctor.Subject())
    assert sound.ok
    if family == "qwen3_5":  # states of the recurrent layers continue across branches
        wrong = lambda predecessor, *sizes: make_chunks(torch.arange(len(predecessor)).numpy() - 1, *sizes)  # noqa: E731
        monkeypatch.setattr(titan_tree.tree.batch, "make_chunks", wrong)
    else:
        mask = TreeLayout.dense_mask
        monkeypatch.setattr(TreeLayout, "dense_mask", lambda layout: torch.ones_like(mask(layout)).tril())
    (finding,) = numerics.self_test(doctor.Subject())
    assert finding.ok is False
    assert finding.fix


def test_the_self_test_fails_for_numbers_that_are_not_finite_and_for_kernels_that_crash(monkeypatch):
    results = iter([(float("nan"), 0.0, 1e-6), (0.0, float("nan"), 1e-6), (0.0, 0.0, float("nan"))])
    monkeypatch.setattr(numerics, "errors", lambda *arguments: next(results))
    assert [finding.ok for finding in numerics.self_test(doctor.Subject())] == [False, False, False]

    def crash(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(numerics, "errors", crash)
    findings = list(numerics.self_test(doctor.Subject()))
    assert [finding.name for finding in findings] == list(numerics.KERNEL_SIZES)
    assert all(finding.value.endswith("illegal memory access was encountered") for finding in findings)


def test_a_gpu_that_is_in_use_or_too_old_is_a_problem(capsys, monkeypatch, only):
    only("GPUs")
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
        "nccl": types.SimpleNamespace(version=lambda: (2, 28, 3)),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(machine.dist, "is_nccl_available", lambda: True)
    found = problems(capsys)
    assert set(found) == {"GPU 1", "GPU 2"}
    assert "18.6 GiB free of 131.3 GiB" in found["GPU 1"]
    assert "CUDA_VISIBLE_DEVICES" in found["GPU 1"]
    assert "bfloat16 needs 8.0" in found["GPU 2"]
