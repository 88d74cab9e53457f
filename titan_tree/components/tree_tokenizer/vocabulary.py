"""Reads vocabularies: tokenizer.json of a Hugging Face folder, .tiktoken rank files, or plain bytes."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import tiktoken

from titan_tree.config.files import regular
from titan_tree.errors import UserError, shorten

# Regular expressions by which Qwen (1 to 3) and GPT-2 split text into pieces. BPE encodes each piece.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_QWEN3 = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
<tool_response> </tool_response> <think> </think>
"""
QWEN3_ADDED_TOKENS = tuple(_QWEN3.split())  # in the order of their ids
# Of these, Qwen's tokenizer_config.json marks as special the ones before <tool_call>.
_QWEN3_NOT_SPECIAL = QWEN3_ADDED_TOKENS[QWEN3_ADDED_TOKENS.index("<tool_call>") :]

ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_BYTES = 1 << 27  # largest file of a tokenizer, decompressed

Json = dict[str, Any]  # a JSON object
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before BPE, such as ``<|im_end|>`` or ``<think>``."""

    content: str
    id: int
    normalized: bool = False  # whether it is cut out after Unicode normalization instead of before
    special: bool = True  # whether it is a control token, which structures a conversation


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that encoding and decoding by byte-level BPE need.

    Ids and ranks are two tables, because ids need not be in merge order.
    """

    tokens: Mapping[bytes, int]  # token -> id
    ranks: Mapping[bytes, int]  # token that BPE can make -> rank: the 256 bytes, then merges, best first
    added: tuple[AddedToken, ...]
    pattern: str  # regular expression that splits text into pieces
    normal_forms: tuple[NormalForm, ...]  # Unicode normal forms, applied in this order


def byte_vocabulary() -> Vocabulary:
    """Returns a vocabulary of the 256 bytes, whose ids are their values, and Qwen3's added tokens."""
    tokens = {bytes([b]): b for b in range(256)}
    added = {token: 256 + index for index, token in enumerate(QWEN3_ADDED_TOKENS)}
    return Vocabulary(tokens, tokens, _with_flags(added), GPT2_PATTERN, ())


def read_tiktoken(
    path: Path, special_tokens: Mapping[str, int] | None, pattern: str, normal_form: NormalForm | None
) -> Vocabulary:
    """Reads a rank file, plain or gzip. Each line is a token in base64 and its rank, which is also its id.

    Args:
        path: the rank file.
        special_tokens: added token -> id. None: Qwen3's, with ids that follow the ranks.
        pattern: regular expression that splits text into pieces.
        normal_form: Unicode normal form of the text, or None to leave it unchanged.

    Raises:
        UserError: an unreadable or malformed file; the error names file and line.
    """
    if normal_form not in (None, *get_args(NormalForm)):
        raise UserError(
            f"normal_form: expected one of {', '.join(get_args(NormalForm))}, got {normal_form!r}"
        )
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(_read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}:{number}: expected a base64 token and its rank, got {shorten(line)}"
            ) from None
    if len(set(tokens.values())) != len(tokens):
        raise UserError(f"{path}: expected every rank once, got a rank twice")
    _require_all_bytes(tokens, str(path))
    if special_tokens is None:
        first = max(tokens.values()) + 1
        special_tokens = {token: first + index for index, token in enumerate(QWEN3_ADDED_TOKENS)}
    if taken := set(special_tokens.values()) & set(tokens.values()):
        raise UserError(f"special_tokens: expected ids that no rank of {path} uses, got {min(taken)}")
    normal_forms = (normal_form,) if normal_form else ()
    return Vocabulary(tokens, tokens, _with_flags(special_tokens), pattern, normal_forms)


def _with_flags(tokens: Mapping[str, int]) -> tuple[AddedToken, ...]:
    """Returns added tokens. All are control tokens except those that Qwen3 does not mark as special."""
    return tuple(AddedToken(t, id, special=t not in _QWEN3_NOT_SPECIAL) for t, id in tokens.items())


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """A tokenizer.json whose pipeline only the library ``tokenizers`` reproduces."""

    spec: Json  # the file's content, with the added tokens of tokenizer_config.json
    file: str  # the file's path, for error messages

    @property
    def added(self) -> dict[str, int]:
        """Added token -> id."""
        return {token["content"]: int(token["id"]) for token in self.spec.get("added_tokens") or []}


