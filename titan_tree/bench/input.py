"""How fast does the host make the inputs of steps, and what does that cost the training process?

titan-tree bench input tau_airline.jsonl.gz --tokenizer qwen.tiktoken.gz --template qwen3

The file is also written as a token store. Both are then read as training reads them: samples, trees, and the
partitioning and packing of steps for Qwen3-0.6B.

| column     | meaning                                                                  |
|------------|--------------------------------------------------------------------------|
| CPU s      | CPU seconds for one epoch without workers, the minimum over the rounds   |
| M tokens/s | million logical tokens per CPU second                                    |
| workers W  | speed of a loop of small torch operations beside data.workers = W        |

The last columns are fractions of the loop's speed alone, medians over the rounds. They need W + 1 idle cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch

from titan_tree.bench.record import Row, add_rounds, cpu_seconds
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.loader import StepLoader
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.data.token_store import write_store
from titan_tree.engine.step_io import StepPreparer
from titan_tree.models.pretrained import build_model

KEYS = ("file", "source")
RATIOS = ("workers 0", "workers 1")
QUICK = ("demo", "--rounds", "1", "--workers", "0", "--seconds", "0.1")
PACKAGES = ("jinja2", "tiktoken")
ENDLESS = 1_000_000  # steps
TOKENS_PER_SECOND = 47_000  # that Qwen3-0.6B executed on an H200, see docs/log/2026-11-20-tau-bench.md
GROUPS, MAX_TOKENS = 4, 65_536  # of a step, as in train_configs/qwen3_0.6b_tau.toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("file")
    add("--tokenizer", default="byte")
    add("--template", default="qwen3")
    add("--workers", type=int, nargs="+", default=[0, 1])
    add("--seconds", type=float, default=6.0, help="of each measurement of the loop")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row for the file, and one for the store that is made from it."""
    tokenizer = TreeTokenizer.load(args.tokenizer, args.template)
    with torch.device("meta"):
        costs = build_model("qwen3", "0.6B").costs()
    prepare = StepPreparer("path_mean", False, costs, TreePartitioner("auto", MAX_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        reader = SampleReader(DataConfig(files=[args.file]), tokenizer)
        write_store(store, ((group.id, reader.paths(group)) for group in reader.groups()), header(tokenizer))
        rows = []
        for source, file in (("files", args.file), ("token store", str(store))):
            made: Row = {"source": source, "file": Path(args.file).name}
            rows.append(made | measure(file, tokenizer, prepare, args))
        return rows


def header(tokenizer: TreeTokenizer) -> dict[str, Any]:
    return {
        "sources": [],
        "tokenizer": tokenizer.fingerprint(),
        "tokenizer_name": "benchmark",
        "sample": {},
        "advantage": "given",
    }


def measure(file: str, tokenizer: TreeTokenizer, prepare: StepPreparer, args: argparse.Namespace) -> Row:
    """Returns the throughput of a data file, and the speed of the loop beside it."""

    def dataset(epochs: int | None = None) -> TreeDataset:
        config = DataConfig(files=[file], global_batch_groups=GROUPS, max_tokens=MAX_TOKENS)
        return TreeDataset(config, SampleReader(config, tokenizer), allow_larger=True, epochs=epochs)

    seconds, tokens = [], 0
    for _ in range(args.rounds):
        tokenizer._encoder._cache.clear()
        started = cpu_seconds()
        tokens = sum(prepare(step).counts.logical_tokens for step in dataset(epochs=1))
        seconds.append(cpu_seconds() - started)
    first_input = prepare(next(iter(dataset())))
    alone: list[float] = []
    beside: dict[int, list[float]] = {workers: [] for workers in args.workers}
    for _ in range(args.rounds):
        alone.append(loop_speed(repeat((first_input, {})), args.seconds))
        for workers, speeds in beside.items():
            inputs: Any = iter(StepLoader(dataset(), prepare, ENDLESS, workers))
            first = next(inputs)  # waits until the workers have started
            speeds.append(loop_speed(chain([first], inputs), args.seconds))
            inputs.close()
    return {
        "logical tokens": tokens,
        "CPU s": f"{min(seconds):.2f}",
        "M tokens/s": f"{tokens / min(seconds) / 1e6:.1f}",
        **{f"workers {w}": f"{median(speeds) / median(alone):.2f}" for w, speeds in beside.items()},
    }


def loop_speed(inputs: Iterator[Any], seconds: float) -> float:
    """Returns iterations per second of small torch operations, as eager training launches them.

    The loop takes the next input when a GPU would be done with the one before.
    """
    x = torch.zeros(16)
    iterations, started = 0, time.perf_counter()
    step_ends = started
    while (now := time.perf_counter()) < started + seconds:
        if now >= step_ends:
            step_input, _ = next(inputs)
            step_ends = time.perf_counter() + step_input.counts.executed_tokens / TOKENS_PER_SECOND
        for _ in range(100):
            x = x.add(1.0)
        iterations += 1
    return iterations / (time.perf_counter() - started)
