"""GPUs. tree/costs.py has the rates that training reaches on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from titan_tree.errors import UserError
from titan_tree.tree.costs import NETWORK, NODE_GPUS

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU of the Hopper generation: all of them multiply at the same rate, but their memory differs."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second that kernels reach on the GPU's memory


# The bandwidths are 83 % of what the vendor states, 4.8 and 3.35 TB/s.
GPUS = {"h200": Gpu("H200", 139 * GIB, 4.0e12), "h100": Gpu("H100", 79 * GIB, 2.8e12)}


def find_gpu(text: str) -> Gpu:
    """Returns the GPU with a name of ``GPUS``, or an H200 with that many GiB.

    Raises:
        UserError: ``text`` is neither a known name nor a positive number.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UserError(f"--gpu: expected {', '.join(GPUS)} or a number of GiB, got {text!r}")
    return replace(GPUS["h200"], name=f"GPU of {size:g} GiB", memory=size * GIB)


def bandwidth(rate: float, ranks: int) -> float:
    """Returns the bytes per second of a collective over ``ranks`` adjacent GPUs."""
    return rate if ranks <= NODE_GPUS else NETWORK
