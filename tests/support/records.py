"""Paths with recorded experts, and the records that their tree must have, found by plain loops."""

import base64
import io
import random

import numpy as np

from titan_tree.tree.paths import TokenPath

MODES = ("first", "majority", "split")
LAYERS, TOP_K, EXPERTS = 2, 2, 6


def random_recorded_path(tokens, draw, kinds=EXPERTS, **fields):
    """Returns a path with random records of ``kinds`` experts. Some rows, and some paths, have none."""
    rows = [
        [draw.sample(range(kinds), TOP_K) if draw.random() < 0.8 else [-1] * TOP_K for _ in range(LAYERS)]
        for _ in range(draw.randint(1, len(tokens)))
    ]
    return TokenPath(tokens, routed_experts=rows if draw.random() < 0.9 else None, **fields)


def with_records(groups, seed, kinds=EXPERTS):
    """Returns the paths of ``groups`` with random records."""
    draw = random.Random(seed)
    return [
        [random_recorded_path(p.tokens, draw, kinds, loss_mask=p.loss_mask, weight=p.weight) for p in paths]
        for paths in groups
    ]


def rows_of(path):
    """Returns the recorded experts as lists [T][L]; None if a row was not recorded."""
    if path.routed_experts is None:
        return [[None] * LAYERS for _ in path.tokens]
    return [[None if row[0] < 0 else row for row in token] for token in path.routed_experts.tolist()]


def expected_records(paths, mode):
    """Returns each path's experts [T, L, k], the number of recorded rows, and that of rows that disagree."""
    votes = {}  # (prefix, layer) -> records of all paths, in order
    for path in paths:
        for t, token in enumerate(rows_of(path)):
            for layer, row in enumerate(token):
                cell = votes.setdefault((tuple(path.tokens[: t + 1]), layer), [])
                cell += [] if row is None else [row]

    def winner(cell):
        sets = [frozenset(row) for row in cell]
        most = max(map(sets.count, sets))
        return (
            cell[0]
            if mode == "first"
            else next(r for r, s in zip(cell, sets, strict=True) if sets.count(s) == most)
        )

    def used(path):
        if mode == "split":
            return [[row or [-1] * TOP_K for row in token] for token in rows_of(path)]
        cells = [[votes[tuple(path.tokens[: t + 1]), i] for i in range(LAYERS)] for t in range(len(path))]
        return [[winner(cell) if cell else [-1] * TOP_K for cell in token] for token in cells]

    filled = [cell for cell in votes.values() if cell]
    disagreeing = sum(len(set(map(frozenset, cell))) > 1 for cell in filled)
    return [np.array(used(path)) for path in paths], len(filled), disagreeing


def npy(rows):
    """Returns an array as base64 of an .npy file."""
    file = io.BytesIO()
    np.save(file, np.array(rows))
    return base64.b64encode(file.getvalue()).decode()
