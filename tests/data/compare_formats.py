"""Writes all real rollouts in every format, and compares what the readers return with the own schema.

python tests/data/compare_formats.py

Trajectories are whole samples, in the tokens of Qwen. Prints N_flat and N_tree of each file and format.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import formats
from tests.support.datasets import REAL_DATA, sample_reader
from tests.support.formats import Task, write_dataset, write_document, write_lines, write_parquet
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Groups = list[tuple[str, list[TokenPath]]]

Write = Callable[[Path, Any], str]
# Per row: what the format can express of the tasks, how to convert them, and how to write the result.
FORMATS: dict[str, tuple[Callable[[list[Task]], list[Task]], Callable[[list[Task]], Any], Write]] = {
    "openai_chat": (formats.own, formats.openai_chat, write_lines),
    "openai_responses": (formats.own, formats.openai_responses, write_lines),
    "anthropic": (formats.own, formats.anthropic, write_document),
    "sharegpt": (formats.only_text_or_calls, formats.sharegpt, write_document),
    "tree": (formats.own, formats.message_trees, write_lines),
    "tau_bench": (formats.without_tools, formats.tau_bench, write_document),
    "messages as text in Parquet": (formats.own, formats.chat_text, write_parquet),
    "messages as text in a folder": (formats.own, formats.chat_text, write_dataset),
}
TOKEN_FORMATS: dict[str, tuple[Callable[[Groups], Any], Write]] = {
    "token_rows": (formats.token_rows, write_lines),
    "token_rows in Parquet": (formats.token_rows, write_parquet),
    "tree of tokens": (formats.token_trees, write_lines),
}


def main() -> int:
    vocabulary = REAL_DATA / "qwen.tiktoken.gz"
    if not vocabulary.exists():
        raise SystemExit(f"{vocabulary}: no such file; this script needs the rollouts of {REAL_DATA}")
    tokenizer = TreeTokenizer.from_tiktoken(vocabulary)
    failed = 0
    for name in ("tau_airline", "toolbench_dfsdt", "webdancer_think"):
        tasks = formats.real_tasks(name)
        with tempfile.TemporaryDirectory() as folder:
            files: dict[str, tuple[str, Groups]] = {}
            expected = {}
            for label, (reduce, convert, write) in FORMATS.items():
                if reduce not in expected:
                    own = write_lines(Path(folder) / "own", reduce(tasks))
                    expected[reduce] = read(own, tokenizer)
                files[label] = write(Path(folder) / label, convert(tasks)), expected[reduce]
            if name == "tau_airline":  # its tasks share tools and policy, as a file of tau2-bench does
                files["tau2_bench"] = (
                    write_document(Path(folder) / "tau2", formats.tau2_bench(tasks)),
                    expected[formats.own],
                )
            for label, (convert_tokens, write) in TOKEN_FORMATS.items():
                groups = expected[formats.own]
                files[label] = write(Path(folder) / label, convert_tokens(groups)), groups
            failed += sum(not compare(name, label, *files[label], tokenizer) for label in files)
    return failed


def read(file: str, tokenizer: TreeTokenizer) -> Groups:
    reader = sample_reader(file, tokenizer, sample={"turns": "whole"})
    return [(group.id, reader.paths(group)) for group in reader.files.groups()]


def compare(name: str, label: str, file: str, expected: Groups, tokenizer: TreeTokenizer) -> bool:
    """Prints a line about a file, and returns whether its paths are the expected ones."""
    start = time.process_time()
    records = sum(1 for _ in read_records(file))
    seconds = time.process_time() - start
    groups = read(file, tokenizer)
    stats = [TokenTree.from_paths(paths).stats for _, paths in groups]
    n_flat, n_tree = sum(s.n_flat for s in stats), sum(s.n_tree for s in stats)
    is_equal = contents(groups) == contents(expected)
    result = "equal" if is_equal else "DIFFERENT"
    print(f"{name:16} {label:29} {records:5} records {n_flat:9,} {n_tree:9,} {result}, {seconds:.2f} s")
    return is_equal


def contents(groups: Groups) -> dict[str, list[tuple[bytes, bytes]]]:
    """Returns the tokens and masks of each group, whatever the order of groups and of samples."""
    return {
        name: sorted((path.tokens.tobytes(), path.loss_mask.tobytes()) for path in paths)
        for name, paths in groups
    }


if __name__ == "__main__":
    raise SystemExit(main())
