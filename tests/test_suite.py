"""The everyday suite keeps its budget, and everything else runs with ``--all``."""

import ast
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import budget
from tests.support.cases import exhaustive, for_each, slow_except


def item(*marks: str, fails: bool = True) -> Any:
    """Returns a stand-in for a test with these marks."""
    return SimpleNamespace(
        user_properties=[],
        get_closest_marker=lambda name: name if name in marks else None,
        config=SimpleNamespace(getoption={"budget": fails}.get),
    )


def run_for(tested: Any, patch: pytest.MonkeyPatch, seconds: float, slowness: float = 1.0) -> None:
    """Runs the body of a test that takes CPU time, on a machine that was 1.5 times slower at the start."""
    clock = iter([5.0, 5.0 + seconds])
    with patch.context() as during:  # the budget of this test itself needs the real clock
        during.setattr(budget, "cpu_seconds", lambda: next(clock))
        during.setattr(budget, "slowness", lambda: slowness)
        during.setattr(budget, "_slowness", 1.5)
        with budget.limit(tested, "test"):
            pass


@pytest.mark.parametrize("mark", [None, "slow", "exhaustive", "gpu"])
def test_an_unmarked_test_has_a_budget(mark: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = item(*([mark] if mark else []))
    run_for(tested, monkeypatch, 3.0)
    run_for(tested, monkeypatch, 14.9)
    run_for(tested, monkeypatch, 25.0, slowness=2.6)
    expected = r"took 25\.0 s of CPU time, expected at most 15\.0 s"
    with nullcontext() if mark else pytest.raises(pytest.fail.Exception, match=expected):
        run_for(tested, monkeypatch, 25.0)
    seconds = [value for name, value in tested.user_properties if name == "cpu_s of test"]
    assert seconds == [3.0, 14.9, 25.0, 25.0]


def test_a_test_over_budget_is_named_and_fails_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = item(fails=False)
    run_for(tested, monkeypatch, 12.0)
    run_for(tested, monkeypatch, 25.0)
    where = "a.py::b", ("a.py", 1, "b"), {}
    call, teardown = (pytest.TestReport(*where, "passed", None, when) for when in ("call", "teardown"))
    call.user_properties = teardown.user_properties = tested.user_properties
    assert budget.summary([call, teardown, object()]) == (
        "over budget, see tests/support/budget.py: a.py::b: this test took 25.0 s of CPU time, expected at "
        "most 15.0 s"
    )
    call.user_properties = teardown.user_properties = [("cpu_s of test", 12.0)]
    assert budget.summary([call, teardown]) == ""


def test_the_speed_of_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "WORK_S", 1e9)
    assert budget.slowness() == 1.0
    monkeypatch.setattr(budget, "WORK_S", 1e-3)
    assert budget.slowness() > 10


def test_cases_that_do_not_run_every_day_are_slow() -> None:
    first, second = slow_except({"a"}, ["a", "b"])
    assert first == "a"
    assert second.values == ("b",)
    assert [mark.name for mark in second.marks] == ["slow"]
    first, second = slow_except({"a"}, exhaustive({"b"}, ["a", "b"]))
    assert first == "a"
    assert [mark.name for mark in second.marks] == ["exhaustive"]


def test_a_loop_over_cases_names_the_one_that_fails(tmp_path: Path) -> None:
    seen = []

    @for_each("word", ["a", "b"])
    @for_each(("number", "square"), [(2, 4), (3, 6), (4, 16)])
    def test(tmp_path: Path, word: str, number: int, square: int) -> None:
        seen.append((tmp_path.name, word, number))
        assert number**2 == square

    assert list(inspect.signature(test).parameters) == ["tmp_path"]
    with pytest.raises(AssertionError) as error:
        test(tmp_path=tmp_path)
    assert seen == [("case0", "a", 2), ("case1", "a", 3)]
    assert error.value.__notes__ == ["in case 1: number = 3, square = 6", "in case 0: word = 'a'"]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Returns the nodes of a function, without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def is_assertion(node: ast.AST) -> bool:
    """Returns whether a node is an assert statement, or a call such as pytest.raises or assert_same(...)."""
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return (
        isinstance(node, ast.Assert) or called.startswith("assert_") or called in ("raises", "fail", "skip")
    )


def early_returns(source: str) -> list[str]:
    """Returns the tests that can return before they assert anything. Such a case tests nothing."""
    found = []
    for test in ast.walk(ast.parse(source)):
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            nodes = list(own_nodes(test))
            first = min((node.lineno for node in nodes if is_assertion(node)), default=test.end_lineno or 0)
            if any(isinstance(node, ast.Return) and node.lineno < first for node in nodes):
                found.append(test.name)
    return found


def test_no_test_returns_before_it_asserts() -> None:
    assert early_returns("def test_a(x):\n    if x:\n        return\n    assert x\n") == ["test_a"]
    assert early_returns("def test_b(x):\n    assert x\n    if x:\n        return\n    assert 1\n") == []
    folder = Path(__file__).parent
    found = {path.name: early_returns(path.read_text()) for path in folder.rglob("test_*.py")}
    assert {name: tests for name, tests in found.items() if tests} == {}
