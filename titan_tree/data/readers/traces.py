"""Traces of rollouts with token ids: of verifiers, on which prime-rl trains, NeMo Gym and Agent Lightning.

A compaction or a sub-agent branches from the conversation before it. Each branch (verifiers) or model call
(the others) becomes a path of one rollout; the tree holds what they share once.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from titan_tree.data.readers import Place, Record, Source
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, errors_at, shorten

Node = dict[str, Any]

NO_TOKENS = "no token ids; record the rollouts with a client that returns them"


class TraceReader(RowReader):
    """Reads a format in which each row is a rollout. Rollouts of one task may be anywhere in the file.

    The file is held in memory, because rollouts are written in the order in which they end.
    """

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        groups: dict[object, list[tuple[Place, Record]]] = {}
        for place, record in super().records(source):
            if record["trajectories"]:  # a rollout that is not trained has none
                name = record.get("group_id")
                groups.setdefault(place if name is None else ("group", str(name)), []).append((place, record))
        for members in groups.values():
            yield from members

    def convert(self, row: Record) -> Record:
        trajectories = self.trajectories(row)
        for trajectory in trajectories:
            trajectory.setdefault("rollout_id", self.rollout_id(row))
        return self.task(row) | {"trajectories": trajectories}

    @abstractmethod
    def rollout_id(self, row: Record) -> object:
        """Returns the name of the rollout in its group."""

    @abstractmethod
    def trajectories(self, row: Record) -> list[Record]:
        """Returns the paths of a rollout in titan_tree's schema; none if it is not trained."""

    @abstractmethod
    def task(self, row: Record) -> Record:
        """Returns the other fields of the record, and those of the row that are not known."""


# Of a verifiers node: fields with one entry per sampled token -> field of the schema, fill of other tokens.
PER_SAMPLED = {
    "logprobs": ("rollout_logprobs", None),
    "reference_logprobs": ("ref_logprobs", None),
    "advantages": ("advantage", 0),
}
NODE_LEFT_OUT = frozenset(
    {"parent", "message", "sampled", "token_ids", "mask", "semantic_parents", "finish_reason"}
    | {"tools", "timestamp", "is_content", "usage", "trainer_logprobs", "entropies"}
)
NODE_REFUSED = {
    "loss_weights": "losses chosen per token are not supported; remove it",
    "multi_modal_data": "expected text only",
    "routed_experts": "expected none in a file, as verifiers writes it; remove it",
    "sampling_mask": "expected none, because its form in a trace is not known; sample with top_p = 1",
}
TRACE_LEFT_OUT = (
    *("version", "id", "verifiers", "task", "agent", "tools", "nodes", "calls", "mm_token_type_id_map"),
    *("request_rewrites", "response_rewrites", "rewards", "metrics", "root_reply", "extra_usage"),
    *("is_completed", "is_timeout", "ok", "stop_condition", "errors", "timing"),
    *("num_input_tokens", "num_output_tokens", "num_total_tokens"),
)
EPISODE_LEFT_OUT = (
    *("id", "env", "task", "group", "run", "ok", "is_timeout", "errors", "traces"),
    *("num_input_tokens", "num_output_tokens", "num_total_tokens"),
)
FAILED = "left out traces with an error, or of an agent that is not trained"


