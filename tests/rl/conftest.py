"""Fixtures of all tests of reinforcement learning.

If the command line names a file of this folder, pytest loads this one before tests/conftest.py chooses
Triton's interpreter. What imports triton is therefore imported in fixtures.
"""

from collections.abc import Iterator

import pytest

import titan_tree.errors
from titan_tree.rl.environment import ENVIRONMENTS


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail are sent again soon."""
    from titan_tree.rl.server import client

    monkeypatch.setattr(client, "PAUSE_S", 0.01)


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one test are not hidden in messages of another one."""
    monkeypatch.setattr(titan_tree.errors, "_secrets", {})


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    import torch.distributed as dist

    from tests.support.rl_runs import Letters

    ENVIRONMENTS.register("letters", Letters)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
