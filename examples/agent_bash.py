"""An agent that repairs a small repository with bash. Its exit status is that of the task's test.

It knows nothing of titan_tree. It reads OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and task.json:

    {"issue": "add(1, 2) is -1", "files": {"add.py": "def add(a, b):\\n    return a - b\\n"},
     "test": "python3 -c 'from add import add; assert add(1, 2) == 3'"}

The environment "agent" gives it one line of a file of such tasks. The model's commands can do all that the
program can, so run it in a container:

    titan-tree rl CONFIG.toml rl.environment=agent rl.agent.tasks=TASKS.jsonl \\
        'rl.agent.command=["python", "/PATH/TO/examples/agent_bash.py"]'
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

from openai import OpenAI

MAX_TURNS = 20
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}


def run(arguments: str) -> tuple[int, str]:
    """Returns exit status and output of a call of the tool. The model may have written anything."""
    with TemporaryFile("w+", errors="replace") as output:  # a program in the background may keep it open
        try:
            command = ["timeout", "30", "bash", "-c", json.loads(arguments)["command"]]
            status = subprocess.run(command, stdout=output, stderr=output).returncode
        except (ValueError, TypeError, LookupError, OSError) as error:
            return 1, f"wrong arguments: {error}"
        output.seek(0)
        return status, output.read()[-4000:]


def main() -> None:
    task, create = json.loads(Path("task.json").read_text()), OpenAI().chat.completions.create
    for name, text in task["files"].items():
        Path(name).write_text(text)
    messages = [{"role": "user", "content": f"Repair {', '.join(task['files'])}: {task['issue']}"}]
    for _ in range(MAX_TURNS):
        completion = create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[BASH])
        messages.append(message := completion.choices[0].message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = "exit status {}\n{}".format(*run(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    sys.exit(run(json.dumps({"command": task["test"]}))[0])


if __name__ == "__main__":
    main()
