"""Reinforcement learning: rewards and seconds of a whole run, and its update on trees beside rows.

OMP_NUM_THREADS=1 python -m benchmarks rl --seed 0 --folder outputs/rl_0    # on a CPU, some minutes
python -m benchmarks rl --config train_configs/rl_search.toml --setting search training.steps=90

There is a row per measurement of the warm start (phase "warm_start"), per RL step ("rl"), and for the mean
reward of 256 further tasks ("test"). On a CPU, the column "s" has CPU seconds of this process, which other
programs affect less than wall-clock time. They include the start of Python. On a GPU, it has seconds since
the start of the benchmark. The other times are those of metrics.csv, in seconds. "sampled_tokens" adds up the
logged steps, so leave metrics.log_interval at 1. Every 20 steps, "sampler nats" is the largest difference
between the sampler's log-probs and those of tree_logprobs.

The rows of the phase "update" compare training and scoring on the first step's rollouts, on trees beside one
row per leaf path (columns as in por). "gradient difference" is relative to the norm. If the loss has a
reference, its weights score. A folder with a finished run is resumed, so choose a new one. The picture has
the rewards against seconds, a line per setting and seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.layouts import speed_up
from titan_tree.cli.bench.record import Row
from titan_tree.config.toml import load_tables
from titan_tree.data.packing import leaf_trees, pack
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.metrics import Logger
from titan_tree.run.metrics.loggers import LOGGERS
from titan_tree.scoring.score_trees import score_trees, tree_logprobs
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAY_BE_ZERO = ("seed",)
KEYS = ("setting", "seed", "phase", "step")
RATIOS = ("of operations",)
QUICK = (
    "model.overrides.hidden_size=32", "model.overrides.head_dim=16", "data.global_batch_groups=2",
    "rl.rollouts=3", "rl.branches=3", "warm_start.steps=0", "lr_scheduler.warmup_steps=0",
    "training.steps=2", "checkpoint.interval=0", "checkpoint.resume=false", "--test-tasks", "2",
)  # fmt: skip
COLUMNS = (
    "setting", "seed", "phase", "step", "s", "sampling_s", "scoring_s", "step_s", "reward", "sampled_tokens",
    "por", "sampler nats", "operations x", "tree s", "rows s", "speed-up", "of operations",
    "tree loss", "rows loss", "gradient difference",
)  # fmt: skip
TIMES = ("sampling_s", "scoring_s", "step_s")
ROUNDS = 3  # of the comparison of layouts
STARTED = time.perf_counter()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value")
    add("--config", default="train_configs/rl_demo.toml", help="a TOML file (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--setting", default="demo", help="a name for the rows (default: %(default)s)")
    add("--folder", default="outputs/bench/rl", help="folder of the run (default: %(default)s)")
    add("--test-tasks", type=int, default=256, help="tasks of the last measurement (default: %(default)s)")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of the warm start, of the update, of all steps and of the last measurement."""
    rows: list[Row] = []
    seeds = [f"data.seed={args.seed}", f"training.seed={args.seed}", f"folder={args.folder}"]
    with LOGGERS.registered("reward", reward_logger(rows)):
        overrides = [*seeds, "metrics.loggers=[csv, reward]", *args.overrides]
        config = load_tables(RLRunConfig, args.config, overrides)
        trainer = CheckedRLTrainer(after_warm_start(config))
        trainer.train()
    rollouts = trainer.sample([f"{args.seed}/test/{task}" for task in range(args.test_tasks)], 1)
    reward = float(np.mean([rollout.reward for (rollout,) in rollouts]))
    for row in rows:
        if row["phase"] == "rl" and row["step"] in trainer.differences:
            row["sampler nats"] = f"{trainer.differences[int(str(row['step']))]:.1e}"
    test: Row = {"phase": "test", "step": "", "s": f"{clock():.2f}", "reward": f"{reward:.4f}"}
    trainer.close()
    name: Row = {"setting": args.setting, "seed": args.seed}
    return [name | row for row in (*trainer.update, *rows, test)]


