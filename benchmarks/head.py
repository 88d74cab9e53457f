"""Times the output projection with losses of distillation: from the sampled token, and from likeliest tokens.

python -m benchmarks head               # on a GPU with 40 GB: 32k tokens of Qwen3-8B, k = 8 and 64

Forward and backward passes run from hidden states and weights in bf16 to the loss and both gradients.

| column  | meaning                                                                                      |
|---------|----------------------------------------------------------------------------------------------|
| targets | likeliest tokens per edge; 0: the loss "distill", which reads the sampled token alone        |
| ms      | forward and backward pass, with the loss                                                     |
| x token | the time with targets over that with the sampled token                                       |
| GB      | peak memory beyond the inputs                                                                |
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.timers import Contender, add_rounds, benchmark, peak_memory, reset_peak_memory, time_ms
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.components.logprobs import edge_logprobs
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.path_fields import TokenTargets
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

KEYS = ("tokens", "vocabulary", "hidden", "targets")
RATIOS = ()
QUICK = ("--tokens", "50", "--vocabulary", "300", "--hidden", "16", "--targets", "8", "--rounds", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--tokens", type=int, default=32768)
    add("--vocabulary", type=int, default=151936)
    add("--hidden", type=int, default=4096)
    add("--targets", type=int, nargs="+", default=[8, 64])


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row for the sampled token, and one per number of targets."""
    device = default_device()
    shapes = (args.tokens - 1, args.hidden), (args.vocabulary, args.hidden)
    hidden, weight = (
        torch.randn(shape, device=device).mul_(0.1).bfloat16().requires_grad_() for shape in shapes
    )
    contenders, peaks = [], {}
    for k in (0, *args.targets):
        reset_peak_memory(device)
        batch = taught_batch(args.tokens, args.vocabulary, k).to(device)
        step = partial(one_step, hidden, weight, batch, k)
        held = peak_memory(device)  # the inputs, after the reset
        step()
        peaks[str(k)] = peak_memory(device) - held
        contenders.append(Contender(str(k), partial(timed, step)))

    def row(contender: Contender) -> Row:
        ms = contender.median("ms")
        return {
            "tokens": args.tokens,
            "vocabulary": args.vocabulary,
            "hidden": args.hidden,
            "targets": int(contender.name),
            "ms": round(ms, 2),
            "x token": round(ms / contenders[0].median("ms"), 3),
            "GB": round(peaks[contender.name] / 1e9, 3),
        }

    return benchmark(contenders, args.rounds, row)


def timed(step: partial[None]) -> list[dict[str, float]]:
    return [{"ms": time_ms(step)}]


def one_step(hidden: Tensor, weight: Tensor, batch: TreeBatch, k: int) -> None:
    """Computes a loss and its gradients."""
    logprobs, _, of_targets = edge_logprobs(hidden, weight, batch.edge_label, targets=batch.edge_targets)
    batch = batch.with_target_logprobs(of_targets)
    loss, _ = TreeLoss("distill_topk" if k else "distill")(logprobs, batch, 1.0)
    torch.autograd.grad(loss, [hidden, weight])


def taught_batch(tokens: int, vocabulary: int, k: int) -> TreeBatch:
    """Returns a batch of one path of random tokens, with k different random targets per token."""
    draw = np.random.default_rng(0)
    path = TokenPath(draw.integers(vocabulary, size=tokens), ref_logprobs=np.full(tokens, -1.0))
    if k:
        ids = (draw.integers(vocabulary, size=(tokens, 1)) + np.arange(k)) % vocabulary
        logprobs = np.full(tokens * k, -np.log(2 * k), np.float32)
        path.teacher_topk = TokenTargets(np.full(tokens, k, np.int32), ids.ravel().astype(np.int32), logprobs)
    return TreeBatch.from_trees([TokenTree.from_paths([path])], targets=bool(k))
