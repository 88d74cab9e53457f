"""Encoders: text -> token ids and back. Ids equal those of the library ``tokenizers``.

BytePairEncoder  byte-level BPE with tiktoken, which needs a fifth of the time (docs/design.md, "Decisions")
LibraryEncoder   any other pipeline of a tokenizer.json, with ``tokenizers`` itself
"""

from __future__ import annotations

import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

from titan_tree.components.tree_tokenizer.vocabulary import TokenizerJson, Vocabulary
from titan_tree.errors import UserError, require_unicode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_CHARACTERS = 1 << 24  # capacity of the cache in characters of text; a full cache takes about 100 MB
ENTRY_CHARACTERS = 64  # cost of a cache entry beside its text, in characters
CONTEXT_CHARACTERS = 256  # text before a completion that LibraryEncoder looks at
CUT_CHARACTERS = "<[{(|/#$&*+=@~"  # first characters of the control tokens at which LibraryEncoder cuts


class TextEncoder(ABC):
    """Encodes and decodes text.

    Encoded pieces are cached. The prompts of a conversation repeat its history, so encoding all of them
    costs little more than encoding the last one.

    Attributes:
        special_tokens: control token -> id.
        vocab_size: largest id + 1.
    """

    special_tokens: dict[str, int]
    vocab_size: int

    def __init__(self) -> None:
        self._cache: dict[tuple[str, bool], np.ndarray] = {}
        self._cached_characters = 0

    def encode(self, text: str, special: bool = True) -> list[np.ndarray]:
        """Returns the ids of ``text`` as int32 arrays, to be concatenated.

        Args:
            special: whether control tokens in the text become their ids, or are encoded as plain text.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        return [ids for _, _, ids in self.encode_pieces(text, special)]

    def encode_after(self, before: str, text: str, special: bool = True) -> list[np.ndarray]:
        """Returns the ids of ``text``, which begins at a token boundary after the text ``before``.

        Args:
            before: what comes right before ``text``, already encoded. Its ids are not returned. It matters
                only to pipelines that encode the first word of a text in another way than the same word
                after other text (SentencePiece).
            text: the text to encode.
            special: see ``encode``.
        """
        return self.encode(text, special)

    @abstractmethod
    def encode_pieces(self, text: str, special: bool = True) -> Iterator[tuple[str, bool, np.ndarray]]:
        """Yields the text in pieces: (piece, whether it begins with a control token, ids).

        The ids of all pieces from a control token on depend on no text before it.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id that the vocabulary does not have.
        """

    @abstractmethod
    def _encode_piece(self, text: str, special: bool) -> np.ndarray:
        """Returns the ids of a piece, [n] int32."""

    def _piece_ids(self, text: str, special: bool) -> np.ndarray:
        """Returns the ids of a piece, from the cache if possible."""
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


def make_encoder(vocabulary: Vocabulary | TokenizerJson) -> TextEncoder:
    """Returns the encoder of a vocabulary.

    Raises:
        UserError: tiktoken rejects the split pattern, or ``tokenizers`` the pipeline.
    """
    return BytePairEncoder(vocabulary) if isinstance(vocabulary, Vocabulary) else LibraryEncoder(vocabulary)


class BytePairEncoder(TextEncoder):
    """Byte-level BPE (byte-pair encoding) with control tokens.

    Encoding has four steps, and their order matters:

    1. Cut control tokens out of the raw text.
    2. Convert each piece between them to Unicode normal form. Each piece is normalized separately, so
       ``<think>`` stays intact before a combining mark.
    3. Cut control tokens marked ``normalized`` out of the pieces.
    4. Encode the rest by BPE.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
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

    def encode_pieces(self, text: str, special: bool = True) -> Iterator[tuple[str, bool, np.ndarray]]:
        for piece, ids in self._cut_raw(text) if special else [(text, None)]:
            yield piece, ids is not None, self._piece_ids(piece, special) if ids is None else ids

    def decode(self, ids: Iterable[int]) -> str:
        try:
            return b"".join([self._token_bytes[int(id)] for id in ids]).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"decode: expected ids of this vocabulary, got {error.args[0]}") from None

    def _encode_piece(self, text: str, special: bool) -> np.ndarray:
        """Returns the ids of text without raw control tokens (steps 2 to 4)."""
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


