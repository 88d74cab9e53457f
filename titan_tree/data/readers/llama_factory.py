"""Alpaca and ShareGPT, also with the history, tools and roles of LLaMA-Factory."""

from __future__ import annotations

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import Message, call, joined, without
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.data.readers.strict_json import parse_text
from titan_tree.errors import UserError, shorten

FIELDS = ("instruction", "input", "output", "system", "history", "text")


class AlpacaReader(RowReader):
    """Reads {"instruction", "input"?, "output", "system"?, "history"?: [[question, answer]]}.

    The user's message is the instruction, and the input on the next line, as in LLaMA-Factory. Answers of the
    history become samples, too. ``text`` repeats the row inside of a prompt template and is left out.
    """

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str)

    def convert(self, row: Record) -> Record:
        messages: list[Message] = []
        if row.get("system"):
            messages.append({"role": "system", "content": expect(row["system"], str, "system", "a string")})
        for index, turn in enumerate(expect(row.get("history") or [], list, "history", "a list of pairs")):
            where = f"history[{index}]"
            pair = expect(turn, list, where, "a question and an answer")
            expect(len(pair) == 2 or None, bool, where, "a question and an answer")
            messages += _turn(*(expect(text, str, where, "two strings") for text in pair))
        question = expect(row.get("instruction"), str, "instruction", "a string")
        if row.get("input"):
            text = expect(row["input"], str, "input", "a string")
            question = f"{question}\n{text}" if question else text
        messages += _turn(question, expect(row.get("output"), str, "output", "a string"))
        return joined(without(row, FIELDS), {"messages": messages})


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    "function_call": "function_call",
}


class ShareGptReader(RowReader):
    """Reads {"conversations": [{"from", "value"}], "system"?, "tools"?}.

    Turns of "function_call" hold the JSON of a call {"name", "arguments"}, or of a list of calls. Turns of
    "observation" hold a tool's result. ``tools`` may be JSON text. Other members of a turn are refused.
    """

    def recognizes_row(self, row: Record) -> bool:
        turns = row.get("conversations")
        if isinstance(turns, str):
            return turns.lstrip().startswith("[")
        return isinstance(turns, list) and all(
            isinstance(turn, dict) and "from" in turn for turn in turns[:1]
        )

    def convert(self, row: Record) -> Record:
        messages: list[Message] = []
        if row.get("system"):
            messages.append({"role": "system", "content": expect(row["system"], str, "system", "a string")})
        turns = expect(row.get("conversations"), list, "conversations", "a non-empty list of turns")
        for index, turn in enumerate(turns):
            messages.append(_message(turn, f"conversations[{index}]"))
        record = without(row, ("conversations", "system", "tools"))
        if row.get("tools"):
            tools = expect(row["tools"], list, "tools", "a list of schemas")
            record["tools"] = [_tool(tool) for tool in tools]
        return joined(record, {"messages": messages})


def _message(turn: object, where: str) -> Message:
    turn = expect(turn, dict, where, "an object with from and value")
    speaker, value = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise UserError(f"{where}.from: expected one of {', '.join(ROLES)}, got {shorten(speaker)}")
    value = expect(value, str, f"{where}.value", "a string")
    for name in without(turn, ("from", "value")):
        if turn[name] is not None:
            raise UserError(f"{where}.{name}: expected only from and value; remove the field")
    if ROLES[speaker] != "function_call":
        return {"role": ROLES[speaker], "content": value}
    calls = parse_text(value, f"{where}.value (JSON text of a call)")
    calls = calls if isinstance(calls, list) else [calls]
    converted = []
    for item in calls:
        function = expect(item, dict, f"{where}.value", "calls with name and arguments")
        converted.append(call(function.get("name"), function.get("arguments"), None))
    return {"role": "assistant", "content": "", "tool_calls": converted}


def _tool(tool: object) -> object:
    """Returns a schema in OpenAI's envelope {"type": "function", "function": ...}."""
    is_bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool
