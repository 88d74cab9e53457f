"""The text of some commands is that of the files in tests/golden, letter by letter.

python -m tests.update     # writes the files anew
"""

import contextlib
import io
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.support.cases import for_each
from titan_tree import cli

GOLDEN = Path(__file__).parents[1] / "golden"
COMMANDS = {  # file of tests/golden -> command
    "help.txt": "--help",
    "config.txt": "config optimizer.lr",
    "inspect.txt": "inspect demo",
    "report.txt": "inspect demo --report shop-0",
}
ERRORS = "errors.txt"
MISTAKES = """
    inspekt demo
    inspect
    inspect missing.jsonl
    inspect empty.jsonl
    inspect broken.jsonl
    inspect typo.jsonl
    inspect mask.jsonl
    inspect token.jsonl
    inspect probability.jsonl
    inspect nan.jsonl
    inspect role.jsonl
    inspect question.jsonl
    inspect demo --limt 3
    inspect demo --limit many
    inspect demo --report shop-99
    inspect demo --template chatmi
    inspect demo --tokenizer missing
    config optimizer.learning_rate
    config --model qwen3:0.6B
    ingest mask.jsonl
    score question.jsonl mask.jsonl --model missing
    score question.jsonl scored.jsonl --model missing
    export missing exported
    certify section.toml
    certify table.toml
    certify demo training.steps
    certify demo training.step=3
    certify demo training.steps=many
    certify demo training.steps=-1
    certify demo parallel.sequence_parallel=3
"""
FILES = {
    "empty.jsonl": "",
    "broken.jsonl": '{"tokens": [1, 2]}\n{"tokens": [1, 2\n',
    "typo.jsonl": '{"tokns": [1, 2]}',
    "mask.jsonl": '{"tokens": [1, 2, 3], "loss_mask": [1, 1]}',
    "token.jsonl": '{"tokens": [1, -2, 3]}',
    "probability.jsonl": '{"tokens": [1, 2], "old_logprobs": [0, 0.5]}',
    "nan.jsonl": '{"tokens": [1, 2], "advantage": NaN}',
    "role.jsonl": '{"messages": [{"role": "usr", "content": "Hi"}]}',
    "question.jsonl": '{"messages": [{"role": "user", "content": "Hi"}]}',
    "section.toml": "[training\nsteps = 3\n",
    "table.toml": "[trainnig]\nsteps = 3\n",
}


def printed(command: str) -> str:
    """Returns what a command prints on a terminal of 100 columns, output before errors."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        cli.main(shlex.split(command))
    return out.getvalue() + err.getvalue()


def errors() -> Iterator[str]:
    """Yields a mistake and its message, once for each mistake, in a folder with ``FILES``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, content in FILES.items():
            Path(name).write_text(content)
        for command in filter(None, map(str.strip, MISTAKES.splitlines())):
            yield f"$ titan-tree {command}\n{printed(command)}"


@for_each(("file", "command"), COMMANDS.items())
def test_a_command_prints_its_golden_file(file: str, command: str) -> None:
    assert printed(command) == (GOLDEN / file).read_text(encoding="utf-8")


def test_typical_mistakes_have_their_golden_messages_of_one_line() -> None:
    found = list(errors())
    assert all(each.count("\n") == 2 for each in found)
    assert "\n".join(found) == (GOLDEN / ERRORS).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        (GOLDEN / name).write_text(printed(command), encoding="utf-8")
    (GOLDEN / ERRORS).write_text("\n".join(errors()), encoding="utf-8")
