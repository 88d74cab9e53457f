"""Compares resumed runs with uninterrupted ones, digit for digit.

    python tests/data/compare_resumes.py

The runs train on the bundled sample, from its file and from a token store, on 1 and 2 ranks. Each is stopped
after step 3 and resumed with 0, 1 or 3 worker processes. Another number of workers made the first steps.
"""

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEASURED = (
    *("step_s", "leaf_tokens_per_s", "executed_tokens_per_s", "idle_share"),
    *("passes_share", "optimizer_share", "exchange_share", "host_share"),
)
SETTINGS = [
    "lr_scheduler.warmup_steps=0",
    "lr_scheduler.min_lr_factor=1.0",
    "checkpoint.interval=3",
    "metrics.loggers=[csv]",
    "model.overrides.num_hidden_layers=1",
    "data.shuffle_buffer=5",
]


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = folder / "demo.store"
        run("titan_tree", "ingest", "demo", str(store), "--tokenizer", "byte")
        for source, files in (("file", "demo"), ("token store", str(store))):
            for ranks in (1, 2):
                name = folder / f"{source[0]}{ranks}"
                expected = train(name / "whole", files, ranks, steps=6, workers=0)
                for workers in (0, 1, 3):
                    train(name / str(workers), files, ranks, steps=3, workers=3 - workers)
                    resumed = train(name / str(workers), files, ranks, steps=6, workers=workers)
                    equal = resumed == expected
                    failed += not equal
                    print(
                        f"{source}, {ranks} ranks, {workers} workers: {'equal' if equal else 'DIFFERENT'}",
                        flush=True,
                    )
    return failed


def train(folder: Path, files: str, ranks: int, steps: int, workers: int) -> list[dict[str, str]]:
    """Trains in ``folder`` and returns the rows of metrics.csv without measured times."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m"]
    config = ["train", "train_configs/demo.toml", f"folder={folder}", f"data.files={files}"]
    length = [f"training.steps={steps}", f"data.workers={workers}"]
    run(*(launcher if ranks > 1 else []), "titan_tree", *config, *SETTINGS, *length)
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]


def run(module: str, *arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


if __name__ == "__main__":
    sys.exit(main())
