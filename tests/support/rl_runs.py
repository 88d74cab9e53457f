"""Short runs of reinforcement learning with a tiny model and an environment that often rewards it."""

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_run import MEASURED
from titan_tree.config.toml import load_tables
from titan_tree.rl.environment import DeskEpisode, Reply
from titan_tree.rl.rollouts import Rollout
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer

DEMO = Path(__file__).parents[2] / "train_configs" / "rl_demo.toml"
TINY = (
    "model.overrides.hidden_size=32",
    "model.overrides.head_dim=16",
    "data.global_batch_groups=2",
    "rl.rollouts=3",
    "rl.branches=3",
    "warm_start.steps=0",
    "lr_scheduler.warmup_steps=0",
    "training.steps=4",
    "checkpoint.interval=2",
    "metrics.loggers=[csv]",
)


class LettersEpisode(DeskEpisode):
    """Two turns, whatever the model says. The reward is the share of small letters."""

    def reply(self, turns: Sequence[str]) -> Reply:
        text = "".join(turns)
        if len(turns) == 1:
            return super().reply(["?caps"])
        return Reply(None, sum(map(str.islower, text)) / max(len(text), 1))


class Letters:
    """An environment that rewards some of what a model with random weights says."""

    def episode(self, draw: random.Random) -> LettersEpisode:
        return LettersEpisode(draw)


def tiny(folder: Path, *overrides: str) -> RLRunConfig:
    return load_tables(RLRunConfig, DEMO, [f"folder={folder}", *TINY, *overrides])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        measured = {*MEASURED, "sampling_s", "scoring_s"}
        return [{k: v for k, v in row.items() if k not in measured} for row in csv.DictReader(file)]


def seeds_of(name: str, rollouts: Sequence[Rollout]) -> list[str]:
    return [f"{name}/{i}" for i in range(len(rollouts))]


def with_short_turns(trainer: RLTrainer) -> RLTrainer:
    """Ends turns after at most five tokens, because a model with random weights would hardly end them."""
    sample = trainer.sampler.sample

    def shorter(contexts: Any, limits: Any, stops: Any, seeds: Any) -> Any:
        turns = sample(contexts, limits, stops, seeds)
        for (tokens, logprobs, *_), seed in zip(turns, seeds, strict=True):
            end = random.Random(seed).randint(1, 5)
            if len(tokens) > end:
                tokens[end:], logprobs[end:] = stops[:1], [-5.0]
        return turns

    trainer.sampler.sample = shorter  # type: ignore[method-assign]
    return trainer
