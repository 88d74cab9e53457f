import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import titan_tree.errors
from tests.support.rl_runs import Letters
from titan_tree.registry import ENVIRONMENTS
from titan_tree.rl.server import client


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail are sent again soon."""
    monkeypatch.setattr(client, "PAUSE_S", 0.01)


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one test are not hidden in messages of another one."""
    monkeypatch.setattr(titan_tree.errors, "_secrets", {})


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    ENVIRONMENTS.register("letters", Letters)
    logger = logging.getLogger("titan_tree")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before  # the command changes them
    if dist.is_initialized():
        dist.destroy_process_group()
