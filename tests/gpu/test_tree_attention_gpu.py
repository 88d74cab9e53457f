"""TreeAttention's backends on a GPU, against float64, in every dtype and head dim."""

import types

import numpy as np
import pytest
import torch

from tests.support.gpu import HOPPER
from tests.support.layouts import (
    SMALL,
    ancestor_mask,
    exact_attention,
    exact_results,
    make_layout,
    random_nodes,
    random_qkv,
)
from tests.support.oracle import KINDS, hf_model, in_one_pass, random_groups, relative_error, tree_model
from titan_tree.components.tree_attention import TreeAttention, flash
from titan_tree.components.tree_attention.hopper import (
    forward_pass,
    jobs,
    key_pass,
    query_pass,
    wide_key_pass,
)
from titan_tree.components.tree_attention.triton_kernels import kernels as triton_kernels
from titan_tree.tree.layout import TreeLayout

pytestmark = pytest.mark.gpu

OURS = ["triton", HOPPER]
# The gradients of "triton" are always deterministic: the option changes no kernel.
VARIANTS = [("triton", True), *(pytest.param("hopper", flag, marks=HOPPER.marks) for flag in (False, True))]
TREES = SMALL | {
    "chain of 127": [(-1, 127)],
    "chain of 128": [(-1, 128)],
    "chain of 700": [(-1, 700)],
    "star of 1-token leaves": [(-1, 1), *[(0, 1)] * 900],
    "random": random_nodes(7, 40, 1, 120),
    "bushy": random_nodes(8, 300, 1, 12),
    "forest": random_nodes(9, 60, 1, 30, roots=0.3),
    "long": [(-1, 700), (0, 300), (1, 130), (0, 400)],
}
large_memory = pytest.mark.xdist_group("large_memory")  # two at a time, beside other tests, exceed 80 GB
# After larger trees, FlexAttention fails to compile for trees of one block: do not compare with it.
SMALL_TREES = [name for name, nodes in TREES.items() if sum(length for _, length in nodes) <= 128]
LARGE = {
    "65,536 nodes of one token": random_nodes(10, 65_536, 1, 1, roots=0.0),
    "one node of 131,072 tokens": [(-1, 131_072)],
    "500 trees": random_nodes(11, 5000, 1, 10, roots=0.1),
    "one token": [(-1, 1)],
}


@pytest.fixture(autouse=True, scope="module")
def _many_shapes():
    """Raises the recompilation limit: FlexAttention recompiles for some properties of shapes."""
    # Without duck shapes, sizes that are equal by chance, such as N = M, cause no recompilation.
    few_properties = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(recompile_limit=64), few_properties:
        yield


def results(attention, layout, q, k, v, do):
    """Returns o, dq, dk and dv."""
    out = attention(q, k, v, attention.prepare(layout))
    return out, *torch.autograd.grad(out, (q, k, v), do)


def errors(nodes, backends, dtype, dim, heads=(4, 2), queries=None, deterministic=False) -> list[list[float]]:
    """Returns, per backend, the errors of o, dq, dk and dv against float64, relative to the norm of do."""
    mask, layout = ancestor_mask(nodes, queries).cuda(), make_layout(nodes, queries).to("cuda")
    q, k, v, do = random_qkv(*mask.shape, heads, dim, dtype=dtype, device="cuda")
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact_attention(*exact_inputs, mask)
    want = (expected, *torch.autograd.grad(expected, exact_inputs, do.double()))
    return [
        [
            ((a - b).norm() / do.double().norm()).item()
            for a, b in zip(
                results(TreeAttention(backend, deterministic), layout, q, k, v, do), want, strict=True
            )
        ]
        for backend in backends
    ]


