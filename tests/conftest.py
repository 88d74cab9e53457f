"""Test set-up: without a GPU, Triton kernels run in Triton's interpreter."""

import os
from collections.abc import Iterator
from functools import partialmethod

import pytest
import torch

from titan_tree import registry

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes COLUMNS, which Python's readline sets in the workers of xdist. Tables would become narrow."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles modules up to Inductor's graphs. Inductor would take minutes to build C++ from them."""
    compile_up_to_graphs = partialmethod(torch.nn.Module.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_up_to_graphs)


REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
ENTRIES = [dict(each._entries) for each in REGISTRIES]


@pytest.fixture(autouse=True)
def _own_registries() -> Iterator[None]:
    """Removes what a test and its fixtures register."""
    yield
    for each, entries in zip(REGISTRIES, ENTRIES, strict=True):
        each._entries = dict(entries)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shortens the ids of tests with long parameters, such as 100,000 brackets."""
    if isinstance(val, str | bytes) and len(val) > 60:
        return f"{val[:20]!r} and {len(val) - 20} more"
    return None
