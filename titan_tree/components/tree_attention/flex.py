"""Backend "flex": compiled FlexAttention (Dong et al., arXiv:2412.05496) with the interval mask.

Windows, soft caps and sinks serve benchmarks. FlexAttention needs a GPU for their backward passes, so no test
runs them on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from titan_tree.components.backends import Scoring
from titan_tree.components.tree_attention.context import join
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

NOT_DETERMINISTIC = "has no deterministic backward pass; use 'hopper' or 'triton'"


def _inductor(graph: GraphModule, inputs: list[Tensor]) -> object:
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
    return NOT_DETERMINISTIC if deterministic else None


def prepare(layout: TreeLayout, window: int | None = None) -> BlockMask:
    """Returns the mask in blocks of 128 x 128.

    Raises:
        UserError: the layout is not on a GPU. FlexAttention has no backward pass on CPUs.
    """
    device = layout.positions.device
    if device.type != "cuda":
        raise UserError(f"TreeAttention: backend 'flex' needs a CUDA device, got {device}; use 'auto'")
    end, key_index = layout.subtree_end, layout.key_index
    depth = None if window is None else layout.key_depths()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key_index[query]
        sees = (key <= column) & (column < end[key])
        if depth is None or window is None:
            return sees
        return sees & (depth[column] - depth[key] < window)

    return _create_block_mask(visible, None, None, len(key_index), len(end), device=device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, prepared: BlockMask,
    scale: float, scoring: Scoring, deterministic: bool, kernels: Literal["AUTO", "FLASH"] = "AUTO",
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``. kernels: FlexAttention's own option ``BACKEND``."""
    k, v = join(k, v, context, layout.key_source)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    options: dict[str, Any] = {
        "score_mod": None if scoring.softcap is None else _capped(scoring.softcap, q.device),
        "block_mask": prepared,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": {"BACKEND": kernels},
    }
    if scoring.sinks is None:
        out = _flex_attention(q, k, v, **options)
    else:  # the share of the softmax that the sink leaves to the keys is e^lse / (e^lse + e^sink)
        options["return_aux"] = AuxRequest(lse=True)
        out, aux = _flex_attention(q, k, v, **options)
        out = out * torch.sigmoid(aux.lse - scoring.sinks[:, None])[..., None].to(out.dtype)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    """Returns FlexAttention's ``score_mod`` for a soft cap. One function per cap compiles once."""
    cap = torch.full((), softcap, device=device)  # a float would become a symbol, which FlexAttention refuses

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
