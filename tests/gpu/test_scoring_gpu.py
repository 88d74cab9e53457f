"""Windows, soft caps, sinks and head dims of known models on a GPU, against float64 and FlexAttention."""

import numpy as np
import pytest
import torch

from tests.components.tree_attention.test_triton_builds import BUILDS, Build
from tests.support.layouts import exact_attention, make_layout, random_nodes, window_mask
from titan_tree.components.tree_attention import Scoring, TreeAttention

pytestmark = pytest.mark.gpu

TREES = {
    "random": random_nodes(7, 40, 1, 120),
    "bushy": random_nodes(8, 300, 1, 12),
    "long": [(-1, 700), (0, 300), (1, 130), (0, 400)],
}
CASES = BUILDS | {  # windows that are short enough for these trees
    "short window": Build((64, 64), window=20, softcap=2.0, sinks=True),
    "wide heads": Build((256, 256), window=150, softcap=5.0, sinks=True),
    "wide keys": Build((192, 128), window=150, sinks=True),
}


def random_case(build, nodes, queries, dtype):
    """Returns the layout, the mask, the inputs with their sinks, and a gradient of the output."""
    n_keys = sum(length for _, length in nodes)
    mask = window_mask(nodes, queries, build.window or n_keys).cuda()
    n, (dim, dim_v) = len(mask), build.dims
    shapes = (n, 4, dim), (n_keys, 2, dim), (n_keys, 2, dim_v), (n, 4, dim_v)
    *inputs, do = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    if build.sinks:
        inputs.append(torch.randn(4, device="cuda"))
    return make_layout(nodes, queries).to("cuda"), mask, [x.requires_grad_() for x in inputs], do


def scoring_of(build, sinks):
    return Scoring(build.window, build.softcap, *sinks)


def results(attention, build, layout, inputs, do):
    """Returns the output and the gradients of all inputs."""
    q, k, v, *sinks = inputs
    layout = attention.prepare(layout, [build.window])
    out = attention(q, k, v, layout, scale=0.1, scoring=scoring_of(build, sinks))
    return out, *torch.autograd.grad(out, inputs, do)


def errors(build, nodes, queries, dtype, backends):
    """Returns, per backend, the errors of output and gradients, relative to the norm of do."""
    layout, mask, inputs, do = random_case(build, nodes, queries, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = exact_attention(*exact[:3], mask, 0.1, scoring_of(build, exact[3:]))
    want = expected, *torch.autograd.grad(expected, exact, do.double())
    return [
        [
            ((a - b).norm() / do.double().norm()).item()
            for a, b in zip(results(TreeAttention(backend), build, layout, inputs, do), want, strict=True)
        ]
        for backend in backends
    ]


# Each pair of head dims and each kind of scoring once, because all combinations would compile for minutes.
# test_tree_attention_gpu.py tests head dims 64, 128 and 256 without scoring. Contexts compile again.
WITHOUT_CONTEXT = (
    "short window",
    "wide heads",
    "wide keys",
    "gpt-oss",
    "Gemma 2 27B",
    "Phi-3",
    "DeepSeek-V3",
    "head dim 80",
)
WITH_CONTEXT = ("short window", "wide heads", "wide keys", "head dim 80")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "all") for name in WITHOUT_CONTEXT), *((name, "between") for name in WITH_CONTEXT)],
)
def test_bf16_is_exact_to_one_rounding(name, kind):
    for tree, nodes in TREES.items():
        n = sum(length for _, length in nodes)
        queries = None if kind == "all" else np.flatnonzero(np.random.default_rng(0).random(n) < 0.4)
        (got,) = errors(CASES[name], nodes, queries, torch.bfloat16, ["triton"])
        assert max(got) < torch.finfo(torch.bfloat16).eps, (tree, got)


@pytest.mark.parametrize("name", ["short window", "wide keys", "head dim 80"])
def test_triton_is_exact_in_fp32(name):
    (got,) = errors(CASES[name], TREES["random"], None, torch.float32, ["triton"])
    assert max(got) < 2e-6, got


@pytest.mark.parametrize("name", ["gpt-oss", "short window", "DeepSeek-V3"])
def test_flex_computes_the_same(name):
    flex, triton = errors(CASES[name], TREES["long"], None, torch.bfloat16, ["flex", "triton"])
    for theirs, ours in zip(flex, triton, strict=True):
        assert theirs < torch.finfo(torch.bfloat16).eps
        assert ours <= 1.1 * theirs + 1e-4  # the gradient of a sink sums products of rounded outputs


@pytest.mark.parametrize("name", ["short window", "wide keys"])
def test_never_waits_for_the_gpu_and_repeats_bit_for_bit(name):
    layout, _, inputs, do = random_case(CASES[name], TREES["long"], None, torch.bfloat16)
    attention = TreeAttention("triton")
    first = results(attention, CASES[name], layout, inputs, do)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    again = results(attention, CASES[name], layout, inputs, do)
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
