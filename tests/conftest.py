"""Which tests run, how much time they may take, and what every test starts from.

Without ``--all``, tests marked ``slow`` are left out, except those of files that the command line names. An
expression for ``-m`` decides instead. Tests marked ``exhaustive`` or ``speed`` run only if such an expression
names the mark.
"""

import logging
import os
import re
import signal
from collections.abc import Generator, Iterator
from functools import partialmethod
from itertools import chain
from pathlib import Path

import pytest

from tests.support import budget
from tests.support.isolation import restore_registries

BY_HAND = ("exhaustive", "speed")  # marks of tests that run only if -m names them
# A file whose tests are all slow. The everyday suite does not even import it.
ALL_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked slow")
    parser.addoption("--budget", action="store_true", help="fail tests that take too much CPU time")


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers:  # importing torch takes seconds
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


def is_everyday(config: pytest.Config) -> bool:
    return not config.option.all and not config.option.markexpr


def is_named(config: pytest.Config, path: Path) -> bool:
    """Returns whether the command line names this test file, and not just its folder."""
    return any((config.invocation_params.dir / arg.split("::")[0]) == path for arg in config.args)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if is_named(config, collection_path) or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    if (mark := config.option.markexpr) in ("slow", "speed"):  # collecting every test takes seconds
        return True if mark not in collection_path.read_text().lower() else None
    if not is_everyday(config):
        return None
    without_gpu = collection_path.parent.name == "gpu" and "TRITON_INTERPRET" in os.environ
    return True if without_gpu or ALL_SLOW.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA device")
    run, left_out = [], []
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
        slow = item.get_closest_marker("slow") and is_everyday(config) and not is_named(config, item.path)
        asked = config.option.markexpr
        by_hand = any(item.get_closest_marker(mark) and mark not in asked for mark in BY_HAND)
        (left_out if slow or by_hand else run).append(item)
    items[:] = run
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with budget.limit(item, "set-up"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with budget.limit(item, "test"):
        return (yield)


def pytest_sessionstart() -> None:
    budget.start_session()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = chain.from_iterable(terminalreporter.stats.values())
    if line := budget.summary(reports):
        terminalreporter.write_line(line)


def pytest_sessionfinish() -> None:
    budget.stop_session_ranks()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes COLUMNS, which Python's readline sets in the workers of xdist. Tables would become narrow."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Restores the default handlers of signals that a shell ignores for programs that run in its background.

    Processes that the test starts inherit them. nohup ignores SIGHUP, and "&" in a script ignores SIGINT.
    """
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    earlier = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles modules up to Inductor's graphs. Inductor would take minutes to build C++ from them."""
    import torch

    compile_up_to_graphs = partialmethod(torch.nn.Module.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_up_to_graphs)


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    """Restores the logger, which the commands change."""
    logger = logging.getLogger("titan_tree")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(autouse=True)
def _own_registries() -> Iterator[None]:
    """Removes what a test and its fixtures register."""
    yield
    restore_registries()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shortens the ids of tests with long parameters, such as 100,000 brackets."""
    if isinstance(val, str | bytes) and len(val) > 60:
        return f"{val[:20]!r} and {len(val) - 20} more"
    return None
