"""Backend "flex": compiled FlexAttention (Dong et al., arXiv:2412.05496) with the interval mask."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan_tree.components.tree_attention.backend import Scoring, plain_only
from titan_tree.components.tree_attention.context import join
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

NOT_DETERMINISTIC = "has no deterministic backward pass; use 'hopper' or 'triton'"


def _inductor(graph: GraphModule, inputs: list[Tensor]) -> Any:
    """Compiles by Inductor. Its import takes seconds, and every process imports this file."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


# With fullgraph, exceeding the recompilation limit is an error. Without it, FlexAttention would fall back to
# a dense [N, M] matrix of scores.
_flex_attention = torch.compile(flex_attention, backend=_inductor, dynamic=True, fullgraph=True)
_create_block_mask = torch.compile(create_block_mask, backend=_inductor, dynamic=True)


def is_automatic(device: torch.device) -> bool:
    """Returns False: titan_tree's own kernels are faster."""
    return False


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """See ``AttentionBackend.refusal``."""
    return NOT_DETERMINISTIC if deterministic else plain_only(q, v, scoring)


def prepare(layout: TreeLayout) -> BlockMask:
    """Returns the mask in blocks of 128 x 128.

    Raises:
        UserError: the layout is not on a GPU. FlexAttention has no backward pass on CPUs.
    """
    device = layout.positions.device
    if device.type != "cuda":
        raise UserError(
            f"TreeAttention: backend 'flex' needs a CUDA device, got {device}; use 'reference' on CPUs"
        )
    end, key_index = layout.subtree_end, layout.key_index

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key_index[query]
        return (key <= column) & (column < end[key])

    return _create_block_mask(visible, None, None, len(key_index), len(end), device=device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: BlockMask,
    scoring: Scoring, deterministic: bool, kernels: Literal["AUTO", "FLASH"] = "AUTO",
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``. kernels: FlexAttention's own option ``BACKEND``."""
    k, v = join(k, v, context, layout.key_source)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = _flex_attention(q, k, v, block_mask=plan, enable_gqa=gqa, kernel_options={"BACKEND": kernels})
    return out.squeeze(0).transpose(0, 1)
