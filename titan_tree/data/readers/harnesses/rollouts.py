"""Rollouts with token ids, one per row: the base class of their readers, NeMo Gym and Agent Lightning.

A compaction or a sub-agent branches from the conversation before it. Each branch (verifiers.py) or model call
(the others) becomes a path of one rollout; the tree holds what they share once.
"""

from __future__ import annotations

import base64
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import NO_MEDIA, RowReader, expect
from titan_tree.errors import UserError, shorten
from titan_tree.tree.path_fields import decoded_array

ENVELOPE = "nrlre1:"
NO_TOKENS = "no token ids; record the rollouts with a client that returns them"
GYM_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
GYM_LEFT_OUT = (
    "responses_create_params",
    "response",
    "agent_ref",
    "mask_sample",
    "_ng_task_index",
    "_ng_rollout_index",
    "reward",
)
LIGHTNING_LEFT_OUT = ("rollout_id", "task", "final_reward", "triplets", "trace", "logs", "metadata")


class TraceReader(RowReader):
    """Reads a format in which each row is a rollout. Rollouts of one task may be anywhere in the file.

    The file is held in memory, because rollouts are written in the order in which they end.
    """

    rollout_field: str  # holds the name of the rollout in its group

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        groups: dict[object, list[tuple[str, Record]]] = {}
        for place, record in super().records(source):
            if record["trajectories"]:  # a rollout that is not trained has none
                name = record.get("group_id")
                groups.setdefault(place if name is None else ("group", str(name)), []).append((place, record))
        for members in groups.values():
            yield from members

    def convert(self, row: Record) -> Record:
        trajectories = self.trajectories(row)
        for trajectory in trajectories:
            trajectory.setdefault("rollout_id", row.get(self.rollout_field))
        return self.task(row) | {"trajectories": trajectories}

    @abstractmethod
    def trajectories(self, row: Record) -> list[Record]:
        """Returns the paths of a rollout in titan_tree's schema; none if it is not trained."""

    @abstractmethod
    def task(self, row: Record) -> Record:
        """Returns the other fields of the record, and those of the row that are not known."""


def objects_in(value: object, where: str) -> list[Record]:
    """Returns the value. Raises UserError if it is no list of objects."""
    items = expect(value, list, where, "a list")
    return [expect(item, dict, f"{where}[{index}]", "an object") for index, item in enumerate(items)]


def model_call(
    prompt: list[object], ids: list[object], logprobs: list[object] | None, reward: object
) -> Record:
    """Returns a model call as a path: its prompt is context, and the ids that it generated are trained."""
    record = {"tokens": prompt + ids, "loss_mask": [0] * len(prompt) + [1] * len(ids), "reward": reward}
    if logprobs is not None:
        record["rollout_logprobs"] = [None] * len(prompt) + logprobs
    return record


def recorded_call(call: Record, names: Sequence[str], where: str) -> Record:
    """Returns a model call as a path, with its ``routed_experts``, if it has some.

    Args:
        names: of the fields with the ids of the prompt, those of the answer, and the log-probs, if any.
        where: what errors begin with before the name of a field.

    Raises:
        UserError: a field that is not a list, or lists of other lengths.
    """
    prompt, ids, *rest = (expect(call.get(name), list, f"{where}{name}", "a list") for name in names)
    if rest and len(rest[0]) != len(ids):
        raise UserError(f"{where}{names[2]}: expected {len(ids)} entries, got {len(rest[0])}")
    record = model_call(prompt, ids, rest[0] if rest else None, None)
    if experts := call.get("routed_experts"):
        field = f"{where}routed_experts"
        is_text = isinstance(experts, str)
        experts = _decoded(experts, field) if is_text else expect(experts, list, field, "a list or text")
        size = len(record["tokens"])
        if len(experts) not in (size - 1, size):
            raise UserError(
                f"{field}: expected {size - 1} or {size} entries, for all tokens of the call, whose last one "
                f"engines do not read, got {len(experts)}"
            )
        record["routed_experts"] = experts
    return record


def _decoded(experts: str, field: str) -> np.ndarray:
    """Returns the experts of "nrlre1:<dtype>:<T>x<L>x<k>:<base64>" (NeMo-RL) or base64 of .npy (vLLM)."""
    if not experts.startswith(ENVELOPE):
        return np.atleast_1d(decoded_array(field, experts))
    try:
        dtype, shape, values = experts.removeprefix(ENVELOPE).split(":")
        if dtype not in ("int8", "int16", "int32"):
            raise ValueError
        array = np.frombuffer(base64.b64decode(values, validate=True), dtype)
        return array.reshape([int(size) for size in shape.split("x")])
    except ValueError:
        raise UserError(
            f"{field}: expected {ENVELOPE}DTYPE:TxLxK:BASE64, got {shorten(experts)}; record the call again"
        ) from None


