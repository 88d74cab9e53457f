"""The CPU time that an unmarked test may take.

A test that takes more than about two seconds on an idle core should be marked slow. CPU time is measured,
because a busy machine stretches the time on the clock. CPU time doubles there too, and the first test that
uses a library pays for its import. The limits are therefore larger than two seconds, and grow with the time
that this machine needs for a fixed piece of work. A test over its limit fails only with ``--budget``, a guard
for developers. Otherwise the end of the session names it.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

# Seconds of CPU time: of a test, and of the fixtures that are set up for it and for later tests.
LIMITS = {"test": 10.0, "set-up": 20.0}
WORK_S = 0.1  # CPU time of ``_work`` where LIMITS were chosen
OVER = "over budget"  # name of the property with what the end of a session says
_slowness = 1.0  # at the start of the session


def start_session() -> None:
    """Measures the speed of this machine."""
    global _slowness
    _slowness = slowness()


def slowness() -> float:
    """Returns how much longer than expected this machine needs for a fixed piece of work, at least 1."""
    start = time.process_time()
    _work()
    return max(1.0, (time.process_time() - start) / WORK_S)


def _work() -> None:
    """Computes, and reads memory beyond the caches, which other programs slow down more."""
    number = 300_007
    values = [float(i) for i in range(number)]
    sum(values[7919 * i % number] for i in range(number))


@contextmanager
def limit(item: pytest.Item, part: str) -> Iterator[None]:
    """Records the CPU time of a part of a test, and whether an unmarked test takes too much."""
    start = cpu_seconds()
    yield
    used = cpu_seconds() - start
    item.user_properties.append((f"cpu_s of {part}", round(used, 2)))
    is_marked = any(item.get_closest_marker(name) for name in ("slow", "exhaustive", "gpu"))
    if is_marked or used <= LIMITS[part]:
        return
    limit_s = LIMITS[part] * max(_slowness, slowness())  # the machine may have become busy
    if used > limit_s:
        over = f"this {part} took {used:.1f} s of CPU time, expected at most {limit_s:.1f} s"
        item.user_properties.append((OVER, over))
        if item.config.getoption("budget"):
            pytest.fail(
                f"{over}: make it faster, or mark the test as slow, which removes it from the everyday suite",
                pytrace=False,
            )


def summary(reports: Iterable[object]) -> str:
    """Returns a line with the tests over budget, or nothing if there are none."""
    found = {
        (report.nodeid, value): None
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
        if name == OVER
    }
    tests = "; ".join(f"{test}: {value}" for test, value in found)
    return tests and f"over budget, see tests/support/budget.py: {tests}"


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
