"""Converts the fields of a TokenPath to NumPy arrays and checks them. Errors name the field.

T is the number of tokens of the path, and S the number of ids in its sampling mask, or of its targets.
"""

from __future__ import annotations

import base64
import io
import math
import operator
import tokenize
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, SupportsFloat, cast

import numpy as np

from titan_tree.errors import UserError, shorten

MAX_ID = np.iinfo(np.int32).max  # of tokens and policy versions
MAX_EXPERT = np.iinfo(np.int16).max
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_ZERO = 2.0**-150  # the largest number that float32 rounds to 0
MAX_LOGPROB = 0.01  # a log-prob is at most 0; engines that round may report slightly more
MAX_NUMBER = 1e12  # of numbers in the loss: the product of a weight, a mask and an advantage fits float32


LISTS = "a list of token ids for each token"  # of a sampling mask
# Log-probs by id, as numbers, or as objects with "logprob"
TopK = Mapping[int, float] | Mapping[str, float] | Mapping[str, Mapping[str, object]]
TOPK = "for each token an object of log-probs by token id, or null"
MAX_MASS = 1.01  # the probabilities of the targets of a token add up to at most 1, up to rounding


class SamplingMask(NamedTuple):
    """The token ids that top-p, top-k or min-p sampling kept when it drew each token, token after token.

    Truncated sampling draws from a distribution over these ids alone. A trainer that normalizes log-probs
    over the whole vocabulary changes every ratio of the two policies by the mass that was cut off. With the
    mask, it normalizes over the same ids (Keep Sampling Mask, arXiv:2512.02556, section 3.1).
    """

    sizes: np.ndarray  # [T] int32: how many ids it kept; 0: the whole vocabulary
    ids: np.ndarray  # [S] int32

    def of_tokens(self, tokens: np.ndarray) -> SamplingMask:
        """Returns the mask of the chosen ``tokens`` [t] int64, in their order."""
        return SamplingMask(self.sizes[tokens], self.ids[ragged_index(self.sizes, tokens)])

    def by_token(self) -> list[np.ndarray]:
        """Returns the ids of each token."""
        return np.split(self.ids, np.cumsum(self.sizes))[:-1]


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
    def concatenate(parts: Iterable[TokenTargets | None], lengths: Iterable[int]) -> TokenTargets:
        """Returns the targets of paths of these ``lengths`` as those of one. None: a path without any."""
        none = np.empty(0, np.int32), np.empty(0, np.float32)
        filled = [x or (np.zeros(size, np.int32), *none) for x, size in zip(parts, lengths, strict=True)]
        return TokenTargets(*map(np.concatenate, zip(*filled, strict=True)))


def wrong(field: str, expected: str, got: object) -> UserError:
    """Returns the error of a field with a wrong value."""
    return UserError(f"{field}: expected {expected}, got {got}")


def number(
    field: str, value: object, expected: str, accepts: Callable[[float], bool], limit: float = MAX_NUMBER
) -> float:
    """Returns a number that is at most ``limit`` and ``accepts``; ``expected`` describes these numbers.

    A number that float32 rounds to 0 becomes 0.
    """
    try:
        is_text = isinstance(value, str | bytes | bool)
        result = float("nan") if is_text else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if abs(result) <= FLOAT32_ZERO:  # batches store numbers of paths in float32
        result = 0.0
    if not (abs(result) <= limit and accepts(result)):
        raise wrong(field, expected, shorten(value))
    return result


def token_array(tokens: object) -> np.ndarray:
    """Returns [T] int32 with T >= 1."""
    array = any_array("tokens", tokens, "a flat list of token ids")
    if array.ndim != 1 or array.size == 0:
        got = (
            f"shape {array.shape}"
            if array.ndim
            else shorten(tokens if isinstance(tokens, str) else array.item())
        )
        raise wrong("tokens", "a non-empty list of token ids", got)
    return integer_array("tokens", array, "ids")


