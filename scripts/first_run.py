"""Trains the demo, lets its model answer one of its own tasks, and draws the run's page.

./scripts/train.sh starts it without arguments. It is one process, which gets all signals.
"""

from pathlib import Path

from titan_tree.cli import main
from titan_tree.cli.run_process import exit_process
from titan_tree.run.config import load_config

CONFIG = Path(__file__).resolve().parents[1] / "train_configs" / "demo.toml"


def first_run() -> int:
    """Returns the exit status of the first command that fails, or 0."""
    folder = load_config(CONFIG).folder
    page = f"{folder}/xray.html"
    status = main(["train", str(CONFIG)])
    status = status or main(["chat", folder, "--task"])
    status = status or main(["xray", folder, "--out", page])
    if not status:
        print(f"picture of the loss, and of the trees: open {page} in a browser")
        print("next: titan-tree inspect YOUR_ROLLOUTS.jsonl, and docs/quickstart.md trains on them")
        print(f"      titan-tree chat {folder} talks to the model (activate .venv first)")
    return status


if __name__ == "__main__":
    exit_process(first_run)