def context_queries(nodes, kind) -> np.ndarray:
    """Returns key columns of the queries. The other keys, the context, are in front of them or in between."""
    n = sum(length for _, length in nodes)
    if kind == "front":
        return np.arange(n // 3, n)
    return np.flatnonzero(np.random.default_rng(0).random(n) < 0.4)


def our_backends() -> list[str]:
    """Returns titan_tree's own backends that run on this GPU."""
    return ["triton", "hopper"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]


def fast_backends(dim) -> list[str]:
    """Returns them and "flash", if it runs on this GPU."""
    has_flash = dim in (64, 128) and flash._is_installed() and flash.is_hopper(torch.device("cuda"))
    return [*our_backends(), *(["flash"] if has_flash else [])]


@pytest.mark.parametrize("name", TREES)
def test_triton_is_exact_in_fp32(name):
    """Products run on CUDA cores. With TF32 the error would be 1e-4."""
    assert max(errors(TREES[name], ["triton"], torch.float32, 64)[0]) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 16), (torch.float16, 32), *((torch.float32, dim) for dim in (16, 64, 128, 256))],
    ids=str,
)
def test_triton_is_exact_for_all_dtypes_and_head_dims(dtype, dim):
    rounding = torch.finfo(dtype).eps
    assert max(errors(TREES["random"], ["triton"], dtype, dim)[0]) < max(rounding, 1e-6)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bf16_is_exact_to_one_rounding(dim):
    for name, nodes in TREES.items():
        backends = our_backends() if name in SMALL_TREES else fast_backends(dim)
        for backend, got in zip(backends, errors(nodes, backends, torch.bfloat16, dim), strict=True):
            assert max(got) < torch.finfo(torch.bfloat16).eps, f"{backend}: {name}: {got}"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["no context", "front", "between"])
def test_bf16_is_as_exact_as_flex(kind, dim):
    """Errors are at most 1.1 times FlexAttention's, which compiles again for trees of other kinds."""
    backends = fast_backends(dim)
    for tree in ("random", "bushy", "long"):
        queries = None if kind == "no context" else context_queries(TREES[tree], kind)
        floor, *ours = errors(TREES[tree], ["flex", *backends], torch.bfloat16, dim, queries=queries)
        assert max(floor) < torch.finfo(torch.bfloat16).eps
        for backend, got in zip(backends, ours, strict=True):
            for name, error, allowed in zip(("o", "dq", "dk", "dv"), got, floor, strict=True):
                assert error <= 1.1 * allowed + 1e-5, f"{backend}: {tree}: {name}: {error:.2e}, {allowed:.2e}"


@pytest.mark.parametrize(("dim", "heads"), [(64, (6, 2)), (128, (8, 1)), (256, (4, 1))])
@pytest.mark.parametrize(("backend", "deterministic"), VARIANTS)
def test_fp16_is_exact_for_any_heads(backend, dim, heads, deterministic):
    for name in ("random", "forest", "long"):
        (got,) = errors(TREES[name], [backend], torch.float16, dim, heads, deterministic=deterministic)
        assert max(got) < 1e-3


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_triton_is_exact_in_fp32_with_context(share):
    nodes = random_nodes(3, 60, 1, 60, roots=0.0)
    n = sum(length for _, length in nodes)
    queries = np.flatnonzero(np.random.default_rng(0).random(n) < share)
    assert max(errors(nodes, ["triton"], torch.float32, 64, queries=queries)[0]) < 1e-6


@large_memory
@pytest.mark.parametrize("name", LARGE)
def test_extreme_trees_are_exact_to_one_rounding(name):
    """All rows in bf16 are compared with float64, relative to each result's norm."""
    layout = make_layout(LARGE[name]).to("cuda")
    n = len(layout.key_index)
    q, k, v, do = random_qkv(n, n, (2, 1), 128, dtype=torch.bfloat16, device="cuda")
    want = exact_results(q, k, v, do, layout)
    for backend in our_backends():
        got = results(TreeAttention(backend), layout, q, k, v, do)
        for result, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
            error = (a - b).norm() / max(b.norm(), 1e-3 * do.double().norm())
            assert error < torch.finfo(torch.bfloat16).eps, f"{backend}: {result}: {error:.2e}"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("backend", "deterministic"), VARIANTS)
def test_repeats_bit_for_bit(backend, deterministic, dim):
    """All results if ``deterministic``, and otherwise all but dq."""
    attention = TreeAttention(backend, deterministic)
    # The plan of this layout cuts ranges into jobs.
    layout = make_layout([(-1, 3000), *random_nodes(7, 80, 1, 120)]).to("cuda")
    n = len(layout.key_index)
    inputs = random_qkv(n, n, (16, 8), dim, dtype=torch.bfloat16, device="cuda")
    first = results(attention, layout, *inputs)
    for _ in range(4):
        for name, a, b in zip(
            ("o", "dq", "dk", "dv"), results(attention, layout, *inputs), first, strict=True
        ):
            assert torch.equal(a, b) or (name == "dq" and not deterministic), name


