"""Mutates lines of data files: each one must be read correctly, or be refused in one line with file and line.

    python -m tests.support.mutated_lines --lines 100000 --seed 0

Records come from the bundled sample, from the real rollouts if they are present, and from token ids with
every field. A mutation drops, renames, repeats, retypes, nests or swaps values, or damages the text. A line
that is read is compared with a plain interpretation of ``json.loads``.
"""

from __future__ import annotations

import argparse
import base64
import copy
import gzip
import io
import json
import math
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.datasets import REAL_DATA, sample_reader
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data import demo
from titan_tree.data.data_files import group_records
from titan_tree.data.readers import Source
from titan_tree.data.readers.containers import json_objects
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

NAME = "rollouts.jsonl"
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
BOOKKEEPING = {"task", "source", "search", "answer", "metadata"}  # in the records below
READ = {"messages", "tools", "tokens", "input_ids", "trajectories", "loss_mask", "routed_experts", "id"} | {
    *("group_id", "rollout_id", "reward", "weight", "advantage", "temperature", "policy_version"),
    *LOGPROBS,
    *(f"shifted_{name}" for name in LOGPROBS),
}
# In place of any other value:
SCALARS = (None, True, False, 0, 1, -1, 0.5, 1e308, -1e-320, 2**31, 2**63, 2**64, 10**310)
TEXTS = ("", "1", "NaN", "\x1b[2J\x00", "\u202e", "\r\n", "🙂", "\x85\u2028", "a" * 5000)
JSON_TEXTS = (
    "{",
    "[" * 1100,
    "[" * 500 + "]" * 500,
    "9" * 4400,
    f'{{"a": {"9" * 4400}}}',
    '{"a": 1, "a": 2}',
)
LISTS = ([], [[]], [{}], [1, "2"], [None], [True], [1.5], [[[[[[1]]]]]], [{"type": "text", "text": "x"}])
OBJECTS = ({}, {"a": 1}, {"type": "text", "text": "x"})
VALUES: tuple[Any, ...] = (*SCALARS, *TEXTS, *JSON_TEXTS, *LISTS, *OBJECTS)

