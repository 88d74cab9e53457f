"""PrefixEncoder encodes the prompts of a conversation, each of which repeats most of the one before."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from titan_tree.components.tree_tokenizer.encoders import TextEncoder
from titan_tree.components.tree_tokenizer.templates import ChatTemplate


class _Cut(NamedTuple):
    """A point in a text before a control token. The text before it does not change how the rest is encoded.

    Let n be the length of the longest control token. Whether a control token starts at character s depends on
    at most n characters from s on: "<a>" may become "<ab>" or "<a>b". If another text agrees with this one in
    the first ``needed`` characters, it therefore has the same cut.
    """

    offset: int  # characters before the cut
    needed: int  # characters in which another text must agree to have this cut
    num_ids: int  # ids of the text before the cut


class PrefixEncoder:
    """Encodes rendered texts one after another, and reuses the ids of what a text shares with the one before.

    Ids are equal to those of encoding each text alone, for every vocabulary and every template. Only control
    tokens separate reusable parts. Elsewhere, the ids of a word can depend on the words behind it.
    """

    def __init__(self, encoder: TextEncoder, template: ChatTemplate) -> None:
        self._encoder = encoder
        self._template = template
        self._longest = max(map(len, encoder.special_tokens), default=0)
        self._text = ""
        self._ids = np.empty(0, np.int32)
        self._cuts = [_Cut(0, 0, 0)]

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text with marked text spans, [n] int32. Do not change them."""
        old = self._text

        def differs(cut: _Cut) -> bool:
            return cut.needed > len(old) or not text.startswith(old[: cut.needed])

        cuts = self._cuts[: bisect_left(self._cuts, True, key=differs)]
        offset, needed, num_ids = cuts[-1]
        pieces = [self._ids[:num_ids]]
        for span, special in self._template.spans(text[offset:]):
            for piece, is_control, ids in self._encoder.encode_pieces(span, special):
                if is_control:
                    needed = max(needed, offset + self._longest)
                    cuts.append(_Cut(offset, needed, num_ids))
                pieces.append(ids)
                num_ids += len(ids)
                offset += len(piece)
            offset += 1  # the mark behind the span
        self._text, self._ids, self._cuts = text, np.concatenate(pieces), cuts
        return self._ids
