"""The kernels of experts, in PyTorch and in Triton, against float64 and against PyTorch's own operators."""

import pytest
import torch
import torch.nn.functional as F

from titan_tree.components.moe import kernels
from titan_tree.components.moe.kernels import copy_rows, sum_rows, swiglu, swiglu_backward, top_k


@pytest.fixture(params=["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Returns the device. Kernels run in Triton's interpreter or on a GPU."""
    if request.param == "torch":
        return "cpu"
    if request.param == "interpreted":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles if there is a GPU")
        monkeypatch.setattr(kernels, "_use_kernels", lambda x: True)
        return "cpu"
    return "cuda"


def assert_close(got, want, tolerance):
    assert got.shape == want.shape
    assert (got.cpu().double() - want).norm() <= tolerance * want.norm()


# The interpreter rounds to bf16 towards zero.
TOLERANCES = [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 1), (5, 24), (3, 300), (19, 768)])
def test_swiglu_and_its_gradients(num_rows, width, dtype, tolerance, device):
    h, scale, grad = torch.randn(num_rows, 2 * width), torch.rand(num_rows, 1), torch.randn(num_rows, width)
    h, grad = h.to(dtype), grad.to(dtype)
    leaves = [t.double().requires_grad_() for t in (h, scale)]
    gate, up = leaves[0].chunk(2, 1)
    want = F.silu(gate) * up * leaves[1]
    d_h, d_scale = torch.autograd.grad(want, leaves, grad.double())
    arguments = [t.to(device) for t in (h, scale, grad)]
    hidden, got_h, got_scale = swiglu_backward(*arguments)
    assert torch.equal(hidden, swiglu(*arguments[:2]))
    assert (hidden.dtype, got_h.dtype, got_scale.dtype) == (dtype, dtype, torch.float32)
    for got, wanted in ((hidden, want.detach()), (got_h, d_h)):
        assert_close(got, wanted, tolerance)
    assert_close(got_scale, d_scale, 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_rows", "width", "columns"), [(0, 2, 8), (1, 1, 3), (7, 4, 40), (3, 9, 1030)])
def test_sums_of_rows(num_rows, width, columns, dtype, tolerance, device):
    """Rows that are named with -1 add nothing, even if there are no rows to name or they hold NaN."""
    x = torch.randn(5, columns).to(dtype)
    x[0] = torch.nan
    index = torch.randint(1, 5, (num_rows, width), dtype=torch.int32).where(
        torch.rand(num_rows, width) < 0.6, -1
    )
    want = torch.stack([
        sum((x[i].double() for i in row if i >= 0), torch.zeros(columns).double()) for row in index.tolist()
    ]) if num_rows else torch.zeros(0, columns)  # fmt: skip
    got = sum_rows(x.to(device), index.to(device))
    assert got.dtype == dtype
    assert_close(got, want, tolerance)
    nothing = sum_rows(x[:0].to(device), torch.full((2, 3), -1, dtype=torch.int32, device=device))
    assert torch.equal(nothing.cpu(), torch.zeros(2, columns, dtype=dtype))


def test_rows_are_added_from_left_to_right_in_fp32(device):
    """The sum of 1, 2**-9 and -1 is exact in fp32 only; those of 1e8, 1 and -1e8 depend on the order."""
    x = torch.tensor([[1.0], [2.0**-9], [-1.0]], dtype=torch.bfloat16, device=device)
    index = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    assert sum_rows(x, index).item() == 2.0**-9
    x = torch.tensor([[1e8], [1.0], [-1e8]], device=device)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32, device=device)
    assert sum_rows(x, orders).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("num_rows", "width", "columns"), [(0, 2, 8), (1, 1, 3), (7, 4, 40), (3, 9, 1030)])
def test_copies_of_rows_are_the_transpose_of_sums(num_rows, width, columns, index_dtype, device):
    """Each row of the result is named once. Some entries name none."""
    x = torch.randn(num_rows, columns)
    index = torch.full((num_rows, width), -1, dtype=index_dtype)
    named = torch.rand(num_rows, width) < 0.6
    index[named] = torch.randperm(int(named.sum())).to(index_dtype)
    want = torch.zeros(int(named.sum()), columns)
    for row, targets in zip(x, index.tolist(), strict=True):
        for target in targets:
            if target >= 0:
                want[target] = row
    got = copy_rows(x.to(device), index.to(device), len(want))
    assert torch.equal(got.cpu(), want)
    weight = torch.randint(-9, 9, want.shape).float()
    transposed = sum_rows(weight.to(device), index.to(device)).cpu()
    torch.testing.assert_close((got.cpu() * weight).sum(), (x * transposed).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("num_rows", "columns", "k"), [(0, 4, 2), (1, 1, 1), (37, 128, 8), (9, 60, 4)])
def test_the_largest_of_each_row(num_rows, columns, k, device):
    x = torch.randn(num_rows, columns)
    want = x.topk(k).indices
    assert torch.equal(top_k(x.to(device), k).cpu(), want)


def test_the_first_of_equal_numbers_comes_first_in_kernels(device):
    """A choice has different columns also if numbers are equal, infinite or not numbers."""
    x = torch.randn(6, 40)
    x[0] = 0.5
    x[1, ::2], x[2], x[3], x[4, 7] = 9.0, -torch.inf, torch.nan, torch.inf
    x[5] = torch.tensor([-0.0, 0.0]).repeat(20)
    got = top_k(x.to(device), 8).cpu()
    assert ((got >= 0) & (got < 40)).all()
    assert (got.sort(1).values.diff(dim=1) > 0).all()
    assert torch.equal(x.gather(1, got)[[0, 1, 2, 4, 5]], x.topk(8).values[[0, 1, 2, 4, 5]])
    if device == "cuda" or kernels._use_kernels(x):
        assert got[0].tolist() == got[5].tolist() == list(range(8))
        assert got[1].tolist() == list(range(0, 16, 2))


OPERATORS = {
    "swiglu": (swiglu, (torch.randn(5, 16), torch.rand(5, 1))),
    "swiglu_backward": (swiglu_backward, (torch.randn(5, 16), torch.rand(5, 1), torch.randn(5, 8))),
    "copy_rows": (copy_rows, (torch.randn(2, 8), torch.tensor([[0, 2], [1, -1]]), 3)),
    "sum_rows": (sum_rows, (torch.randn(3, 8), torch.tensor([[0, 2], [1, -1]]))),
    "top_k": (top_k, (torch.randn(5, 16), 3)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_opcheck(name):
    torch.library.opcheck(*OPERATORS[name], test_utils=("test_schema", "test_faketensor"))
