"""Which cases of a parametrized test run every day."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(everyday: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases for ``pytest.mark.parametrize``; those that are not in ``everyday`` are slow."""
    return [case if case in everyday else pytest.param(case, marks=pytest.mark.slow) for case in cases]
