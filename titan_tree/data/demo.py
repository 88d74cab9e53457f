"""The bundled sample: branching tool-use rollouts that a tiny byte-level model learns in a few dozen steps.

A customer asks a shop clerk for the number of two items, and then of a third one. The clerk looks the numbers
up and adds them. The trials of a task diverge where those of real agents do. Tools are called in parallel or
one by one, thoughts use other words, and sums may be wrong. Chat templates also drop the thoughts of an
earlier turn when the customer speaks again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_TASKS = 64
TRIALS = 4
ITEMS = ("caps", "cups", "eggs", "figs", "nuts", "pens", "pots", "tins")
SYSTEM = "You are the clerk of a shop."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "Count an item",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
]

Message = dict[str, Any]


def records() -> Iterator[dict[str, object]]:
    """Yields one record per task in the schema of titan_tree/data/schema.py, the same on every call."""
    for task in range(NUM_TASKS):
        draw = random.Random(f"demo/{task}")
        items = draw.sample(ITEMS, 3)
        count = {item: draw.randint(1, 9) for item in items}
        # Half of the trials call tools in parallel. One in four gives a wrong answer.
        trials = [_trial(items, count, parallel=t % 2 == 0, draw=draw, slip=t == 3) for t in range(TRIALS)]
        rewards = [0.0 if t == 3 else 1.0 for t in range(TRIALS)]
        yield {
            "id": f"shop-{task}",
            "tools": TOOLS,
            "trajectories": [
                {"id": f"trial{t}", "reward": reward, "messages": messages}
                for t, (reward, messages) in enumerate(zip(rewards, trials, strict=True))
            ],
        }


def write(path: str | Path) -> None:
    """Writes the records to a JSON Lines file."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records()), encoding="utf-8")


def _trial(
    items: list[str], count: dict[str, int], parallel: bool, draw: random.Random, slip: bool
) -> list[Message]:
    """Returns the messages of one rollout. With ``slip``, the last sum is too large by 1."""
    first, second, third = items
    total = count[first] + count[second]
    look = draw.choice(("Look up", "I need"))
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"How many {first} and {second}?"},
    ]
    for wanted in [[first, second]] if parallel else [[first], [second]]:
        messages += _lookup(f"{look} {' and '.join(wanted)}.", wanted, count)
    messages += [
        _answer(f"{count[first]} + {count[second]} = {total}", total),
        {"role": "user", "content": f"And with {third}?"},
        *_lookup(f"{look} {third}.", [third], count),
    ]
    final = total + count[third] + slip
    return [*messages, _answer(f"{total} + {count[third]} = {final}", final)]


def _lookup(thought: str, items: list[str], count: dict[str, int]) -> list[Message]:
    calls = [{"name": "stock", "arguments": {"item": item}} for item in items]
    asks = {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": calls}
    return [asks, *({"role": "tool", "name": "stock", "content": str(count[item])} for item in items)]


def _answer(thought: str, number: int) -> Message:
    return {"role": "assistant", "content": str(number), "reasoning_content": thought}
