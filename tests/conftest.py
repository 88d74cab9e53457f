"""Test set-up: without a GPU, Triton kernels run in Triton's interpreter."""

import os
from collections.abc import Iterator

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


REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
ENTRIES = [dict(each._entries) for each in REGISTRIES]


@pytest.fixture(autouse=True)
def _own_registries() -> Iterator[None]:
    """Removes what a test and its fixtures register."""
    yield
    for each, entries in zip(REGISTRIES, ENTRIES, strict=True):
        each._entries = dict(entries)
