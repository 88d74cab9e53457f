"""Trains an RL configuration with one seed and records reward and seconds, for docs/log/2026-11-23-rl.md.

    OMP_NUM_THREADS=1 python scripts/benchmark/rl.py --seed 0 --csv rl.csv --folder FOLDER [key=value ...]
    python scripts/benchmark/rl.py --config train_configs/rl_search.toml --csv rl.csv --folder FOLDER

It appends one row per RL step, and per measurement of the warm start, to the CSV. At the first RL step it
also compares the layouts "tree" and "flat" on the same rollouts, and every 20 steps the sampler with
tree_logprobs. On a CPU, the column "s" has CPU seconds of this process, which other programs affect less
than wall-clock time. They include the start of Python. On a GPU, it has seconds since the start of this
script. The other times are those of metrics.csv, in seconds. "sampled_tokens" adds up the logged steps, so
leave metrics.log_interval at 1.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from titan_tree import TreeBatch, tree_logprobs
from titan_tree.config.rl import RLRunConfig
from titan_tree.config.toml import load_tables
from titan_tree.data.packing import flat_trees, pack
from titan_tree.metrics import Logger
from titan_tree.registry import LOGGERS
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.trainer import RLTrainer
from titan_tree.scoring.score_trees import score_trees
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

COLUMNS = (
    "setting",
    "seed",
    "phase",
    "step",
    "s",
    "sampling_s",
    "scoring_s",
    "step_s",
    "reward",
    "sampled_tokens",
    "por",
)
ROUNDS = 3  # of the comparison of layouts
STARTED = time.perf_counter()


def clock() -> float:
    """Returns the seconds that this benchmark counts, when the GPU has finished its work."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter() - STARTED


def reward_logger(file: Path, setting: str, seed: int) -> type[Logger]:
    """Returns a logger that appends rewards to ``file``."""

    class RewardLogger(Logger):
        sampled = 0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            phase = "rl" if "reward" in values else "warm_start"
            reward = values.get("reward", values.get("validation_reward"))
            self.sampled += int(values.get("sampled_tokens", 0))
            if reward is None:
                return
            seconds = (clock(), *(values.get(name, 0.0) for name in COLUMNS[5:8]))
            row = (*(f"{s:.2f}" for s in seconds), f"{reward:.4f}", self.sampled, f"{values['por']:.3f}")
            new = not file.exists()
            with file.open("a", newline="") as out:
                writer = csv.writer(out, lineterminator="\n")
                writer.writerows([COLUMNS] if new else [])
                writer.writerow((setting, seed, phase, step, *row))

    return RewardLogger


class CheckedRLTrainer(RLTrainer):
    """Compares layouts at the first step, and the sampler with the trainer every 20 steps."""

    def paths(self, step: int) -> list[list[TokenPath]]:
        by_task = super().paths(step)
        if step == 1:
            self.compare_layouts(by_task)
        if step % 20 == 1:
            paths = by_task[0]
            with torch.no_grad():
                scores = tree_logprobs(self.model, [path.tokens.tolist() for path in paths])
            worst = max(
                float(np.abs((score.cpu().numpy() - path.old_logprobs[1:])[path.loss_mask[1:] > 0]).max())
                for score, path in zip(scores, paths, strict=True)
            )
            print(f"step {step}: sampler and tree_logprobs differ by at most {worst:.1e} nats", flush=True)
        return by_task

    @torch.no_grad()
    def score(self, trees: list[TokenTree]) -> object:
        model = self.reference.model if self.reference else self.model
        return score_trees(model, trees, self.config.data.max_tokens, self.tree_step.partitioner)

    def compare_layouts(self, by_task: list[list[TokenPath]]) -> None:
        """Prints losses, gradients and seconds of both layouts, packed alike.

        If the loss has a reference, its weights score.
        """
        max_tokens, costs = self.config.data.max_tokens, self.model.costs()
        layouts = {
            "tree": [TokenTree.from_paths(paths) for paths in by_task],
            "flat": flat_trees(list(chain.from_iterable(by_task))),
        }
        steps = {name: self.tree_step.prepare(pack(trees, max_tokens)) for name, trees in layouts.items()}
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        gradients = {}
        for is_timed in (False, *[True] * ROUNDS):
            for name, trees in layouts.items():
                for work, run in (
                    ("scoring", partial(self.score, trees)),
                    ("training", partial(self.tree_step.run, steps[name])),
                ):
                    self.optimizers.zero_grad()
                    started = clock()
                    result = run()
                    if is_timed:
                        seconds[name, work].append(clock() - started)
                gradients[name] = torch.cat([p.grad.flatten() for p in self.model.parameters()])
                self.optimizers.zero_grad()
                if not is_timed:
                    tokens = result.counts.executed_tokens
                    print(f"{name}: loss {result.loss.item():.9f}, {tokens:,} tokens")
        error = ((gradients["tree"] - gradients["flat"]).norm() / gradients["flat"].norm()).item()
        print(f"gradients differ by {error:.1e} of their norm")
        operations = {
            name: sum(costs.training_flops(TreeBatch.from_trees([tree])) for tree in trees)
            for name, trees in layouts.items()
        }
        bound = operations["flat"] / operations["tree"]
        for work in ("scoring", "training"):
            flat, tree = (statistics.median(seconds[name, work]) for name in ("flat", "tree"))
            print(
                f"{work}: flat {flat:.3f} s, tree {tree:.3f} s: {flat / tree:.2f}x, "
                f"{flat / tree / bound:.2f} of the operations' {bound:.2f}x",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="train_configs/rl_demo.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--setting", default="demo", help="a name in the CSV")
    parser.add_argument("--folder", required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    LOGGERS.register("reward", reward_logger(args.csv, args.setting, args.seed))
    seeds = [f"data.seed={args.seed}", f"training.seed={args.seed}", f"folder={args.folder}"]
    loggers = "metrics.loggers=[csv, reward]"
    config = load_tables(RLRunConfig, args.config, [*seeds, loggers, *args.overrides])
    trainer = CheckedRLTrainer(after_warm_start(config))
    trainer.train()
    rollouts = trainer.sample([f"{args.seed}/test/{task}" for task in range(256)], 1)
    rewards = [rollout.reward for (rollout,) in rollouts]
    print(f"mean reward of 256 further tasks: {np.mean(rewards):.3f}; {clock():.0f} s")
    trainer.close()


if __name__ == "__main__":
    main()
