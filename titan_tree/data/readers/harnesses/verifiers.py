"""Traces of verifiers, on which prime-rl trains: graphs of messages, whose branches become paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import content_of, sources_of, without
from titan_tree.data.readers.harnesses.rollouts import NO_TOKENS, TraceReader, objects_in
from titan_tree.data.readers.row_reader import NO_MEDIA, expect
from titan_tree.errors import UserError, errors_at, shorten

# Fields of a node with one entry per sampled token -> field of the schema, fill of other tokens.
PER_SAMPLED = {
    "logprobs": ("rollout_logprobs", None),
    "reference_logprobs": ("ref_logprobs", None),
    "advantages": ("advantage", 0),
}
NODE_LEFT_OUT = (
    "parent", "message", "sampled", "token_ids", "mask", "semantic_parents", "finish_reason", "tools",
    "timestamp", "is_content", "usage", "trainer_logprobs", "entropies",
)  # fmt: skip
NODE_REFUSED = {
    "loss_weights": "losses chosen per token are not supported; remove it",
    "multi_modal_data": NO_MEDIA,
    "routed_experts": "expected none in a file, as verifiers writes it; remove it",
    "sampling_mask": "expected none in a file, as verifiers writes it; sample with top_p = 1",
}
TRACE_LEFT_OUT = (
    "version", "id", "verifiers", "task", "agent", "tools", "nodes", "calls", "mm_token_type_id_map",
    "request_rewrites", "response_rewrites", "rewards", "metrics", "root_reply", "extra_usage",
    "is_completed", "is_timeout", "ok", "stop_condition", "errors", "timing", "num_input_tokens",
    "num_output_tokens", "num_total_tokens",
)  # fmt: skip
EPISODE_LEFT_OUT = (
    "id", "env", "task", "group", "run", "ok", "is_timeout", "errors", "traces", "num_input_tokens",
    "num_output_tokens", "num_total_tokens",
)  # fmt: skip
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

    A node holds the tokens that a message adds, and its message the images. A branch is the path from a root
    to a leaf. A sampled node that several branches share is trained in the first of them, and is context in
    the others. Left out are branches without tokens to train, compactions that the agent did not resume from,
    episodes and traces with an error, and traces of agents that are not trained.

    Sources: ``v1/trace.py``, ``v1/graph.py`` and ``v1/episode.py`` of verifiers 0.4.0, whose graph builder
    and writer made the files on which this reader was checked. Of PrimeIntellect-ai/prime-rl,
    ``iter_trainable_branches`` of ``orchestrator/trajectories.py``, and ``monitors/file/monitor.py``.
    """

    rollout_field = "id"

    def rows(self, source: Source) -> Iterator[tuple[str, Record]]:
        """Yields the traces of a file. What an episode says of all its traces becomes a part of each."""
        for place, row in super().rows(source):
            if "traces" not in row:
                yield place, row
                continue
            with errors_at(place):
                traces = objects_in(row["traces"], "traces")
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
        nodes = objects_in(row.get("nodes"), "nodes")
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


def _check_node(fields: Record, index: int) -> None:
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
    fields["message"] = content_of(content, f"{where}.message.content")
    fields["semantic_parents"] = objects_in(fields.get("semantic_parents") or [], f"{where}.semantic_parents")
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


def _branches(nodes: list[Record]) -> Iterator[list[int]]:
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


def _joined(nodes: list[Record], branch: Iterable[int], trained: list[int]) -> Record:
    """Returns the tokens of a branch and their values."""
    members = [nodes[index] for index in branch]
    record: Record = {
        "tokens": [token for node in members for token in node["token_ids"]],
        "loss_mask": [
            int(sampled and index in trained) for index in branch for sampled in nodes[index]["mask"]
        ],
        **sources_of(node["message"] for node in members),
    }
    for name, (field, fill) in PER_SAMPLED.items():
        if any(node.get(name) for node in members):
            record[field] = [value for node in members for value in _spread(node, name, fill)]
    return record


def _spread(node: Record, name: str, fill: float | None) -> list[object]:
    """Returns one value per token of a field that has one per sampled token."""
    values = iter(node.get(name) or [])
    return [next(values, fill) if sampled else fill for sampled in node["mask"]]


def _temperatures(row: Record) -> dict[int, float | None]:
    """Returns the temperature of each node that a model call sampled, where it is known."""
    found = {}
    for index, call in enumerate(objects_in(row.get("calls") or [], "calls")):
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
