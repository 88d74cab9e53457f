"""Sessions of OpenHands: actions of the agent and observations of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_tree.data.readers import Reader, Record, Source
from titan_tree.data.readers.chat import Message, call, text_of
from titan_tree.data.readers.harnesses.rollouts import objects_in
from titan_tree.data.readers.harnesses.sessions import (
    Event,
    as_text,
    context,
    leave_out,
    session_record,
    without_media,
)
from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, errors_at

RESULTS = {  # events of version 1 that are the result of a call, and where their text is
    "ObservationEvent": "observation",
    "AgentErrorEvent": "error",
    "UserRejectObservation": "rejection_reason",
}
SUMMARY = "-summary"  # how the name of a condensation's summary ends; OpenHands names it in the same way
KINDS = ("SystemPromptEvent", "MessageEvent", "ActionEvent", *RESULTS)
NEUTRAL = (  # events that cannot change a prompt, of version 0 and version 1
    "action change_agent_state", "action null", "action None", "action pause", "action resume",
    "action start", "observation agent_state_changed", "observation null", "observation None",
    "action condensation_request", "CondensationRequest", "PauseEvent", "InterruptEvent", "TokenEvent",
    "ConversationStateUpdateEvent", "ConversationErrorEvent", "LLMCompletionLogEvent", "StreamingDeltaEvent",
)  # fmt: skip


class OpenHandsReader(Reader):
    """Reads {"history": [events]}, one per row, or a folder of events: 0.json, or event-00000-ID.json.

    Events of version 0 have an ``action`` or an ``observation``, and those of version 1 a ``kind``. Actions
    with one ``model_response`` or ``llm_response_id`` are one answer. An action of version 0 without a
    response becomes a call of its own name. An observation is the result of the call that
    ``tool_call_id`` or ``cause`` names. The context after a condensation is a root: the events that it keeps,
    with its summary in place of an earlier one. The events between a delegation and its result are those of
    another agent, with a root of its own. Other events are left out.
    """

    def recognizes(self, source: Source) -> bool:
        return any(
            isinstance(event, dict)
            and ("action" in event or "observation" in event or event.get("kind") in KINDS)
            for row in source.first_rows[:1]
            if isinstance(row.get("history"), list)
            for event in _flat(row["history"])[:1]
        )

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        for place, row in source.rows():
            with errors_at(place):
                history = _History(source)
                for index, event in enumerate(_flat(expect(row.get("history"), list, "history", "a list"))):
                    try:
                        with errors_at(f"history[{index}]"):
                            history.add(expect(event, dict, "event", "an object"))
                    except UserError as error:
                        source.skip_broken(error)
                name = row.get("instance_id")
                name = name if isinstance(name, str) else Path(source.path.removesuffix("/events")).stem
                record = session_record(source, name, history.events)
            yield place, record | {"tools": history.tools}


def _flat(history: list[object]) -> list[object]:
    """Returns the events of a history, which older versions store as pairs [action, observation]."""
    return [e for entry in history for e in (entry if isinstance(entry, list) else [entry])]


class _History:
    """The events of a conversation that grows, and that a condensation makes shorter."""

    def __init__(self, source: Source) -> None:
        self.events: list[Event] = []
        self.tools: object = None
        self._source = source
        self._ids: dict[Event, object] = {}  # of the events of the current context
        self._last: Event | None = None
        self._delegating: list[tuple[dict[Event, object], Event | None]] = []  # contexts of waiting agents
        self._responses = set[str]()  # of the model, which have been added
        self._answers: dict[str, Message] = {}  # of version 1, by the ids of responses
        self._calls = set[str]()  # ids of calls that stand for actions without a response

    def add(self, event: Record) -> None:
        """Adds what an event says. Raises UserError for a malformed event."""
        if isinstance(event.get("kind"), str):
            self._add_newer(event, event["kind"])
            return
        kind = "action" if "action" in event else "observation"
        name = as_text(event.get(kind))[:40]
        arguments = expect(event.get("args") or {}, dict, "args", "an object")
        if kind == "observation":
            if name == "delegate" and self._delegating:
                self._ids, self._last = self._delegating.pop()
            message = self._result(event)
        elif name == "condensation":
            self._condense(arguments, event.get("id"))
            return
        elif name == "system":
            self.tools = arguments.get("tools") or self.tools
            message = {"role": "system", "content": text_of(arguments.get("content"), "args.content")}
        else:
            message = self._action(event, name, arguments)
        if message is None:
            leave_out(self._source, f"{kind} {name}", NEUTRAL)
        elif message:
            self._append(message, event.get("id"))
        if kind == "action" and name == "delegate":
            self._delegating.append((self._ids, self._last))
            self._ids, self._last = {}, None

    def _add_newer(self, event: Record, kind: str) -> None:
        """Adds an event of version 1."""
        identifier, name = event.get("tool_call_id"), event.get("tool_name")
        if kind == "Condensation":
            self._condense(event, event.get("id"))
        elif kind == "SystemPromptEvent":
            tools = expect(event.get("tools") or [], list, "tools", "a list")
            if all(isinstance(tool, dict) and "function" in tool for tool in tools):
                self.tools = tools or self.tools
            else:
                self._source.skipped["tool schemas in another form"] += 1
            content = self._text(event.get("system_prompt"))
            self._append({"role": "system", "content": content}, event.get("id"))
        elif kind == "MessageEvent":
            said = expect(event.get("llm_message"), dict, "llm_message", "an object with role and content")
            role = said.get("role") or ("user" if event.get("source") == "user" else "assistant")
            content = self._text(said.get("content")) + self._text(event.get("extended_content"))
            message: Message = {"role": role, "content": content}
            if thought := self._text(said.get("reasoning_content")):
                message["reasoning_content"] = thought
            self._append(message, event.get("id"))
        elif kind == "ActionEvent":
            self._add_call(event)
        elif kind in RESULTS:
            content = self._text(event.get(RESULTS[kind]))
            message = {"role": "tool", "content": content, "tool_call_id": identifier}
            self._append(message if name is None else {**message, "name": name}, event.get("id"))
        else:
            leave_out(self._source, kind, NEUTRAL)

    def _add_call(self, event: Record) -> None:
        """Adds the call of an action of version 1, to the answer that has begun with an earlier one."""
        made = expect(event.get("tool_call") or {}, dict, "tool_call", "an object with name and arguments")
        made = made | expect(made.get("function") or {}, dict, "tool_call.function", "an object")
        action = expect(event.get("action") or {}, dict, "action", "an object")
        arguments = made.get("arguments", {key: action[key] for key in action if key != "kind"})
        new = call(made.get("name") or event.get("tool_name"), arguments, event.get("tool_call_id"))
        response = event.get("llm_response_id")
        answer = self._answers.get(str(response)) if response is not None else None
        if answer is not None:
            answer["tool_calls"].append(new)
            return
        message: Message = {"role": "assistant", "content": self._text(event.get("thought"))}
        if thought := self._text(event.get("reasoning_content")):
            message["reasoning_content"] = thought
        message["tool_calls"] = [new]
        self._answers[str(response)] = message
        self._append(message, event.get("id"))

    def _text(self, value: object) -> str:
        """Returns a text: a string, {"text": string}, {"content": texts}, or a list of these."""
        if value is None or isinstance(value, str):
            return value or ""
        value = without_media(value, self._source)
        if isinstance(value, list):
            return "".join(map(self._text, value))
        value = expect(value, dict, "text", "a string, or objects with a text")
        for name in ("text", "content"):
            if isinstance(part := value.get(name), str | list):
                return self._text(part)
        return as_text({name: value[name] for name in value if name != "kind"})

    def _append(self, message: Message, name: object) -> None:
        self._last = Event(self._last, [message])
        self._ids[self._last] = name
        self.events.append(self._last)

    def _action(self, event: Record, name: str, arguments: Record) -> Message | None:
        """Returns the message of an action: None if it has none, and {} if it was added already."""
        if (response := _metadata(event).get("model_response")) is not None:
            response = expect(response, dict, "model_response", "an object with choices")
            identifier = as_text(response if response.get("id") is None else response["id"])
            if identifier in self._responses:
                return {}
            self._responses.add(identifier)
            return _answer(response)
        if name == "message":
            role = "user" if event.get("source") == "user" else "assistant"
            return {"role": role, "content": text_of(arguments.get("content"), "args.content")}
        if event.get("source") != "agent":
            return None
        self._calls.add(identifier := f"event{event.get('id')}")
        rest = {key: value for key, value in arguments.items() if key != "thought"}
        return {
            "role": "assistant",
            "content": text_of(arguments.get("thought"), "args.thought"),
            "tool_calls": [call(name, rest, identifier)],
        }

    def _result(self, event: Record) -> Message | None:
        metadata = _metadata(event)
        identifier = metadata.get("tool_call_id") or f"event{event.get('cause')}"
        if not metadata and identifier not in self._calls:
            return None
        content = text_of(without_media(event.get("content"), self._source), "content")
        message = {"role": "tool", "content": content, "tool_call_id": identifier}
        name = metadata.get("function_name")
        return message if name is None else {**message, "name": name}

    def _condense(self, arguments: Record, condensation: object) -> None:
        forgotten = arguments.get("forgotten_event_ids")
        if forgotten is None:
            first, last = arguments.get("forgotten_events_start_id"), arguments.get("forgotten_events_end_id")
            first = expect(first, int, "args.forgotten_events_start_id", "the id of an event")
            last = expect(last, int, "args.forgotten_events_end_id", "the id of an event")
            forgotten = range(first, last + 1)
        else:
            expect(forgotten, list, "forgotten_event_ids", "a list of the ids of events")
        summary, offset = arguments.get("summary"), arguments.get("summary_offset")
        kept = [
            (name, m)
            for event, name in self._ids.items()
            if name not in forgotten and not (summary is not None and str(name).endswith(SUMMARY))
            for m in event.messages
        ]
        if isinstance(summary, str):  # in place of an earlier one
            place = min(offset, len(kept)) if type(offset) is int and offset >= 0 else len(kept)
            kept.insert(place, (f"{condensation}{SUMMARY}", {"role": "user", "content": summary}))
        self._last, self._ids = None, {}
        for name, message in kept:
            self._append(context([message])[0], name)


def _metadata(event: Record) -> Record:
    return expect(event.get("tool_call_metadata") or {}, dict, "tool_call_metadata", "an object")


def _answer(response: Record) -> Message:
    """Returns the message of a response in the form of Chat Completions."""
    choices = expect(response.get("choices"), list, "model_response.choices", "a list of one choice")
    where = "model_response.choices[0]"
    choice = expect(choices[0] if choices else None, dict, where, "a choice")
    said = expect(choice.get("message"), dict, f"{where}.message", "an object")
    message: Message = {"role": "assistant", "content": text_of(said.get("content"), f"{where}.content")}
    if said.get("reasoning_content"):
        message["reasoning_content"] = said["reasoning_content"]
    if calls := said.get("tool_calls"):
        message["tool_calls"] = [
            call(function.get("name"), function.get("arguments"), item.get("id"))
            for item in objects_in(calls, f"{where}.tool_calls")
            for function in [expect(item.get("function"), dict, f"{where}.tool_calls", "calls of functions")]
        ]
    if choice.get("finish_reason") is not None:
        message["finish_reason"] = choice["finish_reason"]
    return message
