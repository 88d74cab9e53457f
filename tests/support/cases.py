"""Which cases of a parametrized test run every day, and short cases that run as one test."""

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest
import torch


def slow_except(everyday: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases for ``pytest.mark.parametrize``; those that are not in ``everyday`` are slow.

    Args:
        everyday: cases of the everyday suite.
        cases: one value per case, or a tuple of values.
    """
    return [
        case if hasattr(case, "marks") or case in everyday else _marked(case, pytest.mark.slow)
        for case in cases
    ]


def exhaustive(by_hand: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases for ``pytest.mark.parametrize``; those in ``by_hand`` are exhaustive."""
    return [_marked(case, pytest.mark.exhaustive) if case in by_hand else case for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def for_each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[..., Any]:
    """Runs a test for many short cases as one item. A failure names its case.

    Takes what ``pytest.mark.parametrize`` takes. pytest spends more time on an item than such a case takes.
    Each case gets a folder, patches and a random seed of its own.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    # ``pytest.param(..., id=...)`` is accepted, for cases that other tests use one by one.
    cases = [_values(case, len(names)) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, values in enumerate(cases):
                arguments = fixtures | dict(zip(names, values, strict=True))
                if "tmp_path" in fixtures:
                    arguments["tmp_path"] = fixtures["tmp_path"] / f"case{number}"
                    arguments["tmp_path"].mkdir()
                torch.manual_seed(0)
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        if "monkeypatch" in fixtures:
                            arguments["monkeypatch"] = patch
                        test(**arguments)
                except BaseException as error:
                    error.add_note(f"in case {number}: {', '.join(map(_describe, names, values))}")
                    raise

        others = [value for name, value in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def _describe(name: str, value: object) -> str:
    text = repr(value)
    return f"{name} = {text if len(text) <= 200 else text[:200] + '...'}"


def _values(case: Any, number: int) -> tuple[Any, ...]:
    if hasattr(case, "marks"):
        assert not case.marks, "a case of a loop has no marks"
        return tuple(case.values)
    return tuple(case) if number > 1 else (case,)
