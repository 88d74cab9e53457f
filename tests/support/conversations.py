"""Random conversations and unusual chat templates, on which shortcuts of the tokenizer could go wrong."""

import random
from typing import Any

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import (
    QWEN3_ADDED_TOKENS,
    QWEN_PATTERN,
    AddedToken,
    Vocabulary,
)

TEMPLATES = {
    "trims content, prints indented tools": """
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|im_start|>system\n" ~ system }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{{- "<|im_end|>\n" }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "searches backwards, drops thoughts": """
{%- set ns = namespace(open=true, query=messages | length - 1) %}
{%- for message in messages[::-1] %}{%- if ns.open and message.role == "user" %}{%- set ns.open = false %}
{%- set ns.query = (messages | length - 1) - loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if message.role == "tool" %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != "tool" }}{{- message.content }}
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != "tool" }}{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{{- '<think>' ~ message.reasoning_content if loop.index0 > ns.query and message.reasoning_content }}
{{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}""",
    "counts messages, rewrites history": """
{%- set ns = namespace(n=0, seen='') %}{%- for message in messages %}
{%- if messages | length % 3 == 0 and message.role == 'user' %}
{{- '<|im_end|>' ~ messages | length }}{%- endif %}
{%- set ns.n = ns.n + message.content | length %}{%- set ns.seen = message.role ~ ns.n %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if messages[loop.index0 + 2] is defined and message.role == 'tool' %}{{- 'old' }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>\n' ~ (ns.seen if message.role != 'assistant') }}{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}""",
    "has no control tokens": """
{%- for message in messages %}{{- message.role ~ ': ' ~ message.content ~ '\n' }}{%- endfor %}
{{- 'assistant: ' if add_generation_prompt }}""",
    "ends turns with text that may complete a control token": """
{%- for message in messages %}{{- '<a>' ~ message.content ~ ('<a>' if loop.last else '<a>b<|im_end|>') }}
{%- endfor %}{{- '<a>' if add_generation_prompt }}""",
    "prints whole messages as JSON": """
{%- for message in messages %}{{- '<|im_start|>' ~ {'m': message} | tojson ~ [message] | tojson }}
{{- message | tojson(indent=1) ~ message | tojson(sort_keys=true, separators=[',', ':']) ~ '<|im_end|>' }}
{%- endfor %}{{- '<|im_start|>{"m": {"role": "assistant", ' if add_generation_prompt }}""",
    "mixes text spans with control tokens": """
{%- for message in messages %}{{- message.role | text ~ '<a>' ~ message.content | text }}
{{- 'b<|im_end|>' ~ message.content ~ '' | text ~ '<|im_end|>\n' }}
{%- endfor %}{{- 'assistant' | text ~ '<a>' if add_generation_prompt }}""",
}
PIECES = (
    *("hello", " world", "\n", "\n\n", "  ", "\t", "don't", "é", "e\u0301", "\u0301", "日本", "123", "!!!"),
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
        "</think>",
        "\n</think>\n\n",
        "<tool_call>",
        "<tool_response>",
    ),
    *("<a>", "<a>b", "x<a>y", "x", "y", "<", "a", ">", "b", "<|im", "_end|>", "\u017f", "\u200d", "\r\n"),
    *('{"a": 1}', "\u00a0", "\U0001f600"),
)
MERGES = (
    *("\n\n", "\n\n\n", "  ", "he", "hel", "hell", "hello", " w", "<|", "|>", "> ", "im", "<a", ">\n", "!!"),
    "12",
)


NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "<tool_response>", "<a>b")  # added tokens


def vocabularies() -> dict[str, Vocabulary]:
    """Returns two vocabularies with merges. The control tokens of the second one contain one another."""
    tokens = {bytes([b]): b for b in range(256)}
    tokens |= {merge.encode(): 256 + index for index, merge in enumerate(MERGES)}
    overlapping = ("<|im_start|>", "<|im_end|>", "<a>", "<a>b", "x<a>y")
    return {
        name: Vocabulary(
            tokens,
            tokens,
            (
                *(AddedToken(t, 300 + i, special=t not in NOT_SPECIAL) for i, t in enumerate(added)),
                AddedToken("e\u0301!", 299, True, special=False),
            ),
            QWEN_PATTERN,
            ("NFC",),
        )
        for name, added in (("qwen3", QWEN3_ADDED_TOKENS), ("overlapping", overlapping))
    }


def tokenizers(template: str) -> dict[str, TreeTokenizer]:
    """Returns a tokenizer with each vocabulary."""
    return {name: TreeTokenizer(v, ChatTemplate.load(template)) for name, v in vocabularies().items()}


def random_conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Returns messages and tools."""

    def text() -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.choice((0, 0, 1, 2, 3, 6, 12))))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.6 else []
    messages.append({"role": "user", "content": text()})
    for _ in range(rng.randrange(1, 9)):
        turn: dict[str, Any] = {"role": "assistant", "content": text(), "finish_reason": "stop"}
        if rng.random() < 0.4:
            turn["reasoning_content"] = text()
        if rng.random() < 0.5:
            arguments = rng.choice(({"q": text()}, text(), {}))
            turn["tool_calls"] = [{"name": rng.choice("fg"), "arguments": arguments}] * rng.randrange(1, 3)
        if not any(turn.get(field) for field in ("content", "reasoning_content", "tool_calls")):
            turn["content"] = "!"
        roles = [rng.choice(("tool", "tool", "user", "system")) for _ in range(rng.choice((0, 1, 1, 2)))]
        messages += [turn, *({"role": role, "content": text()} for role in roles)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": text()}}}
    return messages, rng.choice((None, [tool]))
