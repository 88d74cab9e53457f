"""CostFit: fits ``TreeCosts`` to measured seconds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.tree.costs import TreeCosts

# Relative weight of the start values against the measurements, which cannot tell tokens from edges if all
# trees are alike.
PRIOR = 1e-3
LARGEST_CHANGE = 10.0  # of a coefficient, relative to the others


class CostFit:
    """Fits TreeCosts to measured seconds by least squares.

    All sums are made element by element, so that every rank gets the same bits. Only ``solve`` may round
    differently on another CPU.

    Args:
        start: the coefficients without measurements. A coefficient of 0 stays 0.
    """

    def __init__(self, start: TreeCosts) -> None:
        self.start = start
        self._products = np.zeros((len(start), len(start)))  # sums of size_i size_j, in units of ``start``
        self._moments = np.zeros(len(start))  # sums of size_i seconds, in units of ``start``

    def add(self, sizes: np.ndarray, seconds: float) -> None:
        """Adds a measurement: the sizes of a pass [4], the number of its forward passes, and its seconds."""
        estimated = np.array(self.start) * sizes.astype(np.float64)  # seconds of each size
        self._products += estimated[:, None] * estimated
        self._moments += estimated * seconds

    def solve(self) -> TreeCosts:
        """Returns the fitted coefficients, or ``start`` without measurements."""
        products, moments = self._products, self._moments
        total = products.sum()
        if total <= 0 or moments.sum() <= 0:
            return self.start
        scale = moments.sum() / total  # of all coefficients together
        prior = PRIOR * np.trace(products) * np.eye(len(self.start))
        factors = scale + np.linalg.solve(products + prior, moments - products.sum(1) * scale)
        factors = factors.clip(scale / LARGEST_CHANGE, scale * LARGEST_CHANGE)
        return TreeCosts(*(np.array(self.start) * factors).tolist())

    def state_dict(self) -> dict[str, object]:
        """Returns the sums as JSON values, which keep every bit."""
        return {"products": self._products.tolist(), "moments": self._moments.tolist()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises UserError unless ``state`` is one that ``state_dict`` has returned."""
        self._products = finite_array("products", state.get("products"), self._products.shape)
        self._moments = finite_array("moments", state.get("moments"), self._moments.shape)


def finite_array(name: str, values: object, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values`` of a checkpoint as float64. Raises UserError for another shape or a bad number."""
    array = np.empty(0)
    with suppress(TypeError, ValueError, OverflowError):
        array = np.array(values, np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(
            f"checkpoint: balance.{name}: expected finite numbers of shape {shape}, got {shorten(values)}; "
            "resume from another checkpoint"
        )
    return array
