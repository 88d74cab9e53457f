"""The everyday suite keeps its budget, and everything else runs with ``--all``."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import budget
from tests.support.cases import exhaustive, for_each, slow_except


def item(*marks: str) -> Any:
    """Returns a stand-in for a test with these marks."""
    return SimpleNamespace(
        user_properties=[], get_closest_marker=lambda name: name if name in marks else None
    )


@pytest.mark.parametrize("mark", [None, "slow", "exhaustive", "gpu"])
def test_an_unmarked_test_has_a_budget(mark: str | None) -> None:
    tested = item(*([mark] if mark else []))
    with pytest.MonkeyPatch.context() as patch:  # the budget of this test itself needs the real clock
        clock = iter([5.0, 8.0, 5.0, 30.0])
        patch.setattr(budget, "cpu_seconds", lambda: next(clock))
        with budget.limit(tested, "test"):
            pass
        expected = nullcontext() if mark else pytest.raises(pytest.fail.Exception, match=r"took 25\.0 s")
        with expected, budget.limit(tested, "test"):
            pass
    assert tested.user_properties == [("cpu_s of test", 3.0), ("cpu_s of test", 25.0)]


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
