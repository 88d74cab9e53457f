"""8-bit AdamW, in PyTorch and in Triton, against torchao and float64."""

from itertools import chain
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components import adamw_kernel as adamw_8bit
from titan_tree.components.adamw_kernel import Moment, adamw_

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[torchao]'")
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map
from torchao.optim.subclass_8bit import OptimState8bit

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FP32, BF16 = torch.float32, torch.bfloat16
QUANTIZED = (9, 4, 256)  # not a multiple of the kernel's BLOCKS * BLOCK


@triton.jit
def codes_kernel(x, out, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, adamw_8bit._codes(tl.load(x + i), BINS).to(tl.uint8))


@pytest.mark.parametrize("bins", [1, 2], ids=["first moments", "second moments"])
def test_the_kernel_finds_the_nearest_code(bins: int) -> None:
    table = torch.tensor(create_dynamic_map(signed=bins == 1))
    halfway = ((table[1:].double() + table[:-1].double()) / 2).float()
    around = torch.cat([halfway * (1 - 2e-6), halfway * (1 + 2e-6), table])  # fp32 rounds by 6e-8
    x = torch.cat([around, 10 ** (-9 * torch.rand(2048)), torch.rand(2048)])
    x = torch.cat([x, -x]).clamp(-1, 1) if bins == 1 else x
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    on_device = x.to("cuda" if torch.cuda.is_available() else "cpu")
    codes = torch.empty_like(on_device, dtype=torch.uint8)
    codes_kernel[(len(x) // 1024,)](on_device, codes, bins, 1024)
    codes = codes.cpu()
    distance = (x.double()[:, None] - table.double()).abs()
    nearest, chosen = distance.amin(1), distance.gather(1, codes.long()[:, None])[:, 0]
    # Rounding may decide between two values that are almost equally near.
    assert ((chosen - nearest) <= 1e-6 * x.abs()).all()
    assert (chosen != nearest).sum() <= 5
    assert len(codes.unique()) == 256


@pytest.fixture(params=["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the device. The kernel runs in Triton's interpreter or on a GPU."""
    if request.param == "interpreted":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles if there is a GPU")
        monkeypatch.setattr(adamw_8bit, "_update", adamw_8bit._launch)
    return "cuda" if request.param == "cuda" else "cpu"


class Weight:
    """A weight and its moments, as torchao stores them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, quantized: bool) -> None:
        self.weight = (1e-3 * torch.randn(shape)).to(dtype)
        self.states = [torch.zeros_like(self.weight) for _ in range(2)]
        if quantized:
            self.states = [OptimState8bit.zeros(shape, signed, dtype=dtype) for signed in (True, False)]

    def copy(self, device: str = "cpu") -> "Weight":
        made = Weight.__new__(Weight)
        made.weight = self.weight.to(device, copy=True)
        made.states = [
            OptimState8bit(
                x.codes.to(device, copy=True), x.scale.to(device, copy=True), x.qmap.to(device), x.signed
            )
            if isinstance(x, OptimState8bit)
            else x.to(device, copy=True)
            for x in self.states
        ]
        return made

    def updated(self, grad: Tensor, scalars: Tensor, device: str) -> "Weight":
        """Returns the result of ``adamw_`` on the device."""
        there = self.copy(device)
        first, second = there.moments()
        adamw_([there.weight], [grad.to(device)], [first], [second], scalars[None].to(device), **OPTIONS)
        return there.copy()

    def moments(self) -> list[Moment]:
        return [
            Moment(x.codes, x.scale, x.qmap) if isinstance(x, OptimState8bit) else Moment(x)
            for x in self.states
        ]

    def tensors(self) -> list[Tensor]:
        parts = chain.from_iterable(moment[:2] for moment in self.moments())  # tables never change
        return [self.weight, *(x for x in parts if x is not None)]


def scalars(step: int, divisor: float = 1.0, skip: float = 0.0) -> Tensor:
    beta1, beta2 = OPTIONS["betas"]
    return torch.tensor([1 - beta1**step, (1 - beta2**step) ** 0.5, divisor, skip])


def draw_gradient(shape: tuple[int, ...], dtype: torch.dtype, step: int) -> Tensor:
    """Returns gradients of many magnitudes; some are 0, and in a whole block all are."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(shape, generator=generator) * 10 ** (-4 * torch.rand(shape, generator=generator))
    x.view(-1)[256:512] = x.view(-1)[700::7] = 0
    return x.to(dtype)


def step_by_torchao(state: Weight, grad: Tensor, step: int) -> None:
    """Runs the function that torchao compiles, in eager mode. In fp32, 1 - 0.95**step loses digits."""
    t, lr, decay = torch.tensor(step).double(), torch.tensor(OPTIONS["lr"]), OPTIONS["weight_decay"]
    options = lr, *OPTIONS["betas"], decay, OPTIONS["eps"]
    single_param_adam(state.weight, grad, t, *state.states, None, *options, True, False)


def step_in_float64(state: Weight, grad: Tensor, step: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the new weight and moments before they are quantized, of AdamW by definition."""
    (beta1, beta2), lr, g = OPTIONS["betas"], OPTIONS["lr"], grad.double()
    m, v = (x.dequantize().double() if isinstance(x, OptimState8bit) else x.double() for x in state.states)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    denominator = (v / (1 - beta2**step)).sqrt() + OPTIONS["eps"]
    kept = (1 - lr * OPTIONS["weight_decay"]) * state.weight.double()
    return kept - lr * m / (1 - beta1**step) / denominator, [m, v]


def assert_quantized(state: OptimState8bit, other: OptimState8bit, exact: Tensor) -> int:
    """Two quantizations of ``exact`` differ only by ties. Returns their number."""
    torch.testing.assert_close(state.scale, other.scale, rtol=1e-6, atol=0)
    # The paper's bound: half a bin of the highest decade, 0.9 / 64 or 0.9 / 128 of the block's largest.
    error = (state.dequantize() - exact).abs().view(-1, 256)
    assert (error <= (0.00704 if state.signed else 0.00352) * state.scale[:, None]).all()
    tie = state.codes != other.codes
    codes = torch.stack([state.codes[tie], other.codes[tie]]).int()
    assert ((codes[0] - codes[1]).abs() <= 1).all()
    relative = (exact.view(-1, 256) / state.scale[:, None].double()).view_as(exact)[tie]
    halfway = state.qmap.double()[codes].mean(0)
    torch.testing.assert_close(relative, halfway, rtol=1e-6, atol=2e-7)
    return int(tie.sum())


@pytest.mark.parametrize(
    ("shape", "dtype", "grad_dtype"),
    [
        (QUANTIZED, FP32, FP32),
        (QUANTIZED, BF16, BF16),
        (QUANTIZED, FP32, BF16),
        ((1001,), FP32, FP32),
        ((5, 3), BF16, BF16),
        ((1,), FP32, FP32),
    ],
)
def test_steps_equal_those_of_torchao_and_of_float64(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    state, ties = Weight(shape, dtype, quantized=shape == QUANTIZED), 0
    for step in range(1, 5):
        grad = draw_gradient(shape, grad_dtype, step)
        ours = state.updated(4 * grad, scalars(step, divisor=4), device)
        weight, moments = step_in_float64(state, grad, step)
        size = (weight - state.weight.double()).abs().max().item()
        step_by_torchao(state, grad, step)
        rounding = torch.finfo(dtype).eps * weight.abs() if dtype == BF16 else 0.0
        for other in (state.weight.double(), weight):
            assert ((ours.weight.double() - other).abs() <= 1e-6 * size + rounding).all(), step
        if dtype == BF16 and "interpreted" not in request.node.name:  # the interpreter truncates
            assert (ours.weight != state.weight).sum() <= 5
        for mine, theirs, exact in zip(ours.states, state.states, moments, strict=True):
            if shape == QUANTIZED:
                ties += assert_quantized(mine, theirs, exact)
            else:
                torch.testing.assert_close(mine, theirs, rtol=1.6e-2 if dtype == BF16 else 1e-6, atol=1e-9)
    assert ties <= 20  # of 73,728 codes


@pytest.mark.parametrize("shape", [QUANTIZED, (1001,)])
def test_a_skipped_step_changes_no_bit(shape: tuple[int, ...], device: str) -> None:
    before = Weight(shape, FP32, quantized=shape == QUANTIZED)
    step_by_torchao(before, draw_gradient(shape, FP32, 1), 1)
    skipped = before.updated(torch.full(shape, torch.nan), scalars(2, skip=1.0), device)
    assert all(map(torch.equal, skipped.tensors(), before.tensors()))
    stepped = before.updated(torch.ones(shape), scalars(2), device)
    assert not any(map(torch.equal, stepped.tensors(), before.tensors()))


def test_a_gradient_changes_the_codes_of_its_own_block_only(device: str) -> None:
    before, results = Weight(QUANTIZED, FP32, quantized=True), []
    for value in (0.0, 100.0):
        grad = draw_gradient(QUANTIZED, FP32, 1)
        grad.view(-1)[5 * 256 + 7] = value
        results.append(before.updated(grad, scalars(1), device).states[0])
    small, large = results
    assert (small.codes != large.codes).view(-1, 256).any(1).nonzero().tolist() == [[5]]
    assert (small.scale != large.scale).nonzero().tolist() == [[5]]
    assert large.scale[5] == pytest.approx(10)


def test_one_call_updates_weights_of_all_kinds(
    device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight as if it were alone, with scalars of its own; one launch for all weights of a kind."""
    launches: list[int] = []
    kernel = adamw_8bit._adamw_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launches.append(*grid)
            return kernel[grid]

    shapes = [QUANTIZED, (1,), (0, 7), (1001,), (64, 32), (33,), (2048,), (5, 3), QUANTIZED, (128,), (1025,)]
    weights = [Weight(x, BF16 if x == (33,) else FP32, quantized=x == QUANTIZED) for x in shapes]
    grads = [draw_gradient(x, BF16 if i in (3, 8) else FP32, 1) for i, x in enumerate(shapes)]
    grads[9][:] = torch.nan
    rows = torch.stack([scalars(1 + i, 2.0**i, skip=float(i == 9)) for i in range(len(shapes))])
    alone = [x.updated(grad, row, device) for x, grad, row in zip(weights, grads, rows, strict=True)]

    monkeypatch.setattr(adamw_8bit, "_adamw_kernel", Spy())
    together = [x.copy(device) for x in weights]
    buffer = torch.empty(2049, device=device)  # the address of a part of it is no multiple of 16
    together[6].weight = buffer[1:].copy_(together[6].weight)
    firsts, seconds = zip(*(x.moments() for x in together), strict=True)
    there = [grad.to(device) for grad in grads]
    adamw_([x.weight for x in together], there, firsts, seconds, rows.to(device), **OPTIONS)
    # Programs for fp32 gradients: quantized, plain, not multiples of 16; for bf16 ones; for the bf16 weight.
    programs = [9, 2 + 1, 1 + 2 + 1 + 2, 9, 1, 1]
    assert sorted(launches) == ([] if "torch" in request.node.name else sorted(programs))
    for i, (x, y) in enumerate(zip(together, alone, strict=True)):
        (weight, *moments), (other, *others) = x.copy().tensors(), y.tensors()
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-8, msg=f"weight {i}")  # a step is 1e-2
        torch.testing.assert_close(moments, others, rtol=1e-6, atol=0, msg=f"moments {i}")
    assert torch.equal(together[9].weight.cpu(), weights[9].weight)