def version_array(field: str, value: object, loss_mask: np.ndarray) -> np.ndarray:
    """Returns [T] int32 from one version, or from one per token. -1: the token was not sampled.

    Args:
        field: the field's name.
        value: one integer, or T of them. None stands for -1.
        loss_mask: [T] tokens that the loss counts must have a version.
    """
    array = any_array(field, value, "integers")
    if array.dtype.kind == "O":
        array = np.where(array == np.array(None), -1, array)
    versions = _per_token(field, integer_array(field, array, "versions", lowest=-1), len(loss_mask))
    bad = (versions == -1) & (loss_mask > 0)
    bad[0] = False  # nothing predicts the first token
    if bad.any():
        hint = "only tokens with loss mask 0 may lack one"
        raise wrong(field, "versions >= 0", f"none at token {int(bad.argmax())}; {hint}")
    return versions


def mask_array(field: str, value: object, num_tokens: int) -> np.ndarray:
    """Returns [T] float32 from [T] numbers >= 0 or booleans."""
    array = float_array(field, value, "iufb", (int, float))
    if array.shape != (num_tokens,):
        raise wrong(field, f"{num_tokens} entries, one per token", _size(array))
    if not (array.min() >= 0 and array.max() <= MAX_NUMBER):
        token = int((~((array >= 0) & (array <= MAX_NUMBER))).argmax())
        raise wrong(field, "every entry from 0 to 1e12", f"{array[token]} at token {token}")
    return array


def advantage_array(field: str, value: object, num_tokens: int) -> np.ndarray:
    """Returns [T] float32 from one number, or from one per token. The first token's may be anything."""
    array = _per_token(field, float_array(field, value, "iuf", (int, float)), num_tokens)
    if (bad := ~(np.abs(array[1:]) <= MAX_NUMBER)).any():
        token = 1 + int(bad.argmax())
        raise wrong(field, "numbers from -1e12 to 1e12", f"{array[token]} at token {token}")
    return array


def logprob_array(name: str, values: object, shifted: object, loss_mask: np.ndarray) -> np.ndarray | None:
    """Returns [T] float32, or None without log-probs. NaN: the token was not scored.

    Args:
        name: the field's name.
        values: T log-probs, or None. NaN and None stand for tokens that were not scored.
        shifted: the T - 1 log-probs of the tokens after the first, or None.
        loss_mask: [T] tokens that the loss counts must have a log-prob.
    """
    if values is None and shifted is None:
        return None
    other = f"shifted_{name}"
    if values is not None and shifted is not None:
        raise UserError(f"{name}: expected either {name} or {other}, got both; remove one of them")
    missing = int(shifted is not None)  # entries that the field lacks in front
    field, other = (other, name) if missing else (name, other)
    array = float_array(field, shifted if missing else values, "iuf", (int, float, type(None)))
    num_tokens = len(loss_mask)
    if array.shape != (num_tokens - missing,):
        which = "one per token after the first" if missing else "one per token"
        index = "t" if missing else "t + 1"
        hint = f"; if entry t belongs to tokens[{index}], name the field {other}"
        hint = hint if array.shape == (num_tokens - 1 + missing,) else ""
        raise wrong(field, f"{num_tokens - missing} entries, {which}", _size(array) + hint)
    array = np.concatenate([np.full(missing, np.nan, np.float32), array])
    bad = np.where(loss_mask > 0, ~(np.abs(array) <= MAX_NUMBER), np.isinf(array))
    bad[0] = False  # nothing predicts the first token
    if bad.any():
        token = int(bad.argmax())
        hint = "; only tokens with loss mask 0 may lack a log-prob" if np.isnan(array[token]) else ""
        raise wrong(field, "numbers from -1e12 to 0", f"{array[token]} at token {token}{hint}")
    if (bad := (loss_mask > 0) & (array > MAX_LOGPROB))[1:].any():
        token = 1 + int(bad[1:].argmax())
        hint = "; these may be probabilities: give their natural logarithms"
        raise wrong(field, "log-probs, which are at most 0", f"{array[token]:g} at token {token}{hint}")
    return array


