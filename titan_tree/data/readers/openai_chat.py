"""OpenAI Chat Completions: conversations, fine-tuning files, and requests with their responses."""

from __future__ import annotations

from itertools import takewhile

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.anthropic import is_anthropic_row
from titan_tree.data.readers.chat import (
    EARLIER_TURNS,
    REQUEST_FIELDS,
    Message,
    answered,
    call,
    content_of,
    joined,
    mark_of,
    marked,
    sources_of,
    with_answers,
    with_image_column,
    without,
    without_temperature_0,
)
from titan_tree.data.readers.row_reader import NO_MEDIA, PAIR_COLUMNS, SAMPLED, RowReader, expect
from titan_tree.data.readers.sampled import recorded
from titan_tree.data.readers.text_rows import is_trl_log, log_fields
from titan_tree.errors import UserError, shorten

ANSWERED = ("choices", "prompt_token_ids", "prompt_routed_experts", "usage")  # of a response that is merged
ASKED = ("messages", "tools", "functions", "temperature", "continue_final_message", *REQUEST_FIELDS)


class OpenAIChatReader(RowReader):
    """Reads rows of one of these forms, and leaves rows of titan_tree's own schema as they are:

        {"messages": [...], "tools" or "functions"?}
        {"request": {"messages": [...], ...}, "response": {"choices": [{"message": {...}}]}}
        {"messages": [...], ..., "choices": [{"message": {...}}], ...}
        {"prompt": [messages], "completion": [messages]}
        {"prompt"?: [messages], "chosen": [messages], "rejected": [messages]}

    Legacy ``function_call`` and role "function" become tool calls and role "tool", and role "developer"
    becomes "system". A ``refusal`` is the text of its message. A column ``images`` fills the parts
    ``{"type": "image"}`` in order, as in data sets for TRL. Several choices become trajectories. Of the
    last four forms, only the response or completion is trained. A preference pair becomes a task of two
    trajectories; without a prompt, the messages that both answers begin with are the prompt.
    A ``finish_reason`` says how an answer ended. With ``continue_final_message`` in the request, or
    ``prefix`` in its last message, the answer continues that message.
    Token ids that the response records are trained in place of the text (sampled.py). Parameters of the
    request (``REQUEST_FIELDS``) and the response's bookkeeping (usage, log-probs of text) are left out; a
    ``temperature`` above 0 is kept.
    """

    reads_images = True
    reads_pairs = True
    reads_calls = True

    def recognizes(self, source: Source) -> bool:
        """Returns whether some of the first rows are conversations, and none is Anthropic's."""
        first = source.first_rows
        return any(map(self.recognizes_row, first)) and not any(map(is_anthropic_row, first))

    def recognizes_row(self, row: Record) -> bool:
        if isinstance(row.get("messages"), list | str):
            return True
        if isinstance(request := row.get("request"), dict):
            return "messages" in request
        if _are_messages(row.get("chosen")):
            return True
        return _are_messages(row.get("prompt")) and _are_messages(row.get("completion"))

    def convert(self, row: Record) -> Record:
        row = with_image_column(row, ("prompt", "messages", "completion", *PAIR_COLUMNS))
        if row.get("request") is not None:
            return self._pair(row)
        if isinstance(row.get("choices"), list) and "messages" in row:  # a request with its response, merged
            asked = {name: row[name] for name in ASKED if name in row}
            response = {name: row[name] for name in ANSWERED if name in row}
            return self._pair(without(row, (*ASKED, *ANSWERED)) | {"request": asked, "response": response})
        if any(row.get(name) is not None for name in PAIR_COLUMNS):
            return self._preference_pair(row)
        if row.get("completion") is not None and row.get("messages") is None:
            return self._prompt_and_completion(without(row, ("messages",)))
        if "messages" in row:
            return {**converted_request(row), "messages": converted_messages(row["messages"], "messages")}
        if isinstance(trajectories := row.get("trajectories"), list):
            return {**row, "trajectories": [_trajectory(t, i) for i, t in enumerate(trajectories)]}
        return row

    def _pair(self, row: Record) -> Record:
        request = expect(row["request"], dict, "request", "an object with messages")
        response = row.get("response")
        if not isinstance(response, dict):
            names = ", ".join(row)[:60]
            found = "null" if response is None else shorten(response)
            found = found if "response" in row else f"only the fields {names}"
            fix = "rename or add it, or remove a failed call"
            if isinstance(response, list):
                fix = "join the chunks of a stream into one message"
            raise UserError(
                f"response: expected an object with choices beside the request, got {found}; {fix}"
            )
        choices = response.get("choices")
        if not isinstance(choices, list) or not choices:
            found = shorten(choices)
            raise UserError(f"response.choices: expected a non-empty list, got {found}; remove a failed call")
        prompt = converted_messages(request.get("messages"), "request.messages")
        continues = request.get("continue_final_message") is True
        if prompt and prompt[-1].get("prefix") is not None:
            continues = prompt[-1].pop("prefix") is True
        if continues:
            request = without(request, ("continue_final_message", "add_generation_prompt"))
        self._warn_about_turns(prompt[:-1] if continues else prompt)
        asked = without(converted_request(request), ("messages",))
        record = joined(without(row, ("request", "response")), asked)
        is_finished = ending(response.get("status"), "response.status") == "finished"
        answers: list[Record] = []
        for index, choice in enumerate(choices):
            where = f"response.choices[{index}]"
            choice = expect(choice, dict, where, "an object with a message")
            mark = mark_of(choice, where)
            if not is_finished and ending(mark, f"{where}.finish_reason") == "finished":
                raise UserError(f"response.status: expected as in {where}, which is finished; remove one")
            answer = marked(
                converted_messages([choice.get("message")], where), mark, f"{where}.finish_reason"
            )
            answers.append(answered(prompt, answer, continues))
            if (ids := recorded(self.path, request, response, choice, where)) is not None:
                answers[-1][SAMPLED] = ids | sources_of(message.get("content") for message in prompt)
        return with_answers(record, answers)

    def _prompt_and_completion(self, row: Record) -> Record:
        prompt = converted_messages(row.get("prompt"), "prompt")
        self._warn_about_turns(prompt)
        completion = converted_messages(row["completion"], "completion")
        others = without(row, ("prompt", "completion"))
        if is_trl_log(row):
            others = log_fields(self, without(others, ("step",)))
        record = converted_request(others)
        return joined(record, answered(prompt, completion))

    def _preference_pair(self, row: Record) -> Record:
        answers = [converted_messages(row.get(name), name) for name in PAIR_COLUMNS]
        if row.get("prompt") is not None:
            prompt = converted_messages(row["prompt"], "prompt")
        else:
            prompt = [first for first, second in takewhile(_are_equal, zip(*answers, strict=False))]
            answers = [answer[len(prompt) :] for answer in answers]
        self._warn_about_turns(prompt)
        trajectories = []
        for name, answer in zip(PAIR_COLUMNS, answers, strict=True):
            if len(answer) > 1 and any(message.get("role") == "assistant" for message in prompt):
                raise UserError(
                    f"{name}: expected one message, because the prompt has turns of the assistant, got "
                    f"{len(answer)}"
                )
            turns = "whole" if len(answer) > 1 else "last"
            trajectories.append({"messages": prompt + answer, "turns": turns, "preference": name})
        record = converted_request(without(row, ("prompt", *PAIR_COLUMNS)))
        return joined(record, {"trajectories": trajectories})

    def _warn_about_turns(self, prompt: list[Message]) -> None:
        if any(message.get("role") == "assistant" for message in prompt):
            self.warn(EARLIER_TURNS)


