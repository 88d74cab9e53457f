"""Model calls that proxies between agents and engines captured as token ids, and trials of Harbor.

A call, or a branch of calls, is a path: what the model read is context, and what it sampled is trained in the
path that sampled it. The paths of a rollout share the tokens that they begin with.
"""

from __future__ import annotations

import re

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import without, without_temperature_0
from titan_tree.data.readers.harnesses.rollouts import GYM_TOKENS, TraceReader, objects_in, recorded_call
from titan_tree.data.readers.row_reader import expect
from titan_tree.data.readers.token_rows import TokenRowReader
from titan_tree.errors import UserError, errors_at

GYM_ENTRY_LEFT_OUT = (
    "schema_version", "rollout_id", "model_call_id", "model", *GYM_TOKENS, "routed_experts", "output_items",
    "token_item_index", "response_id", "created_at", "parent_call_id", "cum_len", "digest",
    "parent_resolution", "parent_resolution_reason", "continuation_fingerprint", "continuation_context_len",
    "continuation_context_digest", "fingerprint_version", "prompt_is_delta", "prefix_requested",
    "prefix_supplied", "reward",
)  # fmt: skip
SKYRL_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "rollout_expert_indices", "stop_reason")
SKYRL_LEFT_OUT = (
    *SKYRL_COLUMNS, "schema_version", "path_id", "trajectory_id", "node_ids", "node_spans", "abandoned",
    "labels", "annotations", "model", "tools", "trainable_count", "masked_reason", "tokenizer", "reward",
)  # fmt: skip
TRIAL_LEFT_OUT = (
    "schema_version", "id", "task_name", "trial_name", "trial_uri", "task_id", "source", "task_checksum",
    "config", "agent_info", "agent_result", "verifier_result", "verifier_environment_mode", "exception_info",
    "started_at", "finished_at", "environment_setup", "agent_setup", "agent_execution", "verifier",
    "step_results", "reward_valid", "reward",
)  # fmt: skip
TURN = ("prompt_token_ids", "completion_token_ids", "logprobs")
FAILED = "left out rollouts that failed, which have no reliable reward"


class NemoGymCaptureReader(TraceReader):
    """Reads what NeMo Gym's token_id_capture stores in ``<rollout_id>.tokens.jsonl``, one call per row:

        {"rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids", "generation_log_probs",
         "routed_experts"?, "parent_call_id"?, "cum_len"?, "prompt_is_delta"?}

    A prompt that is a delta goes on behind all tokens of its parent, which is an earlier row. Gym derives
    the names of rollouts from its indices, "<task>-<rollout>"; those of one task form a group. The store has
    no rewards: add ``reward`` to the rows, and ``group_id`` if the rollouts have other names.

    Sources: ``token_id_capture/records.py`` (``TokenEntry``, versions 1 to 3), ``store.py``, ``sink.py`` and
    ``rollout_correlation.py`` of NVIDIA-NeMo/Gym; ``utils/routed_experts_codec.py`` of NVIDIA-NeMo/RL.
    """

    rollout_field = "rollout_id"

    def __init__(self) -> None:
        self._tokens: dict[str, list[object]] = {}  # all tokens of the calls so far

    def recognizes_row(self, row: Record) -> bool:
        return bool({"model_call_id", "continuation_fingerprint"} & row.keys())  # rows have sorted keys

    def task(self, row: Record) -> Record:
        record = without(row, GYM_ENTRY_LEFT_OUT) | {"id": row.get("model_call_id")}
        if record.get("group_id") is None:
            name = expect(row.get("rollout_id"), str, "rollout_id", "a name")
            indices = re.fullmatch(r"(\d+)-\d+(-a\d+)?", name)
            record["group_id"] = indices[1] if indices else name
        return record

    def trajectories(self, row: Record) -> list[Record]:
        if row.get("prompt_is_delta"):
            if (parent := self._tokens.get(str(row.get("parent_call_id")))) is None:
                raise UserError("parent_call_id: expected an earlier call, behind which this prompt goes on")
            suffix = expect(row.get("prompt_token_ids"), list, "prompt_token_ids", "a list")
            row = row | {"prompt_token_ids": parent + suffix}
        record = recorded_call(row, GYM_TOKENS, "")
        size = len(record["tokens"])
        if row.get("cum_len") not in (None, size):
            raise UserError(f"cum_len: expected {size}, the tokens of the call, got {row['cum_len']}")
        name = expect(row.get("model_call_id"), str, "model_call_id", "a name")
        self._tokens[name] = record["tokens"]
        return [record | {"id": name, "reward": row.get("reward")}]


class AgentCoreReader(TraceReader):
    """Reads ``rollouts-*.json`` of agentcore-rl-toolkit: groups of episodes, which hold its gateway's traces:

        [[{"rollout_id", "reward", "error", "records": [{"token_ids", "loss_mask", "logprobs", ...}]}]]

    A group of episodes is a row. The masks and log-probs of a trace are those of its response. Episodes
    without a reward have failed, and are left out.

    Sources: ``rollout_gateway/{trace,trajectory}.py`` and ``backends/tinker_api/{data,train}.py`` of
    agentcore-rl-toolkit 0.2.0, whose ``TrajectoryManager`` made the traces on which this reader was checked.
    """

    rollout_field = "rollout_id"

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("episodes"), list)

    def task(self, row: Record) -> Record:
        return without(row, ("episodes",))

    def trajectories(self, row: Record) -> list[Record]:
        records = []
        for index, episode in enumerate(objects_in(row.get("episodes"), "episodes")):
            where = f"episodes[{index}].records"
            traces = objects_in(episode.get("records"), where)
            if episode.get("reward") is None:
                self.warn(FAILED)
                continue
            shared = {"reward": episode["reward"], "rollout_id": episode.get("rollout_id")}
            for number, trace in enumerate(traces):
                with errors_at(f"{where}[{number}]"):
                    truncated = {"truncated": _object(trace, "metadata").get("truncated")}
                    columns = without(trace, ("metadata", "status")) | truncated | shared
                    records.append(TokenRowReader().convert(columns))
        return records