@pytest.mark.parametrize("backend", OURS)
def test_new_trees_launch_cached_kernels(backend):
    """A different N, tree, forest or context recompiles no kernel."""
    of_hopper = [forward_pass, jobs, key_pass, query_pass, wide_key_pass]
    modules = [triton_kernels, *of_hopper] if backend == "hopper" else [triton_kernels]
    kernels = {
        f"{module.__name__}.{name}": kernel
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }

    def run(nodes, queries=None):
        for dim, deterministic in ((64, False), (64, True), (256, False)):
            layout = make_layout(nodes, queries).to("cuda")
            sizes = len(layout.key_index), len(layout.subtree_end)
            inputs = random_qkv(*sizes, (4, 2), dim, dtype=torch.bfloat16, device="cuda")
            results(TreeAttention(backend, deterministic), layout, *inputs)
        device = torch.cuda.current_device()
        return {name: len(kernel.device_caches[device][0]) for name, kernel in kernels.items()}

    trunk = [(-1, 1501), *random_nodes(1, 30, 1, 50)]
    run(trunk, context_queries(trunk, "front"))  # kernels compile once for M = N and once for M > N
    first = run(trunk)
    assert sum(count > 0 for count in first.values()) >= 4
    for name, nodes in TREES.items():
        assert run(nodes) == first, name
    for length in (16, 512, 1024, 1025, 2000):
        assert run([(-1, length)]) == first, length
    for kind in ("front", "between"):
        assert run(TREES["random"], context_queries(TREES["random"], kind)) == first, kind


@pytest.mark.parametrize("backend", OURS)
def test_never_waits_for_the_gpu(backend):
    """Neither the plan nor the kernels synchronize: the host runs ahead."""
    attention = TreeAttention(backend)
    layout = make_layout(TREES["long"]).to("cuda")
    n = len(layout.key_index)
    inputs = random_qkv(n, n, (4, 2), 128, dtype=torch.bfloat16, device="cuda")
    results(attention, layout, *inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    results(attention, layout, *inputs)


@large_memory
@pytest.mark.parametrize("backend", OURS)
def test_row_offsets_may_exceed_int32(backend):
    """N * Hq * D = 2.2e9 elements. Every token is a root, so o = v and dv = do."""
    n, heads, dim = 2**17 + 64, 128, 128
    column = torch.arange(n, dtype=torch.int32, device="cuda")
    layout = TreeLayout(positions=column, subtree_end=column + 1, key_index=column)
    q, k, v, do = random_qkv(n, n, (heads, heads), dim, dtype=torch.bfloat16, device="cuda")
    out, _, _, dv = results(TreeAttention(backend), layout, q, k, v, do)
    assert torch.equal(out[-100:], v[-100:])
    assert torch.equal(out[::1000], v[::1000])
    assert torch.equal(dv[-100:], do[-100:])
    assert torch.equal(dv[::1000], do[::1000])


def test_compiled_checkpointed_model_has_the_eager_gradients():
    """With fullgraph, dynamic shapes and checkpointing, bf16 gradients are as exact as in eager mode."""
    from titan_tree.distributed.parallelize import parallelize

    torch._dynamo.reset()
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    hf = hf_model(True, device="cuda", max_position_embeddings=4096, **sizes)
    alone = types.SimpleNamespace(size=lambda: 1)  # a mesh of one rank
    exact, eager, compiled = (tree_model(hf, backend) for backend in ("reference", "auto", "auto"))
    parallelize(eager, alone)
    parallelize(compiled, alone, activation_checkpoint="selective", compile=True)
    squares = []  # squared errors per forest, model and parameter
    for seed in range(2 * len(KINDS)):
        groups = random_groups(seed, vocab_size=300, max_length=90, num_nodes=10)
        want, *got = (in_one_pass(model, groups)[2].values() for model in (exact, eager, compiled))
        squares.append([[relative_error(a, b) ** 2 for a, b in zip(g, want, strict=True)] for g in got])
    noise, mine = torch.tensor(squares).sum(0).sqrt()
    assert (mine <= 1.2 * noise).all(), (mine / noise).max()
