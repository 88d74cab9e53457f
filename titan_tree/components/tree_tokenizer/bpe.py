"""BytePairEncoder: text -> ids and back, by tiktoken."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import tiktoken

from titan_tree.components.tree_tokenizer.vocabulary import Vocabulary
from titan_tree.errors import UserError

CACHE_CHARACTERS = 1 << 24  # text whose ids are remembered: with them about 100 MB


class BytePairEncoder:
    """Byte-level BPE with added tokens; the ids are those of Hugging Face's ``tokenizers``.

    The order matters: added tokens are cut out of the raw text, each piece between them is normalised on
    its own (so that ``<think>`` before a combining mark stays itself), added tokens marked ``normalized``
    are cut out of that, and BPE sees what is left. A piece is encoded once and remembered: the prompts of
    a conversation repeat its history, and encoding them all costs little more than encoding the history.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises UserError where tiktoken does not take the split pattern."""
        v = vocabulary
        self.special_tokens = {a.content: a.id for a in v.added}
        self.vocab_size = max(*v.tokens.values(), *self.special_tokens.values()) + 1
        self._bytes_of = {id: token for token, id in v.tokens.items()}
        self._bytes_of |= {id: content.encode() for content, id in self.special_tokens.items()}
        self._normal_forms = v.normal_forms
        self._cut_raw = _Cut({a.content: a.id for a in v.added if not a.normalized})
        self._cut_normal = _Cut({self._normalize(a.content): a.id for a in v.added if a.normalized})
        self._id_of_rank: np.ndarray | None = None  # None: ranks are ids
        if any(v.tokens[token] != rank for token, rank in v.ranks.items()):
            self._id_of_rank = np.array([v.tokens[token] for token in v.ranks], np.int32)
        try:
            self._bpe = tiktoken.Encoding(
                "titan_tree", pat_str=v.pattern, mergeable_ranks=dict(v.ranks), special_tokens={}
            )
        except ValueError as error:
            raise UserError(f"split pattern {v.pattern!r}: not one that tiktoken takes: {error}") from None
        self._cache: dict[tuple[str, bool], np.ndarray] = {}
        self._cached = 0  # characters, and some for the entries themselves

    def encode(self, text: str, special: bool = True) -> list[np.ndarray]:
        """Ids of ``text``: int32 arrays, to be concatenated.

        Args:
            special: added tokens in the text are what they say. Otherwise they are text like any other.

        Raises UserError for a lone surrogate: that is no text.
        """
        if not special:
            return [self._piece(text, False)]
        return [
            part if isinstance(part, np.ndarray) else self._piece(part, True) for part in self._cut_raw(text)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD. UserError for an unknown id."""
        try:
            return b"".join([self._bytes_of[int(id)] for id in ids]).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"decode: expected ids of this vocabulary, got {error.args[0]}") from None

    def _piece(self, text: str, special: bool) -> np.ndarray:
        key = text, special
        if (ids := self._cache.get(key)) is None:
            self._cached += len(text) + 64
            if self._cached > CACHE_CHARACTERS:
                self._cache.clear()
                self._cached = len(text) + 64
            normal = self._normalize(text)
            parts = self._cut_normal(normal) if special else [normal]
            found = [part if isinstance(part, np.ndarray) else self._merge(part) for part in parts]
            ids = self._cache[key] = np.concatenate([np.empty(0, np.int32), *found])
        return ids

    def _merge(self, text: str) -> np.ndarray:
        try:
            ranks = self._bpe.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError as error:
            raise UserError(
                f"text: expected Unicode text, got a lone surrogate in {text[error.start :]!r:.40}"
            ) from None
        return ranks.astype(np.int32) if self._id_of_rank is None else self._id_of_rank[ranks]

    def _normalize(self, text: str) -> str:
        for form in self._normal_forms:
            text = unicodedata.normalize(form, text)
        return text


class _Cut:
    """Cuts given tokens out of a text, the leftmost first and the longest of those."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._ids = {token: np.array([id], np.int32) for token, id in tokens.items()}
        longest_first = sorted(tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split

    def __call__(self, text: str) -> list[str | np.ndarray]:
        """The text in order: ids of the tokens, and the non-empty strings between them."""
        parts = self._split(text)
        parts[1::2] = [self._ids[token] for token in parts[1::2]]
        return [part for part in parts if isinstance(part, np.ndarray) or part]
