"""What the modules for AReaL, prime-rl, SkyRL and slime share: fields of samples, trees, scores of paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.scoring.score_trees import PathScores, score_trees
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@torch.no_grad()
def score_paths(
    model: TreeModel, paths: Sequence[TokenPath], max_tokens: int | None = None, entropies: bool = False
) -> list[PathScores]:
    """Returns the scores of all tokens of ``paths`` at each path's temperature, see ``score_trees``.

    Args:
        model: may be sharded over ranks. Every rank then makes the same call, with paths of its own.
        paths: the paths to score, in any order. Their loss masks have no effect.
        max_tokens: maximum tokens of one forward pass; larger trees run in partitions. None: no limit.
        entropies: also return the entropies of the distributions.
    """
    trees = make_trees(
        TokenPath(path.tokens, temperature=path.temperature, id=str(number))
        for number, path in enumerate(paths)
    )
    partitioner = None if max_tokens is None else TreePartitioner("auto", max_tokens)
    scores = score_trees(model, trees, max_tokens, partitioner, entropies=entropies)
    by_number = {
        int(path.id): path_scores
        for tree, scores_of_tree in zip(trees, scores, strict=True)
        for path, path_scores in zip(tree.paths, scores_of_tree, strict=True)
    }
    return [by_number[number] for number in range(len(paths))]


def make_trees(paths: Iterable[TokenPath]) -> list[TokenTree]:
    """Returns the trees of ``paths``: one forest for each temperature."""
    by_temperature: dict[float, list[TokenPath]] = {}
    for path in paths:
        by_temperature.setdefault(path.temperature, []).append(path)
    return [TokenTree.from_paths(group) for group in by_temperature.values()]


def fields_of(
    row: Any, where: str, known: Iterable[str], left_out: Iterable[str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the known fields of a dict or an object that are not None.

    Args:
        where: of the row, for error messages.
        left_out: fields without effect on losses.
        refused: fields that would change the loss, and what to do about them.
    Raises:
        UserError: another field, or a refused one that is not empty.
    """
    fields = dict(row) if isinstance(row, Mapping) else _attributes(row)
    present = {name: value for name, value in fields.items() if not _is_empty(value)}
    for name in present:
        if name in refused:
            raise UserError(f"{where}: {name}: {refused[name]}")
        if name not in known and name not in left_out:
            raise UserError(
                f"{where}: {name}: unknown field, which might change the loss; remove it if it does not"
            )
    return {name: value for name, value in present.items() if name in known}


def column(fields: Mapping[str, Any], name: str, where: str, length: int) -> Sequence[Any] | None:
    """Returns the field ``name`` with one entry for each of ``length`` rows or tokens, or None without it."""
    value = fields.get(name)
    if value is not None and len(value) != length:
        raise UserError(f"{where}: {name}: expected {length} entries, got {len(value)}")
    return value


def array(values: Any, dtype: Any = np.float32) -> np.ndarray:
    """Returns a list, an array or a tensor on any device as an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype)


def after_prompt(values: Any, num_prompt: int, fill: float) -> np.ndarray:
    """Returns values of a response [R] for all tokens [T], with ``fill`` for those of the prompt."""
    return np.concatenate([np.full(num_prompt, fill, np.float32), array(values)])


def required(fields: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns the field ``name``. Raises UserError without it."""
    if name not in fields:
        raise UserError(f"{where}: {name}: missing; give it for every row")
    return fields[name]


def _attributes(row: Any) -> dict[str, Any]:
    names = getattr(row, "__struct_fields__", None)  # of msgspec
    return dict(vars(row)) if names is None else {name: getattr(row, name) for name in names}


def _is_empty(value: Any) -> bool:
    """Returns whether a field says nothing: None, False, an empty container, or a list of None."""
    if isinstance(value, dict):
        return not value
    return value is None or value is False or (isinstance(value, list) and all(x is None for x in value))
