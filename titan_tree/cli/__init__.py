"""The program titan-tree.

To add a command, write titan_tree/cli/COMMAND.py with two functions, ``add_arguments(parser)`` and
``run(args)``, and add a line to ``COMMANDS``. ``run`` may return an exit status other than 0. The module's
docstring becomes the command's --help text.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from titan_tree.cli.run_process import exit_process, rank
from titan_tree.errors import AgreedError, UserError, printable, unknown_name
from titan_tree.signals import Interrupted, keyboard_interrupts

COMMANDS = {  # name -> summary; a command's module is imported only when it runs
    "train": "train a model on data files",
    "rl": "train a model on its own rollouts",
    "config": "show the keys of a configuration, or write one for a model and data",
    "inspect": "show how much the samples of data files share, and what is trained",
    "xray": "show what rollouts and sessions of coding agents repeat, as a page",
    "ingest": "tokenize data files into a token store",
    "score": "write the log-probs of a model for the samples of data files",
    "export": "write the weights of a run as a Hugging Face snapshot, or LoRA as an adapter",
    "chat": "talk to the model of a run, a checkpoint or an export",
    "plan": "estimate the memory of a run before it starts",
    "bench": "train a configuration on trees and on rows, and compare losses and speed",
    "certify": "compare a training step on trees with every path alone, through transformers",
    "doctor": "check the installation, the machine and the numerics, and say how to fix problems",
}
RUNS = ("train", "rl")  # commands that handle signals themselves
EXAMPLES = """examples:
  titan-tree train train_configs/demo.toml training.steps=20
  titan-tree rl train_configs/rl_demo.toml
  titan-tree config --model qwen3:0.6B --data rollouts.jsonl -o my.toml
  titan-tree inspect demo
  titan-tree xray ~/.claude/projects
  titan-tree ingest rollouts.jsonl rollouts.store --tokenizer /models/Qwen3-1.7B
  titan-tree score rollouts.jsonl scored.jsonl --model /models/Qwen3-1.7B
  titan-tree export outputs/demo exported
  titan-tree chat outputs/demo
  titan-tree plan train_configs/qwen3_8b.toml --gpus 8
  titan-tree bench real train_configs/demo.toml --steps 6
  titan-tree certify train_configs/demo.toml
  titan-tree doctor --json"""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, as all other errors are."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists the arguments\n")


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, [], argparse.SUPPRESS) and action.default is not False
        says = "(default" in (action.help or "")
        return f"{action.help} (default: %(default)s)" if has_default and not says else action.help


def program() -> None:
    """Runs the command that ``sys.argv`` names, and ends the process with its exit status."""
    exit_process(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: the command's or 0, 2 for wrong input, 130 after Ctrl-C.

    docs/signals.md lists them.
    """
    args = parse(sys.argv[1:] if argv is None else argv)
    command = partial(args.run, args)
    return call("titan-tree", command if args.words[0] in RUNS else partial(read_and_print, command))


def call(program: str, run: Callable[[], int | None]) -> int:
    """Calls a command of ``program``, which errors name, and returns the exit status, see ``main``."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = run()
    except Interrupted as interrupted:
        return int(interrupted.code or 0)
    except SystemExit as end:  # of code that no guard names: the command itself returns a status
        print(f"{program}: error: code of a plugin ended the run by sys.exit({end.code!r})", file=sys.stderr)
        return 1
    except UserError as error:
        if rank() > 0:
            time.sleep(2)  # rank 0 probably reports the same error, and torchrun then ends this process
        if rank() == 0 or not isinstance(error, AgreedError):
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        return 2
    return status or 0


def read_and_print(command: Callable[[], int | None]) -> int | None:
    """Calls a command that reads files and prints, and returns its exit status."""
    try:
        with keyboard_interrupts():
            status = command()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{printable(error.filename)}: {error.strerror}") from None
    except KeyboardInterrupt:
        return 130
    return status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command; ``run`` is its function, and ``words`` are those of ``argv``.

    Wrong arguments and --help raise SystemExit.
    """
    command = argv[0] if argv else None
    parser = _parser([command])
    if command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if command not in COMMANDS and not command.startswith("-"):
        parser.error(str(unknown_name("command", command, COMMANDS)))
    args, rest = parser.parse_known_args(argv)
    args.words = argv
    if hasattr(args, "overrides"):  # key=value, of which argparse takes no more after an option
        wrong = [text for text in rest if text.startswith("-") and "." not in text.partition("=")[0]]
        args.overrides += [text for text in rest if text not in wrong]
        rest = wrong
    if rest:
        parser.prog = f"titan-tree {command}"
        keys = "; keys are set as optimizer.lr=1e-3" if hasattr(args, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{keys}")
    return args


class PrintCompletion(argparse.Action):
    """Prints the script with which a shell completes commands and options, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: object, *_: object) -> None:
        import shtab

        print(shtab.complete(_parser(COMMANDS), str(shell)))
        parser.exit()


def _parser(commands: Collection[str | None]) -> argparse.ArgumentParser:
    """Returns a parser that knows the names of all commands, and the arguments of ``commands``."""
    description = "Trains language models on token trees, and prepares, checks and measures it."
    parser = Parser("titan-tree", description=description, epilog=EXAMPLES, formatter_class=Help)
    version = import_module("titan_tree").__version__
    add = parser.add_argument
    add("--version", action="version", version=f"titan-tree {version}")
    shells = "bash", "zsh", "fish"
    script = "print a script that completes commands and options in this shell"
    add("--print-completion", action=PrintCompletion, choices=shells, help=script)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=summary, formatter_class=Help)
        if name in commands:
            module = import_module(f"{__name__}.{name}")
            command_parser.description = module.__doc__
            module.add_arguments(command_parser)
            command_parser.set_defaults(run=module.run)
    return parser
