"""Token ids, log-probs, experts and sampling masks that responses of vLLM and SGLang record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import mark_of, with_answers, without, without_temperature_0
from titan_tree.data.readers.row_reader import NO_MEDIA, RowReader, expect, warn_once
from titan_tree.data.readers.token_rows import TokenRowReader
from titan_tree.errors import UserError, shorten

TOKEN_ID = re.compile(r"token_id:([0-9]{1,18})")  # how vLLM writes an id in place of a token's text
AS_RECORDED = (
    "the token ids that responses hold are trained as recorded, not the text; they must be those of this "
    "run's tokenizer: to train the text, remove token_ids from the file"
)
NO_PROMPT = (
    "some responses hold token ids of the answer, but not of the prompt, so the text of both is tokenized "
    "again, and recorded log-probs are left out; log with return_token_ids = true"
)
NO_IDS = (
    "some responses hold log-probs of tokens without ids, which are left out; log with return_token_ids = "
    "true, or score the file (titan-tree score)"
)
MEDIA = ("features", "multi_modal_data", "content_parts", "image_data", "video_data", "audio_data")
SHAPELESS = "routed_experts: some are bytes without a shape (SGLang), which are left out"


def recorded(path: str, request: Record, response: Record, choice: Record, where: str) -> Record | None:
    """Returns what was recorded of an answer as a record of token ids, or None without ids of both parts.

    Args:
        path: the file, for warnings.
        choice: a part of the response; the response itself where it has one answer.
        where: the field of the choice, for errors.

    Raises:
        UserError: lists of other lengths, or ids that contradict each other.
    """
    info = expect(choice.get("meta_info") or {}, dict, f"{where}.meta_info", "an object")
    found = list(_answers(choice, info, where))
    ids = next((ids for ids, _ in found if ids), None)
    logprobs = next((values for _, values in found if values), None)
    if ids is None:
        if logprobs is not None:
            warn_once(path, NO_IDS)
        return None
    if request.get("echo"):
        raise UserError(
            "request.echo: expected false, got true: the answer repeats the prompt; log without it"
        )
    for others, values in found:
        if (others or ids) != ids or len(values or ids) != len(ids):
            got = shorten(values if (others or ids) == ids else others)
            raise UserError(f"{where}: expected {len(ids)} token ids and as many log-probs, got {got}, too")
    count = info.get("completion_tokens", _counted(response, choice))
    if count not in (None, len(ids)) or info.get("finish_reason", "") is None:
        raise UserError(
            f"{where}: expected all {shorten(count)} token ids of an answer that ended, got {len(ids)}; of a "
            "stream, log the ids of all chunks, with the last finish_reason"
        )
    prompts = [part.get("prompt_token_ids") for part in (choice, response)]
    prompts += [request.get(name) for name in ("input_ids", "prompt", "token_ids")]
    prompt = next((ids for ids in (*prompts, _read(info, where)) if _are_ids(ids)), None)
    if prompt is None:
        warn_once(path, NO_PROMPT)
        return None
    warn_once(path, AS_RECORDED)
    row: Record = {"prompt_ids": prompt, "completion_ids": ids, "response_logprobs": logprobs}
    row["sampling_mask"] = choice.get("sampling_mask") or info.get("output_token_sampling_mask")
    row["routed_experts"] = _experts(choice, response, len(prompt) + len(ids), where)
    if info.get("routed_experts") is not None:
        warn_once(path, SHAPELESS)
    settings = request.get("sampling_params") or request
    settings = expect(settings, dict, "request.sampling_params", "an object, of one call per row")
    row |= without_temperature_0({"temperature": settings.get("temperature")})
    finish = info.get("finish_reason", mark_of(choice, where))
    row["finish_reason"] = finish.get("type") if isinstance(finish, dict) else finish
    return {name: value for name, value in TokenRowReader().convert(row).items() if value is not None}


def _experts(choice: Record, response: Record, size: int, where: str) -> object:
    """Returns the experts of ``size`` tokens of the prompt and the answer, or None if none were recorded."""
    experts = choice.get("routed_experts")
    if not isinstance(experts, list):
        return experts
    experts = _list(response, "prompt_routed_experts", "response") + experts
    if len(experts) not in (size - 1, size):  # engines do not read the last token
        raise UserError(
            f"{where}.routed_experts: expected {size - 1} entries, for the prompt and the answer without its "
            f"last token, got {len(experts)}; log prompt_routed_experts, too"
        )
    return experts


def _counted(response: Record, choice: Record) -> object:
    """Returns how many tokens of a choice the usage of a response counts, or None if that is not known."""
    usage, choices = response.get("usage"), response.get("choices") or []
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    others = [other.get("token_ids") for other in choices if isinstance(other, dict) and other is not choice]
    lists = [ids for ids in others if isinstance(ids, list)]
    if len(lists) < len(others):
        return None
    return count - sum(map(len, lists)) if type(count) is int else count


def _answers(choice: Record, info: Record, where: str) -> Iterator[tuple[Any, Any]]:
    """Yields the ids and the log-probs of the answer that each part of a choice has; None if it has none."""
    for name in ("token_ids", "output_ids"):
        yield _list(choice, name, where), None
    if pairs := _pairs(info, "output_token_logprobs", where):
        over_mask = _list(info, "output_token_sampling_logprobs", f"{where}.meta_info")
        yield [pair[1] for pair in pairs], over_mask or [pair[0] for pair in pairs]
    where = f"{where}.logprobs"
    logprobs = expect(choice.get("logprobs") or {}, dict, where, "an object")
    content = [
        expect(part, dict, f"{where}.content", "objects") for part in _list(logprobs, "content", where)
    ]
    tokens = [part.get("token") for part in content] or _list(logprobs, "tokens", where)
    values = [part.get("logprob") for part in content] or _list(logprobs, "token_logprobs", where)
    matches = [TOKEN_ID.fullmatch(str(token)) for token in tokens]
    ids = [int(match[1]) for match in matches if match]
    yield ids if len(ids) == len(tokens) else None, values


def _read(info: Record, where: str) -> list[object] | None:
    """Returns the ids of the prompt, or those that the log-probs of the input cover, if they are all."""
    if ids := _list(info, "prompt_token_ids", f"{where}.meta_info"):
        return ids if len(ids) == info.get("prompt_tokens", len(ids)) else None
    pairs = _pairs(info, "input_token_logprobs", where)
    return [pair[1] for pair in pairs] if len(pairs) == info.get("prompt_tokens") else None


def _pairs(info: Record, name: str, where: str) -> list[list[object]]:
    """Returns the log-probs of SGLang, each with its token id."""
    where = f"{where}.meta_info"
    pairs = [expect(pair, list, f"{where}.{name}", "lists") for pair in _list(info, name, where)]
    if any(len(pair) < 2 for pair in pairs):
        raise UserError(f"{where}.{name}: expected pairs of a log-prob and a token id, got a shorter list")
    return pairs


def _list(part: Record, name: str, where: str) -> list[Any]:
    """Returns a field with a list; null counts as an empty one."""
    return expect([] if part.get(name) is None else part[name], list, f"{where}.{name}", "a list")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class EngineCallReader(RowReader):
    """Reads calls of completions and of generate, whose prompts are text or token ids:

        {"request": {"prompt": ids, ...}, "response": {"choices": [{"token_ids", "logprobs", ...}]}}
        {"request": {"input_ids", ...}, "response": {"meta_info": {"output_token_logprobs", ...}, ...}}

    The ids are trained as recorded. ``prompt_token_ids`` or the request has those of the prompt.
    """

    reads_calls = True

    def recognizes_row(self, row: Record) -> bool:
        request, response = row.get("request"), row.get("response")
        return (
            isinstance(request, dict)
            and not {"messages", "input"} & request.keys()
            and bool({"prompt", "input_ids", "text", "token_ids"} & request.keys())
            and isinstance(response, dict | list)
        )

    def convert(self, row: Record) -> Record:
        request = expect(row.get("request"), dict, "request", "an object with a prompt")
        if media := [name for name in MEDIA if request.get(name)]:
            raise UserError(f"request.{media[0]}: {NO_MEDIA}")
        response = row.get("response")
        choices = response.get("choices", [response]) if isinstance(response, dict) else response
        choices = expect(choices or None, list, "response.choices", "a list of answers; remove a failed call")
        records = []
        for index, choice in enumerate(choices):
            where = f"response.choices[{index}]"
            choice = expect(choice, dict, where, "an object with token ids")
            whole = response if isinstance(response, dict) else {}
            if (record := recorded(self.path, request, whole, choice, where)) is None:
                raise UserError(
                    f"{where}: expected token ids of the prompt and of the answer; log them with "
                    "return_token_ids = true, or give the texts as prompt and completion"
                )
            records.append(record)
        if len({tuple(r["tokens"][: r["loss_mask"].index(1)]) for r in records}) > 1:
            raise UserError("response: expected answers to one prompt, got several; log a row per prompt")
        return with_answers(without(row, ("request", "response")), records)
