"""Certifies that training on trees equals training path by path, with the model and data of a configuration.

titan-tree certify train_configs/demo.toml
titan-tree certify run.toml training.dtype=float32 --page certificate.html
torchrun --nproc-per-node 2 -m titan_tree.cli certify run.toml --json certificate.json

The first step runs on trees, and path by path through the unmodified model of transformers. Errors are set
against the noise of rounding. The exit status is 0 if all checks pass, 1 if one fails, and 2 for wrong input.
"""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree certify``."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the configuration of titan-tree train or of titan-tree rl")
    add("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    add(
        "--tokens",
        type=int,
        metavar="N",
        default=4096,
        help="compare the first paths, of N tokens together (default: 4096)",
    )
    add("--json", metavar="FILE", help="also write the certificate as JSON")
    add("--page", metavar="FILE", help="also write it as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree certify``. Returns 1 if a check failed, else 0."""
    from titan_tree.config.toml import load_any

    config = load_any(args.config, args.overrides)
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
