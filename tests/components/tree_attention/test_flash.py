"""What backend "flash" refuses. Its results are tested in tests/gpu/test_tree_attention_gpu.py."""

import pytest
import torch

from tests.support.layouts import make_layout, random_qkv
from titan_tree.components.tree_attention import Scoring, flash
from titan_tree.errors import UserError


def test_flash_needs_a_hopper_gpu():
    with pytest.raises(UserError, match="'flash' needs a Hopper GPU, got cpu"):
        flash.prepare(make_layout([(-1, 5)]))


def test_flash_needs_its_package(monkeypatch):
    monkeypatch.setattr(flash, "is_hopper", lambda device: True)
    monkeypatch.setattr(flash, "_is_installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install -e '.\[flash\]'"):
        flash.prepare(make_layout([(-1, 5)]))


@pytest.mark.parametrize(
    ("dim", "dtype", "deterministic", "reason"),
    [
        (64, torch.float32, False, "expected bfloat16 or float16, got torch.float32"),
        (256, torch.bfloat16, False, "expected head dim 64 or 128, got 256"),
        (64, torch.bfloat16, True, "has no deterministic backward pass; use 'hopper' or 'triton'"),
        (64, torch.bfloat16, False, None),
    ],
)
def test_flash_gives_the_reason_for_a_refusal(dim, dtype, deterministic, reason):
    q, *_ = random_qkv(5, 5, (2, 1), dim, dtype=dtype)
    assert flash.refusal(q, q, Scoring(), deterministic) == reason