class VerifiersReader(TraceReader):
    """Reads traces of verifiers v1, as prime-rl trains on them. A row is a trace, or an episode with several:

        {"id", "task": {"key" or "hash"}, "ok", "agent": {"trainable"},
         "rewards": {name: {"score", "weight"}},
         "nodes": [{"parent", "token_ids", "mask", "logprobs", "advantages", "reference_logprobs"}],
         "calls": [{"node", "sampling": {"temperature"}}]}

        {"env", "task", "group": {"id"}?, "ok", "traces": [traces of all agents]}

    verifiers writes episodes to ``traces.jsonl``, prime-rl to ``traces/stream/*.jsonl``. Traces with one
    ``group.id`` of their episodes, or else with one task, form a group.

    A node holds the tokens that a message adds. A branch is the path from a root to a leaf. A sampled node
    that several branches share is trained in the first of them, and is context in the others. Left out are
    branches without tokens to train, compactions that the agent did not resume from, episodes and traces with
    an error, and traces of agents that are not trained.

    Sources: ``v1/trace.py``, ``v1/graph.py`` and ``v1/episode.py`` of verifiers 0.4.0, whose graph builder
    and writer made the files on which this reader was checked. Of PrimeIntellect-ai/prime-rl,
    ``iter_trainable_branches`` of ``orchestrator/trajectories.py``, and ``monitors/file/monitor.py``.
    """

    def rows(self, source: Source) -> Iterator[tuple[Place, Record]]:
        """Yields the traces of a file. What an episode says of all its traces becomes a part of each."""
        for place, row in super().rows(source):
            if "traces" not in row:
                yield place, row
                continue
            with errors_at(place):
                traces = _objects(row["traces"], "traces")
                group = expect(row.get("group") or {}, dict, "group", "an object").get("id")
            if row.get("ok") is False:
                self.warn(FAILED)
                continue
            shared = without(row, EPISODE_LEFT_OUT) | ({} if group is None else {"group_id": group})
            for index, trace in enumerate(traces):
                yield f"{place}: traces[{index}]", trace | shared

    def recognizes_row(self, row: Record) -> bool:
        if isinstance(row.get("traces"), list):
            return isinstance(row.get("env"), dict) and isinstance(row.get("task"), dict)
        nodes = row.get("nodes")
        return isinstance(nodes, list) and any(isinstance(node, dict) and "message" in node for node in nodes)

    def rollout_id(self, row: Record) -> object:
        return row.get("id")

    def task(self, row: Record) -> Record:
        record = without(row, TRACE_LEFT_OUT) | {"id": row.get("id")}
        task = expect(row.get("task") or {}, dict, "task", "an object")
        if record.get("group_id") is None:
            record["group_id"] = task.get("key") or task.get("hash")
        if record["group_id"] is None:
            raise UserError("task: expected key or hash, which names the group; add a group_id to the row")
        return record

    def trajectories(self, row: Record) -> list[Record]:
        agent = expect(row.get("agent") or {}, dict, "agent", "an object")
        is_ok = row["ok"] if row.get("ok") is not None else not row.get("errors")
        if not is_ok or agent.get("trainable") is False:
            self.warn(FAILED)
            return []
        nodes = _objects(row.get("nodes"), "nodes")
        for index, node in enumerate(nodes):
            _check_node(node, index)
        temperatures = _temperatures(row)
        reward = _reward(row)
        records = []
        owned: set[int] = set()  # sampled nodes of earlier branches
        for branch in _branches(nodes):
            trained = [index for index in branch if any(nodes[index]["mask"]) and index not in owned]
            if not trained:
                continue
            record: Record = {"id": branch[-1]} | _joined(nodes, branch, trained)
            found = {temperatures.get(index) for index in trained}
            if len(found) > 1:
                raise UserError(
                    f"calls: expected one temperature for the trained nodes of a branch, got {len(found)}"
                )
            record |= {"temperature": found.pop(), "reward": reward}
            records.append(record)
            owned |= set(trained)
        if not records and not any(node["token_ids"] for node in nodes):
            raise UserError(f"nodes: {NO_TOKENS}")
        return records


def _objects(value: object, where: str) -> list[Record]:
    """Returns the value. Raises UserError if it is no list of objects."""
    items = expect(value, list, where, "a list")
    return [expect(item, dict, f"{where}[{index}]", "an object") for index, item in enumerate(items)]


def _check_node(fields: Node, index: int) -> None:
    where = f"nodes[{index}]"
    for name, value in fields.items():
        if name in NODE_REFUSED and value:
            raise UserError(f"{where}.{name}: {NODE_REFUSED[name]}")
        if name not in NODE_LEFT_OUT and name not in PER_SAMPLED and name not in NODE_REFUSED:
            raise UserError(f"{where}.{name}: unknown field, which might change the loss; remove it")
    parent = fields.get("parent")
    if parent is not None and (type(parent) is not int or not 0 <= parent < index):
        raise UserError(f"{where}.parent: expected an earlier node, got {shorten(parent)}")
    message = fields.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and any(
        not isinstance(part, dict) or part.get("type") != "text" for part in content
    ):
        raise UserError(f"{where}.message: expected text only")
    fields["semantic_parents"] = _objects(fields.get("semantic_parents") or [], f"{where}.semantic_parents")
    for name in ("token_ids", "mask"):
        fields[name] = expect(fields.get(name) or [], list, f"{where}.{name}", "a list")
    if wrong := [entry for entry in fields["mask"] if entry not in (0, 1)]:
        raise UserError(f"{where}.mask: expected true or false, got {shorten(wrong[0])}")
    size, sampled = len(fields["token_ids"]), sum(fields["mask"])
    if len(fields["mask"]) != size:
        raise UserError(f"{where}.mask: expected {size} entries, got {len(fields['mask'])}")
    for name in PER_SAMPLED:
        values = expect(fields.get(name) or [], list, f"{where}.{name}", "a list")
        if values and len(values) != sampled:
            raise UserError(
                f"{where}.{name}: expected {sampled} entries, one per sampled token, got {len(values)}"
            )


