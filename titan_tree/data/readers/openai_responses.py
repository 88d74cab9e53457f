"""OpenAI Responses: items of input and output, with instructions."""

from __future__ import annotations

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import (
    EARLIER_TURNS,
    REQUEST_FIELDS,
    Message,
    answered,
    assistant_messages,
    call,
    content_of,
    joined,
    marked,
    result_of,
    text_of,
    without,
    without_temperature_0,
)
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, shorten

ENCRYPTED = (
    "some reasoning items have no text (encrypted, or without summary); their turns are trained without them"
)
RESPONSE_FIELDS = (
    "object", "created_at", "completed_at", "status", "error", "incomplete_details", "usage", "billing",
    "reasoning", "text", "moderation",
)  # fmt: skip
ENDED = ("output", "status", "incomplete_details", "error", "previous_response_id", "conversation")
CALLS = {"function_call": "arguments", "custom_tool_call": "input", "computer_call": "action"}
OUTPUTS = tuple(f"{kind}_output" for kind in CALLS)


class OpenAIResponsesReader(RowReader):
    """Reads {"input", "output"?, "instructions"?, "tools"?}, or a request with its response:

        {"request": {"input", "instructions"?, "tools"?}, "response": {"output"}}

    ``input`` is a string or a list of items, ``output`` a list of items. Instructions become the system
    message. Adjacent reasoning, text and function calls become one assistant message. Reasoning is the text
    of its content, or else of its summary. A ``computer_call`` becomes a call of the tool "computer" with the
    action as its arguments; its result is the screenshot. The ``status`` of a response, and of an item, says
    whether it was cut off or filtered. Parameters are left out, except for a ``temperature`` above 0. Items
    of tools that run at OpenAI are refused. ``previous_response_id`` and ``conversation`` are refused,
    because the earlier items are not in the file.
    """

    reads_calls = True

    def recognizes_row(self, row: Record) -> bool:
        if isinstance(request := row.get("request"), dict):
            return "input" in request
        return _are_items(row.get("input")) or (
            isinstance(row.get("input"), str) and _are_items(row.get("output"))
        )

    def convert(self, row: Record) -> Record:
        if "request" in row:
            request = expect(row["request"], dict, "request", "an object with input")
            response = expect(row.get("response"), dict, "response", "an object with output")
            ended = {name: response.get(name) for name in ENDED}
            row = joined(joined(without(row, ("request", "response")), request), ended)
        for name in ("previous_response_id", "conversation"):
            if row.get(name) is not None:
                raise UserError(
                    f"{name}: expected the items of the earlier responses in input; add them, and remove "
                    "this field"
                )
        messages: list[Message] = []
        if instructions := row.get("instructions"):
            messages.append({"role": "system", "content": text_of(instructions, "instructions")})
        items = row.get("input")
        if isinstance(items, str):
            messages.append({"role": "user", "content": items})
            items = []
        prompt = self.messages(items, "input")
        if any(message["role"] == "assistant" for message in prompt) and row.get("output") is not None:
            self.warn(EARLIER_TURNS)
        messages += prompt
        record = without(row, {*REQUEST_FIELDS, *RESPONSE_FIELDS, *ENDED, "instructions", "input"})
        record = joined(without_temperature_0(record), {"messages": messages})
        details = expect(row.get("incomplete_details") or {}, dict, "incomplete_details", "an object")
        mark = row.get("status") if details.get("reason") is None else details["reason"]
        is_finished = ending(mark, "status") == "finished"
        if is_finished and row.get("error") is not None:
            raise UserError("error: expected an answer without an error; give its status, or remove the row")
        if row.get("output") is not None:
            answer = self.messages(row["output"], "output") or [{"role": "assistant", "content": ""}]
            record |= answered(messages, marked(answer, mark, "status"))
        elif not is_finished:
            raise UserError("status: expected the answer that did not end in output; move its items there")
        if row.get("tools") is not None:
            tools = expect(row["tools"], list, "tools", "a list of schemas")
            record["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        return without(record, () if row.get("tools") is not None else ("tools",))

    def messages(self, items: object, where: str) -> list[Message]:
        """Returns the messages that a list of items becomes."""
        messages: list[Message] = []
        parts: list[tuple[str, object]] = []  # of the assistant, since the last message of another role
        names: dict[str, object] = {}  # of the tools, by the ids of calls
        for index, item in enumerate(_items(items, where)):
            place = f"{where}[{index}]"
            item = expect(item, dict, place, "an item")
            kind = item.get("type", "message")
            role = item.get("role") if kind == "message" else None
            ends = None  # how an item of the assistant ended
            if kind in OUTPUTS or (kind == "message" and role != "assistant"):
                messages += [*assistant_messages(parts), _other_message(item, kind, names, place)]
                parts = []
            elif kind == "message":
                after_text = [("end", None)] if parts and parts[-1][0] == "text" else []
                parts += [*after_text, ("text", text_of(item.get("content"), f"{place}.content"))]
                ends = item.get("status")
            elif kind == "reasoning":
                if text := _reasoning(item, place):
                    parts.append(("reasoning", text))
                else:
                    self.warn(ENCRYPTED)
                ends = item.get("status")
            elif isinstance(kind, str) and kind in CALLS:
                name, arguments = item.get("name"), item.get(CALLS[kind])
                if kind == "computer_call":
                    name = "computer"
                    if arguments is None:
                        arguments = {"actions": expect(item.get("actions"), list, place, "an action")}
                names[str(item.get("call_id"))] = name
                parts.append(("call", call(name, arguments, item.get("call_id"))))
                ends = item.get("status")
            else:
                raise UserError(
                    f"{place}: items of type {shorten(kind)} are not supported; expected message, reasoning, "
                    f"{', '.join(CALLS)} or the output of a call: remove the sample"
                )
            if ending(ends, f"{place}.status") != "finished":
                parts.append(("end", ends))
        return messages + assistant_messages(parts)


def _other_message(item: Message, kind: str, names: dict[str, object], where: str) -> Message:
    """Returns the message of a tool's output, or of a system, developer or user item."""
    if kind in OUTPUTS:
        identifier = item.get("call_id")
        output = [item.get("output")] if kind == "computer_call_output" else item.get("output")
        content = result_of(output, f"{where}.output")
        message = {"role": "tool", "content": content, "tool_call_id": identifier}
        name = names.get(str(identifier))
        return message if name is None else {**message, "name": name}
    role = item.get("role")
    if role not in ("system", "developer", "user"):
        raise UserError(f"{where}.role: expected system, developer, user or assistant, got {shorten(role)}")
    content = content_of(item.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _reasoning(item: Message, where: str) -> str:
    for field in ("content", "summary"):
        parts = item.get(field) or []
        texts = []
        for index, part in enumerate(expect(parts, list, f"{where}.{field}", "a list of texts")):
            place = f"{where}.{field}[{index}]"
            texts.append(
                expect(expect(part, dict, place, "a text").get("text"), str, f"{place}.text", "a string")
            )
        if texts:
            return "\n\n".join(texts)
    return ""


def _items(items: object, where: str) -> list[object]:
    return [] if items is None else expect(items, list, where, "a list of items")


def _are_items(value: object) -> bool:
    """Returns whether a value is a list of items: messages, or objects with a type that Responses has."""
    kinds = ("message", "reasoning", *CALLS, *OUTPUTS)
    return isinstance(value, list) and any(
        isinstance(item, dict) and (item.get("type") in kinds or ("role" in item and "content" in item))
        for item in value
    )


def _tool(tool: object, where: str) -> object:
    """Returns the tool's schema in the spelling of Chat Completions."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    if tool.get("type") != "function":
        raise UserError(
            f"{where}: a tool of type {shorten(tool.get('type'))} has no schema; expected tools of type "
            "function; give it a schema as one, or leave it out"
        )
    return {"type": "function", "function": without(tool, ("type", "strict"))}