class NemoGymReader(TraceReader):
    """Reads the rollouts that NeMo Gym collects, one per row:

        {"_ng_task_index", "_ng_rollout_index", "reward", "responses_create_params": {"temperature"?, ...},
         "response": {"output": [{"prompt_token_ids", "generation_token_ids", "generation_log_probs",
                                  "routed_experts"?, ...}]}}

    Each item of ``output`` with token ids is a model call: its prompt is context, its generation is trained.
    A call whose prompt begins with the tokens of an earlier one continues its path in the tree. A rollout
    with ``mask_sample`` has no reliable reward and is left out. The fields that an environment adds to a row
    are unknown; list them in ``data.ignore_fields``.

    Source: ``nemo_gym/openai_utils.py`` (``TokenIDLogProbMixin``) of nemo-gym 0.7.0, and the files
    ``example_rollouts.jsonl`` in that package, on which this reader was checked. They have no sampling mask,
    whose form is that in NVIDIA-NeMo/RL, and no temperature, whose place is that of OpenAI's schema.
    """

    rollout_field = "_ng_rollout_index"

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("responses_create_params"), dict)

    def task(self, row: Record) -> Record:
        record = without(row, GYM_LEFT_OUT)
        if record.get("group_id") is None:
            record["group_id"] = row.get("_ng_task_index")
        for name in ("_ng_task_index", "_ng_rollout_index"):
            if row.get(name) is None:
                raise UserError(f"{name}: missing; it names the group and the rollout")
        return record | {"id": record.get("id") or f"rollout{row['_ng_rollout_index']}"}

    def trajectories(self, row: Record) -> list[Record]:
        if row.get("mask_sample"):
            self.warn("left out rollouts with mask_sample, whose rewards are not reliable")
            return []
        request = expect(row.get("responses_create_params"), dict, "responses_create_params", "an object")
        response = expect(row.get("response"), dict, "response", "an object with output")
        temperature = request.get("temperature")
        if temperature is None:
            temperature = response.get("temperature")
        records: list[Record] = []
        for index, call in enumerate(objects_in(response.get("output"), "response.output")):
            where = f"response.output[{index}]"
            if not any(call.get(name) for name in GYM_TOKENS):  # missing, or empty lists
                continue
            record = recorded_call(call, GYM_TOKENS, f"{where}.") | {"reward": row.get("reward")}
            if call.get("sampling_mask") is not None:
                mask = expect(call["sampling_mask"], list, f"{where}.sampling_mask", "a list")
                record["sampling_mask"] = [None] * len(call["prompt_token_ids"]) + mask
            records.append(record | {"id": f"call{len(records)}", "temperature": temperature})
        if not records:
            raise UserError(f"response.output: {NO_TOKENS}")
        return records


class AgentLightningReader(TraceReader):
    """Reads rollouts of Agent Lightning with their triplets, one rollout per row:

        {"rollout_id", "task": {"input", ...}, "final_reward",
         "triplets": [{"prompt": {"token_ids", ...}, "response": {"token_ids", "logprobs"?, ...}, "reward"}]}

    A triplet is a model call: its prompt is context, its response is trained. Each call has the reward of its
    rollout: ``final_reward``, or else the last reward of a triplet. Rollouts whose tasks have equal ``input``
    form a group. Log-probs are numbers, or objects with ``logprob``, as in OpenAI's ``logprobs.content``.

    Sources: ``types/core.py`` (``RolloutLegacy``, ``Triplet``) and ``adapter/triplet.py`` of agentlightning
    0.3.0. ``model_dump_json`` of such rollouts wrote the rows on which this reader was checked. Version 1.0
    has no triplets.
    """

    rollout_field = "rollout_id"

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("triplets"), list)

    def task(self, row: Record) -> Record:
        record = without(row, LIGHTNING_LEFT_OUT)
        task = expect(row.get("task") or {}, dict, "task", "an object")
        if record.get("group_id") is None:
            if task.get("input") is None:
                raise UserError("task: expected input, which names the group; add a group_id to the row")
            text = json.dumps(task["input"], sort_keys=True)
            record["group_id"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return record | {"id": record.get("id") or row.get("rollout_id")}

    def trajectories(self, row: Record) -> list[Record]:
        triplets = objects_in(row.get("triplets"), "triplets")
        rewards = [row.get("final_reward"), *(triplet.get("reward") for triplet in reversed(triplets))]
        reward = next((value for value in rewards if value is not None), None)
        records = []
        for index, triplet in enumerate(triplets):
            where = f"triplets[{index}].response"
            _, prompt = _fields_and_ids(triplet.get("prompt"), f"triplets[{index}].prompt")
            response, ids = _fields_and_ids(triplet.get("response"), where)
            if (logprobs := response.get("logprobs")) is not None:
                logprobs = expect(logprobs, list, f"{where}.logprobs", "a list")
                logprobs = [x.get("logprob") if isinstance(x, dict) else x for x in logprobs]
                if len(logprobs) != len(ids):
                    raise UserError(f"{where}.logprobs: expected {len(ids)} entries, got {len(logprobs)}")
            records.append(model_call(prompt, ids, logprobs, reward) | {"id": f"call{index}"})
        if not records:
            raise UserError(f"triplets: {NO_TOKENS}")
        return records


def _fields_and_ids(side: object, where: str) -> tuple[Record, list[object]]:
    """Returns the fields and the token ids of the prompt or the response of a triplet."""
    fields = expect(side, dict, where, "an object with token_ids")
    if fields.get("image_urls"):
        raise UserError(f"{where}.image_urls: {NO_MEDIA}")
    ids = expect(fields.get("token_ids"), list, f"{where}.token_ids", "a list")
    if not ids:
        raise UserError(f"{where}.token_ids: {NO_TOKENS}")
    return fields, ids
