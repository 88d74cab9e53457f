"""Encoders: text -> token ids and back. Ids equal those of the library ``tokenizers``.

BytePairEncoder  byte-level BPE with tiktoken, which needs a fifth of the time (docs/decisions/)
LibraryEncoder   any other pipeline of a tokenizer.json, with ``tokenizers`` itself

An *added token* is cut out of the text before BPE. It is a *control token* if its file marks it as special:
``<|im_end|>`` is one, ``<think>`` is not. Control tokens take effect only in some ``Spans`` of a text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

from titan_tree.components.tree_tokenizer.vocabulary import AddedToken, TokenizerJson, Vocabulary
from titan_tree.errors import UserError, require_unicode

if TYPE_CHECKING:
    from tokenizers import AddedToken as LibraryToken
    from tokenizers import Tokenizer

CACHE_CHARACTERS = 1 << 24  # capacity of the cache in characters of text; a full cache takes about 100 MB
ENTRY_CHARACTERS = 64  # cost of a cache entry beside its text, in characters
CONTEXT_CHARACTERS = 256  # text before a completion that LibraryEncoder looks at
CUT_CHARACTERS = "<[{(|/#$&*+=@~"  # first characters of the added tokens at which LibraryEncoder cuts
HIDDEN = "\ufdd0{}\ufdd1"  # another name of a control token


class Spans:
    """A text that is encoded as one, and where control tokens in it take effect.

    A control token takes effect if one span contains all of it. Else it is plain text. Other added tokens and
    the merges of BPE disregard spans.

    Args:
        spans: (text, whether control tokens in it take effect), in order. A span may be empty.
    """

    def __init__(self, spans: Sequence[tuple[str, bool]]) -> None:
        self._spans = spans
        if len(spans) == 1:
            self.text, self.all_special = spans[0]
            self._starts = [0, len(self.text)]
        else:
            texts, special = zip(*spans, strict=True)
            self.text, self.all_special = "".join(texts), all(special)
            self._starts = [0, *accumulate(map(len, texts))]

    def takes_effect(self, start: int, end: int) -> bool:
        """Returns whether a control token at these characters takes effect."""
        index = self._index(start)
        return self._spans[index][1] and end <= self._starts[index + 1]

    def marks_before(self, position: int) -> int:
        """Returns how many ends of spans precede a character."""
        return self._index(position)

    def part(self, start: int, end: int) -> tuple[tuple[str, bool], ...]:
        """Returns the spans of a part of the text."""
        bounds = zip(self._starts, self._spans, strict=False)
        cut = ((text[max(start - at, 0) : max(end - at, 0)], special) for at, (text, special) in bounds)
        return tuple(span for span in cut if span[0])

    def _index(self, position: int) -> int:
        return bisect_right(self._starts, position, hi=len(self._spans)) - 1


class TextEncoder(ABC):
    """Encodes and decodes text.

    Encoded pieces are cached. The prompts of a conversation repeat its history, so encoding all of them
    costs little more than encoding the last one.

    Attributes:
        special_tokens: added token -> id.
        control_tokens: those of them that are control tokens.
        vocab_size: largest id + 1.
    """

    special_tokens: dict[str, int]
    control_tokens: frozenset[str]
    vocab_size: int

    def __init__(self) -> None:
        self._cache: dict[object, np.ndarray] = {}
        self._cached_characters = 0

    def encode(self, spans: Spans) -> list[np.ndarray]:
        """Returns the ids of a text as int32 arrays, to be concatenated.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        return [ids for _, _, ids in self.encode_pieces(spans)]

    def encode_after(self, before: Callable[[], Spans], spans: Spans) -> list[np.ndarray]:
        """Returns the ids of a text that begins at a token boundary after other text.

        Args:
            before: returns the end of the other text, already encoded. Its ids are not returned. It matters
                only to pipelines that encode the first word of a text in another way than the same word
                after other text (SentencePiece).
            spans: the text to encode.
        """
        return self.encode(spans)

    @abstractmethod
    def encode_pieces(self, spans: Spans) -> Iterator[tuple[int, bool, np.ndarray]]:
        """Yields the text in pieces: (index of the first character, whether an added token begins it, ids).

        The ids of all pieces from an added token on depend on no text before it.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id that the vocabulary does not have.
        """

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

    1. Cut added tokens out of the raw text.
    2. Convert each piece between them to Unicode normal form. Each piece is normalized separately, so
       ``<think>`` stays intact before a combining mark.
    3. Cut added tokens marked ``normalized`` out of the pieces.
    4. Encode the rest by BPE.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        added = vocabulary.added
        self.special_tokens = {token.content: token.id for token in added}
        self.control_tokens = frozenset(token.content for token in added if token.special)
        self.vocab_size = max(*vocabulary.tokens.values(), *self.special_tokens.values()) + 1
        self._normal_forms = vocabulary.normal_forms
        self._cut_raw = _Cutter((token.content, token) for token in added if not token.normalized)
        self._cut_normalized = _Cutter(
            (self._normalize(token.content), token) for token in added if token.normalized
        )
        self._bpe = _tiktoken_encoding(vocabulary)
        self._id_of_rank = _id_of_rank(vocabulary)
        self._token_bytes = {id: token for token, id in vocabulary.tokens.items()}
        self._token_bytes |= {id: content.encode() for content, id in self.special_tokens.items()}

    def encode_pieces(self, spans: Spans) -> Iterator[tuple[int, bool, np.ndarray]]:
        # Without normalized control tokens, step 3 is the same in all spans.
        is_uniform = spans.all_special or not self._cut_normalized.control
        for start, end, ids in self._cut_raw(spans):
            if ids is not None:
                yield start, True, ids
                continue
            text = spans.text[start:end]
            part = ((text, True),) if is_uniform else spans.part(start, end)
            key = text if is_uniform else part
            if (ids := self._cache.get(key)) is None:
                self._make_room(end - start + ENTRY_CHARACTERS)
                ids = self._cache[key] = self._piece_ids(part)
            yield start, False, ids

    def decode(self, ids: Iterable[int]) -> str:
        try:
            return b"".join([self._token_bytes[int(id)] for id in ids]).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"decode: expected ids of this vocabulary, got {error.args[0]}") from None

    def _piece_ids(self, spans: tuple[tuple[str, bool], ...]) -> np.ndarray:
        """Returns the ids of text without raw added tokens (steps 2 to 4), [n] int32."""
        normal = Spans([(self._normalize(text), special) for text, special in spans])
        parts = [
            self._bpe_ids(normal.text[start:end]) if ids is None else ids
            for start, end, ids in self._cut_normalized(normal)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])

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
        except ValueError as error:  # such as a million spaces, on which the regular expression backtracks
            raise UserError(
                f"text: tiktoken cannot split {text[:20]!r}..., {len(text):,} characters: {error}; shorten "
                "its runs of white space"
            ) from None
        return ranks.astype(np.int32) if self._id_of_rank is None else self._id_of_rank[ranks]


