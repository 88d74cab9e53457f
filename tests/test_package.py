"""The package as a whole: public names, the direction of imports, and what is imported only when needed."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import titan_tree
from tests.support.cases import for_each

ROOT = Path(titan_tree.__file__).parent
REPOSITORY = ROOT.parent
DESIGN = (REPOSITORY / "docs" / "design.md").read_text()
FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


def test_every_public_name_resolves() -> None:
    assert dir(titan_tree) == titan_tree.__all__
    for name in titan_tree.__all__:
        if name != "__version__":
            assert getattr(titan_tree, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'titan_tree' has no attribute 'TokenTrie'"):
        titan_tree.TokenTrie  # noqa: B018


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("titan_tree.")
    ]
    assert {alias.name: node.module for node in imports for alias in node.names} == titan_tree._MODULES
    assert all(alias.asname == alias.name for node in imports for alias in node.names)


def test_the_public_names_include_everything_that_the_documentation_uses() -> None:
    promised = """TokenPath TokenTree TreeBatch TreeLayout TreePartitioner TreeTokenizer TreeAttention TreeGDN
        TreeKDA TreeSSD TreeLoss TreeStep TreeDataset Trainer load_config load_pretrained
        save_pretrained build_model register_loss tree_logprobs UserError PathPairs TreeStats
        load_adapter save_adapter KLPenalty RolloutCorrection PlainModel adapters_off OneRank
        clip_and_step __version__"""
    assert set(titan_tree.__all__) == set(promised.split())


@cache
def imported_modules(file: Path) -> list[str]:
    """Returns what a file imports, as "module" or "module.name": in functions and for types, too."""
    modules = []
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: expected an absolute import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


@cache
def levels() -> dict[str, int]:
    """Returns the level of every top-level module, from the list in docs/design.md; 0 is the highest."""
    lines = re.findall(r"^ {4}((?:\w+(?:\.py|/) +)+)", DESIGN, re.M)
    return {re.sub(r"\W.*", "", name): i for i, names in enumerate(lines) for name in names.split()}


def top(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


def test_the_design_lists_every_module() -> None:
    assert levels().keys() == {top(file) for file in FILES}


def test_imports_point_down_the_list_of_the_design() -> None:
    """A file imports modules of its own level and of those below, also inside functions."""
    level = levels()
    for file, module in ((importer, name) for importer in FILES for name in imported_modules(importer)):
        package, _, inner = module.partition(".")
        if package == "titan_tree":
            target = inner.split(".")[0]
            assert target in level, f"{file}: {module}: import it from the module that defines it"
            assert level[top(file)] <= level[target], f"{file}: {module} is above {top(file)}"


def test_the_core_imports_no_application() -> None:
    """The line of docs/design.md between applications and core."""
    above = DESIGN.split("Applications are above this line")[0]
    applications = {name for name in levels() if re.search(rf"^ {{4}}.*\b{name}(/|\.py)", above, re.M)}
    assert {"cli", "rl", "xray"} <= applications < levels().keys()
    for file in FILES:
        if top(file) not in applications:
            used = {name.split(".")[1] for name in imported_modules(file) if name.startswith("titan_tree.")}
            assert not used & applications, f"{file}: {used & applications}"


def allowed(package: str) -> set[Path]:
    """Returns the files that may import a package which the others must not know."""
    if package == "torchtitan":
        return {ROOT / "distributed" / "titan.py"}
    if package == "torchao":
        return {ROOT / "distributed" / "ao.py"}
    if package == "lightning":
        return {ROOT / "integrations" / "lightning.py"}
    if package == "aiohttp":
        return {ROOT / "serve" / "agent_server.py", ROOT / "serve" / "tinker" / "api.py"}
    if package == "tinker":
        return {*(ROOT / "serve" / "tinker").glob("*.py"), *(ROOT / "rl" / "tinker").glob("*.py")}
    if package == "trl":
        return set()  # integrations get its objects
    if package == "verl":
        return {ROOT / "integrations" / "verl.py"}
    if package in ("httpx", "tenacity"):
        return {ROOT / "rl" / "server" / "client.py"}
    if package == "omegaconf":
        return {ROOT / "config" / "toml.py"}
    assert package == "torch.distributed"
    level = levels()
    return {file for file in FILES if level[top(file)] <= level["distributed"]}


PACKAGES = [
    *(
        "torchtitan",
        "torchao",
        "lightning",
        "trl",
        "verl",
        "httpx",
        "tenacity",
        "omegaconf",
        "aiohttp",
        "tinker",
    ),
    "torch.distributed",
]


@for_each("package", PACKAGES)
def test_only_the_designated_files_import(package: str) -> None:
    for file in set(FILES) - allowed(package):
        for module in imported_modules(file):
            is_type = module == "torch.distributed.ProcessGroup"
            assert is_type or not f"{module}.".startswith(f"{package}."), f"{file}: {module}"


@pytest.mark.parametrize("folder", ["tree", "components", "models"])
def test_structures_components_and_models_take_plain_arguments_instead_of_config_tables(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        assert not [module for module in imported_modules(file) if "titan_tree.run.config" in module], file


def test_the_docstring_of_a_folder_lists_its_files() -> None:
    """Every file of a folder whose ``__init__.py`` lists files is in the list."""
    for init in ROOT.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        listed = set(re.findall(r"\b\w+(?=\.py\b)", text))
        if len(listed) > 2:
            files = {file.stem for file in init.parent.glob("*.py")} - {"__init__"}
            assert not files - listed, f"{init}: {files - listed}"


def run_python(code: str) -> None:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_data_and_inspect_do_not_import_torch() -> None:
    run_python(
        "import sys, titan_tree, titan_tree.cli, titan_tree.data.dataset, titan_tree.data.divergence\n"
        "titan_tree.TokenTree, titan_tree.TreeTokenizer, titan_tree.TreeDataset, titan_tree.UserError\n"
        "assert titan_tree.cli.main(['inspect', 'demo', '--limit', '1']) == 0\n"
        "assert titan_tree.cli.main(['xray', 'demo', '--json']) == 0\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
    )


def test_registering_extensions_does_not_import_torch() -> None:
    run_python(
        "import sys\n"
        "from tests.support.isolation import REGISTRIES\n"
        "for registry in REGISTRIES:\n"
        "    registry.register('mine', object()), list(registry)\n"
        "import titan_tree.run.config, titan_tree.cli.reference\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_the_error_of_a_moved_or_removed_module_says_what_to_use() -> None:
    for old, new in titan_tree._MOVED.items():
        assert importlib.util.find_spec(f"titan_tree.{new}"), new
        with pytest.raises(ModuleNotFoundError, match=f"{old} has moved; import titan_tree.{new} instead"):
            importlib.import_module(f"titan_tree.{old}")
    for old, instead in titan_tree._REMOVED.items():
        with pytest.raises(ModuleNotFoundError, match=f"{old} was removed; {re.escape(instead)}"):
            importlib.import_module(f"titan_tree.{old}")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("titan_tree.nothing")


@for_each("module", ["train", "lightning", "rl", "cli"])
def test_a_command_that_was_a_module_says_what_to_run(module: str) -> None:
    old = [sys.executable, "-m", f"titan_tree.{module}", "--config", "train_configs/demo.toml"]
    ended = subprocess.run(old, capture_output=True, text=True)
    command = {"cli": "COMMAND", "lightning": "train CONFIG.toml --trainer lightning"}
    words = command.get(module, f"{module} CONFIG.toml")
    assert f" was removed; run `python -m titan_tree {words}`" in ended.stderr
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
