"""What the commands of a run share: its arguments, its processes, their log lines and their exit status."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from titan_tree.cli.data_arguments import add_overrides, count_to
from titan_tree.errors import hide, shorten
from titan_tree.signals import discard, open_standard_streams

if TYPE_CHECKING:
    from titan_tree.run.config import Config

C = TypeVar("C", bound="Config")

STDOUT = "stdout"  # the file name in its errors


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of a command that runs in one process, or in several that torchrun starts."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the configuration of the run: a file, or a name such as demo")
    add_overrides(parser)
    count_help = "processes, one for each GPU; without effect under torchrun, which starts its own"
    add("--nproc", type=count_to(1000), default=1, metavar="N", help=count_help)


def start(args: argparse.Namespace, tables: type[C]) -> C:
    """Returns the configuration of a run in this process, or replaces this process by torchrun.

    torchrun starts several processes. It would show a wrong configuration as a failure of each of them, so
    the configuration is loaded, and its files are looked for, before.

    Raises:
        UserError: the configuration is wrong, or what it reads is missing.
    """
    from titan_tree.config.toml import load_tables
    from titan_tree.run.config import require_inputs

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning of torch's store prints a stack
    log_to_stdout()
    config = load_tables(tables, args.config, args.overrides)
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # ranks compare what they find
        require_inputs(config)
    start_torchrun(args)
    return config


def start_torchrun(args: argparse.Namespace) -> None:
    """Replaces this process by ``--nproc`` processes of the same command, unless torchrun has started it.

    Signals and the exit status are then those of torchrun.
    """
    if args.nproc == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    sys.stdout.flush()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nproc")
    _, words = parser.parse_known_args(args.words)  # without --nproc, which torchrun takes for its own
    torchrun = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    # -P: torchrun imports no module from the current directory.
    os.execv(sys.executable, [sys.executable, "-P", *torchrun, "-m", "titan_tree", *words])


def rank() -> int:
    """Returns the number of this rank according to torchrun, or 0. ``Launch`` refuses what is no number."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isdecimal() else 0


def exit_place(raised: SystemExit) -> str:
    """Returns which call ended the process, such as "sys.exit(0) at loss.py:5"."""
    frame = traceback.extract_tb(raised.__traceback__)[-1]
    return f"sys.exit({shorten(raised.code)}) at {frame.filename}:{frame.lineno}"


class _StdoutFile(io.FileIO):
    """Names itself in its errors, which otherwise have no file name."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            error.filename = STDOUT
            raise


def prepare_streams() -> None:
    """Opens standard streams that are closed, and lets stdout name itself in its errors.

    In a locale of ASCII, the program starts again in Python's UTF-8 mode: torch reads its own files, which
    are UTF-8, in the encoding of the locale.
    """
    open_standard_streams()
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StdoutFile(1, "w", closefd=False)),
        encoding=sys.stdout.encoding,
        line_buffering=sys.stdout.isatty(),
    )


def exit_process(main: Callable[[], int]) -> None:
    """Runs ``main`` and ends the process with its exit status, or 1 after an exception."""
    try:
        status = main()
    except Exception:
        with suppress(OSError):
            print(hide(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        status = 1
    if status:
        with suppress(OSError):  # the reader of a pipe has ended
            sys.stdout.flush()
        os._exit(status)  # a regular exit shuts down NCCL, which would wait for ranks that have stopped


class _Stdout(logging.Handler):
    """Prints log records with ``print``, which uses the current ``sys.stdout``.

    While a progress bar is visible, it redirects ``sys.stdout`` and shows the printed lines above itself.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(hide(self.format(record)), flush=True)
        except OSError:  # stdout is a pipe whose reader has ended; the run goes on
            discard(1)


def log_to_stdout() -> None:
    """Shows titan_tree's log lines of rank 0, and only the warnings of other ranks.

    Other packages keep Python's default, warnings and above.
    """
    logger = logging.getLogger("titan_tree")
    logger.setLevel(logging.WARNING if rank() else logging.INFO)
    logger.addHandler(_Stdout())
    logger.propagate = False
