"""The Gluon kernels of the recurrences: emulated on a CPU to test their logic, and run on a GPU."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.support.cases import exhaustive
from tests.support.forests import (
    RecurrenceForest,
    arguments,
    assert_relative,
    exact_rule,
    forest,
    ladder,
    random_forest,
    recurrence_case,
    run_rule,
)
from tests.support.gluon_emulator import EmulatedKernel
from titan_tree.components.recurrence import hopper
from titan_tree.components.recurrence.buffers import empty_saved, empty_states
from titan_tree.components.recurrence.hopper import inputs as inputs_pass
from titan_tree.components.recurrence.hopper import kda, passes
from titan_tree.components.recurrence.hopper import prepare as prepare_pass
from titan_tree.errors import UserError
from titan_tree.tree.chunks import make_chains, make_chunks

KERNELS = (
    (prepare_pass, "_prepare_kernel"),
    (passes, "_chain_kernel"),
    (passes, "_gradient_kernel"),
    (inputs_pass, "_inputs_kernel"),
    (kda, "_prepare_kernel"),
    (kda, "_input_kernel"),
)
CASES = {
    "chain": RecurrenceForest(forest([-1], [270]), [], 0, 64, 1, 2, 64, 64),
    "two tokens": RecurrenceForest(forest([-1], [2]), [], 0, 64, 1, 1, 64, 128),
    "star": RecurrenceForest(forest([-1] + [0] * 4, [20, 17, 1, 9, 5]), [], 0, 16, 2, 4, 64, 64),
    "deep": RecurrenceForest(forest(ladder(4), [3] * 9), [], 0, 16, 1, 2, 128, 64),
    "forest": RecurrenceForest(random_forest(4, 9, 40, 0.3), [], 0, 64, 1, 3, 64, 64),
    "gateway": RecurrenceForest(
        forest([-1, 0, 0, -1, -1], [20, 10, 8, 5, 30], {0: 2, 3: 1, 4: 1}),
        [19, 40, 72, 72], 4, 16, 1, 2, 64, 64,
    ),
}  # fmt: skip
SOME = [*product(CASES, ["gdn"]), ("star", "ssd"), ("star", "kda"), ("deep", "kda")]
# In fp16, dbeta of two tokens under KDA has an error of 1.3e-3, with the Triton kernels as well.
OTHERS = [case for case in product(CASES, ["ssd", "kda"]) if case not in [*SOME, ("two tokens", "kda")]]


def emulate(monkeypatch):
    """Lets the emulator run the Gluon kernels."""
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, EmulatedKernel(getattr(module, kernel)))
    for module in (inputs_pass, passes):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 3)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles if there is a GPU")
@pytest.mark.parametrize(("name", "rule"), [*exhaustive(OTHERS, [*SOME, *OTHERS])])
def test_emulated_kernels_equal_recurrence(name, rule, monkeypatch):
    """The inputs are fp16, whose rounding errors are smaller than bf16's and so hide less.

    They are not hard: see ``recurrence_case``.
    """
    case = recurrence_case(CASES[name], torch.float16, hard=False, rule=rule)
    emulate(monkeypatch)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        got = run_rule(case, "hopper")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_relative(got, exact_rule(case), 1e-3)


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles if there is a GPU")
@pytest.mark.parametrize("rule", ["gdn", "ssd", "kda"])
def test_a_sibling_changes_nothing(rule, monkeypatch):
    """TMA fetches the second child's tokens with those of the first. Others there change no bit elsewhere."""
    sizes = RecurrenceForest(forest([-1, 0, 0], [20, 17, 9]), [], 0, 64, 1, 2, 64, 64)
    case = recurrence_case(sizes, torch.bfloat16, hard=False, rule=rule)
    case.upstream[0][37:] = 0  # so that the sibling sends no gradients to the tokens before it
    emulate(monkeypatch)
    want = run_rule(case, "hopper")
    for x in case.inputs:
        x.data[37:] = x.data[37:].flip(0) * 3
    got = run_rule(case, "hopper")
    assert not torch.equal(got[0], want[0])
    assert all(torch.equal(a[:37], b[:37]) for a, b in zip(got, want, strict=True))

    # Nor do extreme values, as long as products of keys and queries do not overflow. Gradients of the tokens
    # before the sibling rightly change.
    q, k, v, g = case.inputs[:4]
    for x, extreme in ((q, 1e18), (k, 1e18), (v, 1e30), (g, -torch.inf), (case.upstream[0], 1e30)):
        x.data[37:] = extreme
    got = run_rule(case, "hopper")
    assert torch.equal(got[0][:37], want[0][:37])
    assert all(torch.equal(a[20:37], b[20:37]) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gdn", "ssd", "kda"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_recurrence_on_a_gpu(name, rule):
    """The inputs are those of the emulated kernels, in bf16."""
    case = recurrence_case(CASES[name], torch.bfloat16, "cuda", hard=False, rule=rule)
    assert hopper.refusal(*arguments(case, case.inputs)[:5]) is None
    got = run_rule(case, "hopper")
    assert_relative(got, exact_rule(case), 3e-2)
    for _ in range(10):
        assert all(map(torch.equal, got, run_rule(case, "hopper")))


def test_too_many_chunks_are_refused():
    k, v = (torch.empty(1, 32, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    chunks = make_chunks(np.full(150_000, -1), np.empty(0, np.int64))
    chains = make_chains(chunks)
    saved = empty_saved(k, v, v[..., 0], v[..., 0], chains)
    with pytest.raises(UserError, match="150,000 chunks and 32 heads"):
        passes.states(k, v, *empty_states(saved), saved, chunks, chains)
