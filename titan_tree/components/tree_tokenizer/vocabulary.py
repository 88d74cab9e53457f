"""Reads byte-level BPE vocabularies: tokenizer.json, .tiktoken rank files, or plain bytes.

A tokenizer.json can describe many pipelines. The models that titan_tree trains use one of them: cut out added
tokens, apply a Unicode normal form, split the text by one pattern, encode the pieces by byte-level BPE.
``read_hf`` reproduces this pipeline exactly and refuses every other one. A tokenizer that is almost right
would train on tokens that the model never saw.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

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
QWEN3_CONTROL_TOKENS = tuple(_QWEN3.split())  # in the order of their ids

MAX_BYTES = 1 << 27  # of a tokenizer's file, decompressed

NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before BPE: a control token, or a word that a user added."""

    content: str
    id: int
    normalized: bool = False  # whether it is cut out after Unicode normalization instead of before


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that encoding and decoding need.

    Ids and ranks are two tables, because ids need not be in merge order.
    """

    tokens: Mapping[bytes, int]  # token -> id
    ranks: Mapping[bytes, int]  # token that BPE can make -> rank: the 256 bytes, then merges, best first
    added: tuple[AddedToken, ...]
    pattern: str  # regular expression that splits text into pieces
    normal_forms: tuple[NormalForm, ...]  # Unicode normal forms, applied in this order


def byte_vocabulary() -> Vocabulary:
    """Returns a vocabulary of the 256 bytes, whose ids are their values, and Qwen3's control tokens."""
    tokens = {bytes([b]): b for b in range(256)}
    added = tuple(AddedToken(token, 256 + index) for index, token in enumerate(QWEN3_CONTROL_TOKENS))
    return Vocabulary(tokens, tokens, added, GPT2_PATTERN, ())


