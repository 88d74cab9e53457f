"""Anthropic's Messages API: a system prompt beside the messages, and content in blocks."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import (
    EARLIER_TURNS,
    REQUEST_FIELDS,
    Message,
    answered,
    assistant_messages,
    call,
    joined,
    joined_parts,
    marked,
    not_text,
    part_of,
    result_of,
    text_of,
    without,
    without_temperature_0,
)
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, shorten

BLOCKS = ("thinking", "redacted_thinking", "tool_use", "tool_result")  # only Anthropic has these
ENCRYPTED = "some thoughts are encrypted and have no text; their turns are trained without them"
RESPONSE_FIELDS = (  # more bookkeeping
    "thinking", "context_management", "container", "mcp_servers", "output_config", "output_format",
)  # fmt: skip
MESSAGE_FIELDS = ("id", "type", "model", "usage", "stop_sequence", "container", "context_management")


def is_anthropic_row(row: Record) -> bool:
    """Returns whether a row has messages, and something that only Anthropic's API has."""
    if isinstance(row.get("request"), dict):
        response = row.get("response")
        return isinstance(response, dict) and isinstance(response.get("content"), list)
    messages = row.get("messages")
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    tools = row.get("tools")
    return (
        row.get("system") is not None
        or any(isinstance(block, dict) and block.get("type") in BLOCKS for block in blocks)
        or (isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools))
    )


class AnthropicReader(RowReader):
    """Reads {"messages", "system"?, "tools"?}, or {"request": {the same}, "response": {"content": [...]}}.

    In a request with its response, only the response is trained. The blocks of an assistant's message become
    its reasoning, text and tool calls, and ``tool_result`` blocks become messages of role "tool". Encrypted
    thoughts have no text; they are left out with a warning. ``stop_reason`` says how an answer ended. A
    response continues the assistant's message at the end of its request. Request parameters other than
    a ``temperature`` above 0 are left out.
    """

    reads_calls = True

    def recognizes(self, source: Source) -> bool:
        """Returns whether some of the first rows are Anthropic's. Others may look like OpenAI's."""
        return any(map(is_anthropic_row, source.first_rows))

    def recognizes_row(self, row: Record) -> bool:
        return is_anthropic_row(row)

    def convert(self, row: Record) -> Record:
        if "request" not in row:
            return self._conversation(row)
        request = expect(row["request"], dict, "request", "an object with messages")
        response = expect(row.get("response"), dict, "response", "an object with content")
        messages = expect(request.get("messages"), list, "request.messages", "a list of messages")
        roles = [message.get("role") for message in messages if isinstance(message, dict)]
        if "assistant" in roles[:-1]:
            self.warn(EARLIER_TURNS)
        return joined(without(row, ("request", "response")), self._conversation(request, response))

    def _conversation(self, row: Record, answer: Message | None = None) -> Record:
        record = without_temperature_0(without(row, {*REQUEST_FIELDS, *RESPONSE_FIELDS, "system"}))
        messages: list[Message] = []
        if system := text_of(row.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        names: dict[object, object] = {}  # of the tools, by the ids of calls
        for index, message in enumerate(expect(row.get("messages"), list, "messages", "a list of messages")):
            messages += self.messages(message, names, f"messages[{index}]")
        record["messages"] = messages
        if answer is not None:
            answer = {**answer, "role": "assistant"}
            continues = bool(messages) and messages[-1]["role"] == "assistant"
            record |= answered(messages, self.messages(answer, names, "response"), continues)
        if row.get("tools") is not None:
            tools = expect(row["tools"], list, "tools", "a list of schemas")
            record["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        return record

    def messages(self, message: object, names: dict[object, object], where: str) -> list[Message]:
        """Returns what a message of the API becomes.

        Args:
            message: an object with role and content.
            names: the tools' names by the ids of earlier calls. Those of this message are added.
            where: the field, for errors.
        """
        message = expect(message, dict, where, "an object with role and content")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise UserError(f"{where}.role: expected user or assistant, got {shorten(role)}")
        content, mark = message.get("content"), message.get("stop_reason")
        others = without(message, ("role", "content", "stop_reason", *MESSAGE_FIELDS))
        if role == "assistant":
            converted = self._answer(content, names, f"{where}.content")
            return marked([m | others for m in converted], mark, f"{where}.stop_reason")
        where = f"{where}.content"
        if not isinstance(content, list):
            return [{"role": role, "content": text_of(content, where)} | others]
        return [m | others for m in _user_messages(role, _blocks(content, where), names)]

    def _answer(self, content: object, names: dict[object, object], where: str) -> list[Message]:
        """Returns the messages that the content of an assistant's message becomes."""
        if not isinstance(content, list):
            return [{"role": "assistant", "content": text_of(content, where)}]
        parts = [
            part for block, place in _blocks(content, where) for part in self._parts(block, names, place)
        ]
        return assistant_messages(parts) or [{"role": "assistant", "content": ""}]

    def _parts(self, block: Message, names: dict[object, object], where: str) -> Iterator[tuple[str, object]]:
        kind = block.get("type")
        if kind == "text":
            yield "text", text_of([block], where)
        elif kind == "thinking":
            yield "reasoning", expect(block.get("thinking"), str, f"{where}.thinking", "a string")
        elif kind == "tool_use":
            identifier = block.get("id")
            names[str(identifier)] = block.get("name")
            yield "call", call(block.get("name"), block.get("input"), identifier)
        elif kind == "redacted_thinking":
            self.warn(ENCRYPTED)
        else:
            raise not_text(where, kind)


def _blocks(content: list[object], where: str) -> list[tuple[Message, str]]:
    """Returns the blocks of a message, each with its place."""
    places = [f"{where}[{index}]" for index in range(len(content))]
    return [
        (expect(block, dict, place, "a content block"), place)
        for block, place in zip(content, places, strict=True)
    ]


def _user_messages(
    role: str, blocks: list[tuple[Message, str]], names: dict[object, object]
) -> list[Message]:
    """Returns the messages that the blocks of a user's message become, in order."""
    messages: list[Message] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            identifier = block.get("tool_use_id")
            name = names.get(str(identifier))
            content = result_of(block.get("content"), f"{where}.content")
            result = {"role": "tool", "content": content, "tool_call_id": identifier}
            messages.append(result if name is None else {**result, "name": name})
            continue
        if not (messages and messages[-1]["role"] == role):
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(part_of(block, where))
    for message in messages:
        if message["role"] == role:
            message["content"] = joined_parts(message["content"])
    return messages or [{"role": role, "content": ""}]


def _tool(tool: object, where: str) -> object:
    """Returns the tool's schema in OpenAI's spelling."""
    if not isinstance(tool, dict) or "input_schema" not in tool:
        if isinstance(tool, dict) and tool.get("type", "custom") not in ("custom", "function"):
            raise UserError(
                f"{where}: a tool that runs at Anthropic ({shorten(tool['type'])}) has no schema here; "
                "add its schema as input_schema"
            )
        return tool
    function = {"name": tool.get("name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
