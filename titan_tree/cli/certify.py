"""Certifies that training on trees equals training path by path, with the model and data of a configuration.

titan-tree certify train_configs/demo.toml
titan-tree certify run.toml training.dtype=float32 --page certificate.html
titan-tree certify run.toml --nproc 2 --json certificate.json

The first step runs on trees, and path by path through the unmodified model of transformers. Errors are set
against the noise of rounding. The exit status is 0 if all checks pass, 1 if one fails, and 2 for wrong input.
"""

from __future__ import annotations

import argparse
import os
import sys

from titan_tree.cli.train import add_run_arguments
from titan_tree.errors import UserError

MAX_TOKENS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree certify``."""
    add_run_arguments(parser)
    add = parser.add_argument
    of_all = "compare the first paths, up to N tokens together"
    add("--tokens", type=int, metavar="N", default=MAX_TOKENS, help=of_all)
    add("--json", metavar="FILE", help="also write the certificate as JSON")
    add("--page", metavar="FILE", help="also write it as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree certify``. Returns 1 if a check failed, else 0."""
    from titan_tree.cli.reference import load_any

    if args.tokens < 2:
        raise UserError(f"--tokens: expected at least 2, one for each of two paths, got {args.tokens}")
    for file in filter(None, (args.json, args.page)):
        if not os.path.isdir(folder := os.path.dirname(file) or "."):
            raise UserError(f"{file}: there is no folder {folder}; make it, or name a file in another one")
    config = load_any(args.config, args.overrides)
    if args.nproc > 1:
        os.execv(sys.executable, command(args))
    # These import torch, which --help does not need.
    from titan_tree.certify import certify, report

    certificate = certify(config, args.tokens)
    if int(os.environ.get("RANK", 0)) == 0:
        print(report.text(certificate))
        if args.json:
            report.write_json(certificate, args.json)
        if args.page:
            report.write_page(certificate, args.page)
    return int(not certificate.passed)


def command(args: argparse.Namespace) -> list[str]:
    """Returns the command that runs the same in several processes, which torchrun starts."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)
    files = [f"--{name}={file}" for name in ("json", "page") if (file := getattr(args, name))]
    program = "titan_tree.cli", "certify", args.config, *args.overrides, f"--tokens={args.tokens}", *files
    return [sys.executable, "-m", *torchrun, "-m", *program]
