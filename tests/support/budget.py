"""The time that an unmarked test may take.

A test that takes more than about two seconds on an idle core should be marked slow. CPU time is measured,
because a busy machine stretches the time on the clock. CPU time doubles there too, and the first test that
uses a library pays for its import. The limits are therefore larger than two seconds.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Seconds of CPU time: of a test, and of the fixtures that are set up for it and for later tests.
LIMITS = {"test": 10.0, "set-up": 20.0}


@contextmanager
def limit(item: pytest.Item, part: str) -> Iterator[None]:
    """Records the CPU time of a part of a test, and fails an unmarked test that takes too much."""
    start = cpu_seconds()
    yield
    used = cpu_seconds() - start
    item.user_properties.append((f"cpu_s of {part}", round(used, 2)))
    is_marked = any(item.get_closest_marker(name) for name in ("slow", "exhaustive", "gpu"))
    if used > LIMITS[part] and not is_marked:
        pytest.fail(
            f"this {part} took {used:.1f} s of CPU time, expected at most {LIMITS[part]:g} s: make it "
            "faster, or mark the test as slow, which removes it from the everyday suite",
            pytrace=False,
        )


def cpu_seconds() -> float:
    """Returns the CPU time of this process, of its ended children, and of the session's ranks."""
    times = os.times()
    processes = sys.modules.get("tests.support.processes")
    ranks = processes.session_cpu_s() if processes else 0.0
    return times.user + times.system + times.children_user + times.children_system + ranks


def stop_session_ranks() -> None:
    """Ends the ranks that the session keeps, if a test has started them."""
    processes = sys.modules.get("tests.support.processes")
    if processes:
        processes.stop_session_ranks()