def converted_request(row: Record) -> Record:
    """Returns the row without the parameters of a request, and with legacy ``functions`` as ``tools``."""
    if row.get("system") is not None:
        raise UserError(
            "system: a field of Anthropic's API; set data.format = 'anthropic', or make it a message"
        )
    record = without_temperature_0(without(row, {*REQUEST_FIELDS, "functions", "function_call", "system"}))
    if isinstance(row.get("logprobs"), bool):  # whether the API should return them
        del record["logprobs"]
    if row.get("functions") is not None:
        if row.get("tools") is not None:
            raise UserError("functions: expected either tools or functions, got both; remove one")
        functions = expect(row["functions"], list, "functions", "a list of schemas")
        record["tools"] = [{"type": "function", "function": function} for function in functions]
    return record


def converted_messages(messages: object, where: str) -> list[Message]:
    """Returns OpenAI's messages in the spelling that titan_tree's tokenizer reads."""
    messages = expect(messages, list, where, "a list of messages")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    message = expect(message, dict, where, "an object with role and content")
    result = without(message, ("function_call", "refusal", "audio", "annotations"))
    result["role"] = {"developer": "system", "function": "tool"}.get(
        str(message.get("role")), message.get("role")
    )
    if message.get("audio"):
        raise UserError(f"{where}.audio: {NO_MEDIA}")
    if isinstance(message.get("content"), list):
        result["content"] = content_of(message["content"], f"{where}.content")
    if (refusal := message.get("refusal")) is not None:
        if message.get("content"):
            raise UserError(f"{where}.refusal: expected either content or refusal, got both; remove one")
        result["content"] = refusal
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_tool_call(item) for item in calls]
    if (legacy := message.get("function_call")) is not None:
        if calls:
            raise UserError(
                f"{where}.function_call: expected either this or tool_calls, got both; remove one"
            )
        legacy = expect(legacy, dict, f"{where}.function_call", "an object with name and arguments")
        result["tool_calls"] = [call(legacy.get("name"), legacy.get("arguments"), None)]
    return result


def _tool_call(item: object) -> object:
    """Returns a tool call; that of a custom tool has free text as its arguments."""
    if isinstance(item, dict) and isinstance(custom := item.get("custom"), dict):
        return call(custom.get("name"), custom.get("input"), item.get("id"))
    return item


def _trajectory(trajectory: object, index: int) -> object:
    if not isinstance(trajectory, dict) or "messages" not in trajectory:
        return trajectory
    where = f"trajectories[{index}].messages"
    return {**trajectory, "messages": converted_messages(trajectory["messages"], where)}


def _are_equal(pair: tuple[Message, Message]) -> bool:
    return pair[0] == pair[1]


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
