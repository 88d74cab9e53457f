"""The record schema: which fields records and messages have, and checks of their names and types.

A record is one trajectory, or one task with several. A trajectory becomes one training sample for each of its
trained turns. Fields marked ? are optional, null counts as missing, and ... stands for the fields that all
trajectories can have:

    {"messages": [...], "tools"?, "turns"?, "chat_template_kwargs"?, ...} a conversation
    {"tokens" or "input_ids": [...], "loss_mask"?, "old_logprobs"?, "ref_logprobs"?, "rollout_logprobs"?,
     "routed_experts"?, "sampling_mask"?, "images"?, "teacher_topk"?, ...}  token ids
    {"text": "...", "prompt"?, ...}                                     text without a chat template
    {"trajectories": [trajectories of any kind], "tools"?, "turns"?, ...} a task

docs/fields.md describes all fields. Every other field is an error, unless it is one of ``BOOKKEEPING`` or
data.ignore_fields lists it; ``UnknownFields`` counts those.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from titan_tree.components.tree_tokenizer.messages import NORMALIZED_FIELDS
from titan_tree.data.readers import Record
from titan_tree.errors import UserError, shorten
from titan_tree.tree.paths import LOGPROBS

TRAJECTORY_KINDS = ("messages", "tokens", "input_ids")  # a trajectory has exactly one of these fields,
TEXT = "text"  # or only this one
LOGPROB_FIELDS = (*LOGPROBS, *(f"shifted_{name}" for name in LOGPROBS))
TOKEN_FIELDS = (
    "loss_mask",
    *LOGPROB_FIELDS,
    "routed_experts",
    "sampling_mask",
    "images",
    "teacher_topk",
)  # only beside token ids
# Of the TokenPaths of any trajectory:
PATH_FIELDS = ("weight", "advantage", "temperature", "policy_version", "teacher")
OWN_FIELDS = (  # of trajectories, not of tasks
    "id", "group_id", "rollout_id", "reward", "preference", "pair", "finish_reason",
)  # fmt: skip
CONVERSATION_FIELDS = ("tools", "turns", "chat_template_kwargs")  # only beside messages
INHERITED_FIELDS = (*CONVERSATION_FIELDS, *PATH_FIELDS)  # a task passes them on to its trajectories

KNOWN = {  # the fields of each kind of record
    "a conversation": frozenset(
        {"messages", "prompt_tokens", *OWN_FIELDS, *CONVERSATION_FIELDS, *PATH_FIELDS}
    ),
    "token ids": frozenset({"tokens", "input_ids", *OWN_FIELDS, *TOKEN_FIELDS, *PATH_FIELDS}),
    "a text": frozenset({TEXT, "prompt", *OWN_FIELDS, *PATH_FIELDS}),
    "a task": frozenset({"trajectories", "group_id", "id", *INHERITED_FIELDS}),
}
MESSAGE_FIELDS = NORMALIZED_FIELDS | {"name", "tool_call_id", "weight"}
BOOKKEEPING = frozenset(  # names that say where data comes from; ignored in records and messages
    {
        "task",
        "task_id",
        "uuid",
        "index",
        "source",
        "data_source",
        "dataset",
        "split",
        "url",
        "license",
        "model",
    }
    | {"created_at", "timestamp", "metadata", "meta", "info", "extra_info", "tags", "category", "language"}
    | {"difficulty", "question", "answer", "search", "comment", "notes", "entropies"}
    # Of stored completions and the logs of proxies:
    | {"object", "created", "usage", "system_fingerprint", "service_tier", "request_id", "status_code"}
    | {"latency", "latency_s", "latency_ms", "duration", "duration_s", "duration_ms", "cost", "provider"}
    # Of harnesses and their data sets:
    | {"ts", "time", "updated_at", "start_time", "end_time", "elapsed", "elapsed_s", "cost_usd"}
    | {"trial", "trial_id", "step_index", "step_id", "attempt", "session_id", "trace_id", "span_id", "run_id"}
    | {"harness_version", "version", "instance_id", "traj_id", "trajectory_format", "resolved", "patch"}
    | {"repo", "agent", "exit_status", "extra"}
)
ADVICE = {  # what to do about fields that are probably meant to be read
    "labels": "not read; give unpadded tokens and a loss_mask (0: not trained on)",
    "attention_mask": "not read; give unpadded tokens and a loss_mask (0: not trained on)",
    "response_mask": "not read; give a loss_mask with one entry per token, 0 for the prompt",
    "finish_reason": "not read here; give each trajectory, or its last message, a finish_reason of its own",
    "from": "not read; write role and content, or name the list conversations, as in ShareGPT",
    **dict.fromkeys(
        ("pixel_values", "image_grid_thw", "multi_modal_data", "multi_modal_inputs"),
        "not read; name the files of images in the field images (docs/images.md)",
    ),
    "score": "not read; a reward is called reward",
    "reward": "not read here; give each trajectory a reward of its own",
    "preference": "not read here; give each trajectory a preference of its own",
    "rollout_id": "not read here; give each trajectory a rollout_id of its own",
    "tools": "not read here; only conversations have tools",
    "turns": "not read here; only conversations have turns",
}
MAX_NAME = 512  # characters of an id, which error messages and reports show

_INTEGERS, _NUMBERS = frozenset({int}), frozenset({int, float})
_TYPES: Mapping[str, frozenset[type]] = {  # Python types of a field's value, or of the items of its list
    "tokens": _INTEGERS,
    "input_ids": _INTEGERS,
    "prompt_tokens": _INTEGERS,
    "policy_version": _INTEGERS | {type(None)},
    "loss_mask": _NUMBERS | {bool},
    "weight": _NUMBERS,
    "advantage": _NUMBERS,
    "temperature": _NUMBERS,
    **dict.fromkeys(LOGPROB_FIELDS, _NUMBERS | {type(None)}),
}


def is_text(record: Record) -> bool:
    """Returns whether a trajectory is text without a chat template."""
    return isinstance(record.get(TEXT), str) and not any(map(record.get, TRAJECTORY_KINDS))


def present_fields(record: Record, names: Iterable[str]) -> Record:
    """Returns the named fields that the record has; null counts as missing."""
    return {name: record[name] for name in names if record.get(name) is not None}


def refuse_fields(record: Record, names: Iterable[str], reason: str) -> None:
    """Raises UserError if the record has one of the named fields, which would be dropped silently."""
    for name in names:
        if record.get(name) is not None:
            raise UserError(f"{name}: {reason}")


def record_name(record: Record, field: str) -> str | None:
    """Returns ``id``, ``group_id`` or ``rollout_id`` as text, or None if it is missing."""
    name = record.get(field)
    if name is None:
        return None
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(f"{field}: expected a string or an integer, got {shorten(name)}")
    if len(text := str(name)) > MAX_NAME:
        raise UserError(f"{field}: expected at most {MAX_NAME} characters, got {len(text):,}; shorten it")
    return text


class UnknownFields:
    """Finds the fields of records and messages that are not known.

    Args:
        ignored: fields that are no errors, such as ``name`` or ``messages[*].name``; "*" stands for all.
        raises: whether ``refuse`` raises. Otherwise ``problems`` collects those of several records.

    Attributes:
        counts: how often unknown fields were ignored, by name.
        problems: what is wrong with each of the others that were found, by name.
    """

    def __init__(self, ignored: Iterable[str] = "*", raises: bool = True) -> None:
        self.ignored = frozenset(name.rpartition("[*].")[2] for name in ignored) | BOOKKEEPING
        self.counts: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        self.raises = raises

    def check(self, record: Record, known: Set[str], kind: str, where: str = "") -> None:
        """Adds the unknown fields of a record or message to ``counts`` or ``problems``."""
        if record.keys() <= known:
            return
        for name, value in record.items():
            if value is None or name in known:
                continue
            if name in self.ignored or "*" in self.ignored:
                self.counts[name] += 1
            else:
                self.problems[f"{where}{name[:60]}"] = _problem(name[:60], known, kind)

    def refuse(self) -> None:
        """Raises UserError for all unknown fields that were found."""
        if self.raises and self.problems:
            raise UserError(self.message())

    def message(self) -> str:
        """Returns what is wrong with the fields in ``problems``, and how to ignore them."""
        by_problem: dict[str, list[str]] = {}
        for name, problem in self.problems.items():
            by_problem.setdefault(problem, []).append(name)
        parts = [
            f"{', '.join(names)}: {p if len(names) == 1 else p.replace('unknown field', 'unknown fields')}"
            for p, names in by_problem.items()
        ]
        names = ", ".join(json.dumps(name.rpartition("[*].")[2]) for name in self.problems)
        text = " ".join(part if part.endswith("?") else f"{part}." for part in parts)
        return f"{text} To ignore: data.ignore_fields='[{names}]'"


def _problem(name: str, known: Set[str], kind: str) -> str:
    if name in ADVICE:
        return ADVICE[name]
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown field; did you mean {close[0]!r}?" if close else f"unknown field of {kind}"


ALL_IGNORED = UnknownFields()


def check_record(record: Record, kind: str, fields: UnknownFields) -> None:
    """Checks the names of a record's fields, and the types of numbers.

    Args:
        kind: a key of ``KNOWN``.
        fields: finds unknown fields.

    Raises:
        UserError: unknown fields, or text, a boolean or null in place of a number.
    """
    fields.check(record, KNOWN[kind], kind)
    fields.refuse()
    for field, value in record.items():
        types = _TYPES.get(field)
        if types is None or value is None or hasattr(value, "dtype"):
            continue  # no number, missing, or an array, whose dtype TokenPath checks
        items = value if isinstance(value, list) else [value]
        if set(map(type, items)) <= types:
            continue
        index = next(i for i, item in enumerate(items) if type(item) not in types)
        where = f"{field}[{index}]" if isinstance(value, list) else field
        noun = "a number" if float in types else "an integer"
        raise UserError(f"{where}: expected {noun}, got {shorten(items[index])}")


def check_messages(messages: object, template_fields: Set[str], fields: UnknownFields) -> None:
    """Checks the names of the fields of messages. Other checks are those of ``normalize_messages``.

    Args:
        messages: the field of a record, of any type.
        template_fields: fields that the chat template reads.
        fields: see ``check_record``.
    """
    known = MESSAGE_FIELDS | template_fields - {"text"}  # which content parts have
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            fields.check(message, known, "a message", "messages[*].")
    fields.refuse()


def turn_weights(messages: Iterable[Mapping[str, object]]) -> list[int]:
    """Returns the ``weight``, 0 or 1, of each assistant message of a valid conversation; 1 by default."""
    weights = []
    for index, message in enumerate(messages):
        weight = message.get("weight")
        if weight is not None and message["role"] != "assistant":
            raise UserError(f"messages[{index}].weight: expected only on assistant messages; remove it")
        if weight is not None and (type(weight) not in _NUMBERS or weight not in (0, 1)):
            expected = "0 (no sample of this turn) or 1"
            raise UserError(f"messages[{index}].weight: expected {expected}, got {shorten(weight)}")
        if message["role"] == "assistant":
            weights.append(1 if weight is None else int(weight))
    return weights
