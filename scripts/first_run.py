"""Trains the demo, says what rows would cost, lets the model answer one of its tasks, and draws a page.

./scripts/train.sh starts it without arguments. It is one process, which gets all signals.
"""

import csv
import shutil
import sys
from pathlib import Path

from titan_tree.cli import main
from titan_tree.cli.run_process import exit_process
from titan_tree.run.config import load_config

CONFIG = Path(__file__).resolve().parents[1] / "train_configs" / "demo.toml"


def first_run() -> int:
    """Returns the exit status of the first command that fails, or 0."""
    print("Training a tiny Qwen3 on the bundled sample takes about a minute. Loading torch ...", flush=True)
    folder = load_config(CONFIG).folder
    page = f"{folder}/xray.html"
    status = main(["train", str(CONFIG)])
    if not status:
        print(cost_of_rows(f"{folder}/metrics.csv"))
    status = status or main(["chat", folder, "--task"])
    status = status or main(["xray", folder, "--out", page])
    if not status:
        print(f"picture of the loss, and of the trees: open {page} in a browser")
        print("next: titan-tree inspect YOUR_ROLLOUTS.jsonl, and docs/quickstart.md trains on them")
        program = "titan-tree" if shutil.which("titan-tree") else f"{sys.executable} -m titan_tree"
        print(f"      {program} chat {folder} talks to the model")
    return status


def cost_of_rows(metrics: str) -> str:
    """Returns how many tokens the steps of a run computed, and how many without trees."""
    with open(metrics, newline="") as file:
        steps = list(csv.DictReader(file))
    names = "executed_tokens", "leaf_tokens", "logical_tokens"
    trees, leaves, samples = (sum(int(float(step[name])) for step in steps) for name in names)
    return (
        f"The same steps compute {trees:,} tokens on trees, {leaves:,} on one row per leaf path "
        f"({leaves / trees:.1f}x), and {samples:,} on one row per model call ({samples / trees:.1f}x)."
    )


if __name__ == "__main__":
    exit_process(first_run)