def clock() -> float:
    """Returns the seconds that this benchmark counts, when the GPU has finished its work."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter() - STARTED


def reward_logger(rows: list[Row]) -> type[Logger]:
    """Returns a logger that appends rewards to ``rows``."""

    class RewardLogger(Logger):
        sampled = 0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            phase = "rl" if "reward" in values else "warm_start"
            reward = values.get("reward", values.get("validation_reward"))
            self.sampled += int(values.get("sampled_tokens", 0))
            if reward is None:
                return
            row: Row = {"phase": phase, "step": step, "s": f"{clock():.2f}"}
            row |= {name: f"{values.get(name, 0.0):.2f}" for name in TIMES}
            row |= {"reward": f"{reward:.4f}", "sampled_tokens": self.sampled, "por": f"{values['por']:.3f}"}
            rows.append(row)

    return RewardLogger


class CheckedRLTrainer(RLTrainer):
    """Compares layouts at the first step, and the sampler with the trainer every 20 steps.

    Attributes:
        update: the rows of the first step's comparison.
        differences: the largest difference of log-probs, in nats, by step.
    """

    def __init__(self, config: RLRunConfig) -> None:
        super().__init__(config)
        self.update: list[Row] = []
        self.differences: dict[int, float] = {}

    def paths(self, step: int) -> list[list[TokenPath]]:
        by_task = super().paths(step)
        if step % 20 == 1:
            paths = by_task[0]
            with torch.no_grad():
                scores = tree_logprobs(self.model, [path.tokens.tolist() for path in paths])
            self.differences[step] = max(
                float(np.abs((score.cpu().numpy() - old[1:])[path.loss_mask[1:] > 0]).max())
                for score, path in zip(scores, paths, strict=True)
                if (old := path.old_logprobs) is not None
            )
        if step == 1:
            self.add_logprobs([TokenTree.from_paths(paths, self.config.data.replay) for paths in by_task])
            self.update = self.compare_layouts(by_task)
        return by_task

    @torch.no_grad()
    def score(self, trees: list[TokenTree]) -> object:
        model = self.reference.model if self.reference else self.model
        return score_trees(model, trees, self.config.data.max_tokens, self.tree_step.partitioner)

    def compare_layouts(self, by_task: list[list[TokenPath]]) -> list[Row]:
        """Returns seconds, losses and gradients of training and scoring in both layouts, packed alike."""
        data, costs = self.config.data, self.model.costs()
        layouts = {
            "tree": [TokenTree.from_paths(paths, data.replay) for paths in by_task],
            "rows": [row for paths in by_task for row in leaf_trees(paths, data.replay)],
        }
        packed = {name: pack(trees, data.max_tokens) for name, trees in layouts.items()}
        steps = {name: self.tree_step.prepare(batches) for name, batches in packed.items()}
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        losses, gradients = {}, {}
        for is_timed in (False, *[True] * ROUNDS):
            for name, trees in layouts.items():
                self.optimizers.zero_grad()
                started = clock()
                self.score(trees)
                scored = clock()
                losses[name] = self.tree_step.run(steps[name]).loss.item()
                trained = clock()
                if is_timed:
                    seconds[name, "scoring"].append(scored - started)
                    seconds[name, "training"].append(trained - scored)
                gradients[name] = torch.cat(
                    [g.flatten() for p in self.model.parameters() if (g := p.grad) is not None]
                )
                self.optimizers.zero_grad()
        operations = {
            name: sum(costs.training_flops(TreeBatch.from_trees([tree])) for tree in trees)
            for name, trees in layouts.items()
        }
        bound = operations["rows"] / operations["tree"]
        error = (gradients["tree"] - gradients["rows"]).norm() / gradients["rows"].norm()
        rows: list[Row] = []
        for work in ("training", "scoring"):
            tree_s, rows_s = (statistics.median(seconds[name, work]) for name in ("tree", "rows"))
            rows.append({"phase": "update", "step": work} | speed_up(tree_s, rows_s, bound))
        rows[0] |= {f"{name} loss": f"{loss:.9f}" for name, loss in losses.items()}
        rows[0]["gradient difference"] = f"{error.item():.1e}"
        return rows


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the reward against time, a line per setting and seed."""
    figure.set_size_inches(7, 3.6)
    panel = figure.subplots()
    runs = dict.fromkeys((row["setting"], row["seed"]) for row in rows)
    for color, (setting, seed) in enumerate(runs):
        for phase, style in (("warm_start", ":"), ("rl", "-")):
            key = (setting, seed, phase)
            chosen = [row for row in rows if (row["setting"], row["seed"], row["phase"]) == key]
            reward = [float(row["reward"]) for row in chosen]
            if phase == "rl":  # the mean of the last ten steps
                parts = [reward[max(0, i - 9) : i + 1] for i in range(len(reward))]
                reward = [sum(part) / len(part) for part in parts]
            label = f"{setting}, seed {seed}" if phase == "rl" else None
            panel.plot([float(row["s"]) for row in chosen], reward, style, color=f"C{color}", label=label)
    panel.axhline(0.9, color="0.8", zorder=0)
    panel.set(xlabel="seconds (dotted: warm start)", ylabel="mean reward on new tasks", ylim=(0, 1))
    panel.legend()