def expert_array(value: object, num_tokens: int) -> np.ndarray:
    """Returns [T, L, k] int16; see ``TokenPath.routed_experts``."""
    field = "routed_experts"
    expected = "the same number of layers and experts for every token"
    array = any_array(field, value, expected, "lists of unequal lengths")
    if array.ndim != 3 or len(array) > num_tokens or array.dtype.kind not in "iu" or not array.size:
        expected = f"integers [at most {num_tokens} tokens, layers, experts per token]"
        raise wrong(field, expected, f"{array.dtype} of shape {array.shape}")
    ordered = np.sort(array, axis=-1)
    missing = (ordered[..., 0] == -1) & (ordered[..., -1] == -1)
    distinct = (ordered[..., 1:] > ordered[..., :-1]).all(-1)
    valid = (ordered[..., 0] >= 0) & (ordered[..., -1] <= MAX_EXPERT) & distinct
    if not (missing | valid).all():
        token, layer = np.argwhere(~(missing | valid))[0]
        expected = f"different ids from 0 to {MAX_EXPERT}, or only -1"
        raise wrong(f"{field} of token {token}, layer {layer}", expected, array[token, layer].tolist())
    padded = np.full((num_tokens, *array.shape[1:]), -1, np.int16)
    padded[: len(array)] = array
    return padded


def sampling_mask_of(value: object, tokens: np.ndarray, loss_mask: np.ndarray) -> SamplingMask | None:
    """Returns the mask of a path; see ``TokenPath``. None: the whole vocabulary for all tokens.

    Args:
        value: a SamplingMask, or a list of T lists of ids. None and [] stand for the whole vocabulary.
        tokens, loss_mask: [T] each. A token that the loss counts must be among its ids.
    """
    sizes, ids = value if isinstance(value, SamplingMask) else _flat(value)
    sizes, ids = integer_array("sampling_mask", sizes, "sizes"), integer_array("sampling_mask", ids, "ids")
    if sizes.shape != tokens.shape or ids.shape != (sizes.sum(dtype=np.int64),):
        expected = f"{len(tokens)} lists of token ids, one per token"
        raise wrong("sampling_mask", expected, f"{len(sizes)} lists of {ids.size} ids in total")
    is_counted = loss_mask > 0
    is_counted[0] = False  # nothing predicts the first token
    token_of_id = np.repeat(np.arange(len(tokens)), sizes)
    is_kept = sizes == 0
    is_kept[token_of_id[ids == tokens[token_of_id]]] = True
    if (bad := is_counted & ~is_kept).any():
        token = int(bad.argmax())
        got = shorten(ids[token_of_id == token].tolist())
        raise wrong(
            f"sampling_mask of token {token}",
            f"the sampled id {tokens[token]} among the ids that sampling kept",
            f"{got}; entry t of the mask belongs to tokens[t]",
        )
    # Other entries are never used. Without them, masks are equal where they are used equally.
    ids = ids[is_counted[token_of_id]]
    return SamplingMask(np.where(is_counted, sizes, np.int32(0)), ids) if len(ids) else None


def teacher_topk_of(
    value: object, tokens: np.ndarray, loss_mask: np.ndarray, sampling_mask: SamplingMask | None
) -> TokenTargets | None:
    """Returns the targets of a path; see ``TokenPath``. None: the loss counts no token.

    Args:
        value: TokenTargets, or a list of T mappings ``TopK``. None and {} stand for no targets.
        tokens, loss_mask: [T] each. A token that the loss counts must have targets.
        sampling_mask: the targets of a token must be among the ids that sampling kept, if it kept not all.
    """
    sizes, ids, logprobs = value if isinstance(value, TokenTargets) else _flat_topk(value)
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
            expected = "ids of the sampling mask, because the student gives all others probability 0"
            got = f"{ids[bad.argmax()]}; remove sampling_mask, or score the teacher with it"
            raise wrong(f"teacher_topk of token {token_of_id[bad.argmax()]}", expected, got)
    return targets if len(ids) else None


def any_array(field: str, value: object, expected: str, got: str = "a nested list") -> np.ndarray:
    """Returns an array of any type. ``expected`` and ``got`` are for the error of what is none."""
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        raise wrong(field, expected, got) from None
    except (RuntimeError, TypeError) as error:  # a tensor
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{field}: expected {expected} that NumPy can read, got a tensor: {reason}; "
            f"pass {field}.detach().float().cpu()"
        ) from None


def integer_array(field: str, array: np.ndarray, noun: str, lowest: int = 0) -> np.ndarray:
    """Returns int32 of any shape from integers of at least ``lowest``, which ``noun`` names in errors."""
    if array.dtype.kind not in "iuO" or (array.dtype.kind == "O" and not _only(array, (int,))):
        raise wrong(field, f"integer {noun}", f"dtype {array.dtype}")
    low, high = array.min(initial=0), array.max(initial=0)  # Python integers if they exceed 64 bits
    if low < lowest or high > MAX_ID:
        raise wrong(field, f"{noun} from {lowest} to 2**31 - 1", shorten(int(low if low < lowest else high)))
    return array.astype(np.int32, copy=False)