class LibraryEncoder(TextEncoder):
    """The pipeline of a tokenizer.json, such as Unigram, or BPE with ``byte_fallback``.

    A text is cut before control tokens, and each piece is encoded alone. This gives the ids of the whole
    text. The library finds control tokens first, from left to right, the longest of several, and encodes the
    text between two of them without regard to the rest. Some pipelines treat the beginning of a text in
    another way, but a piece behind a cut begins with a control token. A token that takes the white space to
    its left, or depends on the characters around it, is no place for a cut.
    """

    def __init__(self, vocabulary: TokenizerJson) -> None:
        super().__init__()
        self._tokenizer = _library_tokenizer(vocabulary.spec, vocabulary.file)
        self._plain = _library_tokenizer(_without_added_tokens(vocabulary.spec), vocabulary.file)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items()}
        for content, id in vocabulary.added.items():
            if (library_id := self.special_tokens.get(content, id)) != id:
                raise UserError(
                    f"{vocabulary.file}: added_tokens: expected id {library_id} of {content!r}, "
                    f"which the package tokenizers gives it, got {id}; save the tokenizer again"
                )
        self._ids = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if not self._ids:
            raise UserError(f"{vocabulary.file}: model.vocab: expected at least one token, got none")
        self.vocab_size = max(self._ids) + 1
        raw = sorted((t.content for t in added.values() if not t.normalized), key=len, reverse=True)
        self._find_raw = re.compile("|".join(map(re.escape, raw)) or "(?!)").finditer
        free = {t.content for t in added.values() if not (t.lstrip or t.single_word)}
        self._cut_at = {content for content in free if content[0] in CUT_CHARACTERS}

    def encode_pieces(self, text: str, special: bool = True) -> Iterator[tuple[str, bool, np.ndarray]]:
        for piece, is_cut in self._split(text) if special else [(text, False)]:
            yield piece, is_cut, self._piece_ids(piece, special)

    def encode_after(self, before: str, text: str, special: bool = True) -> list[np.ndarray]:
        # Many pipelines mark the beginning of a text with a space, so the first word has another id alone.
        # Both texts are therefore encoded together, if ``before`` then ends at a token boundary.

        if special and (pieces := list(self._split(before))):
            context = pieces[-1][0][-CONTEXT_CHARACTERS:]
            known = np.concatenate(self.encode(context))
            both = np.concatenate(self.encode(context + text))
            if np.array_equal(both[: len(known)], known):
                return [both[len(known) :]]
        return self.encode(text, special)

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(id) for id in ids]
        if unknown := set(ids) - self._ids:
            raise UserError(f"decode: expected ids of this vocabulary, got {min(unknown)}")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of a text, and whether each one begins with a control token."""
        cuts = [match.start() for match in self._find_raw(text) if match[0] in self._cut_at]
        if cuts[:1] != [0] and text:
            yield text[: cuts[0] if cuts else len(text)], False
        for start, end in pairwise([*cuts, len(text)]):
            yield text[start:end], True

    def _encode_piece(self, text: str, special: bool) -> np.ndarray:
        tokenizer = self._tokenizer if special else self._plain
        try:
            return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except (UnicodeEncodeError, TypeError):
            require_unicode(text, "text")
            raise


def _library_tokenizer(spec: dict[str, object], file: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises nothing more special
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{file}: expected a tokenizer that the package tokenizers can open ({reason})"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added_tokens(spec: dict[str, object]) -> dict[str, object]:
    """Returns a pipeline that reads control tokens as plain text.

    Unigram and others may also find them as words of the vocabulary, where they get another name.
    """
    model, added = spec["model"], spec.get("added_tokens") or []
    assert isinstance(model, dict)
    assert isinstance(added, list)
    merges = model.get("merges") or []
    merged = {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
    control = (
        {token["content"] for token in added if token.get("special")} - merged - {model.get("unk_token")}
    )
    hidden = {content: f"\ufdd0{number}\ufdd1" for number, content in enumerate(sorted(control))}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {hidden.get(token, token): id for token, id in vocab.items()}
    else:
        unk = model.get("unk_id")
        vocab = [
            [token if index == unk else hidden.get(token, token), score]
            for index, (token, score) in enumerate(vocab)
        ]
    return {**spec, "added_tokens": [], "model": {**model, "vocab": vocab}, "post_processor": None}


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
