"""The Triton kernels of Kimi Delta Attention, compiled for Hopper on a machine without a GPU."""

import numpy as np
import pytest
import torch

from tests.support.forests import forest
from tests.support.hopper_compiler import SHARED_MEMORY, compile_launches, compiled_by
from titan_tree.components.recurrence import triton_kernels
from titan_tree.components.recurrence.triton_kernels import kda_backward, kda_forward
from titan_tree.tree.chunks import make_chains, make_chunks

BUILDS = (128,)
SOURCES = tuple(
    f"components/recurrence/triton_kernels/{name}.py"
    for name in ("forward_kernels", "kda_forward", "kda_backward")
)
# Bytes of spilled registers. The first kernel has half of the registers, so that two programs run at a time.
SPILLS = {("_prepare_kernel", True): 384, ("_prepare_kernel", False): 160, ("_input_kernel", None): 96}


def compile_kernels(dim: int) -> None:
    """Launches the kernels of the forward and backward passes, in bfloat16, for few chains."""
    compile_launches("INVERSE", gluon=False)
    kda_forward.stages = kda_backward.stages = lambda x, programs, least: 3
    chunks = make_chunks(forest([-1], [200]), np.empty(0, np.int64))
    chains = make_chains(chunks)
    q, k, v = (torch.zeros(200, 4, dim, dtype=torch.bfloat16) for _ in range(3))
    g, beta = torch.zeros(200, 4, dim), torch.zeros(200, 4, dtype=torch.bfloat16)
    _, exported, saved = triton_kernels.forward(q, k, v, g, beta, None, chunks, chains)
    triton_kernels.backward(v, exported, q, k, v, g, beta, None, saved, chunks, chains)


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    """Shared memory suffices, ptxas does not serialize products, and few registers spill."""
    results = compiled_by(__name__, SOURCES, 128)
    kernels = [
        "_prepare_kernel", "_state_kernel", "output_kernel", "_prepare_kernel", "_state_gradient_kernel",
        "_state_kernel", "_pair_gradient_kernel", "_input_kernel",
    ]  # fmt: skip
    assert [result["kernel"] for result in results] == kernels
    for result in results:
        assert result["shared"] <= SHARED_MEMORY, result
        assert not result["warnings"], result
        assert result["spills"] <= SPILLS.get((result["kernel"], result["inverse"]), 0), result