def read_hf(folder: Path) -> Vocabulary | TokenizerJson:
    """Reads tokenizer.json of a Hugging Face folder, and the added tokens of tokenizer_config.json.

    Returns:
        A Vocabulary if tiktoken gives the same ids. It does if the pipeline cuts out added tokens, applies
        Unicode normal forms, splits the text by one pattern and encodes the pieces by byte-level BPE whose
        merges the file lists best first, as BPE training and conversions from tiktoken do. Else the file's
        content.

    Raises:
        UserError: a missing or malformed file; the error names it.
    """
    path = folder / "tokenizer.json"
    spec = read_json(path)
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UserError(f"{path}: model.vocab: missing; expected a fast tokenizer of Hugging Face")
    added = _added_tokens(spec.get("added_tokens") or [], f"{path}: added_tokens")
    config = folder / "tokenizer_config.json"
    if os.path.lexists(config):
        by_id = read_json(config).get("added_tokens_decoder") or {}
        for content, token in _added_tokens(by_id, f"{config}: added_tokens_decoder").items():
            added.setdefault(content, token)
    spec["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return _byte_level_bpe(spec) or TokenizerJson(spec, str(path))


def _byte_level_bpe(spec: Json) -> Vocabulary | None:
    """Returns the vocabulary of a pipeline that tiktoken reproduces, or None for any other one.

    It also returns None for a malformed pipeline, so that the error is that of the library.
    """
    model, added = spec["model"], spec["added_tokens"]
    unusual = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    try:
        if model.get("type", "BPE") != "BPE" or any(map(model.get, unusual)):
            return None
        if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
            return None
        forms = tuple(step["type"] for step in _steps(spec.get("normalizer"), "normalizers"))
        pattern = _pattern(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
        if pattern is None or not set(forms) <= set(get_args(NormalForm)):
            return None
        vocab: dict[str, int] = model["vocab"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        single_bytes = sorted((t for t in vocab if len(t) == 1 and t in _BYTE_OF), key=vocab.__getitem__)
        mergeable = dict.fromkeys([*single_bytes, *(left + right for left, right in merges)])
        if len(single_bytes) < 256 or not mergeable.keys() <= vocab.keys():
            return None
        ranks = {_token_bytes(token): rank for rank, token in enumerate(mergeable)}
        # The vocabulary may also list added tokens, spelled as text instead of as bytes.
        names = {token["content"] for token in added}
        tokens = {_token_bytes(t): int(id) for t, id in vocab.items() if t in mergeable or t not in names}
        if model.get("ignore_merges") and len(tokens) > len(ranks):
            return None
        tokens_added = (AddedToken(t["content"], t["id"], t["normalized"], t["special"]) for t in added)
        vocabulary = Vocabulary(tokens, ranks, tuple(tokens_added), pattern, forms)
        tiktoken.Encoding("pattern", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    return vocabulary


def read_json(path: Path) -> Json:
    """Returns the JSON object in a file. Raises UserError with the file's name for other content."""
    content = _read_bytes(path)
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise UserError(f"{path}: broken JSON: brackets are nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: broken JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _steps(step: Json | None, children: str) -> list[Json]:
    """Returns the steps of a pipeline: none, one, or those of a Sequence, which may be nested."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for child in step[children] for inner in _steps(child, children)]


def _pattern(steps: list[Json]) -> str | None:
    """Returns the split pattern of [ByteLevel], or of [Split, ByteLevel without a pattern]; else None."""
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        return None
    byte_level = steps[-1]
    if byte_level.get("add_prefix_space", True) or byte_level.get("use_regex", True) != (len(steps) == 1):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN
    split = steps[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return split["pattern"].get("Regex")


def _added_tokens(entries: object, where: str) -> dict[str, Json]:
    """Reads added tokens from a list of {"id", "content", ...}, or from {id: {"content", ...}}."""
    if not isinstance(entries, list | dict):
        raise UserError(f"{where}: expected a list, got {shorten(entries)}")
    added: dict[str, Json] = {}
    for id, entry in entries.items() if isinstance(entries, dict) else ((None, entry) for entry in entries):
        try:
            content, id = entry["content"], int(entry["id"] if id is None else id)
            if not isinstance(content, str) or not content:
                raise ValueError("an empty token would match everywhere")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{where}: expected objects with id and content, got {shorten(entry)}") from None
        flags = {flag: bool(entry.get(flag)) for flag in ADDED_TOKEN_FLAGS}
        added.setdefault(content, {"id": id, "content": content, **flags})
    return added


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's spelling of bytes: character -> byte.

    A printable Latin-1 character stands for its own byte. The characters from U+0100 on stand for the other
    bytes, in ascending order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + index): b for index, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def byte_characters(tokens: Mapping[bytes, int]) -> dict[str, int]:
    """Returns tokens of one byte as tokenizer.json spells them, with their ids."""
    return {char: tokens[bytes([byte])] for char, byte in _BYTE_OF.items()}


def _token_bytes(token: str) -> bytes:
    return bytes([_BYTE_OF[char] for char in token])


def _require_all_bytes(tokens: Mapping[bytes, int], where: str) -> None:
    if missing := [b for b in range(256) if bytes([b]) not in tokens]:
        raise UserError(f"{where}: expected a token for each byte, 0 to 255, got none for byte {missing[0]}")


def _read_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            compressed = file.peek(2)[:2] == b"\x1f\x8b"
            data = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{path}: expected at most {MAX_BYTES:,} bytes of a tokenizer, got more")
        return data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); copy it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
