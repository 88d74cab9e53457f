"""The Gluon kernels of attention, compiled for Hopper on a machine without a GPU."""

import numpy as np
import pytest
import torch

from tests.support.cases import exhaustive
from tests.support.hopper_compiler import SHARED_MEMORY, compile_launches, compiled_by
from tests.support.layouts import make_layout, random_qkv
from titan_tree.components.tree_attention import Scoring, hopper
from titan_tree.components.tree_attention.block_lists import prepare
from titan_tree.components.tree_attention.hopper import forward_pass, query_pass

# The launches to compile, per head dim: with as many keys as queries ("square") or not, and deterministic or
# not. A SQUARE kernel has a simpler mask and is otherwise the same, so one of them is enough.
LAUNCHES = {
    64: [("not square", False), ("not square", True)],
    128: [("not square", False), ("not square", True), ("square", True)],
    256: [("not square", True)],
}
BUILDS = tuple(LAUNCHES)
SOURCES = (
    "components/rings.py",
    "components/tree_attention/hopper",
    "components/tree_attention/block_lists.py",
)


def compile_kernels(dim: int) -> None:
    """Launches the kernels of the forward and backward passes for a head dim, as LAUNCHES says."""
    compile_launches("SQUARE", "WITH_DQ")
    for module in (forward_pass, query_pass):
        module.num_multiprocessors = lambda device: 132
    for shape, deterministic in LAUNCHES[dim]:
        n_keys = 200 if shape == "square" else 300
        layout = make_layout([(-1, n_keys)], np.arange(n_keys - 200, n_keys))
        tree = layout.subtree_end, layout.key_index, prepare(layout)
        q, k, v, do = random_qkv(200, n_keys, (32, 8), dim, dtype=torch.bfloat16)
        options = dim**-0.5, Scoring()
        o, lse = hopper.forward(q, k, v, *tree, *options)
        hopper.backward(do, q, k, v, o, lse, *tree, *options, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("dim", exhaustive((64,), BUILDS))
def test_kernels_compile_for_hopper(dim):
    """Shared memory suffices, ptxas does not serialize products, and (nearly) no registers spill."""
    results = compiled_by(__name__, SOURCES, dim)
    assert {(result["kernel"], result["square"], result["with_dq"]) for result in results} == {
        64: {
            ("_forward_kernel", None, None),
            ("_queries_kernel", None, None),
            ("_keys_kernel", False, True),
            ("_keys_kernel", False, False),
        },
        128: {
            ("_forward_kernel", None, None),
            ("_queries_kernel", None, None),
            ("_keys_kernel", False, True),
            ("_keys_kernel", False, False),
            ("_keys_kernel", True, False),
        },
        256: {
            ("_forward_kernel", None, None),
            ("_queries_kernel", None, None),
            ("_wide_keys_kernel", False, None),
        },
    }[dim]
    for result in results:
        assert result["shared"] <= SHARED_MEMORY, result
        assert not result["warnings"], result
        # Some bytes spill in the forward pass, in the key pass with dq, whose three groups share 64 Ki
        # registers, and in kernels whose masks read columns.
        assert result["spills"] <= (128 if result["with_dq"] else 0 if result["square"] else 64), result
