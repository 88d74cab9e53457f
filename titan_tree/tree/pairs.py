"""The (edge, path) pairs of a tree, on which losses of single sequences run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.path_fields import SamplingMask, TokenTargets
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree

MAX_LOG_RATIO = 20.0  # of importance weights and of divergences; verl has the same bound
Edges = Literal["all", "loss"]  # all edges, or only those that the loss mask of some path counts


class TreeEdges(NamedTuple):
    """The E edges of a tree, sorted by the token that they predict.

    An edge has one distribution. Paths that count an edge at different temperatures, or with different
    sampling masks, therefore have an edge each.
    """

    label: np.ndarray  # [E] int64, ascending: DFS index in the tree of the token that the edge predicts
    temperature: np.ndarray | None  # [E] float32; None: all are 1
    mask: SamplingMask | None  # of the E labels; None: every edge has the whole vocabulary


class TreePairs(NamedTuple):
    """The F (edge, path) pairs of a tree with P paths, path after path."""

    edge: np.ndarray  # [F] int64: number of the edge, 0 .. E-1
    path: np.ndarray  # [F] int64
    fields: dict[str, np.ndarray]  # [F] each: the per-token fields of ``PathPairs``
    path_fields: dict[str, np.ndarray]  # [P] each: the fields per path
    targets: TokenTargets | None = None  # of the F pairs; None: not asked for, or no path has them


def tree_pairs(tree: TokenTree, edges: Edges, targets: bool = False) -> tuple[TreeEdges, TreePairs]:
    """Returns the edges and pairs of a tree.

    Args:
        targets: also return the targets of pairs that count, with a path of positive weight.

    Raises:
        UserError: a field is missing in some paths, but not in all.
    """
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
    if (rollout := _rollouts(paths, loss_tokens)) is not None:
        path_fields["rollout"] = rollout
    tree_edges, edge_of_pair = _edges(tree, chosen, path_of_pair, fields["loss_mask"] > 0)
    pair_targets = _joined_targets(paths) if targets else None
    if pair_targets is not None:
        is_counted = (fields["loss_mask"] > 0) & (path_fields["weight"][path_of_pair] > 0)
        pair_targets = pair_targets.of_tokens(chosen).where(is_counted)
    return tree_edges, TreePairs(edge_of_pair, path_of_pair, fields, path_fields, pair_targets)


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
    total = np.bincount(pairs.edge, weight)
    first = np.full(len(total), -1)  # the first pair that counts each edge
    first[pairs.edge[counted[::-1]]] = counted[::-1]  # the last assignment wins
    kept = np.sort(first[first >= 0])
    edge = pairs.edge[kept]
    fields = {name: values[kept] for name, values in pairs.fields.items()}
    fields["loss_mask"] = total[edge].astype(np.float32)
    path_fields = pairs.path_fields | {"weight": np.ones_like(pairs.path_fields["weight"])}
    return TreePairs(edge, pairs.path[kept], fields, path_fields)


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


def _rollouts(paths: Sequence[TokenPath], loss_tokens: np.ndarray) -> np.ndarray | None:
    """Returns [P] int64: the number of the first path of each path's rollout.

    A rollout is complete as soon as the loss counts ``rollout_tokens`` of its tokens. A name may then begin
    another rollout, as a group may occur twice. The result is None if a rollout is not complete.
    """
    numbers = np.arange(len(paths))
    first: dict[str | int, int] = {}
    missing: dict[str | int, float] = {}  # loss tokens that are yet to come, of rollouts that have begun
    for number, (path, own) in enumerate(zip(paths, loss_tokens.tolist(), strict=True)):
        if path.rollout_tokens is None or not own:
            continue  # a rollout of its own, or nothing that a ratio counts
        name = number if path.rollout is None else path.rollout
        if name not in missing:
            first[name], missing[name] = number, path.rollout_tokens
        missing[name] -= own
        numbers[number] = first[name]
        if abs(missing[name]) <= 1e-6 * path.rollout_tokens:
            del missing[name]
    return None if missing else numbers


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


def _edges(
    tree: TokenTree, index: np.ndarray, path: np.ndarray, is_counted: np.ndarray
) -> tuple[TreeEdges, np.ndarray]:
    """Returns the edges of a tree, and the number of each pair's edge, [F] int64.

    Args:
        index: [F] each pair's entry in ``TokenTree.path_index``.
        path: [F] the number of its path.
        is_counted: [F] whether the path counts it.
    """
    label = tree.path_index[index]
    by_path = np.array([path.temperature for path in tree.paths], np.float32)
    mask = _joined_masks(tree.paths)
    if mask is None and (by_path == by_path[0]).all():
        labels, edge = _numbered(label, len(tree))
        temperature = None if by_path[0] == 1 else np.full(len(labels), by_path[0])
        return TreeEdges(labels, temperature, None), edge
    distribution = _distributions(label, by_path[path], mask, index, is_counted)
    # The pair whose distribution an edge has is the first that counts, or else the first one. Pairs that do
    # not count have the edge of this pair.
    first = _first_pairs(label, is_counted, len(tree))
    distribution = np.where(is_counted, distribution, distribution[first[label]])
    keys, edge = np.unique(label * (distribution.max(initial=0) + 1) + distribution, return_inverse=True)
    first = _first_pairs(edge, is_counted, len(keys))
    edge_mask = None if mask is None else mask.of_tokens(index[first])
    return TreeEdges(label[first].astype(np.int64), by_path[path[first]], edge_mask), edge


def _distributions(
    label: np.ndarray,
    temperature: np.ndarray,
    mask: SamplingMask | None,
    index: np.ndarray,
    is_counted: np.ndarray,
) -> np.ndarray:
    """Returns [F] int64: for pairs that count a label, numbers that are equal if their distributions are."""
    temperatures, number = np.unique(temperature, return_inverse=True)
    if mask is None:
        return number
    count = np.bincount(label[is_counted], minlength=label.max(initial=0) + 1)
    (shared,) = (is_counted & (count[label] > 1)).nonzero()
    numbers: dict[bytes, int] = {}
    for pair, ids in zip(shared, mask.of_tokens(index[shared]).by_token(), strict=True):
        number[pair] += len(temperatures) * numbers.setdefault(np.sort(ids).tobytes(), len(numbers))
    return number


def _numbered(keys: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct ``keys``, all below ``size``, in ascending order, and the rank of each key."""
    is_key = np.zeros(size, bool)
    is_key[keys] = True
    return np.flatnonzero(is_key), (np.cumsum(is_key) - 1)[keys]


