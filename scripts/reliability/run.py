"""Makes runs fail many times, and counts the trials in which a user would have lost something.

    python scripts/reliability/run.py kills --trials 100 --csv reliability.csv

In most campaigns, a trial trains a tiny model, makes the run fail at a random moment, starts the same command
again and compares the logged losses with those of an uninterrupted run, digit for digit. The module docstring
of each campaign says what it does. A trial's number seeds its random choices: ``--first N --trials 1``
repeats trial N. The exit status is 1 if anything was lost or a traceback appeared. The folders of such trials
are kept.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from training import ROOT, LostError

# One module per campaign. Each defines TRIALS, KINDS, ``prepare(work)`` and ``trial(...)``.
CAMPAIGNS = (
    "kills",
    "damage",
    "flips",
    "signals",
    "starts",
    "ranks",
    "differences",
    "lines",
    "templates",
    "combined",
    "ragged",
    "costs",
    "servers",
)
AT_ONCE = 2  # trials that run in parallel


@dataclass
class Outcome:
    """The result of one trial.

    Attributes:
        lost: what was lost or not reported; empty if nothing was.
        note: when and how the run failed, or what was measured.
    """

    number: int
    kind: str
    lost: str
    note: str


@dataclass
class Campaign:
    """A campaign, with the name of its module, and the folder in which its trials run."""

    name: str
    work: Path

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    def run(self, number: int) -> Outcome:
        """Runs the trial of a number."""
        kinds = self.module.KINDS
        kind, folder = kinds[number % len(kinds)], self.work / f"trial-{number}"
        draw = random.Random(f"{self.name}/{number}")
        lost = note = ""
        folder.mkdir()
        try:
            note = self.module.trial(kind, draw, self.work, folder)
            shutil.rmtree(folder)
        except LostError as error:
            lost = str(error)
        except Exception:
            lost = traceback.format_exc()
        return Outcome(number, kind, lost, note)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--trials", type=int, help="number of trials (default: as in docs/trust.md)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--csv", type=Path, help="append a row per trial to this file")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # the order of sums depends on it
    os.chdir(ROOT)
    campaign = Campaign(args.campaign, Path(tempfile.mkdtemp(prefix=f"{args.campaign}-")))
    campaign.module.prepare(campaign.work)
    numbers = range(args.first, args.first + (args.trials or campaign.module.TRIALS))
    outcomes = []
    with multiprocessing.get_context("fork").Pool(AT_ONCE) as pool:
        for outcome in pool.imap(campaign.run, numbers):
            print(f"{outcome.number:4}  {outcome.kind}  {outcome.note}  {outcome.lost or 'ok'}", flush=True)
            outcomes.append(outcome)
    _append_csv(args.csv, args.campaign, outcomes)
    _print_summary(outcomes)
    if any(outcome.lost for outcome in outcomes):
        print(f"folders of the trials that lost something: {campaign.work}")
        return 1
    shutil.rmtree(campaign.work)
    return 0


def _print_summary(outcomes: Sequence[Outcome]) -> None:
    tried = Counter(outcome.kind for outcome in outcomes)
    lost = Counter(outcome.kind for outcome in outcomes if outcome.lost)
    width = max(map(len, tried))
    print(f"\n{'kind':{width}}  tried  recovered  lost")
    for kind, count in tried.items():
        print(f"{kind:{width}}  {count:5}  {count - lost[kind]:9}  {lost[kind]:4}")


def _append_csv(path: Path | None, campaign: str, outcomes: Sequence[Outcome]) -> None:
    if path is None:
        return
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["date", "commit", "campaign", "trial", "kind", "recovered", "lost", "note"])
        for outcome in outcomes:
            row = [time.strftime("%Y-%m-%d"), commit, campaign, outcome.number, outcome.kind]
            writer.writerow([*row, int(not outcome.lost), outcome.lost, outcome.note])


if __name__ == "__main__":
    sys.exit(main())
