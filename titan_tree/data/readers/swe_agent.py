"""SWE-agent trajectories: one JSON document per run (.traj)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.readers.chat import Message, text_of
from titan_tree.data.readers.containers import first_rows, load_document
from titan_tree.data.readers.openai_chat import converted_messages
from titan_tree.data.readers.row_reader import expect, warn_once
from titan_tree.data.readers.tau_bench import NO_TOOLS
from titan_tree.errors import UserError, errors_at

# What SWE-agent parsed from a message, and how it treats the message.
BOOKKEEPING = (
    "agent",
    "message_type",
    "thought",
    "action",
    "is_demo",
    "tags",
    "cache_control",
    "tool_call_ids",
)


class SweAgentReader(Reader):
    """Reads {"trajectory": [steps], "history": [messages], "info", ...}; the file's name is the task.

    The samples are the messages of ``history``, one trajectory per agent. ``trajectory``, ``info`` and
    ``environment`` repeat them or describe the run. History processors, which shorten old observations in
    prompts, are not applied. The tools' schemas and the outcome are not in the file.
    """

    def recognizes(self, source: Source) -> bool:
        return any(_is_run(row) for row in first_rows(source))

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        document = load_document(source)
        with errors_at(source.path):
            run = expect(document, dict, "document", "an object with trajectory and history")
            history = expect(run.get("history"), list, "history", "a list of messages")
            agents: dict[str, list[Message]] = {}
            for index, message in enumerate(history):
                where = f"history[{index}]"
                agent = str(expect(message, dict, where, "an object").get("agent"))
                agents.setdefault(agent, []).append(_message(message, where))
            trajectories = [{"id": agent, "messages": messages} for agent, messages in agents.items()]
        if any(message.get("tool_calls") for messages in agents.values() for message in messages):
            warn_once(source.path, NO_TOOLS)
        name = Path(source.path).name.split(".traj")[0]
        yield source.path, {"id": name, "trajectories": trajectories}


def _is_run(row: Record) -> bool:
    steps = row.get("trajectory")
    return isinstance(steps, list) and all(
        isinstance(step, dict) and {"action", "observation"} & step.keys() for step in steps[:1]
    )


def _message(message: Message, where: str) -> Message:
    if message.get("is_demo") and message.get("role") == "assistant":
        raise UserError(
            f"{where}.is_demo: a demonstration is not the agent's own turn; remove the demonstration"
        )
    kept: dict[str, object] = {name: message[name] for name in message if name not in BOOKKEEPING}
    if thoughts := kept.pop("thinking_blocks", None):
        texts = [
            block.get("thinking") for block in expect(thoughts, list, f"{where}.thinking_blocks", "a list")
        ]
        kept["reasoning_content"] = "\n".join(
            expect(text, str, f"{where}.thinking_blocks", "blocks with a thinking text") for text in texts
        )
    kept["content"] = text_of(kept.get("content"), f"{where}.content")
    if identifiers := message.get("tool_call_ids"):
        kept["tool_call_id"] = expect(identifiers, list, f"{where}.tool_call_ids", "a list of one id")[0]
    (converted,) = converted_messages([kept], where)
    return converted
