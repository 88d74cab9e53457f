"""Rows of plain text: a prompt and a completion, and the logs of completions that TRL and verl write."""

from __future__ import annotations

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import RowReader

TRL_LOG = ("step", "advantage")  # columns beside prompt and completion that TRL's log_completions writes
KEPT = ("id", "group_id", "reward", "weight", "advantage")
LEFT_OUT = "columns of the log are left out: {}; to train on rewards, name one of them reward"


class TextRowReader(RowReader):
    """Reads rows of text, which is tokenized as it is, without a chat template:

        {"prompt": str, "completion": str}                                the completion is trained
        {"step", "prompt": str, "completion": str, "advantage", ...}      TRL's log of completions
        {"input": str, "output": str, "score", ...}                       verl's dump of rollouts

    The score becomes the reward. A log's other columns are left out with a warning.
    """

    def recognizes_row(self, row: Record) -> bool:
        return _are_texts(row, "prompt", "completion") or _is_dump(row)

    def convert(self, row: Record) -> Record:
        if _is_dump(row):
            texts = {"prompt": row["input"], "text": row["output"], "reward": row["score"]}
            return log_fields(self, without(row, ("input", "output", "score", "gts", "step"))) | texts
        texts = {"prompt": row["prompt"], "text": row["completion"]}
        others = without(row, ("prompt", "completion"))
        return (log_fields(self, without(others, ("step",))) if is_trl_log(row) else others) | texts


def log_fields(reader: RowReader, row: Record) -> Record:
    """Returns the columns of a log, beside its texts, that training reads. ``reader`` warns of others."""
    if others := sorted(row.keys() - set(KEPT)):
        reader.warn(LEFT_OUT.format(", ".join(others)))
    return {name: row[name] for name in KEPT if name in row}


def is_trl_log(row: Record) -> bool:
    """Returns whether a row with a prompt and a completion comes from TRL's log of completions."""
    return all(name in row for name in TRL_LOG)


def _is_dump(row: Record) -> bool:
    return _are_texts(row, "input", "output") and "score" in row and "instruction" not in row


def _are_texts(row: Record, *names: str) -> bool:
    return all(isinstance(row.get(name), str) for name in names) and "messages" not in row
