"""Shows what a run will need, before it starts: memory, the time of a step, and the settings that fit.

titan-tree plan CONFIG.toml --gpus 8                  8 H200s
titan-tree plan CONFIG.toml key=value --gpus 8        with other values in the configuration
titan-tree plan CONFIG.toml --gpus 8 --gpu h100       another GPU: h100, h200, or its memory in GiB
titan-tree plan CONFIG.toml --gpus 8 --json           the same numbers, for programs

No GPU is needed. The trees come from the data of the configuration, packed as training packs them. What
layers keep for their backward pass depends on the version of torch, so use that of the run. docs/memory.md
compares the results with measurements. The files:

    workload.py      the steps of a run, from a sample of its data
    layer_trace.py   what layers keep for their backward pass
    memory.py        memory, part by part
    timing.py        time, part by part
    planner.py       estimates of a configuration and of changes to it
"""

from __future__ import annotations

import argparse
import json
import logging
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from titan_tree.errors import UserError

if TYPE_CHECKING:  # --help must not import torch
    from titan_tree.cli.plan.planner import Planner

WIDTH, NAME_WIDTH = 80, 26


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
    from titan_tree.cli.plan.planner import Planner
    from titan_tree.cli.plan.timing import find_gpu
    from titan_tree.config.toml import load_config

    gpus = _positive("--gpus", args.gpus)
    groups = None if args.groups is None else _positive("--groups", args.groups)
    gpu = find_gpu(args.gpu)
    config = load_config(args.config, args.overrides)
    logging.disable(logging.WARNING)  # training shows those that matter
    try:
        planner = Planner(config, gpus, gpu, groups)
        plan = as_json(planner)
        if args.json:
            print(json.dumps(plan))
        else:
            _print(Console(width=WIDTH, highlight=False), plan)
    finally:
        logging.disable(logging.NOTSET)


def _positive(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 10**6):
        raise UserError(f"{option}: expected an integer from 1 to 1,000,000, got {text!r}")
    return int(text)


def as_json(planner: Planner) -> dict[str, Any]:
    """Returns the plan as JSON: bytes, seconds and tokens."""
    estimate, steps = planner.estimate, len(planner.estimate.steps)
    owners = [owner for step in estimate.steps for owner in step]
    parallel = planner.best_parallel() if planner.gpus > 1 else {}
    savings = [] if estimate.fits else planner.savings()
    return {
        "model": planner.model.config.title,
        "parameters": planner.model.num_parameters(),
        "gpus": planner.gpus,
        "gpu": planner.gpu.name,
        "groups": planner.groups,
        "steps": steps,
        "logical_tokens": estimate.counts.logical_tokens / steps,
        "distinct_tokens": estimate.counts.distinct_tokens / steps,
        "executed_tokens": estimate.counts.executed_tokens / steps,
        "por": estimate.counts.por,
        "micro_batches": max(len(owner.micro_batches) for owner in owners),
        "forward_passes": max(len(owner.runs) for owner in owners),
        "chain_tokens": estimate.sizes.chain_tokens,
        "memory": estimate.memory,
        "memory_moment": estimate.moment,
        "memory_sum": sum(estimate.memory.values()),
        "memory_random_router": estimate.random_router,
        "memory_of_gpu": estimate.gpu.memory,
        "fits": estimate.fits,
        "seconds": estimate.seconds,
        "seconds_sum": sum(estimate.seconds.values()),
        "mfu": estimate.mfu,
        "idle_share": estimate.idle_share,
        "parallel": {key.removeprefix("parallel."): value for key, value in parallel.items()},
        "savings": [
            {"settings": changes, "memory": e.bytes, "seconds": sum(e.seconds.values()), "fits": e.fits}
            for changes, e in savings
        ],
        "notes": planner.notes(),
    }


def _print(console: Console, plan: dict[str, Any]) -> None:
    """Prints the plan as text, one section after another."""
    from titan_tree.cli.plan.planner import MARGIN

    executed, logical, seconds = (plan[key] for key in ("executed_tokens", "logical_tokens", "seconds_sum"))
    sums = {"sum": plan["memory_sum"]}
    if plan["memory_random_router"] > plan["memory_sum"]:
        sums["sum, random router"] = plan["memory_random_router"]
    sizes = {name: size for name, size in (plan["memory"] | sums).items() if size}
    times = sorted((item for item in plan["seconds"].items() if item[1]), key=lambda item: -item[1])
    sections = {
        "run": [
            ("model", f"{plan['model']}, {plan['parameters']:,} parameters"),
            ("GPUs", f"{plan['gpus']} x {plan['gpu']}"),
            ("sample", f"{plan['groups']:,} groups in {plan['steps']:,} optimizer step(s)"),
            ("tokens of a step", f"{executed:,.0f} executed, {logical:,.0f} logical"),
            ("POR", f"{plan['por']:.1%}: the share of logical tokens that trees save"),
            ("micro-batches of a GPU", f"at most {plan['micro_batches']:,}"),
            ("forward passes of a GPU", f"at most {plan['forward_passes']:,}"),
            ("live tokens of a GPU", f"at most {plan['chain_tokens']:,}"),
        ],
        "GiB on the fullest GPU": [
            *((name, f"{size / 2**30:7.2f}") for name, size in sizes.items()),
            (
                "memory of the GPU",
                f"{plan['memory_of_gpu'] / 2**30:7.2f}, less {MARGIN:.0%} as a margin: {_fits(plan)}",
            ),
            ("largest at", plan["memory_moment"]),
        ],
        "seconds of a step": [
            *((name, f"{part:9.4f} {part / seconds:6.1%}") for name, part in times),
            ("sum", f"{seconds:9.4f}"),
            ("tokens per second", f"{executed / seconds:,.0f} executed, {logical / seconds:,.0f} logical"),
            ("MFU", f"{plan['mfu']:.1%}"),
            ("idle share", f"{plan['idle_share']:.1%}: of the GPUs' time, waiting for others"),
        ],
        "suggested [parallel]": [(key, _toml(value)) for key, value in plan["parallel"].items()],
        "to need less memory": [
            (
                f"{saving['memory'] / 2**30:7.1f} GiB, {_fits(saving)}",
                " ".join(f"{key}={_toml(value)}" for key, value in saving["settings"].items())
                + f" ({saving['seconds']:.3g} s)",
            )
            for saving in plan["savings"]
        ],
    }
    for title, rows in sections.items():
        if rows:
            console.print(Text(title, style="bold"))
        for name, value in rows:
            indent = " " * (NAME_WIDTH + 3)
            text = fill(value, WIDTH - len(indent), break_on_hyphens=False, drop_whitespace=False)
            console.print(Text(f"  {name:<{NAME_WIDTH}} " + text.replace("\n", f"\n{indent}")))
        if rows:
            console.print()
    console.print(Text("notes", style="bold"))
    for note in plan["notes"]:
        console.print(Text(fill(note, WIDTH, initial_indent="  - ", subsequent_indent="    ")))


def _fits(plan: dict[str, Any]) -> str:
    return "fits" if plan["fits"] else "does not fit"


def _toml(value: str | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