def read_tiktoken(
    path: Path, special_tokens: Mapping[str, int] | None, pattern: str, normal_form: NormalForm | None
) -> Vocabulary:
    """Reads a rank file, plain or gzip. Each line is a token in base64 and its rank, which is also its id.

    Args:
        path: the rank file.
        special_tokens: control token -> id. None: Qwen3's, with ids that follow the ranks.
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
        special_tokens = {token: first + index for index, token in enumerate(QWEN3_CONTROL_TOKENS)}
    if taken := set(special_tokens.values()) & set(tokens.values()):
        raise UserError(f"special_tokens: expected ids that no rank of {path} uses, got {min(taken)}")
    added = tuple(AddedToken(content, id) for content, id in special_tokens.items())
    return Vocabulary(tokens, tokens, added, pattern, (normal_form,) if normal_form else ())


def read_hf(folder: Path) -> Vocabulary:
    """Reads tokenizer.json of a Hugging Face folder, and the added tokens of tokenizer_config.json.

    The result is exact if the file lists merges best first, as BPE training and conversions from tiktoken do.

    Raises:
        UserError: a field that is malformed or cannot be reproduced; the error names file and field.
    """
    path = folder / "tokenizer.json"
    spec = _Field(read_json(path), str(path))
    model = spec["model"]
    if model.get("type", "BPE") != "BPE":
        raise model.refused("type", "BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if model.get(name):
            raise model.refused(name, "none")
    added = _all_added_tokens(spec, folder / "tokenizer_config.json")
    tokens, ranks = _tokens_and_ranks(model, set(added))
    if model.get("ignore_merges") and (unmergeable := [token for token in tokens if token not in ranks]):
        raise UserError(
            f"{path}: model.ignore_merges: expected false, because no merge produces token {unmergeable[0]!r}"
        )
    return Vocabulary(tokens, ranks, tuple(added.values()), _pattern(spec), _normal_forms(spec))


def _all_added_tokens(spec: _Field, config_file: Path) -> dict[str, AddedToken]:
    """Returns added tokens by their content. tokenizer.json takes precedence over tokenizer_config.json."""
    tokens = _added_tokens(spec.get("added_tokens") or [], f"{spec.where}: added_tokens")
    added = {token.content: token for token in tokens}
    if config_file.is_file():
        by_id = read_json(config_file).get("added_tokens_decoder") or {}
        for token in _added_tokens(by_id, f"{config_file}: added_tokens_decoder"):
            added.setdefault(token.content, token)
    return added


def _tokens_and_ranks(model: _Field, added: set[str]) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Returns ``Vocabulary.tokens`` and ``Vocabulary.ranks`` from the fields vocab and merges."""
    vocab = model.mapping("vocab")
    try:
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"].value]
        single_bytes = sorted((t for t in vocab if len(t) == 1 and t in _BYTE_OF), key=vocab.__getitem__)
        mergeable = dict.fromkeys([*single_bytes, *(left + right for left, right in merges)])
        ranks = {_token_bytes(token): rank for rank, token in enumerate(mergeable)}
        # The vocabulary may also list added tokens, spelled as text instead of as bytes.
        tokens = {_token_bytes(t): int(id) for t, id in vocab.items() if t in mergeable or t not in added}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{model.where}: expected vocab {{token: id}} and merges [left, right] in byte-level spelling"
        ) from None
    if missing := [token for token in mergeable if token not in vocab]:
        raise UserError(f"{model.where}.merges: the merged token {missing[0]!r} is not in model.vocab")
    _require_all_bytes(ranks, f"{model.where}.vocab")
    return tokens, ranks


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises UserError with the file's name for other content."""
    content = _read_bytes(path)
    try:
        data = json.loads(content)
    except RecursionError:
        raise UserError(f"{path}: broken JSON: brackets are nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: broken JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


class _Field:
    """A value in a JSON file, together with its place there for error messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def __getitem__(self, name: str) -> _Field:
        if not isinstance(self.value, dict) or self.value.get(name) is None:
            raise UserError(f"{self.where}: {name}: missing; expected a fast tokenizer of Hugging Face")
        return _Field(self.value[name], f"{self.where}: {name}")

    def get(self, name: str, default: Any = None) -> Any:
        if not isinstance(self.value, dict):
            raise UserError(f"{self.where}: expected an object, got {type(self.value).__name__}")
        return self.value.get(name, default)

    def mapping(self, name: str) -> dict[str, Any]:
        field = self[name]
        if not isinstance(field.value, dict):
            raise UserError(f"{field.where}: expected an object, got {type(field.value).__name__}")
        return field.value

    def refused(self, name: str, supported: str) -> UserError:
        got = shorten(self.get(name))
        return UserError(f"{self.where}: {name}: expected {supported}, got {got}, which is not supported")

    def steps(self, name: str, children: str) -> list[_Field]:
        """Returns the steps of a pipeline: none, one, or those of a Sequence, which may be nested."""
        if self.get(name) is None:
            return []
        step = self[name]
        if step.get("type") != "Sequence":
            return [step]
        nested = step[children]
        if not isinstance(nested.value, list):
            raise UserError(f"{nested.where}: expected a list, got {shorten(nested.value)}")
        return [s for item in nested.value for s in _Field({name: item}, nested.where).steps(name, children)]


def _pattern(spec: _Field) -> str:
    """Returns the split pattern. Pipelines are [ByteLevel] or [Split, ByteLevel without its own pattern]."""
    steps = spec.steps("pre_tokenizer", "pretokenizers")
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise UserError(
            f"{spec.where}: pre_tokenizer: expected [Split,] ByteLevel, got {kinds}, which is not supported"
        )
    byte_level = steps[-1]
    if byte_level.get("add_prefix_space", True):
        raise byte_level.refused("add_prefix_space", "false")
    if byte_level.get("use_regex", True) != (len(steps) == 1):
        raise byte_level.refused("use_regex", "true without a Split before it, else false")
    if len(steps) == 1:
        return GPT2_PATTERN
    split = steps[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        raise split.refused("behavior", "Isolated, not inverted")
    pattern = split["pattern"].get("Regex")
    if not isinstance(pattern, str):
        raise split.refused("pattern", "a Regex")
    return pattern


def _normal_forms(spec: _Field) -> tuple[NormalForm, ...]:
    """Returns the Unicode normal forms that the normalizer applies."""
    forms = [step.get("type") for step in spec.steps("normalizer", "normalizers")]
    if unknown := [form for form in forms if form not in get_args(NormalForm)]:
        raise UserError(
            f"{spec.where}: normalizer: expected {', '.join(get_args(NormalForm))}, got {unknown[0]!r}"
        )
    return tuple(forms)


def _added_tokens(entries: Any, where: str) -> list[AddedToken]:
    """Reads added tokens from a list of {"id", "content", ...}, or from {id: {"content", ...}}."""
    if not isinstance(entries, list | dict):
        raise UserError(f"{where}: expected a list, got {shorten(entries)}")
    added = []
    for id, entry in entries.items() if isinstance(entries, dict) else ((None, entry) for entry in entries):
        try:
            id = int(entry["id"] if id is None else id)
            token = AddedToken(entry["content"], id, bool(entry.get("normalized")))
            if not isinstance(token.content, str) or not token.content:
                raise ValueError("an empty token would match everywhere")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{where}: expected objects with id and content, got {shorten(entry)}") from None
        for flag in ("lstrip", "rstrip", "single_word"):
            if entry.get(flag):
                raise UserError(
                    f"{where}: {token.content!r}: {flag}: expected false, got true, which is not supported"
                )
        added.append(token)
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


def _token_bytes(token: str) -> bytes:
    return bytes([_BYTE_OF[char] for char in token])


def _require_all_bytes(tokens: Mapping[bytes, int], where: str) -> None:
    if missing := [b for b in range(256) if bytes([b]) not in tokens]:
        raise UserError(f"{where}: expected a token for each byte, 0 to 255, got none for byte {missing[0]}")


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == b"\x1f\x8b"
            data = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{path}: expected at most {MAX_BYTES:,} bytes of a tokenizer, got more")
        return data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); copy it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
