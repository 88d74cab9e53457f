"""Writes tasks of titan_tree's own schema in other data formats, for tests of the readers.

A task is {"id", "tools"?, "trajectories": [{"id", "reward", "messages"}]}.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.datasets import REAL_DATA
from titan_tree.data import demo

Task = dict[str, Any]
Message = dict[str, Any]


def real_tasks(name: str, count: int | None = None) -> list[Task]:
    """Returns the first tasks of a file of real rollouts, without the fields that no reader needs."""
    with gzip.open(REAL_DATA / f"{name}.jsonl.gz") as file:
        tasks = [json.loads(line) for line in itertools.islice(file, count)]
    kept = [{key: task[key] for key in ("tools", "trajectories") if key in task} for task in tasks]
    return [
        {"id": f"{number}-{tasks[number]['id']}"} | task for number, task in enumerate(kept)
    ]  # ids repeat


def demo_tasks(count: int) -> list[Task]:
    return list(itertools.islice(demo.records(), count))


def without_tools(tasks: list[Task]) -> list[Task]:
    return [{key: value for key, value in task.items() if key != "tools"} for task in tasks]


def only_text_or_calls(tasks: list[Task]) -> list[Task]:
    """Returns the tasks without reasoning, and without the text beside tool calls."""
    return [{**task, "trajectories": [_plain(run) for run in task["trajectories"]]} for task in tasks]


def _plain(run: Task) -> Task:
    messages = []
    for message in run["messages"]:
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        messages.append({**plain, "content": ""} if plain.get("tool_calls") else plain)
    return {**run, "messages": messages}


def rows(tasks: list[Task], convert: Any) -> list[Task]:
    """Returns one row per trajectory; ``convert`` maps (messages, tools) to the row's own members."""
    return [
        {"group_id": task["id"], "id": run["id"], "reward": run["reward"]}
        | convert(with_call_ids(run["messages"]), task.get("tools"))
        for task in tasks
        for run in task["trajectories"]
    ]


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Returns the messages with an id for each tool call, which the results name in the same order."""
    numbers, waiting, result = itertools.count(), [], []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            waiting = [f"call_{next(numbers)}" for _ in message["tool_calls"]]
            calls = zip(message["tool_calls"], list(waiting), strict=True)
            message["tool_calls"] = [{**call, "id": name} for call, name in calls]
        elif message["role"] == "tool":
            message["tool_call_id"] = waiting.pop(0)
        result.append(message)
    return result


def own(tasks: list[Task]) -> list[Task]:
    return tasks


def openai_chat(tasks: list[Task]) -> list[Task]:
    """Uses the legacy spelling where it can express a message."""

    def message(m: Message) -> Message:
        calls = m.get("tool_calls", [])
        m = {key: value for key, value in m.items() if key not in ("tool_calls", "tool_call_id")}
        m["role"] = {"system": "developer", "tool": "function"}.get(m["role"], m["role"])
        functions = [
            {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)} for c in calls
        ]
        if len(functions) == 1:
            return {**m, "function_call": functions[0]}
        if functions:
            return {**m, "tool_calls": [{"type": "function", "function": f} for f in functions]}
        is_user = m["role"] == "user"
        return {**m, "content": [{"type": "text", "text": m["content"]}]} if is_user else m

    def convert(messages: list[Message], tools: Any) -> Task:
        functions = {"functions": [tool["function"] for tool in tools]} if tools else {}
        return {"messages": [message(m) for m in messages], "model": "m", **functions}

    return rows(tasks, convert)


def chat_text(tasks: list[Task]) -> list[Task]:
    """Rows whose columns hold JSON text."""

    def convert(messages: list[Message], tools: Any) -> Task:
        return {"messages": json.dumps(messages), "tools": json.dumps(tools)}

    return rows(tasks, convert)


def chat_pairs(tasks: list[Task]) -> list[Task]:
    """Requests with a response; the last message is the response."""

    def convert(messages: list[Message], tools: Any) -> Task:
        request = {"messages": messages[:-1], "model": "m", **({"tools": tools} if tools else {})}
        return {"request": request, "response": {"id": "x", "choices": [{"message": messages[-1]}]}}

    return rows(tasks, convert)


def anthropic(tasks: list[Task]) -> list[Task]:
    def blocks(m: Message) -> Iterator[Message]:
        if m["role"] == "tool":
            yield {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
            return
        if "reasoning_content" in m:
            yield {"type": "thinking", "thinking": m["reasoning_content"], "signature": "x"}
        if m["content"]:
            yield {"type": "text", "text": m["content"]}
        for call in m.get("tool_calls", []):
            yield {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]}

    def convert(messages: list[Message], tools: Any) -> Task:
        system, result = "", []
        for m in messages:
            if m["role"] == "system":
                system = m["content"]
            elif m["role"] == "tool" and result[-1].get("results"):
                result[-1]["content"] += blocks(m)
            else:
                role = "user" if m["role"] == "tool" else m["role"]
                result.append({"role": role, "content": list(blocks(m)), "results": m["role"] == "tool"})
        for m in result:
            del m["results"]
        schemas = [
            {
                **{k: v for k, v in tool["function"].items() if k != "parameters"},
                "input_schema": tool["function"]["parameters"],
            }
            for tool in tools or []
        ]
        return {"system": system, "messages": result, "max_tokens": 9} | ({"tools": schemas} if tools else {})

    return rows(tasks, convert)


def openai_responses(tasks: list[Task]) -> list[Task]:
    def items(m: Message) -> Iterator[Message]:
        if m["role"] == "tool":
            yield {"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]}
            return
        if "reasoning_content" in m:
            yield {"type": "reasoning", "summary": [{"type": "summary_text", "text": m["reasoning_content"]}]}
        calls = m.get("tool_calls", [])
        if m["content"] or not calls:
            kind = "output_text" if m["role"] == "assistant" else "input_text"
            yield {"type": "message", "role": m["role"], "content": [{"type": kind, "text": m["content"]}]}
        for c in calls:
            arguments = json.dumps(c["arguments"], ensure_ascii=False)
            yield {"type": "function_call", "call_id": c["id"], "name": c["name"], "arguments": arguments}

    def convert(messages: list[Message], tools: Any) -> Task:
        first, *rest = messages
        assert first["role"] == "system"
        schemas = [{"type": "function", **tool["function"]} for tool in tools or []]
        row = {"instructions": first["content"], "input": [item for m in rest for item in items(m)]}
        return row | ({"tools": schemas} if tools else {})

    return rows(tasks, convert)


def sharegpt(tasks: list[Task]) -> list[Task]:
    def turn(m: Message) -> Message:
        if "tool_calls" in m:
            calls = [{"name": c["name"], "arguments": c["arguments"]} for c in m["tool_calls"]]
            return {"from": "function_call", "value": json.dumps(calls if len(calls) > 1 else calls[0])}
        speakers = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
        return {"from": speakers[m["role"]], "value": m["content"]}

    def convert(messages: list[Message], tools: Any) -> Task:
        row: Task = {"conversations": [turn(m) for m in messages]}
        return row | ({"tools": json.dumps([tool["function"] for tool in tools])} if tools else {})

    return rows(tasks, convert)


def tau_bench(tasks: list[Task]) -> list[Task]:
    """Interleaves the tasks, as runs with several workers do."""
    results = [
        {"task_id": task["id"], "trial": i, "reward": run["reward"], "info": {}, "traj": run["messages"]}
        for task in tasks
        for i, run in enumerate(task["trajectories"])
    ]
    return sorted(results, key=lambda result: result["trial"])


def tau2_bench(tasks: list[Task]) -> Task:
    """Hides the user's own tool calls among the messages, and makes the common system prompt the policy."""
    policy = tasks[0]["trajectories"][0]["messages"][0]["content"]
    hidden = [
        {"role": "user", "content": None, "tool_calls": [{"id": "u", "name": "f", "arguments": {}}]},
        {"role": "tool", "id": "u", "content": "hidden", "requestor": "user"},
    ]
    simulations = []
    for task in tasks:
        for trial, run in enumerate(task["trajectories"]):
            first, *rest = with_call_ids(run["messages"])
            assert first == {"role": "system", "content": policy}
            messages = [{**m, "turn_idx": i, "cost": 0.0} for i, m in enumerate(rest)]
            for m in messages:
                if m["role"] == "tool":
                    m["id"], m["requestor"] = m.pop("tool_call_id"), "assistant"
                if "reasoning_content" in m:
                    m["raw_data"] = {"message": {"reasoning_content": m.pop("reasoning_content")}}
            reward = {"reward": run["reward"]}
            ids = {"id": f"{task['id']}-{trial}", "task_id": task["id"], "trial": trial}
            simulations.append({**ids, "reward_info": reward, "messages": hidden + messages})
    environment = {"policy": policy, "tool_defs": tasks[0].get("tools")}
    return {"timestamp": "t", "info": {"environment_info": environment}, "simulations": simulations}


