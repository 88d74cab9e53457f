"""Certifies that training on trees equals training path by path, with the model and data of a configuration.

titan-tree certify train_configs/demo.toml
titan-tree certify run.toml training.dtype=float32 --page certificate.html
titan-tree certify run.toml --nproc 2 --json certificate.json

The first step runs on trees, and path by path through the unmodified model of transformers. Errors are set
against the noise of rounding. The exit status is 0 if all checks pass, 1 if one fails, and 2 for wrong input.
"""

from __future__ import annotations

import argparse

from titan_tree.cli.data_arguments import add_force_argument, add_plugins_argument
from titan_tree.cli.run_process import add_run_arguments, rank, start_torchrun
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
    add_force_argument(parser)
    add_plugins_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree certify``. Returns 1 if a check failed, else 0."""
    # These import torch, which --help does not need.
    from titan_tree.certify import certify, report
    from titan_tree.config.files import check_output
    from titan_tree.run.config import load_any, paths_read, stored_code_refused

    if args.tokens < 2:
        raise UserError(f"--tokens: expected at least 2, one for each of two paths, got {args.tokens}")
    with stored_code_refused(args.config, args.plugins):
        config = load_any(args.config, args.overrides)
        read = [args.config, *paths_read(config)]
        for file, marker in ((args.json, report.JSON_MARKER), (args.page, report.PAGE_MARKER)):
            if file:
                check_output(file, marker, read, args.force)
        start_torchrun(args)
        certificate = certify(config, args.tokens)
    if rank() == 0:
        print(report.text(certificate))
        if args.json:
            report.write_json(certificate, args.json, read, args.force)
        if args.page:
            report.write_page(certificate, args.page, read, args.force)
    return int(not certificate.passed)
