"""Reads explicit trees of messages or tokens: nodes with a parent, as search and sampling engines write them.

These are input data. titan_tree's own trees are made later, from the paths (tree/token_tree.py).
"""

from __future__ import annotations

from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import Message, without
from titan_tree.data.readers.openai_chat import converted_messages
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, shorten

KINDS = ("messages", "text", "tokens")  # a node has exactly one of these
PER_TOKEN = (
    "loss_mask", "old_logprobs", "rollout_logprobs", "ref_logprobs", "sampling_mask", "policy_version",
    "advantage", "teacher_topk",
)  # fmt: skip
# Of the node at which a sample ends:
OF_SAMPLE = ("reward", "weight", "temperature", "rollout_id", "finish_reason", "teacher")
ALLOWED = {
    kind: frozenset(
        {"id", "parent", "sample", kind, *OF_SAMPLE, *(PER_TOKEN if kind == "tokens" else ("advantage",))}
    )
    for kind in KINDS
}


class ExplicitTreeReader(RowReader):
    """Reads trees, one per row. Fields marked ? are optional:

        {"id"?, "group_id"?, "tools"?, "prompt"?, "nodes": [
            {"id"?, "parent"?, "messages" or "text" or "tokens", "sample"?, "reward"?, "weight"?, ...}]}

    A node without a parent (missing or null) is a root. A node without an id is known by its index in the
    list. Nodes may be in any order. A sample is the path from a root to a leaf, or to a node with
    ``"sample": true``. A leaf with ``"sample": false`` ends no sample.

    - ``messages``: chat messages. The tree's ``prompt`` comes before those of every root. It is a list of
      messages, or the text of a user's message.
    - ``text``: a part of an assistant's message. The texts of adjacent nodes are joined without a separator.
    - ``tokens``: token ids. ``loss_mask`` (default 1), ``old_logprobs``, ``rollout_logprobs``,
      ``ref_logprobs``, ``sampling_mask``, ``policy_version``, ``advantage`` and ``teacher_topk`` have one
      entry per token of the node, or one number for all of them.
    - ``reward``, ``weight``, ``temperature``, ``rollout_id``, ``teacher``, and the ``advantage`` of messages
      belong to the sample that ends at the node. Other nodes must not have them.
    """

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(nodes := row.get("nodes"), list) and any(
            isinstance(node, dict) and set(KINDS) & node.keys() for node in nodes
        )

    def convert(self, row: Record) -> Record:
        nodes = expect(row.get("nodes"), list, "nodes", "a non-empty list")
        for index, node in enumerate(nodes):
            _check_node(node, index)
        parents = _parents(nodes)
        ends = _sample_ends(nodes, parents)
        prompt = row.get("prompt") or []
        prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        shared = converted_messages(prompt_messages, "prompt")
        per_token = [name for name in PER_TOKEN if any(node.get(name) is not None for node in nodes)]
        trajectories = [_sample(nodes, parents, end, shared, per_token) for end in ends]
        return {**without(row, ("nodes", "prompt")), "trajectories": trajectories}


def _check_node(node: object, index: int) -> None:
    if not isinstance(node, dict):
        raise UserError(f"nodes[{index}]: expected an object, got {shorten(node)}")
    kinds = [kind for kind in KINDS if node.get(kind) is not None]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise UserError(f"nodes[{index}]: expected one of {', '.join(KINDS)}, got {got}")
    (kind,) = kinds
    if not isinstance(node[kind], str if kind == "text" else list):
        raise UserError(f"nodes[{index}].{kind}: expected text or a list, got {shorten(node[kind])}")
    if node.get("sample") is not None:
        expect(node["sample"], bool, f"nodes[{index}].sample", "true or false")
    if node.keys() <= (allowed := ALLOWED[kind]):
        return
    for name in node:
        if name not in allowed and node[name] is not None:
            expected = ", ".join(sorted(allowed))
            raise UserError(f"nodes[{index}].{name}: unknown field; expected one of {expected}")


