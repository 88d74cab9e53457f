"""Result files of benchmarks: tau-bench (one JSON array of runs), tau2-bench and SWE-agent (JSON objects)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from titan_tree.data.readers import Reader, Record, Source
from titan_tree.data.readers.chat import Message, call, joined, mark_of, marked, not_text, text_of, without
from titan_tree.data.readers.openai_chat import converted_messages
from titan_tree.data.readers.row_reader import expect, warn_once
from titan_tree.data.schema import KNOWN, MESSAGE_FIELDS, TOKEN_FIELDS, present_fields
from titan_tree.errors import UserError, errors_at, shorten

SIMULATION_FIELDS = (KNOWN["a conversation"] | {*TOKEN_FIELDS}) - {"id", "messages"}
NO_TOOLS = "the file has no schemas of the tools; the samples are rendered without them"


class TauBenchReader(Reader):
    """Reads [{"task_id", "trial"?, "reward", "traj": [messages], "info"}]; the trials of a task form a group.

    ``info`` describes the task and its score, and is left out. The tools' schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        return "task_id" in row and ("traj" in row or "info" in row)

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        document = source.document()
        with errors_at(source.path):
            results = expect(document, list, "document", "a list of results")
        warn_once(source.path, NO_TOOLS)
        yield from _by_task(results, f"{source.path}:", _record)


def _by_task(
    results: Sequence[object], where: str, convert: Callable[[Record], Record]
) -> Iterator[tuple[str, Record]]:
    """Yields the record of each result, those of one task next to each other."""
    tasks: dict[str, list[tuple[str, Record]]] = {}
    for index, item in enumerate(results):
        with errors_at(place := f"{where}[{index}]"):
            result = expect(item, dict, "result", "an object with task_id")
            task = result.get("task_id")
            if isinstance(task, bool) or not isinstance(task, str | int):
                raise UserError(f"task_id: expected a string or an integer, got {shorten(task)}")
        tasks.setdefault(str(task), []).append((place, result))
    for task, members in tasks.items():
        for place, result in members:
            with errors_at(place):
                trial = {} if result.get("trial") is None else {"id": f"trial{result['trial']}"}
                record = joined({"group_id": task, **trial}, convert(result))
            yield place, record


def _record(result: Record) -> Record:
    messages = expect(result.get("traj"), list, "traj", "a list of messages")
    record = without(result, ("task_id", "trial", "traj", "info"))
    return joined(record, {"messages": converted_messages(messages, "traj")})


class Tau2BenchReader(Reader):
    """Reads {"info", "tasks", "simulations": [{"task_id", "trial"?, "messages", "reward_info"}]}.

    The trials of a task form a group. Without a system message, the policy in ``info.environment_info``
    becomes one; the agent's own instructions are not in the file. ``tool_defs`` beside it become the tools.
    The user's own tool calls and their results are left out, because the agent did not see them. Costs, times
    and indices of turns are left out, too. Raw responses are read for reasoning and finish reasons only.
    Fields that decide what is trained, such as ``weight``, are kept in simulations and messages.
    """

    def recognizes_row(self, row: Record) -> bool:
        info = row.get("info")
        return isinstance(info, dict) and not info.keys().isdisjoint(("environment_info", "agent_info"))

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        document = source.document()
        with errors_at(source.path):
            run = expect(document, dict, "document", "an object with simulations")
            simulations = expect(run.get("simulations"), list, "simulations", "a list")
            info = expect(run.get("info") or {}, dict, "info", "an object")
            ran_in = expect(info.get("environment_info") or {}, dict, "info.environment_info", "an object")
        yield from _by_task(simulations, f"{source.path}:simulations", partial(_simulation, ran_in))


def _simulation(environment: Record, simulation: Record) -> Record:
    recorded = expect(simulation.get("messages"), list, "messages", "a list of messages")
    messages: list[Message] = []
    has_system = any(isinstance(m, dict) and m.get("role") == "system" for m in recorded)
    if (policy := environment.get("policy")) and not has_system:
        messages.append({"role": "system", "content": policy})
    for index, message in enumerate(recorded):
        messages += _seen_by_agent(message, f"messages[{index}]")
    reward_info = expect(simulation.get("reward_info") or {}, dict, "reward_info", "an object")
    fields = {"reward": reward_info.get("reward"), "messages": messages}
    if isinstance(tools := environment.get("tool_defs"), list):
        fields["tools"] = tools
    return joined(present_fields(simulation, SIMULATION_FIELDS), fields)