def float_array(field: str, value: object, kinds: str, types: tuple[type, ...]) -> np.ndarray:
    """Returns float32. ``types`` are the Python types that an array of objects may hold; None becomes NaN."""
    array = any_array(field, value, "numbers")
    if array.dtype.kind not in kinds and not (array.dtype.kind == "O" and _only(array, types)):
        raise wrong(field, "numbers", shorten(value))
    if array.dtype.kind in "iub":
        return array.astype(np.float32)  # 64 bits fit
    try:
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32, copy=False)
    except OverflowError:
        raise wrong(field, "numbers up to 1e12", "an integer of more than 308 digits") from None
    for entry in array[np.isinf(numbers)].tolist():  # infinite entries are refused later, if they count
        if math.isfinite(entry):
            raise wrong(field, "numbers up to 1e12", shorten(entry))
    return numbers


def _only(array: np.ndarray, types: tuple[type, ...]) -> bool:
    return set(map(type, array.flat)) <= set(types)


def _per_token(field: str, array: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns [T] values from one for the whole path, or from one per token."""
    if array.ndim == 0:
        return np.full(num_tokens, array)
    if array.shape != (num_tokens,):
        raise wrong(field, f"one value, or {num_tokens} entries, one per token", _size(array))
    return array


def _size(array: np.ndarray) -> str:
    return f"{len(array)}" if array.ndim == 1 else f"shape {array.shape}"


def _flat(value: object) -> SamplingMask:
    if not isinstance(value, list | tuple):
        raise wrong("sampling_mask", LISTS, shorten(value))
    lists = [[] if ids is None else ids for ids in value]
    try:
        sizes = np.array([len(ids) for ids in lists], np.int64)
        return SamplingMask(sizes, np.concatenate([sizes[:0], *(ids for ids in lists if len(ids))]))
    except (TypeError, ValueError):  # a number in place of a list, or lists within lists
        raise wrong("sampling_mask", LISTS, shorten(value)) from None


def _flat_topk(value: object) -> TokenTargets:
    if not isinstance(value, list | tuple):
        raise wrong("teacher_topk", TOPK, shorten(value))
    entries = [{} if entry is None else entry for entry in value]
    if bad := [entry for entry in entries if not isinstance(entry, Mapping)]:
        raise wrong("teacher_topk", TOPK, shorten(bad[0]))
    try:
        ids = [int(id) if isinstance(id, str) else operator.index(id) for entry in entries for id in entry]
        logprobs = [
            value["logprob"] if isinstance(value, Mapping) else value
            for entry in entries
            for value in entry.values()
        ]
    except (TypeError, ValueError, KeyError) as error:  # another key than an id, or an object without logprob
        raise wrong("teacher_topk", TOPK, f"{type(error).__name__}: {error!s:.80}") from None
    sizes = np.array([len(entry) for entry in entries], np.int64)
    return TokenTargets(
        sizes, np.array(ids or sizes[:0]), np.array(logprobs or [], None if logprobs else "f4")
    )


def ragged_index(sizes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the indices of the entries of the chosen ``tokens`` [t] int64; token i has ``sizes[i]``."""
    chosen = sizes[tokens]
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    shifts = starts[tokens] - (np.cumsum(chosen, dtype=np.int64) - chosen)
    index: np.ndarray = np.repeat(shifts, chosen) + np.arange(chosen.sum(dtype=np.int64))
    return index


def decoded_array(field: str, encoded: str) -> np.ndarray:
    """Returns the array of integers that ``numpy.save`` wrote and base64 encoded."""
    expected = f"{field}: expected base64 of a .npy file of integers"
    try:
        content = base64.b64decode(encoded, validate=True)
        file = io.BytesIO(content)
        if np.lib.format.read_magic(file) != (1, 0):  # type: ignore[no-untyped-call]
            raise ValueError("a format version other than 1.0")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
        values = content[file.tell() :]
        if dtype.kind not in "iu" or len(values) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(values)} bytes of values of {dtype} and shape {shape}")
        return np.frombuffer(values, dtype).reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, EOFError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise UserError(f"{expected}, got {str(error)[:80]}; encode the file again") from None