class LibraryEncoder(TextEncoder):
    """The pipeline of a tokenizer.json, such as Unigram, or BPE with ``byte_fallback``.

    A text is cut before added tokens, and each piece is encoded alone. This gives the ids of the whole
    text. The library finds added tokens first, from left to right, the longest of several, and encodes the
    text between two of them without regard to the rest. Some pipelines treat the beginning of a text in
    another way, but a piece behind a cut begins with an added token. A token that takes the white space to
    its left, or depends on the characters around it, is no place for a cut.

    If some control tokens of a text are plain text, a second pipeline encodes it. It knows control tokens by
    other names, which replace those that take effect.
    """

    def __init__(self, vocabulary: TokenizerJson) -> None:
        super().__init__()
        self._tokenizer = _library_tokenizer(vocabulary.spec, vocabulary.file)
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
        self.control_tokens = frozenset(token.content for token in added.values() if token.special)
        self._hidden = {
            name: HIDDEN.format(number) for number, name in enumerate(sorted(self.control_tokens))
        }
        self._plain = _library_tokenizer(
            _hidden_control_tokens(vocabulary.spec, self._hidden), vocabulary.file
        )
        plain_ids = self._plain.get_vocab(with_added_tokens=True)
        self._id_of_plain = np.arange(max(plain_ids.values()) + 1, dtype=np.int32)
        for content, id in self.special_tokens.items():
            self._id_of_plain[plain_ids[self._hidden.get(content, content)]] = id
        raw = [token for token in added.values() if not token.normalized]
        self._find_raw = _pattern_of_tokens(raw).finditer
        self._find_all = _pattern_of_tokens(added.values()).finditer
        free = {t.content for t in raw if not (t.lstrip or t.single_word)}
        self._cut_at = {content for content in free if content[0] in CUT_CHARACTERS}

    def encode_pieces(self, spans: Spans) -> Iterator[tuple[int, bool, np.ndarray]]:
        for start, is_cut, piece in self._pieces(spans, spans.all_special):
            key = piece, spans.all_special
            if (ids := self._cache.get(key)) is None:
                self._make_room(len(piece) + ENTRY_CHARACTERS)
                ids = self._cache[key] = self._encode_piece(*key)
            yield start, is_cut, ids

    def encode_after(self, before: Callable[[], Spans], spans: Spans) -> list[np.ndarray]:
        # Many pipelines mark the beginning of a text with a space, so the first word has another id alone.
        # Both texts are therefore encoded together, if ``before`` then ends at a token boundary.
        end = before()
        all_special = end.all_special and spans.all_special
        if pieces := list(self._pieces(end, all_special)):
            context = pieces[-1][2][-CONTEXT_CHARACTERS:]
            known = self._encode_piece(context, all_special)
            text = "".join(piece for _, _, piece in self._pieces(spans, all_special))
            both = self._encode_piece(context + text, all_special)
            if np.array_equal(both[: len(known)], known):
                return [both[len(known) :]]
        return self.encode(spans)

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(id) for id in ids]
        if unknown := set(ids) - self._ids:
            raise UserError(f"decode: expected ids of this vocabulary, got {min(unknown)}")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _pieces(self, spans: Spans, all_special: bool) -> Iterator[tuple[int, bool, str]]:
        """Yields the pieces of a text: (index of the first character, whether it is behind a cut, piece).

        Without ``all_special``, control tokens that take effect have their hidden names in the text.
        """
        text, start, is_cut = spans.text, 0, False
        if not all_special and HIDDEN[0] in text:
            raise UserError("text: expected no U+FDD0, which Unicode reserves; remove it")
        renamed: list[str] = []  # the piece up to ``end``
        end = 0
        for match in self._find_raw(text) if all_special else self._find_all(text):
            token, at = match[0], match.start()
            if token in self.control_tokens and not spans.takes_effect(at, match.end()):
                continue
            if token in self._cut_at:
                if at > start:
                    yield start, is_cut, "".join([*renamed, text[end:at]])
                start, is_cut, renamed, end = at, True, [], at
            if not all_special and token in self._hidden:
                renamed += [text[end:at], self._hidden[token]]
                end = match.end()
        if start < len(text):
            yield start, is_cut, "".join([*renamed, text[end:]])

    def _encode_piece(self, text: str, all_special: bool) -> np.ndarray:
        """Returns the ids of a piece, [n] int32."""
        tokenizer = self._tokenizer if all_special else self._plain
        try:
            ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except (UnicodeEncodeError, TypeError):
            require_unicode(text, "text")
            raise
        return ids if all_special else self._id_of_plain[ids]


