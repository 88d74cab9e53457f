"""docs/configuration.md is what the generator makes from the tables."""

import subprocess
import sys

from tests.docs.configuration_page import PAGE

PRINT_PAGE = "import sys; from tests.docs.configuration_page import page; sys.stdout.write(page())"


def test_the_page_of_the_configuration_is_current() -> None:
    # A process of its own, because other tests register names.
    made = subprocess.run([sys.executable, "-c", PRINT_PAGE], cwd=PAGE.parents[1], capture_output=True)
    assert made.returncode == 0, made.stderr.decode()
    assert made.stdout.decode() == PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.docs.configuration_page"
    )
