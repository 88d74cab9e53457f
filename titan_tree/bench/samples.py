"""What does one sample per assistant turn cost on the host, compared with handling each conversation once?

titan-tree bench samples tau_airline.jsonl.gz --tokenizer qwen.tiktoken.gz --template qwen3

| column      | CPU seconds, minima over the rounds, of                                       |
|-------------|-------------------------------------------------------------------------------|
| once        | rendering and encoding each conversation once                                 |
| each        | `TreeTokenizer.samples`, which makes one sample per assistant turn            |
| encode once | the encoding in "once"                                                        |
| encode each | the rest of "each" if all turns are rendered beforehand: encoding, TokenPaths |

"once / each" and "encode once / each" are ratios of these seconds. The process in which chat templates run
counts. Other processes disturb a minimum less than a median. All work begins with empty caches. The cache of
the encoder also speeds up "once", because conversations of one task share the system prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_tree.bench.record import Contender, Row, add_rounds, cpu_seconds, run_rounds
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.encoders import Spans
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.components.tree_tokenizer.samples import ConversationSamples
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig

Conversation = tuple[Any, Any]  # messages and tools


KEYS = ("file", "template")
RATIOS = ("once / each", "encode once / each")
QUICK = ("demo", "--template", "chatml", "--rounds", "1")
PACKAGES = ("jinja2", "tiktoken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("files", nargs="+")
    add("--tokenizer", default="byte")
    add("--template", nargs="+", default=["qwen3"])


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per file and template."""
    rows: list[Row] = []
    for file in args.files:
        conversations = list(read_conversations(file))
        for template in args.template:
            tokenizer = TreeTokenizer.load(args.tokenizer, template)
            name: Row = {"file": Path(file).name, "template": template}
            rows.append(name | measure(tokenizer, conversations, args.rounds))
    return rows


def read_conversations(file: str) -> Iterator[Conversation]:
    """Yields all conversations of a data file."""
    for group in SampleReader(DataConfig(files=[file])).groups():
        for _, record in group.records:
            for conversation in record.get("trajectories", [record]):
                yield normalize_messages(conversation["messages"], "messages"), record.get("tools")


def measure(tokenizer: TreeTokenizer, conversations: Sequence[Conversation], rounds: int) -> Row:
    """Returns sizes, times and ratios for one file and template."""
    encoder, template = tokenizer._encoder, tokenizer._template
    assert template is not None

    def all_samples() -> Iterator[ConversationSamples]:
        return (ConversationSamples(encoder, template, *conversation, {}) for conversation in conversations)

    def render_once() -> list[str]:
        return [template.render(messages, tools, False, {}) for messages, tools in conversations]

    def encode_once(texts: Sequence[str]) -> None:
        for text in texts:
            encoder.encode(Spans(template.spans(text)))

    def samples() -> list[int]:
        return [len(p) for messages, tools in conversations for p in tokenizer.samples(messages, tools)]

    def encode_turns() -> None:
        for of_conversation, turns in zip(all_samples(), rendered_turns, strict=True):
            for turn in turns:
                of_conversation.encode(turn)

    texts = render_once()
    rendered_turns = [list(s.render_turns(s.assistant_turns())) for s in all_samples()]
    work: dict[str, Callable[[], object]] = {
        "once": lambda: encode_once(render_once()),
        "each": samples,
        "encode once": lambda: encode_once(texts),
        "encode each": encode_turns,
    }
    contenders = [Contender(name, cpu_timer(tokenizer, run)) for name, run in work.items()]
    run_rounds(contenders, rounds)
    seconds = {contender.name: min(contender.samples["s"]) for contender in contenders}
    lengths = samples()
    return {
        "conversations": len(conversations),
        "samples": len(lengths),
        "logical tokens": sum(lengths),
        **{name: f"{s:.3f}" for name, s in seconds.items()},
        "once / each": f"{seconds['once'] / seconds['each']:.3f}",
        "encode once / each": f"{seconds['encode once'] / seconds['encode each']:.3f}",
        "M tokens/s": f"{sum(lengths) / seconds['each'] / 1e6:.1f}",
    }


def cpu_timer(tokenizer: TreeTokenizer, run: Callable[[], object]) -> Callable[[], list[dict[str, float]]]:
    """Returns a measurement of ``run``: its CPU seconds, with the encoder's cache empty at its beginning."""

    def measurement() -> list[dict[str, float]]:
        tokenizer._encoder._cache.clear()
        started = cpu_seconds()
        run()
        return [{"s": cpu_seconds() - started}]

    return measurement
