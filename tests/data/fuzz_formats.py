"""Mutates rows of every format. Each must become samples, or be refused with a UserError of one line.

python tests/data/fuzz_formats.py 20000
"""

from __future__ import annotations

import collections
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import formats
from tests.support.datasets import sample_reader
from tests.support.formats import TOKEN_ROWS, Task, write_lines
from tests.support.sessions import CLAUDE, CODEX, OPENHANDS, OPENHANDS_NEWER, PI
from tests.support.traces import (
    BRANCHES,
    EPISODES,
    GYM,
    GYM_CALLS,
    LIGHTNING,
    TRACE,
    TRIAL,
    episode,
)
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError

SESSIONS = {"claude_code": CLAUDE, "codex": CODEX, "pi": PI}


def fuzz(count: int, seed: int, folder: Path) -> collections.Counter[str]:
    """Returns how many mutated rows were "read" and "refused". A longer message is counted as it is."""
    draw = random.Random(seed)
    originals = list(original_rows(folder).items())
    tokenizer = TreeTokenizer.byte_level()
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        format, rows = draw.choice(originals)
        row = mutated(draw, draw.choice(rows))
        is_session = format in SESSIONS and isinstance(row, list)
        file = write_lines(folder / "mutated", row if is_session else [row])
        try:
            reader = sample_reader(
                file, tokenizer, format=draw.choice([format, "auto"]), sample={"turns": "last"}
            )
            for group in reader.files.groups():
                reader.paths(group)
            outcomes["read"] += 1
        except UserError as error:
            is_one_line = str(error).startswith(file) and str(error).isprintable()
            outcomes["refused" if is_one_line else str(error)] += 1
    return outcomes


def original_rows(folder: Path) -> dict[str, list[Any]]:
    """Returns rows, or whole documents, of every format."""
    tasks = formats.demo_tasks(1)
    own = sample_reader(write_lines(folder / "own", tasks), TreeTokenizer.byte_level())
    groups = [(group.id, own.paths(group)[:2]) for group in own.files.groups()]
    asks = {"role": "user", "content": "q"}
    cut = {"role": "assistant", "content": "c", "tool_calls": [{"name": "f", "arguments": '{"a": 1.10'}]}
    choice = {"message": cut, "finish_reason": "length"}
    chat: Task = {"request": {"messages": [asks]}, "response": {"choices": [choice]}}
    begun = {"role": "assistant", "content": "b"}
    claude: Task = {
        "request": {"messages": [asks, begun]},
        "response": {"content": [{"type": "text", "text": "c"}], "stop_reason": "max_tokens"},
    }
    said = {"type": "message", "role": "assistant", "content": "c", "status": "incomplete"}
    reason = {"incomplete_details": {"reason": "content_filter"}, "status": "incomplete"}
    responses: Task = {"input": "q", "output": [said], **reason}
    alpaca: Task = {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}
    return {
        "openai_chat": [*formats.openai_chat(tasks)[:1], *formats.chat_pairs(tasks)[:1], chat],
        "openai_responses": [*formats.openai_responses(tasks)[:1], responses],
        "anthropic": [*formats.anthropic(tasks)[:1], claude],
        "sharegpt": formats.sharegpt(formats.only_text_or_calls(tasks))[:1],
        "alpaca": [alpaca],
        "token_rows": [row | {"finish_reason": "length"} for row, _ in TOKEN_ROWS.values()],
        "tree": [*formats.message_trees(tasks), *formats.token_trees(groups)],
        "verifiers": [TRACE, episode(TRACE)],
        "nemo_gym": [GYM],
        "agent_lightning": [LIGHTNING],
        "nemo_gym_capture": GYM_CALLS,
        "agentcore": [EPISODES[0]],
        "skyrl_capture": BRANCHES,
        "harbor": [TRIAL],
        "tau_bench": [formats.tau_bench(tasks)[:1]],
        "tau2_bench": [formats.tau2_bench(tasks)],
        **{name: [lines] for name, lines in SESSIONS.items()},
        "openhands": [{"history": OPENHANDS}, {"history": OPENHANDS_NEWER}],
        "swe_agent": [formats.swe_agent(tasks[0]["trajectories"][0])],
    }


def mutated(draw: random.Random, value: Any) -> Any:
    """Returns the value with one place of it replaced, removed or nested."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        return (
            {**value, name: mutated(draw, value[name])}
            if draw.random() < 0.9
            else {k: v for k, v in value.items() if k != name}
        )
    if isinstance(value, list) and value and draw.random() < 0.8:
        index = draw.randrange(len(value))
        return [*value[:index], mutated(draw, value[index]), *value[index + 1 :]]
    scalars = [None, 3, -1, 0.5, 1e308, float("inf"), True, "", "x", "stop", "refusal", "continued"]
    return draw.choice([*scalars, [], {}, [[]], [None], {"type": "text"}, [value]])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(dict(fuzz(int(sys.argv[1]), 0, Path(folder))))
