"""An agent that knows nothing of titan_tree. It looks things up with a tool, and answers with their sum.

It reads OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the file task.json, and writes answer.txt:

    {"question": "caps pens", "counts": {"caps": 3, "pens": 4, "cups": 1}}
"""

import json
import os
from pathlib import Path

from openai import OpenAI

MAX_TURNS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
        },
    }
]


def count(counts: dict[str, int], arguments: str) -> str:
    """Returns the result of a call of the tool. The model may have written anything."""
    try:
        return str(counts[json.loads(arguments)["thing"]])
    except (ValueError, TypeError, LookupError):
        return "unknown"


def main() -> None:
    task, client = json.loads(Path("task.json").read_text()), OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            Path("answer.txt").write_text(message.content or "")
            return
        for call in message.tool_calls:
            content = count(task["counts"], call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


if __name__ == "__main__":
    main()
