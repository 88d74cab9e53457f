"""Rows of token ids, in the columns of TRL, verl, slime, prime-rl, AReaL and SkyRL."""

from __future__ import annotations

from collections.abc import Iterable

from titan_tree.components.tree_tokenizer.endings import Ending, ending
from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, shorten

PROMPTS = ("prompt_ids", "prompt_token_ids", "prompts", "input_tokens")
RESPONSES = ("completion_ids", "completion_token_ids", "response_ids", "responses", "output_tokens")
WHOLE = ("tokens", "input_ids", "token_ids")

# Columns by the field of titan_tree's schema that they become. The product of all masks is the loss mask.
MASKS = (
    "loss_mask", "loss_masks", "mask", "response_mask", "completion_mask", "tool_mask", "assistant_masks",
)  # fmt: skip
PER_TOKEN = {
    "old_logprobs": ("old_logprobs", "old_log_probs", "old_per_token_logps", "prox_logp"),
    "rollout_logprobs": (
        "rollout_logprobs",
        "rollout_log_probs",
        "sampling_per_token_logps",
        "logprobs",
        "response_logprobs",
        "completion_logprobs",
        "output_logprobs",
    ),
    "ref_logprobs": ("ref_logprobs", "ref_log_prob", "ref_per_token_logps"),
    "sampling_mask": ("sampling_mask",),
    "teacher_topk": ("teacher_topk",),
    "policy_version": ("policy_version", "versions", "output_versions", "weight_version"),
    "advantage": ("advantage", "advantages"),
}
PER_ROW = {
    "reward": ("reward", "rewards", "reward_score"),
    "group_id": ("group_id", "uid", "group_index", "example_id", "problem_id"),
    "rollout_id": ("rollout_id",),
    "id": ("id",),
    "routed_experts": ("routed_experts", "rollout_routed_experts", "rollout_expert_indices"),
    "images": ("images",),
    "teacher": ("teacher",),
}
MARKS = ("finish_reason", "stop_reason", "status")
FLAGS = ("truncated", "is_truncated")  # true: cut off
TEMPERATURES = ("temperature", "temperatures", "completion_temperatures")
# These columns describe the response and never the prompt, whatever their length.
OF_RESPONSE = (
    "response_mask", "tool_mask", "old_log_probs", "rollout_log_probs", "ref_log_prob",
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "response_logprobs",
    "completion_logprobs", "output_logprobs", "output_versions", "completion_temperatures",
)  # fmt: skip
# Text that the tokens already hold, values for a critic, and positions that follow from the tokens.
BOOKKEEPING = (
    "prompt", "response", "completion", "text", "position_ids", "response_length", "returns", "values",
    "token_level_rewards", "token_level_scores",
)  # fmt: skip

# Names that titan_tree's own schema has, too.
OWN_SCHEMA = {"tokens", "input_ids", "loss_mask", "finish_reason", "temperature", *PER_TOKEN, *PER_ROW}


class TokenRowReader(RowReader):
    """Reads a prompt and a response as two lists of token ids, or both as one list with a mask.

    - A column of the response's length belongs to the response: the prompt gets mask 0, and null or 0
      elsewhere. Columns of the whole length are taken as they are. Every other length is an error.
    - ``response_length``, or the length of ``response_mask``, says where a response begins in a single list.
    - ``labels`` (-100: not trained on) become a mask.
    - Tokens with 0 in ``attention_mask`` are padding and are removed, also those of ``prompt_mask``. A
      ``prompt_mask`` of zeros alone is a loss mask.
    - ``start`` of an image counts the tokens of the prompt, those of the response, and padding.
    - ``MARKS`` and ``FLAGS`` say how the response ended. The ids of a response that was cut off are trained
      as they are.
    - Several temperatures in a row are refused. ``BOOKKEEPING`` is left out.
    """

    reads_images = True

    def recognizes_row(self, row: Record) -> bool:
        if any(_are_ids(row.get(name)) for name in PROMPTS):
            is_cut = row.keys() <= KNOWN and next(reversed(row)) in PROMPTS  # behind a prompt of many images
            if is_cut or any(_are_ids(row.get(name)) for name in RESPONSES):
                return True
        if {"path_id", "node_ids"} <= row.keys():  # of skyrl-capture
            return False
        is_own_schema = {"tokens", "input_ids"} & row.keys() and not _foreign(row)
        return not is_own_schema and any(_are_ids(row.get(name)) for name in WHOLE)

    def convert(self, row: Record) -> Record:
        tokens, num_prompt = _tokens(row)
        columns = _Columns(row, len(tokens), num_prompt)
        is_real = _real_tokens(row, columns)
        record: Record = {"tokens": tokens, "loss_mask": _loss_mask(row, columns, tokens)}
        for field, names in PER_TOKEN.items():
            if (name := _only(row, names)) is not None:
                record[field] = columns.values(name, 0 if field == "advantage" else None)
        for field, names in PER_ROW.items():
            if (name := _only(row, names)) is not None:
                record[field] = row[name]
        if row.get("index") is not None:
            record.setdefault("id", row["index"])
        if (name := _only(row, TEMPERATURES)) is not None:
            record["temperature"] = _temperature(columns, name, record["loss_mask"])
        if (mark := _mark(row)) is not None:
            record["finish_reason"] = mark
        if not all(is_real):
            is_masked = any(row.get(name) is not None for name in (*MASKS, "labels"))
            if is_masked and any(
                mask and not real for mask, real in zip(record["loss_mask"], is_real, strict=True)
            ):
                raise UserError(
                    "loss_mask: expected 0 for padding, got a trained token with 0 in attention_mask or "
                    "prompt_mask"
                )
            _remove_padding(record, is_real)
        return {**without(row, KNOWN), **record}


