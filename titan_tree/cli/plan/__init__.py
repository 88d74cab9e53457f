"""Shows how much memory a run will need, before it starts.

titan-tree plan CONFIG.toml                       on the GPUs of this machine, or on its CPU
titan-tree plan CONFIG.toml key=value --gpus 8    on 8 H200s, with other values in the configuration
titan-tree plan CONFIG.toml --gpus 8 --gpu h100   another GPU: h100, h200, or its memory in GiB; or cpu
titan-tree plan CONFIG.toml --json                the same numbers, for programs

No GPU is needed. The trees come from the data of the configuration, packed as training packs them. What
layers keep for their backward pass depends on the version of torch, so use that of the run. docs/memory.md
compares the results with measurements. `titan-tree bench real CONFIG.toml --steps 6` measures times.
"""

# device.py        the GPU, or the CPU, and its memory
# workload.py      the steps of a run, from a sample of its data
# layer_trace.py   what layers keep for their backward pass
# tower_trace.py   what the tower needs for an image
# memory.py        memory, part by part
# estimate.py      all of it for a configuration

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from textwrap import fill
from typing import Any

from titan_tree.cli.data_arguments import add_overrides, add_plugins_argument, count_to
from titan_tree.cli.plan.device import CPU, device_memory
from titan_tree.errors import count, warnings_hidden


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree plan``."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="the configuration of the run")
    add_overrides(parser)
    number = count_to(10**6)
    add("--gpus", type=number, metavar="N", help="number of GPUs (default: those of this machine, or 1)")
    gpu = "h200, h100, the GPU's memory in GiB, or cpu (default: cpu without a GPU and --gpus, else h200)"
    add("--gpu", metavar="NAME", help=gpu)
    sample = "groups to sample from the data (default: data.global_batch_groups)"
    add("--groups", type=number, metavar="N", help=sample)
    add("--json", action="store_true", help="print the numbers as JSON")
    add_plugins_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree plan``. Raises UserError for a wrong configuration, data or arguments."""
    from titan_tree.config.toml import COMMANDS, load_tables, read_tables
    from titan_tree.data.readers import find_files
    from titan_tree.run.config import Config, stored_code_refused

    if args.gpu is not None:
        device_memory(args.gpu)
    with stored_code_refused(args.config, args.plugins):
        config = load_tables(Config, args.config, args.overrides, skip=COMMANDS)
        find_files(config.data.files)
        import torch  # takes seconds, as ``estimate`` does, so check all arguments first

        from titan_tree.cli.plan.estimate import estimate

        here = torch.cuda.device_count()
        gpu = (args.gpu or ("h200" if args.gpus or here else CPU)).lower()
        tables = [table.get("training", {}) for _, table in read_tables(args.config, args.overrides)]
        if all(table.get("dtype", "auto") == "auto" for table in tables):
            config.training.dtype = "float32" if gpu == CPU else "bfloat16"
        with warnings_hidden():  # training shows those that matter
            plan = estimate(config, args.gpus or max(1, here if gpu != CPU else 1), gpu, args.groups)
    print(json.dumps(plan)) if args.json else _print(plan)


def _print(plan: dict[str, Any]) -> None:
    """Prints the plan as text, one section after another."""
    from titan_tree.cli.plan.estimate import MARGIN

    executed, leaf = plan["executed_tokens"], plan["leaf_tokens"]
    sizes = plan["memory"] | {"sum": plan["memory_sum"]}
    if plan["memory_random_router"] > plan["memory_sum"]:
        sizes["sum, random router"] = plan["memory_random_router"]
    _section(
        "run",
        [
            ("model", f"{plan['model']}, {plan['parameters']:,} parameters"),
            ("GPUs", f"{plan['gpus']} x {plan['gpu']}"),
            ("sample", f"{count(plan['groups'], 'group')} in {count(plan['steps'], 'optimizer step')}"),
            ("tokens of a step", f"{executed:,.0f} executed, {leaf:,.0f} of leaf paths"),
            ("tokens of all paths", f"{plan['logical_tokens']:,.0f} in a step"),
            ("POR, sample POR", f"{plan['por']:.1%}, {plan['por_samples']:.1%}: the shares that trees save"),
            ("micro-batches of a GPU", f"at most {plan['micro_batches']:,}"),
            ("forward passes of a GPU", f"at most {plan['forward_passes']:,}"),
            ("live tokens of a GPU", f"at most {plan['chain_tokens']:,}"),
        ],
    )
    fits = "fits" if plan["fits"] else "does not fit"
    device = "GPU" if plan["gpu"] != "CPU" else "machine"
    of_gpu = f"{plan['memory_of_gpu'] / 2**30:7.2f}, less {MARGIN:.0%} as a margin: {fits}"
    rows = [(name, f"{size / 2**30:7.2f}") for name, size in sizes.items() if size]
    rows += [(f"memory of the {device}", of_gpu), ("largest at", plan["memory_moment"])]
    _section("GiB on the fullest GPU" if plan["gpu"] != "CPU" else "GiB of the fullest process", rows)
    print("notes")
    for note in plan["notes"]:
        print(fill(note, 80, initial_indent="  - ", subsequent_indent="    "))


def _section(title: str, rows: Iterable[tuple[str, str]]) -> None:
    lines = [f"  {name:<26} {value}" for name, value in rows]
    wrapped = [fill(line, 80, subsequent_indent=" " * 29, break_on_hyphens=False) for line in lines]
    print(title, *wrapped, sep="\n", end="\n\n")