def _first_pairs(key: np.ndarray, is_counted: np.ndarray, size: int) -> np.ndarray:
    """Returns [size] int64: the first pair that counts each key, or else the first pair of the key."""
    first = np.zeros(size, np.int64)
    for (chosen,) in (np.ones_like(is_counted).nonzero(), is_counted.nonzero()):
        first[key[chosen[::-1]]] = chosen[::-1]  # the last assignment wins
    return first


def _joined(paths: Sequence[TokenPath], name: str) -> np.ndarray | None:
    """Returns a per-token field of all paths, concatenated, or None if no path has it."""
    values = [getattr(path, name) for path in paths]
    missing = [path for path, value in zip(paths, values, strict=True) if value is None]
    if 0 < len(missing) < len(paths):
        raise _missing(missing[0], name)
    return None if missing else np.concatenate(values)


def _joined_targets(paths: Sequence[TokenPath]) -> TokenTargets | None:
    """Returns the teacher's targets of all paths, concatenated, or None if no path has them."""
    if all(path.teacher_topk is None for path in paths):
        return None
    for path in paths:
        if path.teacher_topk is None and path.loss_tokens:
            raise _missing(path, "teacher_topk")
    return TokenTargets.concatenate([path.teacher_topk for path in paths], map(len, paths))


def _missing(path: TokenPath, name: str) -> UserError:
    return UserError(
        f"path {path.id or '?'}: {name}: missing, but other paths of the batch have it; give it to all paths "
        "or to none"
    )


def _joined_masks(paths: Sequence[TokenPath]) -> SamplingMask | None:
    """Returns the sampling masks of all paths, concatenated, or None if no path has one."""
    present = [path.sampling_mask.ids for path in paths if path.sampling_mask is not None]
    sizes = [
        np.zeros(len(path), np.int32) if path.sampling_mask is None else path.sampling_mask.sizes
        for path in paths
    ]
    return SamplingMask(np.concatenate(sizes), np.concatenate(present)) if present else None
