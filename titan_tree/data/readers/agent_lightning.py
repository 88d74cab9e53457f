"""Rollouts of Agent Lightning, whose triplets become paths."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.trace_reader import NO_TOKENS, TraceReader, model_call, objects_in
from titan_tree.errors import UserError


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

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("triplets"), list)

    def rollout_id(self, row: Record) -> object:
        return row.get("rollout_id")

    def task(self, row: Record) -> Record:
        record = without(row, ("rollout_id", "task", "final_reward", "triplets", "trace", "logs", "metadata"))
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


def _fields_and_ids(side: object, where: str) -> tuple[Record, list[Any]]:
    """Returns the fields and the token ids of the prompt or the response of a triplet."""
    fields = expect(side, dict, where, "an object with token_ids")
    if fields.get("image_urls"):
        raise UserError(f"{where}.image_urls: expected text only")
    ids = expect(fields.get("token_ids"), list, f"{where}.token_ids", "a list")
    if not ids:
        raise UserError(f"{where}.token_ids: {NO_TOKENS}")
    return fields, ids