def _seen_by_agent(message: object, where: str) -> list[Message]:
    """Returns the message as the agent saw it, or nothing if it did not."""
    message = expect(message, dict, where, "an object with role and content")
    role = message.get("role")
    if message.get("requestor") == "user" or (role == "user" and message.get("tool_calls")):
        return []
    if message.get("is_audio"):
        raise not_text(where, "audio")
    if (results := message.get("tool_messages")) is not None:
        parts = expect(results, list, f"{where}.tool_messages", "a list of messages")
        return [
            m for i, part in enumerate(parts) for m in _seen_by_agent(part, f"{where}.tool_messages[{i}]")
        ]
    result = present_fields(message, sorted(MESSAGE_FIELDS - {"tool_calls"}))
    result["content"] = text_of(message.get("content"), f"{where}.content")
    if role == "tool":
        return [joined(result, {"tool_call_id": message.get("id")})]
    if role != "assistant":
        return [result]
    if calls := expect(message.get("tool_calls") or [], list, f"{where}.tool_calls", "a list"):
        result["tool_calls"] = [
            call(item.get("name"), item.get("arguments"), item.get("id"))
            for item in calls
            if expect(item, dict, f"{where}.tool_calls", "objects") is item
        ]
    raw, where = message.get("raw_data"), f"{where}.raw_data"
    if isinstance(raw, dict) and raw.get("choices") is not None:
        choices = expect(raw["choices"], list, f"{where}.choices", "a list")
        if len(choices) != 1:
            raise UserError(f"{where}.choices: expected one choice, got {len(choices)}")
        where = f"{where}.choices[0]"
        raw = expect(choices[0], dict, where, "an object")
    if not isinstance(raw, dict):
        return [result]
    answer = raw.get("message")
    if isinstance(answer, dict) and isinstance(thought := answer.get("reasoning_content"), str):
        result = joined(result, {"reasoning_content": thought})
    return marked([result], mark_of(raw, where), f"{where}.finish_reason")


# What SWE-agent parsed from a message, and how it treats the message.
BOOKKEEPING = (
    "agent", "message_type", "thought", "action", "is_demo", "tags", "cache_control", "tool_call_ids",
)  # fmt: skip


class SweAgentReader(Reader):
    """Reads {"trajectory": [steps], "history": [messages], "info", ...}; the file's name is the task.

    The samples are the messages of ``history``, one trajectory per agent. ``trajectory``, ``info`` and
    ``environment`` repeat them or describe the run. History processors, which shorten old observations in
    prompts, are not applied. The tools' schemas and the outcome are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        steps = row.get("trajectory")
        return isinstance(steps, list) and all(
            isinstance(step, dict) and {"action", "observation"} & step.keys() for step in steps[:1]
        )

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        document = source.document()
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


def _message(message: Message, where: str) -> Message:
    if message.get("is_demo") and message.get("role") == "assistant":
        raise UserError(
            f"{where}.is_demo: a demonstration is not the agent's own turn; remove the demonstration"
        )
    kept: dict[str, object] = {name: message[name] for name in message if name not in BOOKKEEPING}
    if thoughts := kept.pop("thinking_blocks", None):
        place = f"{where}.thinking_blocks"
        texts = [block.get("thinking") for block in expect(thoughts, list, place, "a list")]
        kept["thinking"] = "\n".join(expect(t, str, place, "blocks with a thinking text") for t in texts)
    kept["content"] = text_of(kept.get("content"), f"{where}.content")
    if identifiers := message.get("tool_call_ids"):
        kept["tool_call_id"] = expect(identifiers, list, f"{where}.tool_call_ids", "a list of one id")[0]
    (converted,) = converted_messages([kept], where)
    return converted