class _Columns:
    """The per-token columns of a row, aligned with the tokens of prompt and response."""

    def __init__(self, row: Record, num_tokens: int, num_prompt: int) -> None:
        self.row, self.num_tokens, self.num_prompt = row, num_tokens, num_prompt

    def values(self, name: str, fill: float | None) -> object:
        """Returns one value per token, with ``fill`` for the prompt, or the single number of the row."""
        column = self.row[name]
        if isinstance(column, int | float) and not isinstance(column, bool):
            return column
        column = expect(column, list, name, "a list of numbers")
        num_response = self.num_tokens - self.num_prompt
        if len(column) == num_response:
            return [fill] * self.num_prompt + column
        if len(column) == self.num_tokens and name not in OF_RESPONSE:
            return column
        whole = "" if name in OF_RESPONSE else f" or {self.num_tokens} (the row)"
        raise UserError(f"{name}: expected {num_response} entries (the response){whole}, got {len(column)}")


def _tokens(row: Record) -> tuple[list[int], int]:
    """Returns the token ids of prompt and response, and how many of them are the prompt's."""
    prompt, response, whole = (_only(row, names) for names in (PROMPTS, RESPONSES, WHOLE))
    if prompt is not None and response is not None:
        ids = [*_ids(row, prompt), *_ids(row, response)]
        if whole is not None and row[whole] != ids:
            raise UserError(
                f"{whole}: expected {prompt} followed by {response}, got other token ids; remove it"
            )
        if (length := row.get("response_length")) not in (None, size := len(row[response])):
            raise UserError(
                f"response_length: expected {size}, as {response} has, got {shorten(length)}; remove it"
            )
        return ids, len(row[prompt])
    if prompt is not None or response is not None or whole is None:
        raise UserError(
            f"{prompt or response or 'tokens'}: expected ids of a prompt and a response, or of both; "
            f"got {', '.join(row)}"
        )
    ids = _ids(row, whole)
    if (length := row.get("response_length")) is None:
        length = len(row["response_mask"]) if isinstance(row.get("response_mask"), list) else len(ids)
    if not 0 <= expect(length, int, "response_length", "an integer") <= len(ids):
        raise UserError(f"response_length: expected at most {len(ids)}, the number of tokens, got {length}")
    return ids, len(ids) - length


def _loss_mask(row: Record, columns: _Columns, tokens: list[int]) -> list[float]:
    """Returns the product of all masks; without any, the prompt has 0 and the response 1."""
    masks = [(name, columns.values(name, 0)) for name in MASKS if row.get(name) is not None]
    if (labels := row.get("labels")) is not None:
        masks.append(("labels", _mask_of_labels(labels, tokens)))
    if not masks and not columns.num_prompt:
        raise UserError(
            "loss_mask: missing, and nothing tells the prompt from the response; add a mask with 1 for each "
            "token that is trained on"
        )
    num_response = len(tokens) - columns.num_prompt
    product = [1.0] * len(tokens) if masks else [0.0] * columns.num_prompt + [1.0] * num_response
    for name, mask in masks:
        numbers = expect(mask, list, name, "a list of numbers")
        if bad := next((repr(n) for n in numbers if not isinstance(n, int | float)), None):
            raise UserError(f"{name}: expected numbers, got {bad:.40}")
        if wrong := [number for number in numbers if not number >= 0]:
            raise UserError(f"{name}: expected numbers of at least 0, got {shorten(wrong[0])}")
        product = [before * float(number) for before, number in zip(product, numbers, strict=True)]
    return product


def _mask_of_labels(labels: object, tokens: list[int]) -> list[int]:
    labels = expect(labels, list, "labels", "a list of token ids")
    if len(labels) != len(tokens):
        raise UserError(f"labels: expected {len(tokens)} entries, one per token, got {len(labels)}")
    for index, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (-100, token):
            raise UserError(f"labels[{index}]: expected -100 or the token {token}, got {shorten(label)}")
    return [int(label != -100) for label in labels]


