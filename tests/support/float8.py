"""What the products of a float8 linear are by definition."""

import torch
from torch import Tensor

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None, power_of_2: bool) -> Tensor:
    """Returns x rounded to float8, in fp64. Slices along ``dim`` have a scale each; None: one scale for x."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double().clamp_min(1e-12)
    if power_of_2:
        scale = 2 ** scale.log2().floor()
    return (x.double() * scale).float().to(dtype).double() / scale


def by_definition(recipe: str, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y = x weight.T and the gradients of x and weight, from rounded operands, in fp64."""
    if recipe == "tensorwise":
        x8, w8, dy8 = (rounded(t, dt, None, False) for t, dt in ((x, E4M3), (weight, E4M3), (dy, E5M2)))
        return x8 @ w8.T, dy8 @ w8, dy8.T @ x8
    y = rounded(x, E4M3, 1, True) @ rounded(weight, E4M3, 1, True).T
    if recipe == "rowwise":
        dx = rounded(dy, E4M3, 1, True) @ rounded(weight, E4M3, 0, True)
        return y, dx, rounded(dy, E4M3, 0, True).T @ rounded(x, E4M3, 0, True)
    dx = rounded(dy, E4M3, 1, True) @ rounded(weight, E4M3, None, True)
    return y, dx, dy.double().T @ x.double()