# Spliced into the text:
NUMBERS = (b"NaN", b"-Infinity", b"1e999", b"9" * 310, b"9" * 4400, b"true", b"null")
BYTES = (b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[31m", b"\n", b"\r")
ESCAPES = (rb"\ud800", rb"\udc00", rb"\ud83d\ude42", rb"\u0000", b"\\")
MARKS = (b'"', b"'", b"//", b"}", b"]", b",", b"[" * 1100, b"[" * 500 + b"]" * 500, b'"id": 1, "id": 2,')
SNIPPETS = (*NUMBERS, *BYTES, *ESCAPES, *MARKS)


def originals() -> list[dict[str, Any]]:
    """Returns short records of every kind."""
    draw = random.Random(0)
    records: list[dict[str, Any]] = []
    files = sorted(REAL_DATA.glob("*.jsonl.gz")) if REAL_DATA.is_dir() else []
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()[:12]]
    for task in [*map(json.loads, lines), *list(demo.records())[:12]]:
        trajectories = [_shortened(trajectory, draw) for trajectory in task["trajectories"][:2]]
        tools = {"tools": task["tools"][:1]} if task.get("tools") else {}
        records.append(task | tools | {"trajectories": trajectories})
        records.append({"messages": trajectories[0]["messages"], "group_id": task["id"], "reward": 1} | tools)
    experts = io.BytesIO()
    np.save(experts, np.arange(12, dtype=np.int16).reshape(3, 2, 2))
    encoded = base64.b64encode(experts.getvalue()).decode()
    for i in range(12):
        size = draw.randint(3, 6)
        numbers = [
            [draw.choice((None, -draw.random())), *(-draw.random() for _ in range(1, size))] for _ in "abc"
        ]
        records.append(
            {
                "tokens": [draw.randrange(256) for _ in range(size)],
                "loss_mask": [draw.randrange(2) for _ in range(size)],
            }
            | dict(zip(LOGPROBS if i % 2 else ("shifted_old_logprobs",), numbers, strict=False))
            | ({"shifted_old_logprobs": numbers[0][1:]} if i % 2 == 0 else {})
            | {"advantage": draw.choice((0.5, [0.5] * size)), "policy_version": draw.choice((3, [3] * size))}
            | {"temperature": 0.7, "weight": 2, "id": f"t{i}", "rollout_id": "r", "metadata": {"a": [1]}}
            | ({"routed_experts": encoded} if i % 3 == 0 else {})
        )
    return records


def _shortened(trajectory: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    messages = copy.deepcopy(trajectory["messages"][: draw.randint(3, 6)])
    for message in messages:
        message["content"] = (message.get("content") or "")[:40]
    return trajectory | {"messages": messages}


def mutated(record: dict[str, Any], draw: random.Random) -> bytes:
    """Returns the record with one to three mutations, as one line of text."""
    record = copy.deepcopy(record)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.7:
            _mutate_value(record, draw)
    text = json.dumps(record, ensure_ascii=draw.random() < 0.5).encode()
    return _mutated_text(text, draw) if draw.random() < 0.4 else text


def _mutate_value(record: Any, draw: random.Random) -> None:
    parent, key = draw.choice(list(_places(record)) or [(record, None)])
    if key is None:
        return
    kind = draw.choice(("drop", "rename", "retype", "retype", "nest", "swap", "repeat", "number"))
    value = parent[key]
    if kind == "drop":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        at = draw.randrange(len(key) + 1)
        parent[
            draw.choice((key[:at] + key[at + 1 :], key[:at] + draw.choice("_s\x1b") + key[at:], key.upper()))
        ] = value
        parent.pop(key, None) if draw.random() < 0.8 else None
    elif kind == "nest":
        parent[key] = draw.choice(([value], {"text": value}, [[value]]))
    elif kind == "swap":
        other, place = draw.choice(list(_places(record)))
        parent[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
    elif kind == "repeat" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    elif kind == "number" and isinstance(value, int | float):
        other = draw.choice(("text", float, bool, lambda x: -x, lambda x: x + 1, lambda x: x * 10**300))
        parent[key] = str(value) if other == "text" or abs(value) > 1e300 else other(value)
    else:
        parent[key] = copy.deepcopy(draw.choice(VALUES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of every value in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _mutated_text(text: bytes, draw: random.Random) -> bytes:
    at, end = sorted(draw.randrange(len(text) + 1) for _ in "ab")
    kind = draw.choice(("truncate", "splice", "splice", "flip", "cut", "key"))
    if kind == "truncate":
        return text[:at]
    if kind == "splice":
        return text[:at] + draw.choice(SNIPPETS) + text[at:]
    if kind == "cut":
        return text[:at] + text[min(end, at + 20) :]
    if kind == "key":
        return b'{"weight": 1, ' + text[1:]
    return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]


class Checker:
    """Reads lines with titan_tree and compares the samples with a plain interpretation of the JSON."""

    def __init__(self) -> None:
        self.tokenizer = TreeTokenizer.byte_level()
        self.reader = sample_reader("demo", self.tokenizer)

    def check(self, line: bytes) -> str:
        """Returns "read" or "refused". Raises AssertionError if a line is neither, or read wrongly."""
        try:
            records = json_objects(io.BytesIO(b"\n\n" + line + b"\n"), NAME, Source(NAME).refuse_row)
            groups = [self.reader.paths(group) for group in group_records(records, {})]
        except UserError as error:
            message = str(error)
            assert message.isprintable(), message
            assert message.startswith((f"{NAME}:3: ", f"{NAME}:4: ")), message
            assert len(message) < 2000, message
            return "refused"
        records = [
            json.loads(part.decode("utf-8-sig"), object_pairs_hook=_strict)
            for part in line.split(b"\n")
            if part.strip()
        ]
        assert len(records) == len(groups)
        for record, paths in zip(records, groups, strict=True):
            samples = (
                [_inherited(record, t) for t in record["trajectories"]]
                if record.get("trajectories")
                else [record]
            )
            want = [path for sample in samples for path in self._expected(sample)]
            assert len(paths) == len(want), (len(paths), len(want))
            for path, expected in zip(paths, want, strict=True):
                _compare(path, expected)
        return "read"

    def _expected(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the fields of each path of a sample, without using TokenPath."""
        sample = {name: value for name, value in sample.items() if value is not None}
        assert sample.keys() <= READ | BOOKKEEPING, sample.keys()
        fields = {name: sample.get(name) for name in ("weight", "temperature", "advantage", "policy_version")}
        if "messages" not in sample:
            return [fields | {name: sample.get(name) for name in sample}]
        result = []
        for i, message in enumerate(sample["messages"], start=1):
            if message["role"] == "assistant" and message.get("weight") != 0:
                text = self.tokenizer.render(sample["messages"][:i], sample.get("tools"))
                result.append(fields | {"tokens": self.tokenizer.encode(text, special=True)})
        return result


def _strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a duplicate key was read"
    return dict(pairs)


def _inherited(task: dict[str, Any], trajectory: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in trajectory.items() if value is not None}
    passed_on = (
        "weight",
        "advantage",
        "temperature",
        "policy_version",
        *(["tools"] if "messages" in own else []),
    )
    return {name: task[name] for name in passed_on if task.get(name) is not None} | own


def _compare(path: TokenPath, want: dict[str, Any]) -> None:
    tokens = want["tokens"] if want.get("tokens") is not None else want["input_ids"]
    assert path.tokens.tolist() == tokens
    weight = 1.0 if want.get("weight") is None else float(want["weight"])
    assert path.weight == (weight if np.float32(weight) else 0.0)
    assert path.temperature == (1 if want.get("temperature") is None else want["temperature"])
    for name in ("loss_mask", "advantage", "policy_version", *LOGPROBS):
        values, shifted = want.get(name), want.get(f"shifted_{name}")
        got = getattr(path, name)
        if values is None and shifted is None:
            assert got is None or name == "loss_mask", name
            continue
        values = [None, *shifted] if shifted is not None else values
        values = values if isinstance(values, list) else [values] * len(tokens)
        assert not any(isinstance(x, bool | str) for x in values), name
        missing = -1 if name == "policy_version" else math.nan
        numbers = [missing if x is None else x for x in values]
        np.testing.assert_array_equal(got[1:], np.array(numbers[1:], got.dtype), err_msg=name)


def check_lines(count: int, seed: int) -> Counter[str]:
    """Checks ``count`` lines. Raises AssertionError with the first line that fails."""
    draw, checker, records = random.Random(seed), Checker(), originals()
    outcomes: Counter[str] = Counter()
    for number in range(count):
        line = mutated(draw.choice(records), draw)
        try:
            outcomes[checker.check(line)] += 1
        except Exception as error:
            raise AssertionError(f"line {number} of seed {seed}: {error!r}\n{line[:3000]!r}") from error
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        outcomes = check_lines(args.lines, args.seed)
    except AssertionError:
        traceback.print_exc()
        raise SystemExit(1) from None
    read, refused = outcomes["read"], outcomes["refused"]
    print(f"{args.lines:,} lines of seed {args.seed}: {read:,} read, {refused:,} refused")


if __name__ == "__main__":
    main()
