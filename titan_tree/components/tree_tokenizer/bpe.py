"""BytePairEncoder: text -> token ids and back, on top of tiktoken."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np
import tiktoken

from titan_tree.components.tree_tokenizer.vocabulary import Vocabulary
from titan_tree.errors import UserError, require_unicode

CACHE_CHARACTERS = 1 << 24  # capacity of the cache in characters of text; a full cache takes about 100 MB
ENTRY_CHARACTERS = 64  # what an entry of the cache costs beside its text, in characters


class BytePairEncoder:
    """Byte-level BPE (byte-pair encoding) with added tokens; ids equal those of the library ``tokenizers``.

    Encoding has four steps, and their order matters:

    1. Cut added tokens out of the raw text.
    2. Convert each piece between them to Unicode normal form. Each piece is normalized separately, so
       ``<think>`` stays intact before a combining mark.
    3. Cut added tokens marked ``normalized`` out of the pieces.
    4. Encode the rest by BPE.

    Encoded pieces are cached. The prompts of a conversation repeat its history, so encoding all of them
    costs little more than encoding the last one.

    Attributes:
        special_tokens: added token -> id.
        vocab_size: largest id + 1.

    Raises:
        UserError: tiktoken rejects the split pattern.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        added = vocabulary.added
        self.special_tokens = {token.content: token.id for token in added}
        self.vocab_size = max(*vocabulary.tokens.values(), *self.special_tokens.values()) + 1
        self._normal_forms = vocabulary.normal_forms
        self._cut_raw = _Cutter({token.content: token.id for token in added if not token.normalized})
        self._cut_normalized = _Cutter(
            {self._normalize(token.content): token.id for token in added if token.normalized}
        )
        self._bpe = _tiktoken_encoding(vocabulary)
        self._id_of_rank = _id_of_rank(vocabulary)
        self._token_bytes = {id: token for token, id in vocabulary.tokens.items()}
        self._token_bytes |= {id: content.encode() for content, id in self.special_tokens.items()}
        self._cache: dict[tuple[str, bool], np.ndarray] = {}
        self._cached_characters = 0

    def encode(self, text: str, special: bool = True) -> list[np.ndarray]:
        """Returns the ids of ``text`` as int32 arrays, to be concatenated.

        Args:
            special: whether added tokens in the text become their ids, or are encoded as plain text.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        return [ids for _, _, ids in self.encode_pieces(text, special)]

    def encode_pieces(self, text: str, special: bool = True) -> Iterator[tuple[str, bool, np.ndarray]]:
        """Yields the added tokens in ``text`` and the text between them: (piece, whether it is one, ids)."""
        for piece, ids in self._cut_raw(text) if special else [(text, None)]:
            yield piece, ids is not None, self._piece_ids(piece, special) if ids is None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id that the vocabulary does not have.
        """
        try:
            return b"".join([self._token_bytes[int(id)] for id in ids]).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"decode: expected ids of this vocabulary, got {error.args[0]}") from None

    def _piece_ids(self, text: str, special: bool) -> np.ndarray:
        """Returns the ids of text without raw added tokens, from the cache if possible (steps 2 to 4)."""
        key = text, special
        if (ids := self._cache.get(key)) is None:
            self._make_room(len(text) + ENTRY_CHARACTERS)
            ids = self._cache[key] = self._encode_piece(text, special)
        return ids

    def _make_room(self, characters: int) -> None:
        self._cached_characters += characters
        if self._cached_characters > CACHE_CHARACTERS:
            self._cache.clear()
            self._cached_characters = characters

    def _encode_piece(self, text: str, special: bool) -> np.ndarray:
        text = self._normalize(text)
        parts = self._cut_normalized(text) if special else [(text, None)]
        pieces = [self._bpe_ids(part) if ids is None else ids for part, ids in parts]
        return np.concatenate([np.empty(0, np.int32), *pieces])

    def _normalize(self, text: str) -> str:
        for form in self._normal_forms:
            text = unicodedata.normalize(form, text)
        return text

    def _bpe_ids(self, text: str) -> np.ndarray:
        try:
            ranks = self._bpe.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            require_unicode(text, "text")
            raise
        return ranks.astype(np.int32) if self._id_of_rank is None else self._id_of_rank[ranks]


def _tiktoken_encoding(vocabulary: Vocabulary) -> tiktoken.Encoding:
    try:
        return tiktoken.Encoding(
            "titan_tree",
            pat_str=vocabulary.pattern,
            mergeable_ranks=dict(vocabulary.ranks),
            special_tokens={},
        )
    except ValueError as error:
        raise UserError(
            f"split pattern {vocabulary.pattern!r}: expected one that tiktoken accepts: {error}"
        ) from None


def _id_of_rank(vocabulary: Vocabulary) -> np.ndarray | None:
    """Returns the id of each rank, [R] int32, or None if every rank is its token's id."""
    if all(vocabulary.tokens[token] == rank for token, rank in vocabulary.ranks.items()):
        return None
    return np.array([vocabulary.tokens[token] for token in vocabulary.ranks], np.int32)


class _Cutter:
    """Cuts given tokens out of a text: the leftmost match first, and of several the longest."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._ids = {token: np.array([id], np.int32) for token, id in tokens.items()}
        longest_first = sorted(tokens, key=len, reverse=True)
        matches_nothing = "(?!)"
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or matches_nothing})").split

    def __call__(self, text: str) -> list[tuple[str, np.ndarray | None]]:
        """Returns the text in order: (token, its ids) and (non-empty text between tokens, None)."""
        parts = enumerate(self._split(text))
        return [(part, self._ids[part] if index % 2 else None) for index, part in parts if part]