class SkyRLCaptureReader(TraceReader):
    """Reads ``token_samples`` that skyrl-capture exports, one branch of a trajectory per row:

        {"path_id", "trajectory_id", "annotations": {"reward"}, "trainable_count", "input_ids", "loss_mask",
         "rollout_logprobs", "rollout_expert_indices", "stop_reason", "node_ids", ...}

    The branches of a trajectory are one rollout. Rows without trained tokens are left out. An export does not
    say which trajectories have one task: add ``group_id`` to the rows.

    Source: ``token_sample_records`` of ``skyrl-capture/src/skyrl_capture/export/formats.py`` of
    NovaSky-AI/SkyRL.
    """

    rollout_field = "trajectory_id"

    def recognizes_row(self, row: Record) -> bool:
        return {"path_id", "node_ids"} <= row.keys() and "messages" not in row

    def task(self, row: Record) -> Record:
        record = without(row, SKYRL_LEFT_OUT) | {"id": row.get("path_id")}
        if record.get("group_id") is None:
            record["group_id"] = row.get("trajectory_id")
        return record

    def trajectories(self, row: Record) -> list[Record]:
        if row.get("trainable_count") == 0:
            return []
        record = TokenRowReader().convert({name: row[name] for name in SKYRL_COLUMNS if name in row})
        reward = _object(row, "annotations").get("reward") if row.get("reward") is None else row["reward"]
        return [record | {"id": row.get("path_id"), "reward": reward}]


class HarborReader(TraceReader):
    """Reads ``result.json`` of Harbor's trials whose agent collected rollout details, one trial per row:

        {"id", "trial_name", "task_checksum", "reward_valid"?, "verifier_result": {"rewards": {"reward"}},
         "agent_result": {"rollout_details": [{"prompt_token_ids": [ids of a turn], "completion_token_ids",
                                               "logprobs"?, "extra"?: {"routed_experts"}}]}}

    Every turn is a path: its prompt is context, its completion is trained. Trials of one task form a group.
    A trial of several steps has ``step_results`` with an ``agent_result`` each. Trials that failed, so that
    their reward is not valid, are left out.

    Sources: ``models/agent/rollout_detail.py``, ``models/trial/result.py`` and ``llms/{chat,lite_llm}.py`` of
    harbor 0.26.0, whose ``Chat`` made the details on which this reader was checked.
    """

    rollout_field = "id"

    def recognizes_row(self, row: Record) -> bool:
        return {"trial_name", "task_checksum"} <= row.keys()

    def task(self, row: Record) -> Record:
        record = without(row, TRIAL_LEFT_OUT) | {"id": row.get("trial_name")}
        if record.get("group_id") is None:
            record["group_id"] = row.get("task_checksum")
        temperature = {"temperature": _object(row, "config.agent.kwargs").get("temperature")}
        return without_temperature_0(temperature) | record

    def trajectories(self, row: Record) -> list[Record]:
        rewards = _object(row, "verifier_result.rewards")
        if row.get("reward_valid") is False and (rewards or row.get("exception_info")):
            self.warn(FAILED)
            return []
        if (reward := row.get("reward", rewards.get("reward"))) is None and rewards:
            if len(rewards) > 1:
                raise UserError(
                    "verifier_result.rewards: expected one, or one called reward, got "
                    f"{', '.join(rewards)}; add reward to the row"
                )
            reward = next(iter(rewards.values()))
        results = [row, *objects_in(row.get("step_results") or [], "step_results")]
        records: list[Record] = []
        for result in results:
            details = _object(result, "agent_result").get("rollout_details") or []
            for index, detail in enumerate(objects_in(details, "rollout_details")):
                for turn in _turns(detail, f"rollout_details[{index}]"):
                    records.append(turn | {"id": f"turn{len(records)}", "reward": reward})
        if not records:
            raise UserError(
                "rollout_details: no token ids; run the agent with collect_rollout_details = true"
            )
        return records


def _turns(detail: Record, where: str) -> list[Record]:
    """Returns the turns of a chat history, whose lists have one entry per turn, as paths."""
    names = [*TURN[:2], *(name for name in TURN[2:] if detail.get(name))]
    columns = {name: expect(detail.get(name), list, f"{where}.{name}", "a list") for name in names}
    if experts := _object(detail, "extra").get("routed_experts"):
        columns["routed_experts"] = expect(experts, list, f"{where}.extra.routed_experts", "a list")
    size = len(columns[TURN[0]])
    if short := next((name for name, column in columns.items() if len(column) != size), None):
        raise UserError(f"{where}.{short}: expected {size} turns, got {len(columns[short])}")
    turns = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [recorded_call(turn, names, f"{where}: turn {n}: ") for n, turn in enumerate(turns)]


def _object(row: Record, path: str) -> Record:
    """Returns a member of nested objects, empty where one of them is missing."""
    for name in path.split("."):
        row = expect(row.get(name) or {}, dict, path, "an object")
    return row
