"""Hopper's kernels on a GPU that another process uses, too."""

import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from benchmarks.recurrence import rule_inputs, rule_on
from benchmarks.trees import random_tree
from tests.support.gpu import HOPPER
from tests.support.layouts import random_qkv
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout

pytestmark = pytest.mark.gpu

MULTIPLY = """
import torch
x = torch.randn(8192, 8192, device="cuda").bfloat16()
print("ready", flush=True)
while True:
    for _ in range(100):
        x @ x
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def busy():
    """Multiplies matrices in another process, between whose products and ours the GPU switches."""
    command = [sys.executable, "-c", MULTIPLY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n", "no second process can use this GPU"
        yield
        process.kill()


def layout() -> TreeLayout:
    return TreeBatch.from_trees([random_tree("agent-fine", 16_384, 100)]).layout.to("cuda")


def assert_repeats(run, times: int) -> None:
    """Asserts that all results are finite, and those of all runs equal.

    Nothing waits for the GPU before the end, so that the other process interrupts kernels.
    """
    first, differs = run(), {}
    for _ in range(times):
        for name, x in run().items():
            differs[name] = (x != first[name]).any() | differs.get(name, ~x.isfinite().all())
    assert [name for name, x in differs.items() if x] == []


@pytest.mark.parametrize("backend", [HOPPER])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention(busy, backend, dim, deterministic):
    attention, tree = TreeAttention(backend, deterministic), layout()
    n = len(tree.key_index)
    *inputs, do = random_qkv(n, n, (8, 2), dim, dtype=torch.bfloat16, device="cuda")

    def run():
        out = attention(*inputs, attention.prepare(tree))
        dq, dk, dv = torch.autograd.grad(out, inputs, do)
        # TMA adds the tiles of dq in any order, unless the pass is deterministic. 0 * nan is nan.
        dq = dq if deterministic else 0 * dq
        return {"o": out, "dq": dq, "dk": dk, "dv": dv}

    assert_repeats(run, times=50)


@pytest.mark.parametrize("backend", [HOPPER])
@pytest.mark.parametrize(
    ("rule", "heads", "dims"),
    [("gdn", [4, 8], [128, 128]), ("ssd", [2, 8], [128, 64]), ("kda", [8, 8], [128, 128])],
)
def test_recurrences(busy, backend, rule, heads, dims):
    tree = layout()
    n = len(tree.key_index)
    function = rule_on(tree, rule)
    inputs = [x.requires_grad_() for x in rule_inputs(n, Namespace(heads=heads, head_dim=dims, rule=rule))]

    def run():
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        return {"out": out} | {f"gradient {i}": x for i, x in enumerate(gradients)}

    assert_repeats(run, times=50)
