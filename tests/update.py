"""Writes all text that tests compare with what the program prints, after a change of it that is meant.

    python -m tests.update             # tests/golden, docs/configuration.md, and outputs in the documentation
    python -m tests.update --curves    # also the loss curves of tests/run/curves

``git diff`` then shows what has changed.
"""

import argparse
import subprocess
import sys

from tests.support.page_runner import PAGES, ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.update", description="Writes generated text anew.")
    parser.add_argument("--curves", action="store_true", help="also train the demos and record their losses")
    args = parser.parse_args()
    pages = [str(page) for page in PAGES if page.parent.name != "log"]  # a log describes the code of its day
    commands = [
        ["tests.cli.test_golden"],
        ["tests.docs.configuration_page"],
        ["tests.docs.dense_step"],
        ["tests.docs.templates_table"],
        ["tests.docs.recipes_table"],
        ["tests.docs.update_outputs", *pages],
        *([["tests.run.test_curves"]] if args.curves else []),
    ]
    for command in commands:  # in a process each, because examples of the documentation register names
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