def _branches(nodes: list[Node]) -> Iterator[list[int]]:
    """Yields the branches that may be trained, each from its root to its leaf, in the order of the leaves."""
    links = [node["semantic_parents"] for node in nodes]
    resumed = [link.get("node") for group in links for link in group if link.get("type") == "compaction"]
    parents = {node.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        is_attempt = any(link.get("type") == "compaction_attempt" for link in links[leaf])
        if leaf in parents or (is_attempt and leaf not in resumed):
            continue
        branch: list[int] = []
        parent: int | None = leaf
        while parent is not None:
            branch.append(parent)
            parent = nodes[parent].get("parent")
        yield branch[::-1]


def _joined(nodes: list[Node], branch: Iterable[int], trained: list[int]) -> Record:
    """Returns the tokens of a branch and their values."""
    members = [nodes[index] for index in branch]
    record: Record = {
        "tokens": [token for node in members for token in node["token_ids"]],
        "loss_mask": [
            int(sampled and index in trained) for index in branch for sampled in nodes[index]["mask"]
        ],
    }
    for name, (field, fill) in PER_SAMPLED.items():
        if any(node.get(name) for node in members):
            record[field] = [value for node in members for value in _spread(node, name, fill)]
    return record


def _spread(node: Node, name: str, fill: float | None) -> list[object]:
    """Returns one value per token of a field that has one per sampled token."""
    values = iter(node.get(name) or [])
    return [next(values, fill) if sampled else fill for sampled in node["mask"]]


def _temperatures(row: Record) -> dict[int, float | None]:
    """Returns the temperature of each node that a model call sampled, where it is known."""
    found = {}
    for index, call in enumerate(_objects(row.get("calls") or [], "calls")):
        where = f"calls[{index}].sampling"
        sampling = expect(call.get("sampling") or {}, dict, where, "an object")
        if (value := sampling.get("temperature")) is not None:
            expect(value, int | float, f"{where}.temperature", "a number")  # type: ignore[arg-type]
        if call.get("node") is not None:
            found[expect(call["node"], int, f"calls[{index}].node", "an integer")] = value
    return found


def _reward(row: Record) -> float | None:
    """Returns the weighted sum of a trace's rewards, or None if none was computed."""
    rewards = expect(row.get("rewards") or {}, dict, "rewards", "an object")
    total = None
    for name, reward in rewards.items():
        if reward is None:
            continue
        parts = expect(reward, dict, f"rewards.{name}", "an object with score and weight")
        score, weight = parts.get("score"), parts.get("weight", 1.0)
        for part, number in (("score", score), ("weight", weight)):
            expect(number, int | float, f"rewards.{name}.{part}", "a number")  # type: ignore[arg-type]
        total = (total or 0.0) + score * weight
    return total


GYM_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
GYM_LEFT_OUT = (
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
        record = without(row, (*GYM_LEFT_OUT, "reward"))
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
        for index, call in enumerate(_objects(response.get("output"), "response.output")):
            where = f"response.output[{index}]"
            if not any(call.get(name) for name in GYM_TOKENS):  # missing, or empty lists
                continue
            prompt, ids, logprobs = (
                expect(call.get(name), list, f"{where}.{name}", "a list") for name in GYM_TOKENS
            )
            if len(logprobs) != len(ids):
                raise UserError(
                    f"{where}.generation_log_probs: expected {len(ids)} entries, got {len(logprobs)}"
                )
            if call.get("routed_experts"):
                raise UserError(f"{where}.routed_experts: not supported; remove it")
            record = _call(prompt, ids, logprobs, row.get("reward"))
            if call.get("sampling_mask") is not None:
                mask = expect(call["sampling_mask"], list, f"{where}.sampling_mask", "a list")
                record["sampling_mask"] = [None] * len(prompt) + mask
            records.append(record | {"id": f"call{len(records)}", "temperature": temperature})
        if not records:
            raise UserError(f"response.output: {NO_TOKENS}")
        return records


def _call(prompt: list[Any], ids: list[Any], logprobs: list[Any] | None, reward: object) -> Record:
    """Returns a model call as a path: its prompt is context, and the ids that it generated are trained."""
    record = {"tokens": prompt + ids, "loss_mask": [0] * len(prompt) + [1] * len(ids), "reward": reward}
    if logprobs is not None:
        record["rollout_logprobs"] = [None] * len(prompt) + logprobs
    return record


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
        triplets = _objects(row.get("triplets"), "triplets")
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
            records.append(_call(prompt, ids, logprobs, reward) | {"id": f"call{index}"})
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
