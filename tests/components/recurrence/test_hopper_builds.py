"""The Gluon kernels of the recurrences, compiled for Hopper on a machine without a GPU."""

import numpy as np
import pytest
import torch

from tests.support.cases import exhaustive
from tests.support.forests import forest
from tests.support.hopper_compiler import SHARED_MEMORY, compile_launches, compiled_by
from titan_tree.components.recurrence import hopper
from titan_tree.components.recurrence.hopper import inputs as inputs_pass
from titan_tree.components.recurrence.hopper import passes
from titan_tree.tree.chunks import make_chains, make_chunks

BUILDS = (64, 128)
# Bytes of spilled registers of KDA's kernels, by their name and INVERSE.
SPILLS = {("_prepare_kernel", True): 32, ("_prepare_kernel", False): 16, ("_input_kernel", None): 300}
SOURCES = (
    "components/rings.py",
    "components/recurrence/hopper",
    "components/recurrence/triton_kernels/kda_forward.py",
    "components/recurrence/triton_kernels/forward_kernels.py",
    "components/recurrence/buffers.py",
    "tree/chunks.py",
)


def compile_kernels(dim: int) -> None:
    """Launches every Gluon kernel of both passes: with K = V = dim, and for SSD with K = dim and V = 64.

    They are launched for many and for few multiprocessors. KDA comes last.
    """
    compile_launches("K", "V", "FORWARD", "DELTA", "INVERSE", "STAGES")
    inputs_pass.num_multiprocessors = lambda device: 132
    chunks = make_chunks(forest([-1], [200]), np.empty(0, np.int64))
    chains = make_chains(chunks)
    q, k, v = (torch.zeros(200, 4, dim, dtype=torch.bfloat16) for _ in range(3))
    g, beta = torch.zeros(200, 4), torch.zeros(200, 4, dtype=torch.bfloat16)
    rules = (v, g, beta), (v[..., :64].contiguous(), g, None), (v, g[..., None].expand(-1, -1, dim), beta)
    for values, g, gate in rules:
        for multiprocessors in (132, 1):
            passes.num_multiprocessors = lambda device, count=multiprocessors: count
            _, exported, saved = hopper.forward(q, k, values, g, gate, None, chunks, chains)
            hopper.backward(values, exported, q, k, values, g, gate, None, saved, chunks, chains)


@pytest.mark.slow
@pytest.mark.parametrize("dim", exhaustive((64,), BUILDS))
def test_kernels_compile_for_hopper(dim):
    """Shared memory suffices, ptxas does not serialize products, and (nearly) no registers spill."""
    results = compiled_by(__name__, SOURCES, dim)
    kernels = {("_chain_kernel", True), ("_chain_kernel", False)}
    kernels |= {(name, None) for name in ("_gradient_kernel", "_inputs_kernel", "_prepare_kernel")}
    for delta in (True, False):
        compiled = [result for result in results if result["delta"] == delta]
        assert {(result["kernel"], result["forward"]) for result in compiled} == kernels
    kda = [result for result in results if result["delta"] is None]
    assert [(result["kernel"], result["inverse"]) for result in kda] == [*SPILLS]
    for result in kda:
        assert result["spills"] <= SPILLS[result["kernel"], result["inverse"]], result
    pairs = {
        (result["forward"], result["delta"]) for result in results if result["stages"] == passes.PAIR_STAGES
    }
    assert pairs == {(False, True), (True, False), (False, False)}
    for result in results:
        half = (SHARED_MEMORY + 1024) // 2 - 1024  # each program of a multiprocessor takes 1 KiB more
        assert result["shared"] <= (half if result["stages"] == passes.PAIR_STAGES else SHARED_MEMORY), result
        assert not result["warnings"], result
    for result in results[: -len(kda)]:
        assert result["spills"] <= (96 if result["kernel"] == "_inputs_kernel" else 0), result
