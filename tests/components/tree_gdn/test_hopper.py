"""The Gluon kernels of the gated delta rule without a Hopper GPU: logic in an emulator, code compiled."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.components.tree_attention.test_hopper import compile_launches, compiled_by
from tests.components.tree_gdn.test_kernels import (
    CUDA,
    assert_close,
    exact,
    forest,
    ladder,
    random_forest,
    run,
)
from tests.support.gluon_emulator import EmulatedKernel
from titan_tree.components.tree_gdn import hopper, kernels_backward, kernels_forward, operator
from titan_tree.components.tree_gdn.buffers import empty_saved, empty_states
from titan_tree.components.tree_gdn.hopper import inputs as inputs_pass
from titan_tree.components.tree_gdn.hopper import passes
from titan_tree.errors import UserError
from titan_tree.tree.chains import make_chains
from titan_tree.tree.chunks import make_chunks

KERNELS = (passes, "_chain_kernel"), (passes, "_gradient_kernel"), (inputs_pass, "_inputs_kernel")
# predecessors, exported tokens, gateway rows, chunk size, key heads, value heads, K, V
CASES = {
    "chain": (forest([-1], [330]), [], 0, 64, 1, 2, 64, 64),
    "two tokens": (forest([-1], [2]), [], 0, 64, 1, 1, 64, 128),
    "star": (forest([-1] + [0] * 6, [20, 30, 9, 1, 17, 2, 5]), [], 0, 16, 2, 4, 64, 64),
    "deep": (forest(ladder(4), [3] * 9), [], 0, 16, 1, 2, 128, 64),
    "forest": (random_forest(4, 9, 40, 0.3), [], 0, 64, 1, 3, 64, 64),
    "gateway": (
        forest([-1, 0, 0, -1, -1], [20, 10, 8, 5, 30], {0: 2, 3: 1, 4: 1}),
        [19, 40, 72, 72], 4, 16, 1, 2, 64, 64,
    ),
}  # fmt: skip


def case(name, dtype, seed=0, device="cpu"):
    predecessor, exports, rows, size, heads_k, heads, width_k, width = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    n = len(predecessor)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v = (randn(n, h, d).to(dtype) for h, d in ((heads_k, width_k), (heads_k, width_k), (heads, width)))
    inputs = [q, k, v, F.logsigmoid(randn(n, heads) + 2), randn(n, heads).sigmoid()]
    inputs += [0.3 * randn(rows, heads, width_k, width)] if rows else []
    upstream = [randn(n, heads, width).to(dtype), randn(len(exports), heads, width_k, width)]
    exports = np.array(exports, np.int64)
    chunks = make_chunks(predecessor, exports, size)
    inputs = [x.to(device).requires_grad_() for x in inputs]
    upstream = [x.to(device) for x in upstream]
    return inputs, upstream, predecessor, exports, chunks, make_chains(chunks, rows)


@pytest.mark.skipif(CUDA, reason="Triton compiles where there is a GPU")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_recurrence(name, seed, monkeypatch):
    inputs, upstream, predecessor, exports, chunks, chains = case(name, torch.float16, seed)
    want = exact(inputs, upstream, predecessor, exports)
    monkeypatch.setattr(operator, "check", lambda q, k, v: None)  # fp16 shows smaller errors than bf16
    monkeypatch.setattr(hopper, "supports", lambda q, v: True)
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, EmulatedKernel(getattr(module, kernel), seed))
    monkeypatch.setattr(inputs_pass, "num_multiprocessors", lambda device: 3)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        got = run(inputs, upstream, chunks, chains)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(got, want, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_recurrence_on_a_gpu(name):
    inputs, upstream, predecessor, exports, chunks, chains = case(name, torch.bfloat16, device="cuda")
    assert hopper.supports(inputs[0], inputs[2])
    got = run(inputs, upstream, chunks, chains, "cuda")
    assert_close(got, exact(inputs, upstream, predecessor, exports), 3e-2)
    for _ in range(10):
        assert all(map(torch.equal, got, run(inputs, upstream, chunks, chains, "cuda")))


def test_too_many_chunks_have_a_message():
    k, v = (torch.empty(1, 32, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    chunks = make_chunks(np.full(150_000, -1), np.empty(0, np.int64))
    chains = make_chains(chunks)
    saved = empty_saved(k, v, chains)
    with pytest.raises(UserError, match="150,000 chunks and 32 heads"):
        hopper.states(k, v, *empty_states(saved), saved, chunks, chains)


def compile_all():
    """Each Gluon kernel that forward and backward launch."""
    compile_launches("K", "V", "FORWARD")
    hopper.supports = lambda q, v: True
    inputs_pass.num_multiprocessors = lambda device: 132
    chunks = make_chunks(forest([-1], [200]), np.empty(0, np.int64))
    chains = make_chains(chunks)
    for width_k, width in ((128, 128), (64, 64)):
        q, k, v = (torch.zeros(200, 4, dim, dtype=torch.bfloat16) for dim in (width_k, width_k, width))
        g, beta = torch.zeros(200, 4), torch.zeros(200, 4, dtype=torch.bfloat16)
        _, exported, saved = kernels_forward.forward(q, k, v, g, beta, None, chunks, chains)
        kernels_backward.backward(v, exported, q, k, v, g, beta, saved, chunks, chains)


def test_kernels_compile_for_hopper(tmp_path):
    """Shared memory fits, products are not serialised, registers suffice, or all but."""
    results = compiled_by("tests.components.tree_gdn.test_hopper:compile_all", tmp_path)
    names = (
        ("_chain_kernel", True),
        ("_chain_kernel", False),
        ("_gradient_kernel", None),
        ("_inputs_kernel", None),
    )
    expected = {(kernel, dim, forward) for kernel, forward in names for dim in (64, 128)}
    assert {(result["kernel"], result["k"], result["forward"]) for result in results} == expected
    for result in results:
        assert result["shared"] <= 227 * 1024, result
        assert not result["warnings"], result
        assert result["spills"] <= (96 if result["kernel"] == "_inputs_kernel" else 0), result
