"""A small data file, and a configuration that trains on it in seconds."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_tree.run.config import Config, load_config
from titan_tree.run.trainer import Trainer

VOCAB = 64
# Options for each model. The hybrid models have one layer of either kind instead of three and one.
HYBRID = {"model__overrides__num_hidden_layers": 2, "model__overrides__full_attention_interval": 2}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {"model__name": "qwen3"},
    "qwen3_5": {"model__name": "qwen3_5", **HYBRID},
    "qwen3_moe": {"model__name": "qwen3_moe"},
    "qwen3_5_moe": {"model__name": "qwen3_5_moe", **HYBRID},
}
# Columns that differ between equal runs. "idle_share" exists only on several ranks, the last two on a GPU.
MEASURED = (
    *("step_s", "leaf_tokens_per_s", "executed_tokens_per_s", "idle_share"),
    *("passes_share", "optimizer_share", "exchange_share", "host_share"),
    *("mfu", "peak_memory_gib"),
)


def write_groups(path: Path, num_groups: int = 9, seed: int = 0) -> Path:
    """Writes groups of token ids that branch twice, with various weights and lengths. Group 4 has no loss."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        # Each token has only two possible successors, so the model can learn them.
        start = draw.randrange(VOCAB)
        return [(start + 7 * i + draw.randrange(2)) % VOCAB for i in range(draw.randint(low, high))]

    with path.open("w") as file:
        for group in range(num_groups):
            prompt = tokens(8, 16)
            for _ in range(draw.randint(1, 3)):
                turn = prompt + tokens(3, 9)
                for _ in range(draw.randint(1, 3)):
                    sample = turn + tokens(1, 9)
                    record = {
                        "group_id": f"g{group}",
                        "tokens": sample,
                        "loss_mask": [0] * len(prompt) + [int(group != 4)] * (len(sample) - len(prompt)),
                        "weight": draw.choice([0.5, 1.0, 2.0]),
                    }
                    file.write(json.dumps(record) + "\n")
    return path


def write_config(folder: Path) -> Path:
    """Writes a TOML file for a run in ``folder``/run on data in ``folder``."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_groups(data)
    path = folder / "config.toml"
    if path.exists():  # another rank may be reading the file
        return path
    path.write_text(
        f"""
folder = "{folder}/run"
[model]
flavor = "debug"
overrides = {{ vocab_size = {VOCAB}, hidden_size = 32, head_dim = 16 }}
[data]
files = "{data}"
global_batch_groups = 3
max_tokens = 160
shuffle_buffer = 4
[optimizer]
lr = 1e-3
[training]
steps = 4
dtype = "float32"
[checkpoint]
interval = 0
[metrics]
loggers = ["console", "csv"]
"""
    )
    return path


def tiny_config(folder: Path, **options: Any) -> Config:
    """Returns a configuration; options override keys: ``training__steps=3`` sets training.steps."""
    folder.mkdir(exist_ok=True, parents=True)
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in options.items()]
    return load_config(write_config(folder), overrides)


def train(config: Config) -> Trainer:
    """Trains from start to end in this process."""
    try:
        trainer = Trainer(config)
        trainer.train()
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    trainer.close()
    return trainer


def read_metrics(config: Config) -> list[dict[str, str]]:
    """Returns the rows of metrics.csv as text, without the columns in ``MEASURED``."""
    with (Path(config.folder) / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]
