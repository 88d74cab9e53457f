"""fp32 on a GPU is fp32, processes share its memory, and the longest tests start first."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests of several ranks to the front: models compile there for minutes."""
    items.sort(key=lambda item: item.path.name != "test_ranks_gpu.py")


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _clean_up() -> Iterator[None]:
    """Ends process groups, lets the host wait for the GPU again, and frees cached memory."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
