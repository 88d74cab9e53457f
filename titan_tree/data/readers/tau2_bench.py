"""tau2-bench: result files, one JSON object with simulations."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Place, Reader, Record, Source
from titan_tree.data.readers.chat import Message, call, text_of
from titan_tree.data.readers.containers import first_rows, load_document
from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.tau_bench import by_task
from titan_tree.errors import errors_at


class Tau2BenchReader(Reader):
    """Reads {"info", "tasks", "simulations": [{"task_id", "trial"?, "messages", "reward_info"}]}.

    The trials of a task form a group. Without a system message, the policy in ``info.environment_info``
    becomes one; the agent's own instructions are not in the file. ``tool_defs`` beside it become the tools.
    The user's own tool calls and their results are left out, because the agent did not see them. Costs, times
    and indices of turns are left out, too. Raw responses are read for their reasoning only.
    """

    def recognizes(self, source: Source) -> bool:
        return any(
            isinstance(info := row.get("info"), dict) and {"environment_info", "agent_info"} & info.keys()
            for row in first_rows(source)
        )

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        document = load_document(source)
        with errors_at(source.path):
            run = expect(document, dict, "document", "an object with simulations")
            simulations = expect(run.get("simulations"), list, "simulations", "a list")
            info = expect(run.get("info") or {}, dict, "info", "an object")
            environment = expect(
                info.get("environment_info") or {}, dict, "info.environment_info", "an object"
            )

        def convert(simulation: Record) -> Record:
            return _simulation(simulation, environment)

        yield from by_task(
            [
                (f"{source.path}:simulations[{i}]", simulation, convert)
                for i, simulation in enumerate(simulations)
            ]
        )


def _simulation(simulation: Record, environment: Record) -> Record:
    recorded = expect(simulation.get("messages"), list, "messages", "a list of messages")
    messages: list[Message] = []
    policy = environment.get("policy")
    if policy and not any(
        isinstance(message, dict) and message.get("role") == "system" for message in recorded
    ):
        messages.append({"role": "system", "content": policy})
    for index, message in enumerate(recorded):
        messages += _seen_by_agent(message, f"messages[{index}]")
    reward_info = expect(simulation.get("reward_info") or {}, dict, "reward_info", "an object")
    tools = environment.get("tool_defs")
    return {
        "reward": reward_info.get("reward"),
        "messages": messages,
        **({"tools": tools} if isinstance(tools, list) else {}),
    }


def _seen_by_agent(message: object, where: str) -> list[Message]:
    """Returns the message as the agent saw it, or nothing if it did not."""
    message = expect(message, dict, where, "an object with role and content")
    role = message.get("role")
    if message.get("requestor") == "user" or (role == "user" and message.get("tool_calls")):
        return []
    content = text_of(message.get("content"), f"{where}.content")
    if role == "tool":
        return [{"role": role, "content": content, "tool_call_id": message.get("id")}]
    result: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls := expect(message.get("tool_calls") or [], list, f"{where}.tool_calls", "a list"):
            result["tool_calls"] = [
                call(item.get("name"), item.get("arguments"), item.get("id"))
                for item in calls
                if expect(item, dict, f"{where}.tool_calls", "objects") is item
            ]
        raw = message.get("raw_data")
        answer = raw.get("message") if isinstance(raw, dict) else None
        if isinstance(answer, dict) and isinstance(thought := answer.get("reasoning_content"), str):
            result["reasoning_content"] = thought
    return [result]
