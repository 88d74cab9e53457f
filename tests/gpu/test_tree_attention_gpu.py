"""TreeAttention's backends on a GPU, against float64, in every dtype and head dim."""

import numpy as np
import pytest
import torch

from tests.layouts import SMALL, ancestor_mask, exact_attention, make_layout, random_nodes, random_qkv
from titan_tree.components.tree_attention import TreeAttention, triton_kernels

pytestmark = pytest.mark.gpu

TREES = SMALL | {
    "random": random_nodes(7, 40, 1, 120),
    "bushy": random_nodes(8, 300, 1, 12),
    "long": [(-1, 700), (0, 300), (1, 130), (0, 400)],
}


def errors(nodes, backend, dtype, dim, heads=(4, 2), queries=None) -> list[float]:
    """Relative error of o, dq, dk, dv against float64 on the same (rounded) inputs."""
    mask = ancestor_mask(nodes, queries).cuda()
    q, k, v, do = random_qkv(*mask.shape, heads, dim, dtype=dtype, device="cuda")
    attention = TreeAttention(backend)
    out = attention(q, k, v, attention.prepare(make_layout(nodes, queries).to("cuda")))
    got = (out, *torch.autograd.grad(out, (q, k, v), do))
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact_attention(*exact_inputs, mask)
    want = (expected, *torch.autograd.grad(expected, exact_inputs, do.double()))
    return [((a - b).norm() / do.double().norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("name", TREES)
def test_triton_fp32(name):
    """CUDA-core products: no TF32, or the error would be 1e-4."""
    assert max(errors(TREES[name], "triton", torch.float32, 64)) < 1e-6


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_triton_dtypes_and_head_dims(dtype, dim):
    rounding = torch.finfo(dtype).eps
    assert max(errors(TREES["random"], "triton", dtype, dim)) < max(rounding, 1e-6)


@pytest.mark.parametrize("name", TREES)
def test_triton_bf16_is_as_exact_as_flex(name):
    ours = errors(TREES[name], "triton", torch.bfloat16, 128)
    flex = errors(TREES[name], "flex", torch.bfloat16, 128)
    for a, b in zip(ours, flex, strict=True):
        assert a <= 1.1 * b + 1e-5


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_gateway_context(backend, share):
    nodes = random_nodes(3, 60, 1, 60, roots=0.0)
    n = sum(length for _, length in nodes)
    queries = np.flatnonzero(np.random.default_rng(0).random(n) < share)
    assert max(errors(nodes, backend, torch.float32, 64, queries=queries)) < 1e-6


def test_gradients_are_deterministic():
    nodes = random_nodes(7, 40, 1, 120)
    layout = TreeAttention("triton").prepare(make_layout(nodes).to("cuda"))
    n = len(layout.key_index)
    q, k, v, do = random_qkv(n, n, (4, 2), 128, dtype=torch.bfloat16, device="cuda")
    runs = []
    for _ in range(3):
        out = TreeAttention("triton")(q, k, v, layout)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), do)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_new_trees_launch_cached_kernels():
    """Another N, another tree: no kernel is compiled again."""
    kernels = (triton_kernels._forward_kernel, triton_kernels._dkdv_kernel, triton_kernels._dq_kernel)

    def run(nodes):
        errors(nodes, "triton", torch.bfloat16, 64)
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in kernels]

    first = run(random_nodes(1, 30, 1, 50))
    assert [run(SMALL[name]) for name in SMALL] == [first] * len(SMALL)


def test_sparse_rows_past_int32():
    """Row offsets beyond 2**31 elements: N * Hq * D = 2.2e9."""
    n, heads, dim = 2**17 + 64, 128, 128
    end = torch.arange(1, n + 1, dtype=torch.int32)  # every token is a root: attention returns v
    layout = make_layout([(-1, 1)]).__class__(torch.zeros(n).int(), end, torch.arange(n).int()).to("cuda")
    q, k, v, _ = random_qkv(n, n, (heads, heads), dim, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        out = TreeAttention("triton")(q, k, v, layout)
    assert torch.equal(out[-100:], v[-100:])
    assert torch.equal(out[::1000], v[::1000])
