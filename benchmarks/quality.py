"""Trains on all paths of each tree, and on the longest one alone, and compares what the models can do.

python -m benchmarks quality                                                  # on one GPU, some minutes
python -m benchmarks quality --environment desk --hidden-size 128 --layers 2 --steps 300 --groups 16 \\
    --train-tasks 512 --max-tokens 512 --lr 3e-3                          # on a CPU

This asks the question of Tree Training (arXiv:2511.00413, section 4.7) about a task that a small model learns
from random weights in minutes: an environment of titan_tree/rl. The paper's benchmark, Terminal-Bench, needs
more than one GPU.

A task has four demonstrations. They share the question and often the first turns, so they form a tree. They
contain mistakes: a perfect copy of the demonstrator earns their mean reward, the column "demonstrations".
"all" trains on the four of them, and "longest" on the longest one (data.paths). The longest of four is right
less often than the mean of them, 0.43 instead of 0.54 in "search", because the right ones are alike. Both
start from the same weights, and take the same number of optimizer steps on the same tasks in the same order.
"all" therefore computes more tokens ("k tokens") in more time ("train s").

Columns: "reward" is the mean over fresh tasks, each sampled once at temperature 1, and "s.e." its standard
error. "greedy reward" takes the likeliest tokens instead. "NLL" is the loss per token, in nats, on all
demonstrations of the fresh tasks. In rows of the seed "mean", these are means over the seeds, and "s.e." is
the standard error of that mean. A seed decides the weights and the order of the tasks.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import torch

from benchmarks.timers import wall_s
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.settings import DataConfig, ValidationConfig
from titan_tree.distributed.settings import LRSchedulerConfig, OptimizerConfig
from titan_tree.models.decoder import Decoder
from titan_tree.models.settings import ModelConfig
from titan_tree.rl.environment import ENVIRONMENTS, Demonstrator, Environment
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.rollouts import Chat, play, rewards
from titan_tree.run.config import Config
from titan_tree.run.settings import CheckpointConfig, MetricsConfig, TrainingConfig
from titan_tree.run.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("environment", "model", "paths", "seed")
RATIOS: tuple[str, ...] = ()  # rewards of few seeds vary by more than a guard allows
QUICK = (
    "--environment", "desk", "--hidden-size", "64", "--layers", "1", "--steps", "4", "--groups", "2",
    "--train-tasks", "8", "--tasks", "4", "--seeds", "2", "--max-tokens", "512",
)  # fmt: skip
Choice = Literal["all", "longest"]  # data.paths
PATHS: tuple[Choice, ...] = ("all", "longest")
DIGITS = {"reward": 4, "s.e.": 4, "greedy reward": 4, "NLL": 4, "train s": 1, "k tokens": 1}
TOKENIZER = TreeTokenizer.byte_level()
MAX_TURN_TOKENS, MAX_ROLLOUT_TOKENS = 20, 2048
GREEDY = 1e3  # factor of logits that makes sampling take the likeliest token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--environment", choices=("search", "desk"), default="search", help="(default: %(default)s)")
    for option, default, meaning in (
        ("--hidden-size", 512, "hidden size of the model, a multiple of 64"),
        ("--layers", 6, "layers of the model"),
        ("--steps", 1000, "optimizer steps"),
        ("--groups", 32, "tasks per step"),
        ("--train-tasks", 4096, "tasks with demonstrations"),
        ("--tasks", 256, "fresh tasks"),
        ("--seeds", 3, "runs of each kind"),
        ("--max-tokens", 32_768, "data.max_tokens"),
    ):
        add(option, type=int, default=default, help=f"{meaning} (default: {default})")
    add("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per seed and choice of paths, and the mean over seeds of each choice."""
    environment, rows = ENVIRONMENTS[args.environment](), []
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrator)
    tasks = [f"fresh/{task}" for task in range(args.tasks)]
    with TemporaryDirectory() as folder:
        files = Path(folder) / "train.jsonl", Path(folder) / "fresh.jsonl"
        write_demonstrations(environment, files[0], [f"train/{task}" for task in range(args.train_tasks)])
        write_demonstrations(environment, files[1], tasks)
        row: Row = {
            "environment": args.environment,
            "model": f"{args.layers} x {args.hidden_size}",
            "steps": args.steps,
            "groups": args.groups,
            "demonstrations": round(fmean(copied(environment, task) for task in tasks), 4),
        }
        for seed, paths in product(range(args.seeds), PATHS):
            trainer = Trainer(configuration(args, Path(folder), paths, seed))
            rows.append(row | {"paths": paths, "seed": seed} | measure(trainer, environment, tasks))
            trainer.close()
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            yield rows[-1]
    for paths in PATHS:
        yield mean([row for row in rows if row["paths"] == paths])


def write_demonstrations(environment: Demonstrator, file: Path, tasks: Sequence[str]) -> None:
    """Writes the demonstrations of tasks as token ids, a line per task."""
    with file.open("w") as lines:
        for task in tasks:
            paths = [
                path
                for messages in environment.demonstrations(random.Random(task))
                for path in TOKENIZER.samples(messages, turns="whole")
            ]
            trajectories = [{"tokens": p.tokens.tolist(), "loss_mask": p.loss_mask.tolist()} for p in paths]
            lines.write(json.dumps({"id": task, "trajectories": trajectories}) + "\n")