def _pattern_of_tokens(tokens: Iterable[LibraryToken]) -> re.Pattern[str]:
    """Returns the pattern of added tokens: the leftmost match first, and of several the longest."""
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    patterns = (
        rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
        for token in longest_first
    )
    return re.compile("|".join(patterns) or "(?!)")


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


def _hidden_control_tokens(spec: dict[str, object], hidden: Mapping[str, str]) -> dict[str, object]:
    """Returns a pipeline that knows control tokens by other names only, and reads their own as plain text.

    Unigram and others may also find control tokens as words of the vocabulary, where they get the other name
    as well. Words that BPE merges, the tokens of bytes, and the unknown token keep theirs.
    """
    model, added = spec["model"], spec.get("added_tokens") or []
    assert isinstance(model, dict)
    assert isinstance(added, list)
    merges = model.get("merges") or []
    merged = {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
    kept = {*merged, model.get("unk_token"), *(f"<0x{byte:02X}>" for byte in range(256))}
    renamed = {name: other for name, other in hidden.items() if name not in kept}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {renamed.get(token, token): id for token, id in vocab.items()}
    else:
        unk = model.get("unk_id")
        vocab = [
            [token if index == unk else renamed.get(token, token), score]
            for index, (token, score) in enumerate(vocab)
        ]
    added = [{**token, "content": hidden.get(token["content"], token["content"])} for token in added]
    return {**spec, "added_tokens": added, "model": {**model, "vocab": vocab}, "post_processor": None}


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
    """Cuts added tokens out of a text: the leftmost match first, and of several the longest.

    Args:
        tokens: (what stands in the text, the token).
    """

    def __init__(self, tokens: Iterable[tuple[str, AddedToken]]) -> None:
        longest_first = sorted(tokens, key=lambda token: len(token[0]), reverse=True)
        self._ids = {text: np.array([token.id], np.int32) for text, token in longest_first}
        self.control = {text for text, token in longest_first if token.special}
        self._find = re.compile("|".join(map(re.escape, self._ids)) or "(?!)").finditer

    def __call__(self, spans: Spans) -> Iterator[tuple[int, int, np.ndarray | None]]:
        """Yields the text in order: (start, end, ids) of tokens, and of non-empty text between, ids None."""
        position = 0
        for match in self._find(spans.text):
            start, end = match.span()
            if match[0] in self.control and not spans.takes_effect(start, end):
                continue
            if start > position:
                yield position, start, None
            yield start, end, self._ids[match[0]]
            position = end
        if position < len(spans.text):
            yield position, len(spans.text), None