def swe_agent(run: Task) -> Task:
    history = [{**m, "agent": "main", "message_type": "x", "thought": "t"} for m in run["messages"]]
    steps = [{"action": "ls", "observation": "", "response": "", "thought": ""}]
    return {"trajectory": steps, "history": history, "info": {}, "environment": "e"}


def message_trees(tasks: list[Task]) -> list[Task]:
    """One node per distinct message of a task. A trajectory that repeats another ends in its own leaf."""
    trees = []
    for task in tasks:
        nodes: list[Task] = []
        children: dict[tuple[int | None, str], int] = {}
        for run in task["trajectories"]:
            parent: int | None = None
            for position, message in enumerate(run["messages"]):
                is_last = position == len(run["messages"]) - 1
                key = (parent, json.dumps(message))
                if key not in children or is_last:
                    children[key] = len(nodes)
                    nodes.append({"id": len(nodes), "parent": parent, "messages": [message]})
                parent = children[key]
            nodes[parent] |= {"sample": True, "reward": run["reward"]}
        trees.append({**task, "nodes": nodes})
        del trees[-1]["trajectories"]
    return trees


def token_trees(groups: list[tuple[str, list[Any]]], block: int = 64) -> list[Task]:
    """Cuts the paths of each group into blocks of tokens, one node per distinct block."""
    trees = []
    for name, paths in groups:
        nodes: list[Task] = []
        children: dict[Any, int] = {}
        for path in paths:
            tokens, mask = path.tokens.tolist(), path.loss_mask.tolist()
            parent = None
            for start in range(0, len(tokens), block):
                end = start + block
                key = (parent, tuple(tokens[start:end]), tuple(mask[start:end]))
                if key not in children or end >= len(tokens):
                    children[key] = len(nodes)
                    node = {"parent": parent, "tokens": tokens[start:end], "loss_mask": mask[start:end]}
                    nodes.append(node)
                parent = children[key]
            nodes[parent]["sample"] = True
        trees.append({"id": name, "nodes": nodes})
    return trees