def _parents(nodes: list[Record]) -> list[int]:
    """Returns the index of each node's parent, -1 for roots. Raises UserError if the nodes form no forest."""
    if not nodes:
        raise UserError("nodes: expected a non-empty list, got []")
    index_of: dict[str | int, int] = {}
    for index, node in enumerate(nodes):
        name = index if node.get("id") is None else node["id"]
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UserError(f"nodes[{index}].id: expected a string or an integer, got {shorten(name)}")
        if index_of.setdefault(name, index) != index:
            raise UserError(f"nodes[{index}].id: expected different ids, got {shorten(name)} twice")
    parents = []
    for index, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (type(parent) not in (str, int) or parent not in index_of):
            raise UserError(
                f"nodes[{index}].parent: no node has the id {shorten(parent)}; roots have no parent"
            )
        parents.append(-1 if parent is None else index_of[parent])
    _check_acyclic(parents)
    return parents


def _check_acyclic(parents: list[int]) -> None:
    rooted = [False] * len(parents)
    for start in range(len(parents)):
        walked: list[int] = []
        seen: set[int] = set()
        node = start
        while node != -1 and not rooted[node]:
            if node in seen:
                raise UserError(f"nodes[{node}].parent: the node is its own ancestor; roots have no parent")
            walked.append(node)
            seen.add(node)
            node = parents[node]
        for node in walked:
            rooted[node] = True


def _sample_ends(nodes: list[Record], parents: list[int]) -> list[int]:
    """Returns the nodes at which samples end, in the order of the file."""
    inner = set(parents)
    marks = [node.get("sample") for node in nodes]
    ends = [i for i, mark in enumerate(marks) if mark or (mark is None and i not in inner)]
    if not ends:
        raise UserError("nodes: expected a leaf or a node with sample = true, got none")
    for index in set(range(len(nodes))) - set(ends):
        node = nodes[index]
        fields = (*OF_SAMPLE, *(() if "tokens" in node else ("advantage",)))
        if name := next((name for name in fields if node.get(name) is not None), None):
            raise UserError(
                f"nodes[{index}].{name}: no sample ends here; set sample = true, or move the field"
            )
    return ends


def _sample(
    nodes: list[Record], parents: list[int], end: int, shared: list[Message], per_token: list[str]
) -> Record:
    """Returns the sample that ends at a node, in titan_tree's schema.

    Args:
        shared: messages before those of every root.
        per_token: the fields of ``PER_TOKEN`` that some node has.
    """
    path = [end]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    path.reverse()
    node = nodes[end]
    record = {name: node[name] for name in OF_SAMPLE if node.get(name) is not None}
    record["id"] = str(end if node.get("id") is None else node["id"])
    has_tokens = {nodes[index].get("tokens") is not None for index in path}
    if has_tokens == {True}:
        if shared:
            raise UserError("prompt: not allowed beside nodes of tokens; make it a node of tokens")
        return record | _joined_tokens(nodes, path, per_token)
    if len(has_tokens) == 2:
        raise UserError(f"nodes[{end}]: expected either tokens or messages and texts on a path, got both")
    if node.get("advantage") is not None:
        record["advantage"] = node["advantage"]
    return record | {"messages": shared + _joined_messages(nodes, path)}


def _joined_messages(nodes: list[Record], path: list[int]) -> list[Message]:
    messages: list[Message] = []
    is_text = False  # the last message consists of texts
    for index in path:
        node = nodes[index]
        if node.get("messages") is not None:
            messages += converted_messages(node["messages"], f"nodes[{index}].messages")
            is_text = False
        elif is_text:
            messages[-1] = {"role": "assistant", "content": messages[-1]["content"] + node["text"]}
        else:
            messages.append({"role": "assistant", "content": node["text"]})
            is_text = True
    return messages


def _joined_tokens(nodes: list[Record], path: list[int], per_token: list[str]) -> Record:
    """Returns the tokens of the path and their values.

    Where a node has no value, the loss mask is 1, the advantage 0, and another field null.
    """
    tokens = [token for index in path for token in nodes[index]["tokens"]]
    record: Record = {"tokens": tokens}
    for name in per_token:
        if all(nodes[index].get(name) is None for index in path):
            continue
        default = {"loss_mask": 1, "advantage": 0}.get(name)
        record[name] = [value for index in path for value in _node_values(nodes[index], name, default, index)]
    return record


def _node_values(node: Record, name: str, default: object, index: int) -> list[object]:
    value, count = node.get(name), len(node["tokens"])
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise UserError(f"nodes[{index}].{name}: expected {count} entries, one per token, got {len(value)}")
    return value
