"""Trains the RL demo with one seed and records reward and CPU seconds, for docs/log/2026-11-23-rl.md.

    OMP_NUM_THREADS=1 python scripts/benchmark/rl.py --seed 0 --csv rl.csv [key=value ...]

It appends one row per RL step, and per measurement of the warm start, to the CSV. At the first RL step it
also compares the layouts "tree" and "flat" on the same rollouts, and every 20 steps the sampler with
tree_logprobs. CPU seconds are those of this process: other programs affect them less than wall-clock time.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from titan_tree import tree_logprobs
from titan_tree.config.rl_tables import RLRunConfig
from titan_tree.config.toml import load_tables
from titan_tree.data.packing import flat_trees, pack
from titan_tree.metrics import Logger
from titan_tree.registry import LOGGERS
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.trainer import RLTrainer
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

COLUMNS = ("setting", "seed", "phase", "step", "cpu_s", "reward", "sampled_tokens", "por")


def cpu_logger(file: Path, setting: str, seed: int) -> type[Logger]:
    """Returns a logger that appends rewards to ``file``."""

    class CpuLogger(Logger):
        sampled = 0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            phase = "rl" if "reward" in values else "warm_start"
            reward = values.get("reward", values.get("validation_reward"))
            self.sampled += int(values.get("sampled_tokens", 0))
            if reward is None:
                return
            row = (step, f"{time.process_time():.1f}", f"{reward:.4f}", self.sampled, f"{values['por']:.3f}")
            new = not file.exists()
            with file.open("a", newline="") as out:
                writer = csv.writer(out, lineterminator="\n")
                writer.writerows([COLUMNS] if new else [])
                writer.writerow((setting, seed, phase, *row))

    return CpuLogger


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
                float(np.abs((score.numpy() - path.old_logprobs[1:])[path.loss_mask[1:] > 0]).max())
                for score, path in zip(scores, paths, strict=True)
            )
            print(f"step {step}: sampler and tree_logprobs differ by at most {worst:.1e} nats", flush=True)
        return by_task

    def compare_layouts(self, by_task: list[list[TokenPath]]) -> None:
        """Prints losses, gradients and CPU seconds of both layouts, packed alike."""
        found = []
        layouts = {
            "tree": [TokenTree.from_paths(paths) for paths in by_task],
            "flat": flat_trees(list(chain.from_iterable(by_task))),
        }
        for layout, trees in layouts.items():
            batches = pack(trees, self.config.data.max_tokens)
            self.tree_step.run(self.tree_step.prepare(batches))
            self.optimizers.zero_grad()
            started = time.process_time()
            result = self.tree_step.run(self.tree_step.prepare(batches))
            seconds = time.process_time() - started
            gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            self.optimizers.zero_grad()
            found.append(gradient)
            tokens = result.counts.executed_tokens
            print(f"{layout}: loss {result.loss.item():.9f}, {tokens:,} tokens, {seconds:.2f} CPU s")
        error = ((found[0] - found[1]).norm() / found[1].norm()).item()
        print(f"gradients differ by {error:.1e} of their norm", flush=True)


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
    LOGGERS.register("cpu", cpu_logger(args.csv, args.setting, args.seed))
    seeds = [f"data.seed={args.seed}", f"training.seed={args.seed}", f"folder={args.folder}"]
    loggers = "metrics.loggers=[csv, cpu]"
    config = load_tables(RLRunConfig, args.config, [*seeds, loggers, *args.overrides])
    trainer = CheckedRLTrainer(after_warm_start(config))
    trainer.train()
    rollouts = trainer.sample([f"{args.seed}/test/{task}" for task in range(256)], 1)
    rewards = [rollout.reward for (rollout,) in rollouts]
    print(f"mean reward of 256 further tasks: {np.mean(rewards):.3f}; {time.process_time():.0f} CPU s")
    trainer.close()


if __name__ == "__main__":
    main()
