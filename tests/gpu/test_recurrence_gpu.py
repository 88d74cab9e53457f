"""The recurrences and their convolution on a GPU: extreme trees, precision in bf16, choice of backend."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.forests import leaves, path_of, predecessors, recurrent_layout
from tests.support.layouts import random_nodes
from titan_tree.components.recurrence import TreeGDN, TreeKDA, TreeSSD, prepare_conv, tree_causal_conv1d
from titan_tree.components.recurrence.reference import recurrence
from titan_tree.errors import UserError

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def random_inputs(n, heads_k, heads, dim, dtype=torch.float32, seed=0, rule=TreeGDN):
    """Returns q, k, v, g and, unless the rule is SSD, beta; and an upstream gradient.

    For KDA, channel 1 decays by exp(-20) per token.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k, v, do = (randn(n, h, dim).to(dtype) for h in (heads_k, heads_k, heads, heads))
    g, beta = F.logsigmoid(randn(n, heads) + 2), torch.sigmoid(randn(n, heads)).to(dtype)
    if rule is TreeKDA:
        g = F.logsigmoid(randn(n, heads, dim) + 2)
        g[..., 1] = -20
    inputs = (q, k, v, g) if rule is TreeSSD else (q, k, v, g, beta)
    return [x.requires_grad_() for x in inputs], do


def results(rule, inputs, do):
    """Returns o and the gradients of the inputs."""
    out = rule(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, do.to(out.dtype))]


def exact(inputs, do, before):
    wide = [x.detach().double().requires_grad_() for x in inputs]
    chunks = recurrent_layout(before).to("cuda").chunks
    beta = [None] if len(inputs) == 4 else []
    return results(lambda *x: recurrence(*x, *beta, None, chunks)[0], wide, do)


def errors(got, want):
    """Returns relative errors, or absolute ones if the exact tensor is 0, as dg without predecessors."""
    return [((a.double() - b).norm() / (b.norm() or 1.0)).item() for a, b in zip(got, want, strict=True)]


def on_tree(before, backend="auto", rule=TreeGDN):
    layout, module = recurrent_layout(before).to("cuda"), rule(backend)
    return lambda *x: module(*x, layout)[0]


RULES = [TreeGDN, TreeKDA, TreeSSD]
EXTREME = {
    "10,000 roots of one token": np.full(10_000, -1),
    "10,000 leaves of one token": np.array([-1, *range(70), *[70] * 10_000]),
    # Every second node has a leaf and the next node below it, so chains nest 1,000 deep.
    "depth 1,000": predecessors([(-1, 2), *[(2 * i, n) for i in range(1000) for n in (1, 2)]]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_trees_equal_the_reference(name, rule):
    before = EXTREME[name]
    inputs, do = random_inputs(len(before), 1, 2, 16, rule=rule)
    got = results(on_tree(before, rule=rule), inputs, do)
    assert max(errors(got, exact(inputs, do, before))) < 2e-5
    assert all(map(torch.equal, got, results(on_tree(before, rule=rule), inputs, do)))


KDA = [*product(["triton"], [32, 64, 128], [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])]
KDA += [pytest.param("hopper", dim, (torch.bfloat16, 3e-2), marks=HOPPER) for dim in (64, 128)]


@pytest.mark.parametrize(("backend", "dim", "precision"), KDA)
def test_kda_equals_the_reference(backend, dim, precision):
    dtype, tolerance = precision
    before = predecessors(random_nodes(0, 12, 1, 200, roots=0.1))
    inputs, do = random_inputs(len(before), 2, 2, dim, dtype, rule=TreeKDA)
    got = results(on_tree(before, backend, TreeKDA), inputs, do)
    relative = errors(got, exact(inputs, do, before))
    print("errors (o, dq, dk, dv, dg, dbeta):", [f"{x:.1e}" for x in relative])
    assert max(relative) < tolerance


@pytest.mark.parametrize(
    ("backend", "rule"),
    [*product(["triton"], RULES), *(pytest.param("hopper", x, marks=HOPPER) for x in RULES)],
)
def test_bf16_is_as_exact_as_path_by_path(backend, rule):
    """Errors against float64, summed over trees, are at most 1.2 times those of single paths."""
    mine = theirs = 0.0
    for seed in range(4):
        before = predecessors(random_nodes(seed, 24, 1, 200, roots=0.0))
        n = len(before)
        inputs, do = random_inputs(n, 2, 4, 128, torch.bfloat16, seed, rule)
        want = exact(inputs, do, before)
        mine = mine + np.square(errors(results(on_tree(before, backend, rule), inputs, do), want))

        out, gradients = torch.zeros_like(want[0]), [torch.zeros_like(x) for x in want[1:]]
        done = np.zeros(n, bool)
        for leaf in leaves(before):
            path = np.array(path_of(leaf, before))
            alone = [x.detach()[torch.from_numpy(path)].requires_grad_() for x in inputs]
            # A token's output counts on its first path only.
            upstream = do[torch.from_numpy(path)] * torch.from_numpy(~done[path]).cuda()[:, None, None]
            got = results(on_tree(np.arange(len(path)) - 1, backend, rule), alone, upstream)
            out[torch.from_numpy(path)] = got[0].double()
            for total, part in zip(gradients, got[1:], strict=True):
                total[torch.from_numpy(path)] += part.double()
            done[path] = True
        theirs = theirs + np.square(errors([out, *gradients], want))
    ratios = np.sqrt(mine / theirs)
    print("errors over path by path (o, dq, dk, dv, dg and, with a delta rule, dbeta):", ratios.round(3))
    assert ratios.max() <= 1.2


@HOPPER
def test_auto_takes_hopper_where_it_can_and_triton_elsewhere():
    before = predecessors(random_nodes(0, 8, 1, 90, roots=0.1))
    for dtype, dim, backend in (
        (torch.bfloat16, 64, "hopper"),
        (torch.bfloat16, 32, "triton"),
        (torch.float32, 64, "triton"),
    ):
        inputs, do = random_inputs(len(before), 1, 2, dim, dtype)
        want = results(on_tree(before, backend), inputs, do)
        assert all(map(torch.equal, results(on_tree(before), inputs, do), want))
    with pytest.raises(
        UserError, match=r"backend 'hopper' needs a GPU of compute capability 9.0, q, k and v in"
    ):
        results(on_tree(before, "hopper"), inputs, do)


def test_never_waits_for_the_gpu():
    before = predecessors(random_nodes(0, 40, 1, 90, roots=0.1))
    layout = recurrent_layout(before).to("cuda")
    inputs, do = random_inputs(len(before), 2, 2, 64, torch.bfloat16)
    x = torch.randn(len(before), 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(512, 4, device="cuda", requires_grad=True)

    def step():
        results(lambda *x: TreeGDN()(*x, layout)[0], inputs, do)
        results(lambda *x: TreeSSD()(*x, layout)[0], inputs[:4], do)
        y, _ = tree_causal_conv1d(x, weight, layout, index=prepare_conv(layout, 4))
        torch.autograd.grad(y.sum(), (x, weight))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    step()
