"""What does a run lose by making its inputs while it trains?

titan-tree bench live train_configs/qwen3_0.6b_tau.toml data.files=tau_airline.jsonl.gz

The trainer first runs *live* steps, whose inputs worker processes make while it trains. It then repeats the
last of these steps with the same inputs, which are *ready* in memory, so that no step waits. Both are timed
in one process, and the device is synchronized before and after each step.

| column      | meaning                                                                          |
|-------------|----------------------------------------------------------------------------------|
| start s     | from the start of the trainer to the end of the first step                       |
| live s      | seconds of the live steps that are repeated                                      |
| ready s     | seconds of their repetitions                                                     |
| ready / live | the share of the possible speed that the run reaches                            |
| MFU live    | model FLOPs utilization of the live steps, only on a GPU                         |
| worst       | the slowest live step after the warm-up, relative to the median                  |
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from titan_tree.bench.record import Row
from titan_tree.distributed import titan
from titan_tree.run.config import load_config
from titan_tree.run.trainer import Trainer

UNLOGGED = ["checkpoint.interval=0", "metrics.loggers=[]", "training.epochs=null", "training.steps=1000000"]


KEYS = ("config", "files", "steps")
RATIOS = ("ready / live",)
QUICK = (
    "train_configs/demo.toml", "folder=outputs/bench/live", "data.max_tokens=512",
    "data.global_batch_groups=1", "--warmup", "1", "--steps", "1", "--repeat", "1",
)  # fmt: skip
PACKAGES = ("jinja2", "tiktoken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="a TOML file")
    add("overrides", nargs="*", metavar="key=value")
    add("--warmup", type=int, default=6, help="steps before the measurement")
    add("--steps", type=int, default=8, help="live steps")
    add("--repeat", type=int, default=8, help="how many of the last live steps to repeat")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns one row."""
    started = time.perf_counter()
    trainer = Trainer(load_config(args.config, [*args.overrides, *UNLOGGED]))
    inputs: Any = trainer.inputs()
    if trainer.config.training.compile:
        trainer.compile()
    trainer.train_step(inputs)
    _synchronize(trainer)
    start = time.perf_counter() - started
    for _ in range(args.warmup - 1):
        trainer.train_step(inputs)

    kept: list[Any] = []
    live = [_seconds(trainer, _keeping(inputs, kept)) for _ in range(args.steps)]
    flops_before = trainer.counts.flops
    del kept[: -args.repeat]
    repeated = live[-args.repeat :]
    ready = [_seconds(trainer, iter([item])) for item in kept]
    row: Row = {
        "config": Path(args.config).stem,
        "files": " ".join(Path(file).name for file in trainer.dataset.reader.files),
        "steps": args.steps,
        "start s": f"{start:.1f}",
        "live s": f"{sum(repeated):.2f}",
        "ready s": f"{sum(ready):.2f}",
        "ready / live": f"{sum(ready) / sum(repeated):.3f}",
        "worst": f"{max(live) / median(live):.2f}x",
    }
    if trainer.device.type == "cuda":
        peak = titan.peak_flops(torch.cuda.get_device_name(trainer.device)) * trainer.mesh.size()
        flops = trainer.counts.flops - flops_before
        row["MFU live"] = f"{flops / sum(repeated) / peak:.1%}"
        row["MFU ready"] = f"{flops / sum(ready) / peak:.1%}"
    is_first = dist.get_rank() == 0
    inputs.close()  # ends the workers
    trainer.close()
    return [row] if is_first else []


def _keeping(inputs: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    """Yields the inputs and appends them to ``kept``."""
    for item in inputs:
        kept.append(item)
        yield item


def _seconds(trainer: Trainer, inputs: Iterator[Any]) -> float:
    """Returns the seconds of one step on the next of ``inputs``."""
    _synchronize(trainer)
    started = time.perf_counter()
    trainer.train_step(inputs)
    _synchronize(trainer)
    return time.perf_counter() - started


def _synchronize(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
