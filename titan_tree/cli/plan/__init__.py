"""Shows what a run will need, before it starts: memory, the time of a step, and the settings that fit.

titan-tree plan CONFIG.toml --gpus 8                  8 H200s
titan-tree plan CONFIG.toml key=value --gpus 8        with other values in the configuration
titan-tree plan CONFIG.toml --gpus 8 --gpu h100       another GPU: h100, h200, or its memory in GiB
titan-tree plan CONFIG.toml --gpus 8 --json           the same numbers, for programs

No GPU is needed. The trees come from the data of the configuration, packed as training packs them. What
layers keep for their backward pass depends on the version of torch, so use that of the run. docs/memory.md
compares the results with measurements. The files:

    hardware.py      GPUs and measured rates
    sharding.py      what GPUs share
    workload.py      the steps of a run, from a sample of its data
    activations.py   what layers keep for their backward pass
    memory.py        memory, part by part
    timing.py        time, part by part
    planner.py       estimates of a configuration and of changes to it
    report.py        the output
"""

from __future__ import annotations

import argparse
import json
import logging

from rich.console import Console

from titan_tree.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree plan``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the configuration of the run")
    add("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    add("--gpus", required=True, metavar="N", help="number of GPUs")
    add("--gpu", default="h200", metavar="NAME", help="h200 (default), h100, or the GPU's memory in GiB")
    add(
        "--groups",
        metavar="N",
        help="groups to sample from the data (default: data.global_batch_groups, which make one step)",
    )
    add("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree plan``. Raises UserError for a wrong configuration, data or arguments."""
    # These import torch, which --help does not need.
    from titan_tree.cli.plan.hardware import find_gpu
    from titan_tree.cli.plan.planner import Planner
    from titan_tree.cli.plan.report import as_json, print_plan
    from titan_tree.config.toml import load_config

    gpus = _positive("--gpus", args.gpus)
    groups = None if args.groups is None else _positive("--groups", args.groups)
    gpu = find_gpu(args.gpu)
    config = load_config(args.config, args.overrides)
    logging.disable(logging.WARNING)  # training shows those that matter
    try:
        planner = Planner(config, gpus, gpu, groups)
        if args.json:
            print(json.dumps(as_json(planner)))
        else:
            print_plan(Console(width=80, highlight=False), planner)
    finally:
        logging.disable(logging.NOTSET)


def _positive(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 10**6):
        raise UserError(f"{option}: expected an integer from 1 to 1,000,000, got {text!r}")
    return int(text)
