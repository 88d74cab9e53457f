"""Programs of others, unchanged, work on a small repository through the server. A script is the model.

They have an environment of their own, because their dependencies are not ours:

    python -m venv .venv-agents
    .venv-agents/bin/pip install mini-swe-agent==2.4.6 litellm==1.110.0 langchain-openai==1.7.4
    python -m pytest tests/serve/test_unchanged_agents.py

By hand, with ``titan-tree serve`` in place of the server here:

    export OPENAI_BASE_URL=http://127.0.0.1:8765/s/fix.0/v1 OPENAI_API_KEY=any
    export MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
    .venv-agents/bin/mini -m openai/policy -y --exit-immediately -t "Fix add in add.py."
    curl -d '{"reward": 1}' http://127.0.0.1:8765/s/fix.0/end
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.agents import ScriptedSampler
from tests.support.conversations import tokenizers
from tests.support.tokenizer_files import published_template
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.serve import session as causes
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.session import Mode
from titan_tree.serve.settings import ServeConfig

PROGRAMS = Path(__file__).parents[2] / ".venv-agents" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (PROGRAMS / "mini").exists(), reason="needs .venv-agents, see above"),
]

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
SCRIPT = [  # thoughts, text and commands
    ("Look.", "I look at it.", "ls; cat add.py"),
    ("A sign is wrong.", "I fix it.", "sed -i 's/a - b/a + b/' add.py && python3 test_add.py"),
    ("It's done.", "Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]
# The agents of these libraries, with the tool above. They run commands until one submits, or there is none.
LITELLM = """
import json, subprocess, sys, litellm
bash, stream = json.loads(sys.argv[1]), sys.argv[2] == "stream"
messages = [{"role": "user", "content": "Fix add."}]
while True:
    response = litellm.completion("openai/policy", messages, tools=[bash], stream=stream)
    if stream:
        response = litellm.stream_chunk_builder(list(response), messages=messages)
    message = response.choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        command = json.loads(call.function.arguments)["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    if "SUBMIT" in output:
        break
json.dump(messages[:-1], open("messages.json", "w"))
"""
LANGCHAIN = """
import json, subprocess, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="policy", streaming=sys.argv[2] == "stream").bind_tools([json.loads(sys.argv[1])])
messages = [HumanMessage("Fix add.")]
while True:
    message = model.invoke(messages)
    messages.append(message)
    for call in message.tool_calls:
        output = subprocess.run(call["args"]["command"], shell=True, capture_output=True, text=True).stdout
        messages.append(ToolMessage(output, tool_call_id=call["id"]))
    if "SUBMIT" in output:
        break
json.dump([{"role": {"human": "user", "ai": "assistant"}.get(each.type, each.type), "content": each.content}
           for each in messages[:-1]], open("messages.json", "w"))
"""


class Served(NamedTuple):
    recorder: ModelRecorder
    sampler: ScriptedSampler
    url: str


@pytest.fixture
def mode() -> Mode:
    return "faithful"


@pytest.fixture
def served(mode: Mode) -> Iterator[Served]:
    """A server whose model writes the script, in tokens that its tokenizer would not choose."""
    chat = Chat(tokenizers("qwen3")["qwen3"])
    sampler = ScriptedSampler(chat, [turn(*each) for each in SCRIPT])
    recorder, until = ModelRecorder(chat, RLConfig(max_rollout_tokens=10**6), mode), threading.Event()
    server = AgentServer(recorder, ServeConfig(port=0), "policy")
    url, sampling = server.start(), threading.Thread(target=recorder.run, args=(sampler, until))
    sampling.start()
    yield Served(recorder, sampler, url)
    until.set()
    sampling.join()
    server.close()


def turn(thought: str, text: str, command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\n{thought}\n</think>\n\n{text}\n<tool_call>\n{call}\n</tool_call>"


def run(served: Served, folder: Path, *command: str) -> None:
    """Runs a program in a repository, which it repairs."""
    (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_add.py").write_text("from add import add\n\nassert add(1, 2) == 3\n")
    session = f"{served.url}/s/fix.0"
    variables = {"OPENAI_BASE_URL": f"{session}/v1", "ANTHROPIC_BASE_URL": session, "HOME": str(folder)}
    variables |= {"OPENAI_API_KEY": "any", "ANTHROPIC_API_KEY": "any", "PATH": os.environ["PATH"]}
    variables |= {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    variables |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    ran = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    subprocess.run([sys.executable, "test_add.py"], cwd=folder, check=True)


def check(served: Served, messages: list[dict[str, Any]]) -> None:
    """Asserts that the session is one path with the ids that were read and written, and the text of messages.

    Args:
        messages: what the program kept. The script says what its turns were.
    """
    script, conversation = iter(SCRIPT), []
    for message in messages:
        if message.get("role") == "assistant" or message.get("object") == "response":
            thought, text, command = next(script)
            call = {"name": "bash", "arguments": {"command": command}}
            message = {"role": "assistant", "reasoning_content": thought, "content": text}
            message["tool_calls"] = [{"type": "function", "function": call}]
        elif message.get("role") != "user" and message.get("role") != "system":
            message = {"role": "tool", "content": message.get("content") or message.get("output")}
        conversation.append(message)
    assert next(script, None) is None
    ((expected,), _) = render_jinja_template(
        [conversation], tools=[BASH], chat_template=published_template("qwen3").read_text()
    )
    session = served.recorder.session("fix.0")
    assert not session.forks()
    (path,) = session.paths()
    assert served.sampler.tokenizer.decode(path.tokens) + "\n" == expected
    before: list[int] = []
    for context, written in served.sampler.read:
        assert context[: len(before)] == before
        before = context + written.tokens
    assert path.tokens == before
    assert sum(path.mask) == sum(len(written.tokens) for _, written in served.sampler.read)


MINI = {
    "chat completions": ["-m", "openai/policy"],
    "responses": ["-m", "openai/policy", "--model-class", "litellm_response"],
    "messages": ["-m", "anthropic/policy"],
}


@pytest.mark.parametrize("api", MINI)
def test_mini_swe_agent(api: str, served: Served, tmp_path: Path) -> None:
    options = ["-y", "--exit-immediately", "-t", "Fix add in add.py.", "-o", "trajectory.json"]
    run(served, tmp_path, str(PROGRAMS / "mini"), *MINI[api], *options)
    trajectory = json.loads((tmp_path / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    *messages, _, _ = trajectory["messages"]  # the last command's result, which nobody reads, and the exit
    check(served, messages)


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_litellm(way: str, served: Served, tmp_path: Path) -> None:
    run(served, tmp_path, str(PROGRAMS / "python"), "-c", LITELLM, json.dumps(BASH), way)
    check(served, json.loads((tmp_path / "messages.json").read_text()))


@pytest.mark.parametrize("mode", ["faithful", "append"])
@pytest.mark.parametrize("way", ["whole", "stream"])
def test_langchain_drops_thoughts(way: str, mode: Mode, served: Served, tmp_path: Path) -> None:
    """Its ChatOpenAI keeps no thoughts, so the template prints earlier turns without them."""
    run(served, tmp_path, str(PROGRAMS / "python"), "-c", LANGCHAIN, json.dumps(BASH), way)
    session = served.recorder.session("fix.0")
    if mode == "append":
        check(served, json.loads((tmp_path / "messages.json").read_text()))
    else:
        assert session.forks() == Counter({causes.PRINTED: 2})
        assert [sum(path.mask) for path in session.paths()] == [
            len(written.tokens) for _, written in served.sampler.read
        ]
