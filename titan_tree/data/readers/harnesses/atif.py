"""ATIF, the trajectory format of Harbor, which OpenHands, Terminus and other agents write, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import Message, call, joined, text_of, without
from titan_tree.data.readers.harnesses.rollouts import model_call, objects_in
from titan_tree.data.readers.harnesses.sessions import without_media
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, shorten

LEFT_OUT = (
    "schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra",
    "subagent_trajectories", "continued_trajectory_ref",
)  # fmt: skip
ROLES = {"system": "system", "user": "user", "agent": "assistant"}
TOKEN_LISTS = ("prompt_token_ids", "completion_token_ids", "logprobs")
REFERRED = "sub-agents or continuations are in other files; give those files, too, to train on them"


class AtifReader(RowReader):
    """Reads {"schema_version": "ATIF-v1.N", "agent", "steps": [{"source", "message", ...}]}, one run per row.

    A step of the agent is an answer: its reasoning, message and tool calls, which the results of its
    observation follow. A result without a call is a message of the user. Copied steps, and those without a
    call of the model, are context. Sub-agents in the row are trajectories of their own. If all answers have
    token ids in their ``metrics``, those are trained in place of the text, one path per call of the model.
    """

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("steps"), list) and str(row.get("schema_version")).startswith("ATIF")

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        self._source = source
        yield from super().records(source)

    def convert(self, row: Record) -> Record:
        name = row.get("trajectory_id") or row.get("session_id") or Path(self.path).stem
        trajectories = [t for n, run in enumerate(_runs(row)) for t in self._trajectories(run, str(n))]
        shared = {n: row[n] for n in ("reward", "temperature") if n in row}
        record = {"id": name, "trajectories": [shared | trajectory for trajectory in trajectories]}
        return joined(without(row, (*LEFT_OUT, *shared)), record)

    def _trajectories(self, run: Record, name: str) -> list[Record]:
        agent = expect(run.get("agent") or {}, dict, "agent", "an object")
        steps = objects_in(run.get("steps"), "steps")
        answers = [step for step in steps if _is_sampled(step)]
        if not answers:
            return []
        if run.get("continued_trajectory_ref") or any(
            "subagent_trajectory_ref" in r for r in _results(steps)
        ):
            self.warn(REFERRED)
        metrics = [expect(step.get("metrics") or {}, dict, "metrics", "an object") for step in answers]
        for m, field in product(metrics, TOKEN_LISTS):
            expect([] if m.get(field) is None else m[field], list, f"metrics.{field}", "a list")
        if all(m.get("prompt_token_ids") and m.get("completion_token_ids") for m in metrics):
            return [
                model_call(m["prompt_token_ids"], m["completion_token_ids"], m.get("logprobs"), None)
                | {"id": f"{name}/{number}", "rollout_id": name}
                for number, m in enumerate(metrics)
            ]
        messages = [m for number, step in enumerate(steps) for m in self._messages(step, f"steps[{number}]")]
        record: Record = {"id": name, "messages": messages}
        return [record | ({"tools": agent["tool_definitions"]} if agent.get("tool_definitions") else {})]

    def _messages(self, step: Record, where: str) -> list[Message]:
        if expect(step.get("extra") or {}, dict, f"{where}.extra", "an object").get("context_management"):
            raise UserError(
                f"{where}.extra.context_management: the step changes what later answers read, and how is "
                "not known; remove the file"
            )
        if (role := ROLES.get(str(step.get("source")))) is None:
            raise UserError(f"{where}.source: expected {', '.join(ROLES)}, got {shorten(step.get('source'))}")
        message: Message = {"role": role, "content": self._text(step.get("message"), f"{where}.message")}
        if thoughts := step.get("reasoning_content"):
            message["reasoning_content"] = thoughts
        if calls := objects_in(step.get("tool_calls") or [], f"{where}.tool_calls"):
            message["tool_calls"] = [
                call(item.get("function_name"), item.get("arguments"), item.get("tool_call_id"))
                for item in calls
            ]
        if role == "assistant" and not _is_sampled(step):
            message["weight"] = 0
        messages = [message]
        for result in _results([step]):
            content = self._text(result.get("content"), f"{where}.observation")
            identifier = result.get("source_call_id")
            own = {"role": "user"} if identifier is None else {"role": "tool", "tool_call_id": identifier}
            messages.append({**own, "content": content})
        return messages

    def _text(self, content: object, where: str) -> str:
        return text_of(without_media(content, self._source), where)


def _runs(row: Record) -> Iterator[Record]:
    """Yields the run of a row, and those of its sub-agents, at any depth."""
    yield row
    for run in objects_in(row.get("subagent_trajectories") or [], "subagent_trajectories"):
        yield from _runs(run)


def _is_sampled(step: Record) -> bool:
    """Returns whether a model wrote the step in this run."""
    return (
        step.get("source") == "agent"
        and not step.get("is_copied_context")
        and step.get("llm_call_count") != 0
    )


def _results(steps: list[Record]) -> Iterator[Record]:
    for step in steps:
        observation = expect(step.get("observation") or {}, dict, "observation", "an object")
        yield from objects_in(observation.get("results") or [], "observation.results")
