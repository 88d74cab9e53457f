"""Sampling masks: the token ids that top-p, top-k or min-p sampling kept when it drew each token.

Truncated sampling draws from a distribution over these ids alone. A trainer that normalizes log-probs over
the whole vocabulary changes every ratio of the two policies by the mass that was cut off. With the mask, it
normalizes over the same ids (Keep Sampling Mask, arXiv:2512.02556, section 3.1).

T tokens of a path, S kept ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from titan_tree.errors import shorten
from titan_tree.tree.path_fields import integer_array, wrong

FIELD = "sampling_mask"
LISTS = "a list of token ids for each token"


class SamplingMask(NamedTuple):
    """The ids that sampling kept for each token of a path, token after token."""

    sizes: np.ndarray  # [T] int32: how many ids it kept; 0: the whole vocabulary
    ids: np.ndarray  # [S] int32

    def of_tokens(self, tokens: np.ndarray) -> SamplingMask:
        """Returns the mask of the chosen ``tokens`` [t] int64, in their order."""
        sizes = self.sizes[tokens]
        shifts = _starts(self.sizes)[tokens] - _starts(sizes)
        index = np.repeat(shifts, sizes) + np.arange(sizes.sum(dtype=np.int64))
        return SamplingMask(sizes, self.ids[index])

    def by_token(self) -> list[np.ndarray]:
        """Returns the ids of each token."""
        return np.split(self.ids, np.cumsum(self.sizes))[:-1]


def sampling_mask(value: object, tokens: np.ndarray, loss_mask: np.ndarray) -> SamplingMask | None:
    """Returns the mask of a path; see ``TokenPath``. None: the whole vocabulary for all tokens.

    Args:
        value: a SamplingMask, or a list of T lists of ids. None and [] stand for the whole vocabulary.
        tokens, loss_mask: [T] each. A token that the loss counts must be among its ids.
    """
    sizes, ids = value if isinstance(value, SamplingMask) else _flat(value)
    sizes, ids = integer_array(FIELD, sizes, "sizes"), integer_array(FIELD, ids, "ids")
    if sizes.shape != tokens.shape or ids.shape != (sizes.sum(dtype=np.int64),):
        expected = f"{len(tokens)} lists of token ids, one per token"
        raise wrong(FIELD, expected, f"{len(sizes)} lists of {ids.size} ids in total")
    is_counted = loss_mask > 0
    is_counted[0] = False  # nothing predicts the first token
    token_of_id = np.repeat(np.arange(len(tokens)), sizes)
    is_kept = sizes == 0
    is_kept[token_of_id[ids == tokens[token_of_id]]] = True
    if (bad := is_counted & ~is_kept).any():
        token = int(bad.argmax())
        got = shorten(ids[token_of_id == token].tolist())
        raise wrong(
            f"{FIELD} of token {token}",
            f"the sampled id {tokens[token]} among the ids that sampling kept",
            f"{got}; entry t of the mask belongs to tokens[t]",
        )
    # Other entries are never used. Without them, masks are equal where they are used equally.
    ids = ids[is_counted[token_of_id]]
    return SamplingMask(np.where(is_counted, sizes, np.int32(0)), ids) if len(ids) else None


def _flat(value: object) -> SamplingMask:
    if not isinstance(value, list | tuple):
        raise wrong(FIELD, LISTS, shorten(value))
    lists = [[] if ids is None else ids for ids in value]
    try:
        sizes = np.array([len(ids) for ids in lists], np.int64)
        return SamplingMask(sizes, np.concatenate([sizes[:0], *(ids for ids in lists if len(ids))]))
    except (TypeError, ValueError):  # a number in place of a list, or lists within lists
        raise wrong(FIELD, LISTS, shorten(value)) from None


def _starts(sizes: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(sizes, dtype=np.int64) - sizes
    return starts
