"""What backend flash says where it cannot run. That it is right: tests/gpu/test_tree_attention_gpu.py."""

import pytest
import torch

from tests.support.layouts import make_layout, random_qkv
from titan_tree.components.tree_attention import flash
from titan_tree.errors import UserError


def test_not_available_on_cpu():
    assert not flash.available(torch.device("cpu"))
    with pytest.raises(UserError, match="'flash' needs a Hopper GPU, got cpu"):
        flash.prepare(make_layout([(-1, 5)]))


def test_not_installed(monkeypatch):
    monkeypatch.setattr(flash, "is_hopper", lambda device: True)
    monkeypatch.setattr(flash, "_installed", lambda: False)
    assert not flash.available(torch.device("cuda"))
    with pytest.raises(UserError, match=r"pip install -e '.\[flash\]'"):
        flash.prepare(make_layout([(-1, 5)]))


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [
        (64, torch.float32, "bfloat16 or float16, got torch.float32"),
        (256, torch.bfloat16, "head dim 64 or 128"),
    ],
)
def test_refuses(dim, dtype, message):
    q, k, v, _ = random_qkv(5, 5, (2, 1), dim, dtype=dtype)
    with pytest.raises(UserError, match=message):
        flash.attention(q, k, v, make_layout([(-1, 5)]), None)