def _real_tokens(row: Record, columns: _Columns) -> list[bool]:
    """Returns for each token whether it is not padding."""
    attention = row.get("attention_mask")
    if attention is None:
        is_real = [True] * columns.num_tokens
    else:
        is_real = _bits(attention, "attention_mask")
        if len(is_real) != columns.num_tokens:
            raise UserError(f"attention_mask: expected {columns.num_tokens} entries, got {len(is_real)}")
        for part in (is_real[: columns.num_prompt], is_real[columns.num_prompt :]):
            if "0" in "".join("01"[entry] for entry in part).strip("0"):
                raise UserError("attention_mask: expected zeros only for padding, got some between tokens")
    if row.get("prompt_mask") is None or not any(prompt := _bits(row["prompt_mask"], "prompt_mask")):
        return is_real
    if len(prompt) != columns.num_prompt or sorted(prompt) != prompt:
        raise UserError(
            f"prompt_mask: expected {columns.num_prompt} entries: 0 for padding at the left, then 1; or all 0"
        )
    return [*prompt, *is_real[columns.num_prompt :]]


def _bits(mask: object, name: str) -> list[bool]:
    entries = expect(mask, list, name, "a list of 0 and 1")
    if wrong := [entry for entry in entries if entry not in (0, 1)]:
        raise UserError(f"{name}: expected 0 or 1 for every token, got {shorten(wrong[0])}")
    return list(map(bool, entries))


def _remove_padding(record: Record, is_real: list[bool]) -> None:
    for field in ("tokens", "loss_mask", "routed_experts", *PER_TOKEN):
        if isinstance(values := record.get(field), list):
            if len(values) != len(is_real):
                raise UserError(f"{field}: expected {len(is_real)} entries beside padding, got {len(values)}")
            record[field] = [value for value, real in zip(values, is_real, strict=True) if real]
    if isinstance(images := record.get("images"), list):
        record["images"] = [_moved(image, is_real) for image in images]


def _moved(image: object, is_real: list[bool]) -> object:
    """Returns an entry of images with the start that it has without padding."""
    start = image.get("start") if isinstance(image, dict) else None
    if not isinstance(image, dict) or type(start) is not int or start < 0:
        return image  # an error, once tokens are read
    return {**image, "start": sum(is_real[:start])}


def _temperature(columns: _Columns, name: str, loss_mask: list[float]) -> object:
    values = columns.values(name, None)
    if not isinstance(values, list):
        return values
    if bad := next((repr(n) for n in values if not isinstance(n, int | float | None)), None):
        raise UserError(f"{name}: expected numbers, got {bad:.40}")
    trained = {value for value, mask in zip(values, loss_mask, strict=True) if mask}
    if len(trained) > 1:
        raise UserError(
            f"{name}: expected one temperature for all trained tokens, got {len(trained)}; split the row"
        )
    return trained.pop() if trained else None


def _mark(row: Record) -> str | None:
    """Returns the mark that says how the response ended; two that contradict each other are an error."""
    marks = {name: row[name] for name in MARKS if row.get(name) is not None}
    flags = [name for name in FLAGS if row.get(name) is not None]
    marks |= {n: "length" if expect(row[n], bool, n, "true or false") else "stop" for n in flags}
    endings: dict[Ending, str] = {ending(mark, name): name for name, mark in marks.items()}
    if len(endings) > 1:
        raise UserError(
            f"{' and '.join(endings.values())}: expected one ending of the response, got "
            f"{' and '.join(endings)}; remove one"
        )
    return next(iter(marks.values()), None)


def _only(row: Record, names: Iterable[str]) -> str | None:
    """Returns the name that the row has; two names of one field are an error."""
    present = [name for name in names if row.get(name) is not None]
    if len(present) > 1:
        raise UserError(
            f"{present[1]}: expected only one of {' and '.join(present)}, which mean the same; remove one"
        )
    return present[0] if present else None


def _ids(row: Record, name: str) -> list[int]:
    ids = expect(row[name], list, name, "a list of token ids")
    for token in ids:
        expect(token, int, name, "integers")
    return ids


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def _foreign(row: Record) -> set[str]:
    """Returns the columns that titan_tree's own schema does not have."""
    return (KNOWN - OWN_SCHEMA - set(BOOKKEEPING)) & row.keys() | ({"response_length", "labels"} & row.keys())


KNOWN = {
    *PROMPTS, *RESPONSES, *WHOLE, *MASKS, *TEMPERATURES, *BOOKKEEPING, *MARKS, *FLAGS,
    "labels", "attention_mask", "prompt_mask", "index",
    *(name for names in (*PER_TOKEN.values(), *PER_ROW.values()) for name in names),
}  # fmt: skip
