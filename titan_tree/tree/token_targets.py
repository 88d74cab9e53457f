"""TokenTargets: what a teacher would say in place of each token, for distillation.

T is the number of tokens of a path, and S the number of its targets.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.tree.path_fields import (
    MAX_LOGPROB,
    MAX_NUMBER,
    SamplingMask,
    float_array,
    integer_array,
    ragged_index,
    wrong,
)

if TYPE_CHECKING:
    from titan_tree.tree.paths import TokenPath

# Log-probs by id, as numbers, or as objects with "logprob"
TopK = Mapping[int, float] | Mapping[str, float] | Mapping[str, Mapping[str, object]]
EXPECTED = "for each token an object of log-probs by token id, or null"
MAX_MASS = 1.01  # the probabilities of the targets of a token add up to at most 1, up to rounding
# Largest difference in nats between two log-probs of one teacher for the same token. Servers round batches of
# different sizes differently, and a logit of 32 in bf16 is rounded to a multiple of 0.25.
TOLERANCE = 0.5


class TokenTargets(NamedTuple):
    """The likeliest tokens under a teacher in place of each token of a path, token after token."""

    sizes: np.ndarray  # [T] int32: how many targets a token has; 0: none
    ids: np.ndarray  # [S] int32
    logprobs: np.ndarray  # [S] float32, nats

    def of_tokens(self, tokens: np.ndarray) -> TokenTargets:
        """Returns the targets of the chosen ``tokens`` [t] int64, in their order."""
        index = ragged_index(self.sizes, tokens)
        return TokenTargets(self.sizes[tokens], self.ids[index], self.logprobs[index])

    def where(self, is_kept: np.ndarray) -> TokenTargets:
        """Returns the targets of the tokens that ``is_kept`` [T] bool selects; the others have none."""
        index = np.repeat(is_kept, self.sizes)
        return TokenTargets(np.where(is_kept, self.sizes, np.int32(0)), self.ids[index], self.logprobs[index])

    @staticmethod
    def concatenate(parts: Sequence[TokenTargets]) -> TokenTargets:
        """Returns the targets of several paths as those of one."""
        return TokenTargets(*map(np.concatenate, zip(*parts, strict=True)))


def no_targets(num_tokens: int) -> TokenTargets:
    """Returns the targets of tokens that have none."""
    return TokenTargets(np.zeros(num_tokens, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def teacher_topk_of(
    value: object, tokens: np.ndarray, loss_mask: np.ndarray, sampling_mask: SamplingMask | None
) -> TokenTargets | None:
    """Returns the targets of a path; see ``TokenPath``. None: the loss counts no token.

    Args:
        value: TokenTargets, or a list of T mappings ``TopK``. None and {} stand for no targets.
        tokens, loss_mask: [T] each. A token that the loss counts must have targets.
        sampling_mask: the targets of a token must be among the ids that sampling kept, if it kept not all.
    """
    sizes, ids, logprobs = value if isinstance(value, TokenTargets) else _flat(value)
    sizes, ids = integer_array("teacher_topk", sizes, "sizes"), integer_array("teacher_topk", ids, "ids")
    logprobs = float_array("teacher_topk", logprobs, "iuf", (int, float))
    if sizes.shape != tokens.shape or not ids.shape == logprobs.shape == (sizes.sum(dtype=np.int64),):
        got = f"{len(sizes)} with {ids.size} ids and {logprobs.size} log-probs in total"
        raise wrong("teacher_topk", f"{len(tokens)} objects of log-probs, one per token", got)
    is_counted = loss_mask > 0
    is_counted[0] = False  # nothing predicts the first token
    # Other targets are never used.
    targets = TokenTargets(sizes, ids, logprobs).where(is_counted)
    sizes, ids, logprobs = targets
    if (bad := is_counted & (sizes == 0)).any():
        hint = "only tokens with loss mask 0 may lack them; entry t belongs to tokens[t]"
        raise wrong(f"teacher_topk of token {bad.argmax()}", "log-probs", f"none; {hint}")
    token_of_id = np.repeat(np.arange(len(tokens)), sizes)
    if not (valid := (logprobs >= -MAX_NUMBER) & (logprobs <= MAX_LOGPROB)).all():
        at = int(valid.argmin())
        expected = "log-probs from -1e12 to 0"
        raise wrong(f"teacher_topk of token {token_of_id[at]}", expected, f"{logprobs[at]:g} of id {ids[at]}")
    keys = token_of_id << 32 | ids
    if (repeated := (ordered := np.sort(keys))[1:] == ordered[:-1]).any():
        token, id = divmod(int(ordered[repeated.argmax()]), 2**32)
        raise wrong(f"teacher_topk of token {token}", "different ids", f"{id} twice")
    mass = np.bincount(token_of_id, np.exp(logprobs.astype(np.float64)), minlength=len(tokens))
    if (bad := mass > MAX_MASS).any():
        got = f"{mass[bad.argmax()]:.4g}; these are not log-probs of one distribution"
        raise wrong(f"teacher_topk of token {bad.argmax()}", "probabilities that add up to at most 1", got)
    if sampling_mask is not None:
        kept = np.repeat(np.arange(len(tokens)), sampling_mask.sizes) << 32 | sampling_mask.ids
        bad = (sampling_mask.sizes[token_of_id] > 0) & ~np.isin(keys, kept)
        if bad.any():
            expected = "ids of the sampling mask, outside of which the student's probability is 0"
            got = f"{ids[bad.argmax()]}; remove sampling_mask, or score the teacher with it"
            raise wrong(f"teacher_topk of token {token_of_id[bad.argmax()]}", expected, got)
    return targets if len(ids) else None


def _flat(value: object) -> TokenTargets:
    if not isinstance(value, list | tuple):
        raise wrong("teacher_topk", EXPECTED, shorten(value))
    entries = [{} if entry is None else entry for entry in value]
    if bad := [entry for entry in entries if not isinstance(entry, Mapping)]:
        raise wrong("teacher_topk", EXPECTED, shorten(bad[0]))
    try:
        ids = [int(id) if isinstance(id, str) else operator.index(id) for entry in entries for id in entry]
        logprobs = [
            value["logprob"] if isinstance(value, Mapping) else value
            for entry in entries
            for value in entry.values()
        ]
    except (TypeError, ValueError, KeyError) as error:  # another key than an id, or an object without logprob
        raise wrong("teacher_topk", EXPECTED, f"{type(error).__name__}: {error!s:.80}") from None
    sizes = np.array([len(entry) for entry in entries], np.int64)
    return TokenTargets(
        sizes, np.array(ids or sizes[:0]), np.array(logprobs or [], None if logprobs else "f4")
    )


def check_shared_targets(paths: Sequence[TokenPath], path_index: np.ndarray) -> None:
    """Checks that paths through an edge have the same targets there, if one teacher made them.

    Only ids that both paths have are compared: servers may disagree on which id is the last of the likeliest.

    Args:
        paths: the paths of a tree.
        path_index: [N_flat] the index of each of their tokens in the tree.

    Raises:
        UserError: two log-probs differ by more than ``TOLERANCE``. It names both paths and the token.
    """
    if all(path.teacher_topk is None for path in paths):
        return
    targets = TokenTargets.concatenate([path.teacher_topk or no_targets(len(path)) for path in paths])
    lengths = list(map(len, paths))
    # Distributions at different temperatures, or over different sampling masks, are different.
    groups: dict[tuple[object, ...], int] = {}
    group = [groups.setdefault((path.teacher, path.temperature), len(groups)) for path in paths]
    edge = path_index * np.int64(len(groups)) + np.repeat(group, lengths)
    is_masked = np.concatenate([_is_masked(path) for path in paths])
    has_targets = (targets.sizes > 0) & ~is_masked
    _, number, count = np.unique(edge[has_targets], return_inverse=True, return_counts=True)
    (shared,) = has_targets.nonzero()
    shared, number = shared[count[number] > 1], number[count[number] > 1]
    sizes, ids, logprobs = targets.of_tokens(shared)
    keys, token = np.repeat(number, sizes) << 32 | ids, np.repeat(shared, sizes)
    order = np.argsort(keys, kind="stable")
    keys, token, logprobs = keys[order], token[order], logprobs[order]
    gap = np.abs(np.diff(logprobs)) * (np.diff(keys) == 0)
    if (bad := gap > TOLERANCE).any():
        at = int(bad.argmax())
        offsets = np.cumsum([0, *lengths])
        first, second = (int(np.searchsorted(offsets, entry, "right")) - 1 for entry in token[at : at + 2])
        raise UserError(
            f"path {paths[second].id or '?'}: teacher_topk of token {token[at + 1] - offsets[second]}: "
            f"expected {logprobs[at]:.4g} for id {keys[at] & 0xFFFFFFFF}, as in path "
            f"{paths[first].id or '?'}, which has the same tokens up to there, got {logprobs[at + 1]:.4g}; "
            "score both with one teacher, or name their teachers in the field teacher"
        )


def _is_masked(path: TokenPath) -> np.ndarray:
    if path.sampling_mask is None:
        return np.zeros(len(path), bool)
    is_masked: np.ndarray = path.sampling_mask.sizes > 0
    return is_masked
