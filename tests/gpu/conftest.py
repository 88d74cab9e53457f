"""fp32 on a GPU is fp32, and processes share its memory."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _free_cached_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
