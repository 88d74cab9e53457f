"""The training command. It runs in one process, or in each process that torchrun starts.

    python -m titan_tree.train --config train_configs/demo.toml training.steps=20
    torchrun --nproc-per-node 8 -m titan_tree.train --config train_configs/qwen3_8b.toml model.hf_path=DIR

To continue an interrupted run from its newest checkpoint, start the same command again.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from titan_tree.errors import AgreedError, UserError, hide
from titan_tree.run.config import load_config
from titan_tree.signals import Interrupted, discard


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the training and returns the exit status, see ``run_command``."""
    return run_command("titan_tree.train", "Train a model on token trees.", _train, argv)


def run_command(
    program: str,
    description: str,
    train: Callable[[str, Sequence[str]], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs ``train(path of a TOML file, overrides)`` with the arguments of a command.

    Returns:
        The exit status: 0 once all steps are trained, 2 for an error, and 128 plus the number of a signal
        that ended the run: 130 after Ctrl-C, 143 after SIGTERM.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", required=True, metavar="FILE.toml", help="see train_configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key, for example training.steps=10"
    )
    number = os.environ.get("RANK", "0")
    rank = int(number) if number.isdecimal() else 0  # ``Launch`` refuses what is no number
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning of torch's store prints a stack
    try:
        args, dashed = parser.parse_known_args(argv)
        _log_to_stdout(rank)
        train(args.config, [*args.overrides, *dashed])
    except Interrupted as interrupted:
        return int(interrupted.code or 0)
    except UserError as error:
        if rank > 0:
            time.sleep(2)  # rank 0 probably reports the same error, and torchrun then ends this process
        if rank == 0 or not isinstance(error, AgreedError):
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _train(path: str, overrides: Sequence[str]) -> None:
    config = load_config(path, overrides)
    # These imports take seconds, so check the configuration first.
    from titan_tree.distributed.faults import failures_named
    from titan_tree.run.trainer import Trainer

    with failures_named(lambda: "the start or the end of the run", lambda: "run the same command again"):
        trainer = Trainer(config)
        trainer.train()
        trainer.close()


def exit_process(main: Callable[[], int]) -> None:
    """Runs ``main`` and ends the process with its exit status, or 1 after an exception."""
    try:
        status = main()
    except Exception:
        print(hide(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        status = 1
    if status:
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


def _log_to_stdout(rank: int) -> None:
    """Shows titan_tree's log lines of rank 0, and only the warnings of other ranks.

    Other packages keep Python's default, warnings and above.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may hold characters that stdout cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("titan_tree")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.addHandler(_Stdout())
    logger.propagate = False


if __name__ == "__main__":
    exit_process(main)
