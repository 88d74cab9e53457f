"""The (edge, path) pairs of a tree, on which losses of single sequences run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree

MAX_LOG_RATIO = 20.0  # of importance weights and of divergences; verl has the same bound
Edges = Literal["all", "loss"]  # all edges, or only those that the loss mask of some path counts


class TreePairs(NamedTuple):
    """The F (edge, path) pairs of a tree with P paths, path after path."""

    label: np.ndarray  # [F] int32: DFS index in the tree of the token that the edge predicts
    path: np.ndarray  # [F] int64
    fields: dict[str, np.ndarray]  # [F] each: the per-token fields of ``PathPairs``
    path_fields: dict[str, np.ndarray]  # [P] each: the fields per path


def tree_pairs(tree: TokenTree, edges: Edges) -> TreePairs:
    """Returns the pairs of a tree. Raises UserError if a field is missing in some paths, but not in all."""
    paths = tree.paths
    starts = tree.path_offsets[:-1]
    mask = np.concatenate([path.loss_mask for path in paths])
    mask[starts] = 0  # no edge predicts the first token of a path
    is_pair = mask > 0 if edges == "loss" else np.ones(len(mask), bool)
    is_pair[starts] = False
    (chosen,) = is_pair.nonzero()
    fields = {"loss_mask": mask[chosen]}
    for name in (*PER_TOKEN, "policy_version", "edge_weight", "is_first"):
        if (values := _joined(paths, name)) is not None:
            # Tokens that the loss does not count may lack a log-prob (NaN).
            fields[name] = np.where(fields["loss_mask"] > 0, values[chosen], values.dtype.type(0))
    per_path = np.diff(np.searchsorted(chosen, tree.path_offsets))
    loss_tokens = np.add.reduceat(mask, starts, dtype=np.float64)  # ``TokenPath.loss_tokens`` of each path
    rollout_tokens = [
        of_path if path.rollout_tokens is None else path.rollout_tokens
        for path, of_path in zip(paths, loss_tokens, strict=True)
    ]
    path_of_pair = np.repeat(np.arange(len(paths)), per_path)
    path_fields = {
        "weight": np.array([path.weight for path in paths], np.float32),
        "loss_tokens": loss_tokens.astype(np.float32),
        "rollout_tokens": np.array(rollout_tokens, np.float32),
    }
    if "old_logprobs" in fields and "rollout_logprobs" in fields:
        gap = fields["old_logprobs"].astype(np.float64) - fields["rollout_logprobs"]
        path_fields |= _rollout_gaps(gap, fields["loss_mask"], path_of_pair, len(paths))
    if any(path.preference for path in paths):
        path_fields |= _preferences(paths)
    return TreePairs(tree.path_index[chosen], path_of_pair, fields, path_fields)


def merged_pairs(pairs: TreePairs) -> TreePairs:
    """Returns one pair per counted edge: that of the first path that counts it.

    Its loss mask is the sum of weight * loss_mask over all paths through the edge, and all weights are 1. The
    sum divided by the weight of one path could be too large for float32. Pairs with fields in which paths may
    differ, such as ``advantage``, stay as they are.
    """
    if pairs.fields.keys() - {"loss_mask", "edge_weight", "is_first"}:
        return pairs
    weight = pairs.path_fields["weight"].astype(np.float64)[pairs.path] * pairs.fields["loss_mask"]
    (counted,) = weight.nonzero()
    total = np.bincount(pairs.label, weight)
    first = np.full(len(total), -1)  # the first pair that counts the edge to each token
    first[pairs.label[counted[::-1]]] = counted[::-1]  # the last assignment wins
    kept = np.sort(first[first >= 0])
    label = pairs.label[kept]
    fields = {name: values[kept] for name, values in pairs.fields.items()}
    fields["loss_mask"] = total[label].astype(np.float32)
    path_fields = pairs.path_fields | {"weight": np.ones_like(pairs.path_fields["weight"])}
    return TreePairs(label, pairs.path[kept], fields, path_fields)


def _rollout_gaps(
    gap: np.ndarray, loss_mask: np.ndarray, path: np.ndarray, num_paths: int
) -> dict[str, np.ndarray]:
    """Returns sums and extremes of the gaps [F] between both policies, per path, see ``PathPairs``."""

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(path, loss_mask * values, minlength=num_paths)

    bounded = gap.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    low, high = np.full(num_paths, np.inf), np.full(num_paths, -np.inf)
    counted = loss_mask > 0
    np.minimum.at(low, path[counted], bounded[counted])
    np.maximum.at(high, path[counted], bounded[counted])
    ends = (np.where(low <= high, end, 0.0) for end in (low, high))  # 0 without counted tokens
    columns = (total(bounded**2 / 2), total(np.expm1(bounded) - bounded), *ends)
    return {
        "rollout_log_ratio": total(gap).astype(np.float32),
        "rollout_divergence": np.stack(columns, axis=1).astype(np.float32),
    }


def _preferences(paths: Sequence[TokenPath]) -> dict[str, np.ndarray]:
    """Returns the fields of preferences, [P] each. If a path has no partner, "partner" is missing.

    Raises:
        UserError: a path has no preference.
    """
    for path in paths:
        if path.preference is None:
            raise UserError(
                f"path {path.id or '?'}: preference: missing, but other paths of the batch have it; give it "
                "to all paths or to none"
            )
    fields = {
        "is_chosen": np.array([path.preference in ("chosen", "desirable") for path in paths]),
        "is_mismatched": np.array([path.preference == "mismatched" for path in paths]),
    }
    # The loss "kto" needs no partners, so this must not depend on which paths share a micro-batch.
    if (partner := _partners(paths)) is not None:
        fields["partner"] = partner
    return fields


def _partners(paths: Sequence[TokenPath]) -> np.ndarray | None:
    """Returns [P] int64: the number of each path's partner, the other path of its preference pair.

    A mismatched path is its own partner. The result is None if a path has no partner.
    """
    if any(path.preference in ("desirable", "undesirable") for path in paths):
        return None
    members: dict[str | None, dict[str, list[int]]] = {}
    for number, path in enumerate(paths):
        if path.preference in ("chosen", "rejected"):
            members.setdefault(path.pair, {"chosen": [], "rejected": []})[path.preference].append(number)
    partner = np.arange(len(paths))
    for chosen, rejected in (found.values() for found in members.values()):
        if len(chosen) != len(rejected):
            return None
        partner[chosen], partner[rejected] = rejected, chosen
    return partner


def edge_tokens(tree: TokenTree, pairs: TreePairs, edges: Edges) -> np.ndarray:
    """Returns the indices of all tokens that edges predict, ascending."""
    if edges == "all":
        return np.flatnonzero(tree.predecessor >= 0)
    is_label = np.zeros(len(tree), bool)
    is_label[pairs.label] = True
    return np.flatnonzero(is_label)


def label_temperatures(tree: TokenTree, pairs: TreePairs) -> np.ndarray | None:
    """Returns the temperature of the edge to each token, [N] float32, or None if all paths have 1.

    An edge has the temperature of the paths that count it, or else of the first path through it.

    Raises:
        UserError: paths that count the same edge have different temperatures.
    """
    by_path = np.array([path.temperature for path in tree.paths], np.float32)
    if (by_path == 1).all():
        return None
    by_pair = by_path[pairs.path]
    is_counted = pairs.fields["loss_mask"] > 0
    result = np.ones(len(tree), np.float32)
    for chosen in (slice(None), is_counted):  # the last assignment wins: the first path that counts the edge
        result[pairs.label[chosen][::-1]] = by_pair[chosen][::-1]
    differs = is_counted & (by_pair != result[pairs.label])
    if differs.any():
        pair = int(differs.argmax())
        first = int((is_counted & (pairs.label == pairs.label[pair])).argmax())
        one, other = (tree.paths[pairs.path[i]] for i in (first, pair))
        raise UserError(
            f"path {other.id or '?'}: temperature: expected {one.temperature:g}, as in path {one.id or '?'}, "
            f"because the loss counts a token that both paths share, got {other.temperature:g}; put samples "
            "of different temperatures into different groups"
        )
    return result


def _joined(paths: Sequence[TokenPath], name: str) -> np.ndarray | None:
    """Returns a per-token field of all paths, concatenated, or None if no path has it."""
    values = [getattr(path, name) for path in paths]
    missing = [path for path, value in zip(paths, values, strict=True) if value is None]
    if 0 < len(missing) < len(paths):
        raise UserError(
            f"path {missing[0].id or '?'}: {name}: missing, but other paths of the batch have it; "
            "give it to all paths or to none"
        )
    return None if missing else np.concatenate(values)
