"""The program titan-tree.

To add a command, write titan_tree/cli/COMMAND.py with two functions, ``add_arguments(parser)`` and
``run(args)``, and add a line to ``COMMANDS``. ``run`` may return an exit status other than 0. The module's
docstring becomes the command's --help text.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from textwrap import fill
from typing import NoReturn

from titan_tree.cli.data_arguments import is_override
from titan_tree.cli.run_process import STDOUT, exit_place, exit_process, prepare_streams, rank
from titan_tree.errors import AgreedError, UserError, did_you_mean, unknown_name
from titan_tree.signals import Interrupted, discard, keyboard_interrupts

COMMANDS = {  # name -> summary; a command's module is imported only when it runs
    "train": "train a model on data files",
    "rl": "train a model on its own rollouts",
    "serve": "serve a model to agents, and write what it read and wrote as token ids",
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
  titan-tree serve train_configs/serve.toml model.hf_path=/models/Qwen3-1.7B
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


class Finished(SystemExit):
    """The output is complete, because --help or a process that the command started has printed it."""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, as all other errors are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists the arguments")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise Finished(status)


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one, and fits sentences to the width of the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Blocks with commands or columns keep their lines.
        blocks = text.strip("\n").split("\n\n")
        filled = [
            block if re.search(r"\S  |^ *(titan-tree|echo|torchrun) ", block, re.M) else fill(block, width)
            for block in blocks
        ]
        return indent + "\n\n".join(filled)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, [], argparse.SUPPRESS) and action.default is not False
        says = "(default" in (action.help or "")
        return f"{action.help} (default: %(default)s)" if has_default and not says else action.help


def program() -> None:
    """Runs the command that ``sys.argv`` names, and ends the process with its exit status."""
    prepare_streams()
    exit_process(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: the command's or 0, 2 for wrong input, 130 after Ctrl-C.

    docs/signals.md lists them.
    """
    words = sys.argv[1:] if argv is None else argv

    def run() -> int | None:
        args = parse(words)
        os.getcwd()  # raises an error if the directory was removed
        with nullcontext() if words[0] in RUNS else keyboard_interrupts():
            return args.run(args)

    return call("titan-tree", run)


def call(program: str, run: Callable[[], int | None]) -> int:
    """Calls a command of ``program``, which errors name, and returns the exit status, see ``main``."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            status = run()
        except Finished as finished:
            status = int(finished.code or 0)
        sys.stdout.flush()
        return status or 0
    except Interrupted as interrupted:
        return int(interrupted.code or 0)
    except KeyboardInterrupt:
        return 130
    except UserError as raised:
        error = raised
    except SystemExit as raised:
        error = UserError(f"{exit_place(raised)} ended the process; let this code raise an exception instead")
    except OSError as raised:
        if raised.filename is None and not isinstance(raised, FileNotFoundError):
            raise
        if raised.filename == STDOUT:
            discard(1)  # Python flushes stdout at exit
            if raised.errno == errno.EPIPE:  # a reader such as head has seen enough
                return 1
        error = UserError(f"{raised.filename}: {raised.strerror}")
        if raised.filename is None:  # only os.getcwd() names no file
            error = UserError("the current directory was removed; start the command in another one")
    if rank() > 0:
        time.sleep(2)  # rank 0 probably reports the same error, and torchrun then ends this process
    if rank() == 0 or not isinstance(error, AgreedError):
        with suppress(OSError):
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    return 2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command; ``run`` is its function, and ``words`` are those of ``argv``.

    Raises:
        UserError: wrong arguments.
        Finished: --help and the like were printed.
    """
    command = argv[0] if argv else None
    parser, command_parser = _parser([command])
    if command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if command not in COMMANDS and not command.startswith("-"):
        parser.error(str(unknown_name("command", command, COMMANDS)))
    words, overrides = list(argv), list[str]()
    takes_keys = any(action.dest == "overrides" for action in command_parser._actions)
    options = command_parser._option_string_actions
    # argparse would take key=value for a file or a value of an option, or refuse it after an option.
    for before, word in pairwise(argv) if takes_keys else ():
        if is_override(word) and not (before in options and options[before].nargs is None):
            overrides.append(word)
            words.remove(word)
    args, rest = parser.parse_known_args(words)
    args.words = argv
    if takes_keys:
        args.overrides += overrides
    if rest:
        parser.prog = f"titan-tree {command}"
        hint = _keys_of(rest[0], "data." if hasattr(args, "format") else "") if takes_keys else ""
        hint = hint or did_you_mean(rest[0].partition("=")[0], options)
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return args


def _keys_of(option: str, prefix: str) -> str:
    """Returns the keys of a configuration that begin with ``prefix`` and that an option may mean."""
    from titan_tree.cli.reference import tables
    from titan_tree.config.toml import COMMANDS as TABLES_OF_COMMANDS

    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if name == "set":
        return "; write key=value without it"
    keys = [key for table in tables() for key in table.keys if key.name.startswith(prefix)]
    forms = {"table": ".NAME=VALUE", "list": "=[VALUE, ...]"}
    means = {
        f"{key.name}{forms.get(re.split('[ ,]', key.type)[0], '=VALUE')}": None
        for key in keys
        if name in (key.name, key.name.replace(".", "_"), key.name.rpartition(".")[2])
    }
    of_all = [form for form in means if form.partition(".")[0] not in TABLES_OF_COMMANDS]
    return f"; write {' or '.join(of_all or means)}" if means else ""


class PrintCompletion(argparse.Action):
    """Prints the script with which a shell completes commands and options, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: object, *_: object) -> None:
        import shtab

        print(shtab.complete(_parser(COMMANDS)[0], str(shell)))
        parser.exit()


def _parser(commands: Collection[str | None]) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Returns a parser that knows the names of all commands, and the arguments of ``commands``.

    The second value is the parser of the last one of ``commands``, or the first value.
    """
    description = "Trains language models on token trees, and prepares, checks and measures it."
    parser = Parser("titan-tree", description=description, epilog=EXAMPLES, formatter_class=Help)
    version = import_module("titan_tree").__version__
    add = parser.add_argument
    add("--version", action="version", version=f"titan-tree {version}")
    shells = "bash", "zsh", "fish"
    script = "print a script that completes commands and options in this shell"
    add("--print-completion", action=PrintCompletion, choices=shells, help=script)
    chosen: argparse.ArgumentParser = parser
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=summary, formatter_class=Help)
        if name in commands:
            module = import_module(f"{__name__}.{name}")
            command_parser.description = module.__doc__
            module.add_arguments(command_parser)
            command_parser.set_defaults(run=module.run)
            chosen = command_parser
    return parser, chosen
