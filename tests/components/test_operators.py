"""Operators have no second derivatives."""

import pytest
import torch
from torch import Tensor

from tests.support.forests import predecessors, recurrent_layout
from tests.support.layouts import make_layout
from titan_tree.components.recurrence import TreeGDN
from titan_tree.components.recurrence.conv import tree_causal_conv1d
from titan_tree.components.tree_attention import TreeAttention

NODES = [(-1, 5), (0, 3), (0, 2)]


def attention(x: Tensor) -> Tensor:
    module, heads = TreeAttention("triton"), x[:, None]
    return module(heads, heads, heads, module.prepare(make_layout(NODES)))


def recurrence(x: Tensor) -> Tensor:
    gate = -torch.ones(len(x), 1)
    layout = recurrent_layout(predecessors(NODES))
    return TreeGDN("triton")(x[:, None], x[:, None], x[:, None], gate, -gate, layout)[0]


def convolution(x: Tensor) -> Tensor:
    return tree_causal_conv1d(x, torch.ones(16, 4), recurrent_layout(predecessors(NODES)))[0]


@pytest.mark.parametrize("function", [attention, recurrence, convolution])
def test_second_derivatives_are_refused(function) -> None:
    """They would be 0."""
    x = torch.randn(10, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()
