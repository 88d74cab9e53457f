"""The output of ``titan-tree plan``, as text of 80 columns and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill, wrap
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from titan_tree.cli.plan.hardware import GIB
from titan_tree.cli.plan.planner import MARGIN, Estimate, Planner, Settings
from titan_tree.cli.plan.timing import total
from titan_tree.tree.costs import NODE_GPUS

WIDTH = 80
NAME_WIDTH = 26


def print_plan(console: Console, planner: Planner) -> None:
    """Prints the plan, one section after another."""

    def section(title: str, rows: Iterable[tuple[str, str]]) -> None:
        console.print(Text(title, style="bold"))
        for name, value in rows:
            first, *others = wrap(value, WIDTH - NAME_WIDTH - 3, break_on_hyphens=False) or [""]
            console.print(Text(f"  {name:<{NAME_WIDTH}} {first}"))
            for line in others:
                console.print(Text(" " * (NAME_WIDTH + 3) + line))
        console.print()

    estimate = planner.estimate
    section("run", _run(planner))
    section("GiB on the fullest GPU", _memory(estimate))
    section("seconds of a step", _time(estimate))
    if planner.gpus > 1:
        section("suggested [parallel]", _settings(planner.best_parallel()))
    if not estimate.fits:
        section("to need less memory", [_saving(*saving) for saving in planner.savings()])
    console.print(Text("notes", style="bold"))
    for note in _notes(planner):
        console.print(Text(fill(note, WIDTH, initial_indent="  - ", subsequent_indent="    ")))


def _run(planner: Planner) -> list[tuple[str, str]]:
    estimate = planner.estimate
    owners = [owner for step in estimate.steps for owner in step]
    sizes = [len(owner.micro_batches) for owner in owners], [len(owner.passes) for owner in owners]
    micro_batches, passes = (f"{sum(each) / len(owners):,.1f} (at most {max(each):,})" for each in sizes)
    tokens = estimate.tokens
    return [
        ("model", f"{planner.model.config.family}, {planner.model.num_parameters():,} parameters"),
        ("GPUs", f"{planner.gpus} x {planner.gpu.name}"),
        ("sample", f"{len(planner.sample.taken):,} groups in {len(estimate.steps):,} optimizer step(s)"),
        ("tokens of a step", f"{tokens.executed:,.0f} executed, {tokens.logical:,.0f} logical"),
        ("POR", f"{tokens.por:.1%}: the share of logical tokens that trees save"),
        ("micro-batches of a GPU", micro_batches),
        ("forward passes of a GPU", passes),
        ("live tokens of a GPU", f"at most {estimate.load.chain_tokens:,}"),
    ]


def _memory(estimate: Estimate) -> list[tuple[str, str]]:
    summed, available = sum(estimate.memory.values()), estimate.gpu.memory
    rows = [(name, f"{size / GIB:7.2f}") for name, size in estimate.memory.items() if size]
    rows.append(("sum", f"{summed / GIB:7.2f}"))
    if estimate.random_router > summed:
        rows.append(("sum, random router", f"{estimate.random_router / GIB:7.2f}"))
    verdict = "fits" if estimate.fits else "does not fit"
    rows.append(("memory of the GPU", f"{available / GIB:7.2f}, less {MARGIN:.0%} as a margin: {verdict}"))
    rows.append(("largest at", estimate.moment))
    return rows


def _time(estimate: Estimate) -> list[tuple[str, str]]:
    seconds = total(estimate.seconds)
    tokens = estimate.tokens
    parts = sorted(estimate.seconds.items(), key=lambda item: -item[1])
    rows = [(name, f"{each:9.4f} {each / seconds:6.1%}") for name, each in parts if each]
    return [
        *rows,
        ("sum", f"{seconds:9.4f}"),
        (
            "tokens per second",
            f"{tokens.executed / seconds:,.0f} executed, {tokens.logical / seconds:,.0f} logical",
        ),
        ("MFU", f"{estimate.mfu:.1%}"),
        ("idle share", f"{estimate.idle_share:.1%}: of the GPUs' time, waiting for others"),
    ]


def _settings(settings: Settings) -> list[tuple[str, str]]:
    return [(key.removeprefix("parallel."), _toml(value)) for key, value in settings.items()]


def _saving(settings: Settings, estimate: Estimate) -> tuple[str, str]:
    fits = "fits" if estimate.fits else "does not fit"
    text = " ".join(f"{key}={_toml(value)}" for key, value in settings.items())
    return f"{estimate.bytes / GIB:7.1f} GiB, {fits}", f"{text} ({total(estimate.seconds):.3g} s)"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _notes(planner: Planner) -> list[str]:
    """Returns what the numbers leave out, and what training will refuse."""
    estimate, training = planner.estimate, planner.config.training
    notes = [f"activations are those of torch {torch.__version__.partition('+')[0]}"]
    if estimate.is_refused:
        notes.append("trees are partitioned, so training will refuse parallel.reduce_gradients = every")
    if len(planner.sample.taken) % planner.config.data.global_batch_groups:
        notes.append("the sample is smaller than its steps, so groups repeat; raise --groups")
    if not training.compile:
        notes.append("training.compile = false needs more memory and time than computed")
    if training.float8 != "none":
        notes.append("the speed of float8 is not measured; the time is that of bf16")
    if training.dtype == "float32":
        notes.append("the rates are those of bf16; float32 is several times slower")
    if planner.gpus > NODE_GPUS:
        notes.append(f"beyond {NODE_GPUS} GPUs, 50 GB/s per GPU are assumed, not measured")
    if planner.config.optimizer.name not in ("adamw", "adamw8bit"):
        notes.append("memory and time of this optimizer are those of adamw")
    return notes


def as_json(planner: Planner) -> dict[str, Any]:
    """Returns the plan as JSON: bytes, seconds and tokens."""
    estimate = planner.estimate
    tokens = estimate.tokens
    owners = [owner for step in estimate.steps for owner in step]
    plan: dict[str, Any] = {
        "model": planner.model.config.family,
        "parameters": planner.model.num_parameters(),
        "gpus": planner.gpus,
        "gpu": planner.gpu.name,
        "groups": len(planner.sample.taken),
        "steps": len(estimate.steps),
        "logical_tokens": tokens.logical,
        "distinct_tokens": tokens.distinct,
        "executed_tokens": tokens.executed,
        "por": tokens.por,
        "micro_batches": max(len(owner.micro_batches) for owner in owners),
        "forward_passes": estimate.load.passes,
        "chain_tokens": estimate.load.chain_tokens,
        "memory": estimate.memory,
        "memory_moment": estimate.moment,
        "memory_sum": sum(estimate.memory.values()),
        "memory_random_router": estimate.random_router,
        "memory_of_gpu": estimate.gpu.memory,
        "fits": estimate.fits,
        "seconds": dict(estimate.seconds),
        "seconds_sum": total(estimate.seconds),
        "mfu": estimate.mfu,
        "idle_share": estimate.idle_share,
        "parallel": {},
        "savings": [],
        "notes": _notes(planner),
    }
    if planner.gpus > 1:
        best = planner.best_parallel()
        plan["parallel"] = {key.removeprefix("parallel."): value for key, value in best.items()}
    if not estimate.fits:
        plan["savings"] = [
            {"settings": settings, "memory": each.bytes, "seconds": total(each.seconds), "fits": each.fits}
            for settings, each in planner.savings()
        ]
    return plan
