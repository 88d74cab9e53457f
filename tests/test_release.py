"""The archives of a release: what they contain, and the command that they install."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from titan_tree import UserError, __version__, load_config

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(file.name for file in (ROOT / "train_configs").glob("*.toml"))


def run(*words: str | Path, cwd: Path) -> str:
    """Returns the standard output of a command that must succeed, and that does not see the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Returns the archive that the build backend writes for a source tree, without network access."""
    code = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    return folder / run(sys.executable, "-c", code, folder, cwd=source).splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_of_the_sdist_shows_and_configures_the_demo_from_any_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in ("titan_tree", "train_configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    sdist = build("sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert (tmp_path / f"titan_tree-{__version__}" / "constraints.txt").exists()
    wheel = build("wheel", tmp_path / f"titan_tree-{__version__}", tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if name.startswith("titan_tree/train_configs/")}
    assert packaged == {f"titan_tree/train_configs/{name}" for name in CONFIGS}
    python_files = {str(file.relative_to(ROOT)) for file in (ROOT / "titan_tree").rglob("*.py")}
    assert python_files <= set(names)

    clean = tmp_path / "venv"
    venv.create(clean, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", clean / "bin/python", "install", "-q", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)  # fmt: skip
    # The requirements are those of the tests: a clean copy of torch would take minutes.
    requirements = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    site = clean / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "requirements.pth").write_text("\n".join(requirements))
    command = clean / "bin/titan-tree"
    assert run(command, "--version", cwd=tmp_path) == f"titan-tree {__version__}\n"
    assert "largest tree: shop-10, 1,887 tokens" in run(command, "inspect", "demo", cwd=tmp_path)
    loaded = run(
        clean / "bin/python",
        "-c",
        "import titan_tree; print(titan_tree.__file__, titan_tree.load_config('demo').folder)",
        cwd=tmp_path,
    )
    assert loaded == f"{site}/titan_tree/__init__.py outputs/demo\n"


def test_the_version_has_one_source_and_an_entry_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "titan_tree.__version__"}
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_file_comes_before_the_packaged_configuration_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("demo").folder == "outputs/demo"
    (tmp_path / "demo").write_text((ROOT / "train_configs/demo.toml").read_text())
    assert load_config("demo", ["folder=mine"]).folder == "mine"
    (tmp_path / "demo").write_text("folder = 3")
    with pytest.raises(UserError, match=r"^demo: folder: expected a string, got 3"):
        load_config("demo")
    with pytest.raises(UserError, match=r"^demos/demo: cannot be read: No such file or directory$"):
        load_config("demos/demo")


def test_workflows_and_the_container_file_name_files_that_exist() -> None:
    commands = []
    for file in ("ci.yml", "gpu.yml"):
        workflow = yaml.safe_load((ROOT / ".github/workflows" / file).read_text())
        assert set(workflow) == {"name", True, "permissions", "jobs"}  # YAML reads "on" as true
        steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        commands += [shlex.split(step["run"], comments=True) for step in steps]
    scripts = [words for words in commands if "/" in words[0]]
    assert [words[0] for words in scripts] == [
        ".ci/run",
        "scripts/versions.sh",
        "./scripts/test.sh",
        "./scripts/test.sh",
    ]
    for words in scripts:
        assert os.access(ROOT / words[0], os.X_OK)
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    (torch,) = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ["pip", "install", torch, "--index-url", "https://download.pytorch.org/whl/cpu"] in commands

    copied = []
    for line in (ROOT / "Containerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied += line.split()[1:-1]
    assert {"pyproject.toml", "constraints.txt", "titan_tree", "train_configs"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