def configuration(args: argparse.Namespace, folder: Path, paths: Choice, seed: int) -> Config:
    """Returns the configuration of a training run on the demonstrations in ``folder``."""
    heads = args.hidden_size // 64
    sizes = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": 3 * args.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "vocab_size": TOKENIZER.vocab_size,
        "rope_theta": 1000.0,  # for short contexts
    }
    return Config(
        folder=str(folder / paths),
        model=ModelConfig(flavor="debug", overrides=sizes),
        data=DataConfig(
            files=str(folder / "train.jsonl"),
            paths=paths,
            seed=seed,
            max_tokens=args.max_tokens,
            global_batch_groups=args.groups,
            workers=0,  # token ids need none
        ),
        loss=LossConfig(name="sft", reduction="token_mean"),
        optimizer=OptimizerConfig(lr=args.lr),
        lr_scheduler=LRSchedulerConfig(
            warmup_steps=min(20, args.steps // 4), decay_type="linear", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            steps=args.steps,
            seed=seed,
            dtype="bfloat16" if default_device().type == "cuda" else "float32",
        ),
        validation=ValidationConfig(files=str(folder / "fresh.jsonl"), interval=args.steps),
        checkpoint=CheckpointConfig(interval=0),
        metrics=MetricsConfig(loggers=["csv"]),
    )


def measure(trainer: Trainer, environment: Environment, tasks: Sequence[str]) -> Row:
    """Trains a model, and returns what it earns on fresh tasks. The likeliest tokens are sampled last."""
    seconds = wall_s(trainer.train)
    earned = sampled_rewards(trainer, environment, tasks)
    values = {
        "reward": fmean(earned),
        "s.e.": standard_error(earned),
        "NLL": trainer.validate(trainer.num_steps)["loss"],
        "train s": seconds,
        "k tokens": trainer.counts.executed_tokens / 1e3,
    }
    assert isinstance(trainer.model, Decoder)
    with torch.no_grad():
        trainer.model.norm.weight.mul_(GREEDY)
    values["greedy reward"] = fmean(sampled_rewards(trainer, environment, tasks))
    return {name: round(values[name], DIGITS[name]) for name in DIGITS}


def sampled_rewards(trainer: Trainer, environment: Environment, tasks: Sequence[str]) -> list[float]:
    """Returns the reward of a sampled rollout for each task. The name of a task is its seed."""
    chat = Chat(TOKENIZER)
    rollouts = [r for task in tasks for r in chat.start(environment.episode(random.Random(task)), 1)]
    sampler = default_sampler(trainer.model)
    limits = {"max_turn_tokens": MAX_TURN_TOKENS, "max_rollout_tokens": MAX_ROLLOUT_TOKENS}
    play(rollouts, sampler, chat, tasks, **limits)
    return rewards([rollouts])


def copied(environment: Environment, task: str) -> float:
    """Returns the mean reward of the demonstrations of a task."""
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrator)
    episode = environment.episode(random.Random(task))
    turns = [
        [message["content"] for message in messages if message["role"] == "assistant"]
        for messages in environment.demonstrations(random.Random(task))
    ]
    return fmean(episode.reply(said).reward for said in turns)


def mean(rows: Sequence[Row]) -> Row:
    """Returns the mean over the seeds of one choice of paths."""
    values = {name: [float(str(row[name])) for row in rows] for name in DIGITS}
    means = {name: fmean(numbers) for name, numbers in values.items()}
    means["s.e."] = standard_error(values["reward"])
    return rows[0] | {"seed": "mean"} | {name: round(means[name], DIGITS[name]) for name in DIGITS}


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of independent values; 0 for a single one."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws rewards and NLL, a row of panels per environment: a point per seed, and a line at their mean."""
    environments = list(dict.fromkeys(row["environment"] for row in rows))
    figure.set_size_inches(9, 3.2 * len(environments))
    grid = figure.subplots(len(environments), 3, squeeze=False)
    for environment, panels in zip(environments, grid, strict=True):
        own = [row for row in rows if row["environment"] == environment]
        for panel, name in zip(panels, ("reward", "greedy reward", "NLL"), strict=True):
            for x, paths in enumerate(PATHS):
                values = {row["seed"]: float(row[name]) for row in own if row["paths"] == paths}
                panel.hlines(values.pop("mean"), x - 0.2, x + 0.2, color=f"C{x}")
                panel.plot([x] * len(values), list(values.values()), "o", color=f"C{x}")
            if name != "NLL":
                copied = float(own[0]["demonstrations"])
                panel.axhline(copied, color="0.7", linestyle=":", label="demonstrations")
                panel.legend(fontsize=8)
            panel.set(
                title=f"{environment}: {name}", xlim=(-0.5, 1.5), xticks=range(len(PATHS)), xticklabels=PATHS
            )
            panel.grid(alpha=0.3)
