"""The kernels of backend "triton", compiled for Hopper on a machine without a GPU."""

from typing import NamedTuple

import pytest
import torch

from tests.support.hopper_compiler import SHARED_MEMORY, compile_launches, compiled_by
from tests.support.layouts import make_layout, random_qkv
from titan_tree.components.tree_attention import Scoring, triton_kernels
from titan_tree.components.tree_attention.block_lists import prepare


class Build(NamedTuple):
    dims: tuple[int, int]  # head dims of keys and values
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


BUILDS = {
    "head dim 64": Build((64, 64)),
    "head dim 128": Build((128, 128)),
    "head dim 256": Build((256, 256)),
    "gpt-oss": Build((64, 64), window=128, sinks=True),
    "Mistral": Build((128, 128), window=4096),
    "Gemma 2 27B": Build((128, 128), window=4096, softcap=50.0),
    "Gemma 2 9B": Build((256, 256), window=4096, softcap=50.0),
    "Gemma 3": Build((256, 256), window=1024),
    "DeepSeek-V3": Build((192, 128)),
    "head dim 80": Build((80, 80)),
    "Phi-3": Build((96, 96), window=2047),
}
IN_CI = {"gpt-oss", "Gemma 2 9B", "DeepSeek-V3"}
SOURCES = ("components/tree_attention/triton_kernels", "components/tree_attention/block_lists.py")


def compile_kernels(name: str) -> None:
    """Launches the kernels of the forward and backward passes of a build."""
    compile_launches(gluon=False)
    triton_kernels._shared_memory = lambda device: SHARED_MEMORY
    (dim, dim_v), window, softcap, sinks = BUILDS[name]
    layout = make_layout([(-1, 200)])
    q, k, *_ = random_qkv(200, 200, (8, 2), dim, dtype=torch.bfloat16)
    v, do = (torch.randn(200, heads, dim_v, dtype=torch.bfloat16) for heads in (2, 8))
    tree = layout.subtree_end, layout.key_index, prepare(layout, window)
    options = dim**-0.5, Scoring(softcap=softcap, sinks=torch.zeros(8) if sinks else None)
    o, lse = triton_kernels.forward(q, k, v, *tree, *options)
    triton_kernels.backward(do, q, k, v, o, lse, *tree, *options, deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in BUILDS],
)
def test_kernels_compile_for_hopper(name):
    """Shared memory suffices, ptxas does not serialize products, and (nearly) no registers spill."""
    results = compiled_by(__name__, SOURCES, name)
    kernels = ["_forward_kernel", "_delta_kernel", "_dq_kernel", "_dkdv_kernel"]
    assert [result["kernel"] for result in results] == kernels
    for result in results:
        assert result["shared"] <= SHARED_MEMORY, result
        assert not result["warnings"], result
        # Plain dk and dv of wide heads were faster with these spills than with smaller tiles.
        limit = {"head dim 256": 512, "DeepSeek-V3": 288}.get(name, 128)
        assert result["spills"] <= (limit if result["kernel"] == "_dkdv_kernel" else 0), result
