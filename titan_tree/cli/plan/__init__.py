"""Shows what a run will need, before it starts: memory, the time of a step, and the settings that fit.

titan-tree plan CONFIG.toml                       on the GPUs of this machine, or one
titan-tree plan CONFIG.toml key=value --gpus 8    on 8 H200s, with other values in the configuration
titan-tree plan CONFIG.toml --gpus 8 --gpu h100   another GPU: h100, h200, or its memory in GiB
titan-tree plan CONFIG.toml --json                the same numbers, for programs

No GPU is needed. The trees come from the data of the configuration, packed as training packs them. What
layers keep for their backward pass depends on the version of torch, so use that of the run. docs/memory.md
compares the results with measurements.
"""

# workload.py      the steps of a run, from a sample of its data
# layer_trace.py   what layers keep for their backward pass
# memory.py        memory, part by part
# timing.py        time, part by part
# planner.py       estimates of a configuration and of changes to it

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from textwrap import fill
from typing import TYPE_CHECKING, Any

from titan_tree.errors import UserError, warnings_hidden

if TYPE_CHECKING:  # --help must not import torch
    from titan_tree.cli.plan.planner import Planner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree plan``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the configuration of the run")
    add("overrides", nargs="*", default=[], metavar="key=value", help="override a key of the configuration")
    add("--gpus", metavar="N", help="number of GPUs (default: those of this machine, or 1)")
    add("--gpu", default="h200", metavar="NAME", help="h200, h100, or the GPU's memory in GiB")
    add("--groups", metavar="N", help="groups to sample from the data (default: data.global_batch_groups)")
    add("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree plan``. Raises UserError for a wrong configuration, data or arguments."""
    import torch

    from titan_tree.cli.plan.planner import Planner
    from titan_tree.cli.plan.timing import find_gpu
    from titan_tree.config.toml import COMMANDS, load_tables
    from titan_tree.run.config import Config

    gpus = max(1, torch.cuda.device_count()) if args.gpus is None else _positive("--gpus", args.gpus)
    groups = None if args.groups is None else _positive("--groups", args.groups)
    gpu = find_gpu(args.gpu)
    config = load_tables(Config, args.config, args.overrides, skip=COMMANDS)
    with warnings_hidden():  # training shows those that matter
        plan = as_json(Planner(config, gpus, gpu, groups))
    print(json.dumps(plan)) if args.json else _print(plan)


def _positive(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 10**6):
        raise UserError(f"{option}: expected an integer from 1 to 1,000,000, got {text!r}")
    return int(text)


def as_json(planner: Planner) -> dict[str, Any]:
    """Returns the plan as JSON: bytes, seconds and tokens."""
    estimate, steps = planner.estimate, len(planner.estimate.steps)
    owners = [owner for step in estimate.steps for owner in step]
    parallel = planner.best_parallel() if planner.gpus > 1 else {}
    tokens = ("logical_tokens", "leaf_tokens", "distinct_tokens", "executed_tokens")
    return {
        "model": planner.model.config.title,
        "parameters": planner.model.num_parameters(),
        "gpus": planner.gpus,
        "gpu": planner.gpu.name,
        "groups": planner.groups,
        "steps": steps,
        **{name: getattr(estimate.counts, name) / steps for name in tokens},
        "por": estimate.counts.por,
        "por_samples": estimate.counts.por_samples,
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
        "optimizer_tokens": estimate.optimizer_tokens,
        "mfu": estimate.mfu,
        "idle_share": estimate.idle_share,
        "parallel": {key.removeprefix("parallel."): value for key, value in parallel.items()},
        "savings": [
            {"settings": changes, "memory": e.bytes, "seconds": sum(e.seconds.values()), "fits": e.fits}
            for changes, e in ([] if estimate.fits else planner.savings())
        ],
        "notes": planner.notes(),
    }


def _print(plan: dict[str, Any]) -> None:
    """Prints the plan as text, one section after another."""
    from titan_tree.cli.plan.planner import MARGIN, OPTIMIZER_SHARE

    executed, leaf, seconds = (plan[key] for key in ("executed_tokens", "leaf_tokens", "seconds_sum"))
    sizes = plan["memory"] | {"sum": plan["memory_sum"]}
    if plan["memory_random_router"] > plan["memory_sum"]:
        sizes["sum, random router"] = plan["memory_random_router"]
    times = sorted(plan["seconds"].items(), key=lambda item: -item[1])
    _section(
        "run",
        [
            ("model", f"{plan['model']}, {plan['parameters']:,} parameters"),
            ("GPUs", f"{plan['gpus']} x {plan['gpu']}"),
            ("sample", f"{plan['groups']:,} groups in {plan['steps']:,} optimizer step(s)"),
            ("tokens of a step", f"{executed:,.0f} executed, {leaf:,.0f} of leaf paths"),
            ("tokens of all paths", f"{plan['logical_tokens']:,.0f} in a step"),
            ("POR", f"{plan['por']:.1%} of leaf paths, {plan['por_samples']:.1%} of all: what trees save"),
            ("micro-batches of a GPU", f"at most {plan['micro_batches']:,}"),
            ("forward passes of a GPU", f"at most {plan['forward_passes']:,}"),
            ("live tokens of a GPU", f"at most {plan['chain_tokens']:,}"),
        ],
    )
    of_gpu = f"{plan['memory_of_gpu'] / 2**30:7.2f}, less {MARGIN:.0%} as a margin: {_fits(plan)}"
    rows = [(name, f"{size / 2**30:7.2f}") for name, size in sizes.items() if size]
    rows += [("memory of the GPU", of_gpu), ("largest at", plan["memory_moment"])]
    _section("GiB on the fullest GPU", rows)
    _section(
        "seconds of a step",
        [
            *((name, f"{part:9.4f} {part / seconds:6.1%}") for name, part in times if part),
            ("sum", f"{seconds:9.4f}"),
            ("tokens per second", f"{executed / seconds:,.0f} executed, {leaf / seconds:,.0f} of leaf paths"),
            (
                f"optimizer at {OPTIMIZER_SHARE:.0%}",
                f"with {plan['optimizer_tokens']:,.0f} executed tokens in a step",
            ),
            ("MFU", f"{plan['mfu']:.1%}"),
            ("idle share", f"{plan['idle_share']:.1%}: of the GPUs' time, waiting for others"),
        ],
    )
    _section("suggested [parallel]", ((key, str(value).lower()) for key, value in plan["parallel"].items()))
    rows = []
    for saving in plan["savings"]:
        settings = " ".join(f"{key}={value}".lower() for key, value in saving["settings"].items())
        title = f"{saving['memory'] / 2**30:7.1f} GiB, {_fits(saving)}"
        rows.append((title, f"{settings} ({saving['seconds']:.3g} s)"))
    _section("to need less memory", rows)
    print("notes")
    for note in plan["notes"]:
        print(fill(note, 80, initial_indent="  - ", subsequent_indent="    "))


def _section(title: str, rows: Iterable[tuple[str, str]]) -> None:
    lines = [f"  {name:<26} {value}" for name, value in rows]
    if lines:
        indent = " " * 29
        wrapped = [fill(line, 80, subsequent_indent=indent, break_on_hyphens=False) for line in lines]
        print(title, *wrapped, sep="\n", end="\n\n")


def _fits(plan: dict[str, Any]) -> str:
    return "fits" if plan["fits"] else "does not fit"
