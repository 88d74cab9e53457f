"""The package's own namespace: every name is there, and nothing heavy comes before it is used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import titan_tree

ROOT = Path(titan_tree.__file__).parent


def test_every_exported_name_resolves():
    for name in titan_tree.__all__:
        assert getattr(titan_tree, name).__name__ == name
        assert name in dir(titan_tree)
    with pytest.raises(AttributeError, match="module 'titan_tree' has no attribute 'TokenTrie'"):
        titan_tree.TokenTrie  # noqa: B018


def test_type_checkers_see_the_same_names_in_the_same_modules():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    ours = {name: module for name, module in seen.items() if module.startswith("titan_tree.")}
    assert ours == {name: f"titan_tree.{home}" for name, home in titan_tree._HOME.items()}
    assert sorted(ours) == titan_tree.__all__


def imported_modules(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down_the_list_of_the_design():
    """docs/design.md: one level per line; a file imports its own level and those below."""
    levels = re.findall(
        r"^ {4}((?:\w+(?:\.py|/) +)+)", (ROOT.parent / "docs" / "design.md").read_text(), re.M
    )
    level = {re.sub(r"\W.*", "", name): i for i, names in enumerate(levels) for name in names.split()}
    files = [file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py"]
    assert level.keys() == {file.relative_to(ROOT).with_suffix("").parts[0] for file in files}
    for file in files:
        own = file.relative_to(ROOT)
        for module in imported_modules(file):
            package, _, inner = module.partition(".")
            if package == "titan_tree":
                assert level[own.with_suffix("").parts[0]] <= level[inner.split(".")[0]], (own, module)
            assert package != "torchtitan" or own == Path("distributed/titan.py"), own
            assert package != "torchao", own  # ao.py imports it where it is asked for
            assert not module.startswith("torch.distributed") or own.parts[0] not in ("data", "components"), (
                own
            )


def test_data_and_inspect_do_without_torch():
    code = (
        "import sys, titan_tree, titan_tree.cli, titan_tree.data.dataset, titan_tree.data.report\n"
        "titan_tree.TokenTree, titan_tree.TreeTokenizer, titan_tree.UserError\n"
        "assert titan_tree.cli.main(['inspect', 'demo', '--limit', '1']) == 0\n"
        "assert not {'torch', 'triton', 'omegaconf', 'transformers'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