def token_rows(groups: list[tuple[str, list[Any]]]) -> list[Task]:
    """Rows of a prompt and a response, with a mask of the response's length."""
    result = []
    for name, paths in groups:
        for path in paths:
            tokens, mask = path.tokens.tolist(), path.loss_mask.tolist()
            start = mask.index(1.0)
            response = {"completion_ids": tokens[start:], "completion_mask": [int(m) for m in mask[start:]]}
            result.append({"uid": name, "prompt_ids": tokens[:start], **response})
    return result


TOKEN_ROWS: dict[
    str, tuple[Task, Task]
] = {  # columns of the frameworks -> records of 3 tokens of prompt and 2 of response
    "TRL": (
        {
            "prompt_ids": [0, 1, 2, 3],
            "prompt_mask": [0, 1, 1, 1],
            "completion_ids": [4, 5],
            "completion_mask": [1, 1],
        }
        | {"tool_mask": [1, 0], "old_per_token_logps": [-1.0, -2.0], "advantages": 0.5},
        {"loss_mask": [0, 0, 0, 1, 0], "old_logprobs": [None, None, None, -1.0, -2.0], "advantage": 0.5},
    ),
    "verl": (
        {"prompts": [0, 1, 2, 3], "responses": [4, 5, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 0], "uid": "u"}
        | {"response_mask": [1, 1, 0], "rollout_log_probs": [-1.0, -2.0, 0.0], "advantages": [0.5, 0.25, 0.0]}
        | {"input_ids": [0, 1, 2, 3, 4, 5, 0], "position_ids": [0, 0, 1, 2, 3, 4, 4]},
        {"loss_mask": [0, 0, 0, 1, 1], "advantage": [0, 0, 0, 0.5, 0.25], "group_id": "u"}
        | {"rollout_logprobs": [None, None, None, -1.0, -2.0]},
    ),
    "verl, one list": (
        {"input_ids": [1, 2, 3, 4, 5], "response_mask": [1, 0]},
        {"loss_mask": [0, 0, 0, 1, 0]},
    ),
    "slime": (
        {
            "tokens": [1, 2, 3, 4, 5],
            "response_length": 2,
            "loss_mask": [1, 1],
            "rollout_id": 7,
            "group_index": 3,
        }
        | {"rollout_log_probs": [-1.0, -2.0], "reward": 1.0, "index": 9, "prompt": "p", "response": "r"},
        {"loss_mask": [0, 0, 0, 1, 1], "rollout_logprobs": [None, None, None, -1.0, -2.0], "rollout_id": 7}
        | {"reward": 1.0, "id": 9, "group_id": 3},
    ),
    "prime-rl": (
        {
            "token_ids": [1, 2, 3, 4, 5],
            "mask": [False, False, False, True, True],
            "advantages": [0, 0, 0, 1, 1],
        }
        | {
            "logprobs": [0.0, 0.0, 0.0, -1.0, -2.0],
            "temperatures": [1.0, 1.0, 1.0, 0.7, 0.7],
            "example_id": 4,
        },
        {"loss_mask": [0, 0, 0, 1, 1], "rollout_logprobs": [0.0, 0.0, 0.0, -1.0, -2.0], "temperature": 0.7}
        | {"advantage": [0, 0, 0, 1, 1], "group_id": 4},
    ),
    "AReaL": (
        {
            "input_ids": [1, 2, 3, 4, 5],
            "loss_mask": [0, 0, 0, 1, 1],
            "versions": [-1, -1, -1, 6, 7],
            "rewards": 1.0,
        }
        | {"logprobs": [0.0, 0.0, 0.0, -1.0, -2.0], "attention_mask": [1, 1, 1, 1, 1]},
        {"loss_mask": [0, 0, 0, 1, 1], "policy_version": [-1, -1, -1, 6, 7], "reward": 1.0}
        | {"rollout_logprobs": [0.0, 0.0, 0.0, -1.0, -2.0]},
    ),
    "labels": (
        {
            "input_ids": [1, 2, 3, 4, 5, 0],
            "labels": [-100] * 3 + [4, 5, -100],
            "attention_mask": [1] * 5 + [0],
        },
        {"loss_mask": [0, 0, 0, 1, 1]},
    ),
    "a mask of the whole row": (
        {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "loss_mask": [0, 1, 0, 1, 1], "kept": "k"},
        {"loss_mask": [0, 1, 0, 1, 1], "kept": "k"},
    ),
    "no mask": ({"prompt_ids": [1, 2, 3], "completion_ids": [4, 5]}, {"loss_mask": [0, 0, 0, 1, 1]}),
    "prompt_mask that is a loss mask": (
        {
            "prompt_ids": [1, 2, 3],
            "prompt_mask": [False] * 3,
            "completion_ids": [4, 5],
            "completion_mask": [1, 1],
        },
        {"loss_mask": [0, 0, 0, 1, 1]},
    ),
}


def write_lines(path: Path, records: list[Task]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_document(path: Path, value: Any, indent: int | None = 2) -> str:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, records: list[Task]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def write_dataset(folder: Path, records: list[Task]) -> str:
    """Writes what ``datasets.Dataset.save_to_disk`` writes, in two files."""
    import pyarrow
    import pyarrow.ipc

    folder.mkdir()
    table = pyarrow.Table.from_pylist(records)
    half = (len(records) + 1) // 2
    names = []
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pyarrow.ipc.new_stream(str(folder / names[-1]), table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)
