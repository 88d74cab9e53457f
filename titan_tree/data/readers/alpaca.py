"""Alpaca: an instruction with an input and an output, also with the history of LLaMA-Factory."""

from __future__ import annotations

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import Message, without
from titan_tree.data.readers.row_reader import RowReader, expect

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
        return {**without(row, FIELDS), "messages": messages}


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
