"""Samples of every turn equal those of rendering and encoding each turn from its beginning.

The whole comparison takes several minutes; the tests take a part of it:

    python -m tests.components.tree_tokenizer.test_turns --fuzz 2000
    python -m tests.components.tree_tokenizer.test_turns FILE.jsonl.gz ... --tokenizer RANKS.tiktoken.gz
"""

import argparse
import gzip
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import TEMPLATES, random_conversation, tokenizers
from tests.support.datasets import REAL_DATA
from tests.support.plain_samples import PlainTokenizer, assert_same_samples
from titan_tree.components import tree_tokenizer
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data import demo

BUILT_IN = {
    name: Path(tree_tokenizer.__file__).with_name(f"{name}.jinja").read_text() for name in ("chatml", "qwen3")
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "chatml": [{}, {"keep_reasoning": False}, {"turns": "whole"}, {"turns": "last"}],
    "qwen3": [
        {},
        {"enable_thinking": False},
        {"preserve_thinking": True, "empty_blocks": False},
        {"turns": "whole"},
        {"turns": "last"},
    ],
}
SOURCES = BUILT_IN | TEMPLATES
Conversation = tuple[list, list | None]  # messages and tools


def compare(
    tokenizer: TreeTokenizer, source: str, conversations: Iterable[Conversation], options: dict
) -> Counter:
    """Asserts equality, and returns the numbers of samples and of refused conversations."""
    plain = PlainTokenizer(tokenizer, source)
    counts: Counter = Counter()
    for messages, tools in conversations:
        n = assert_same_samples(tokenizer, plain, messages, tools, **options)
        counts += Counter(refused=1) if n is None else Counter(samples=n)
    return counts


def fuzz(num_conversations: int, seed: int) -> Counter:
    rng = random.Random(seed)
    conversations = [random_conversation(rng) for _ in range(num_conversations)]
    counts: Counter = Counter()
    for name, source in SOURCES.items():
        for tokenizer in tokenizers(source).values():
            for options in OPTIONS.get(name, [{}, {"turns": "whole"}]):
                counts += compare(tokenizer, source, conversations, options)
    return counts


def conversations_of(tasks: Iterable[dict]) -> list[Conversation]:
    return [(t["messages"], task.get("tools")) for task in tasks for t in task["trajectories"]]


def read_tasks(file: Path) -> Iterator[dict]:
    return map(json.loads, gzip.decompress(file.read_bytes()).splitlines())


@pytest.mark.slow
def test_random_conversations_have_the_same_samples_under_every_template():
    counts = fuzz(6, seed=0)
    assert counts["samples"] > 150
    assert counts["refused"] > 10


@pytest.mark.parametrize("template", BUILT_IN)
def test_the_bundled_sample_has_the_same_samples(template):
    conversations = conversations_of(islice(demo.records(), 4))
    tokenizer = TreeTokenizer.byte_level(template)
    counts = [compare(tokenizer, BUILT_IN[template], conversations, options) for options in OPTIONS[template]]
    assert counts[0]["samples"] > 2 * len(conversations)
    assert counts[0]["refused"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
@pytest.mark.parametrize("template", BUILT_IN)
def test_real_rollouts_have_the_same_samples(template):
    """One or two conversations per file; the command above takes all."""
    tokenizer = TreeTokenizer.from_tiktoken(REAL_DATA / "qwen.tiktoken.gz", template=template)
    for file in sorted(REAL_DATA.glob("*.jsonl.gz")):
        conversations = conversations_of(islice(read_tasks(file), 2))[:3:2]
        for options in OPTIONS[template]:
            compare(tokenizer, BUILT_IN[template], conversations, options)


def test_a_pickled_copy_makes_the_same_samples():
    """Worker processes receive such a copy."""
    conversations = conversations_of(islice(demo.records(), 1))
    for source in BUILT_IN.values():
        tokenizer = TreeTokenizer.byte_level(source)
        tokenizer.samples(*conversations[0])  # fills the caches
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert compare(copy, source, conversations, {})["samples"] > 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--fuzz", type=int, default=0, help="number of random conversations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for file in args.files:
        conversations = conversations_of(read_tasks(file))
        for name, source in BUILT_IN.items():
            tokenizer = TreeTokenizer.load(args.tokenizer, name)
            for options in OPTIONS[name]:
                print(
                    file.name,
                    name,
                    options,
                    dict(compare(tokenizer, source, conversations, options)),
                    flush=True,
                )
    if args.fuzz:
        print(f"{args.fuzz} random conversations", dict(fuzz(args.fuzz, args.seed)))


if __name__ == "__main__":
    main()
