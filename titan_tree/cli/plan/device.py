"""The device of a plan, by its name on the command line."""

import math
import os

from titan_tree.errors import UserError

GIB = 2**30
GPUS = {"h200": 139 * GIB, "h100": 79 * GIB}  # bytes
CPU = "cpu"


def device_memory(text: str) -> tuple[str, float]:
    """Returns the name and the bytes of a GPU of ``GPUS``, of one with that many GiB, or of this CPU.

    Raises:
        UserError: ``text`` is neither a known name nor a positive number.
    """
    if text.lower() in GPUS:
        return text.upper(), GPUS[text.lower()]
    if text.lower() == CPU:
        return "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UserError(f"--gpu: expected {', '.join(GPUS)}, {CPU} or a number of GiB, got {text!r}")
    return f"GPU of {size:g} GiB", size * GIB
