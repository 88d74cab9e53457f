"""The everyday suite keeps its budget, and everything else runs with ``--all``."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import budget
from tests.support.cases import slow_except


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
