"""Rollouts of NeMo Gym, whose model calls become paths."""

from __future__ import annotations

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.trace_reader import NO_TOKENS, TraceReader, model_call, objects_in
from titan_tree.errors import UserError

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
LEFT_OUT = (
    *("responses_create_params", "response", "agent_ref", "mask_sample"),
    *("_ng_task_index", "_ng_rollout_index"),
)


class NemoGymReader(TraceReader):
    """Reads the rollouts that NeMo Gym collects, one per row:

        {"_ng_task_index", "_ng_rollout_index", "reward", "responses_create_params": {"temperature"?, ...},
         "response": {"output": [{"prompt_token_ids", "generation_token_ids", "generation_log_probs", ...}]}}

    Each item of ``output`` with token ids is a model call: its prompt is context, its generation is trained.
    A call whose prompt begins with the tokens of an earlier one continues its path in the tree. A rollout
    with ``mask_sample`` has no reliable reward and is left out. The fields that an environment adds to a row
    are unknown; list them in ``data.ignore_fields``.

    Source: ``nemo_gym/openai_utils.py`` (``TokenIDLogProbMixin``) of nemo-gym 0.7.0, and the files
    ``example_rollouts.jsonl`` in that package, on which this reader was checked. They have no sampling mask,
    whose form is that in NVIDIA-NeMo/RL, and no temperature, whose place is that of OpenAI's schema.
    """

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("responses_create_params"), dict)

    def rollout_id(self, row: Record) -> object:
        return row.get("_ng_rollout_index")

    def task(self, row: Record) -> Record:
        record = without(row, (*LEFT_OUT, "reward"))
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
            if not any(call.get(name) for name in TOKENS):  # missing, or empty lists
                continue
            prompt, ids, logprobs = (
                expect(call.get(name), list, f"{where}.{name}", "a list") for name in TOKENS
            )
            if len(logprobs) != len(ids):
                raise UserError(
                    f"{where}.generation_log_probs: expected {len(ids)} entries, got {len(logprobs)}"
                )
            if call.get("routed_experts"):
                raise UserError(f"{where}.routed_experts: not supported; remove it")
            record = model_call(prompt, ids, logprobs, row.get("reward"))
            if call.get("sampling_mask") is not None:
                mask = expect(call["sampling_mask"], list, f"{where}.sampling_mask", "a list")
                record["sampling_mask"] = [None] * len(prompt) + mask
            records.append(record | {"id": f"call{len(records)}", "temperature": temperature})
        if not records:
            raise UserError(f"response.output: {NO_TOKENS}")
        return records
