"""Reads the answers of servers that sample turns, and refuses those that are not one whole turn."""

from __future__ import annotations

import base64
import binascii
import io
import math

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.rl.sampler import Completion
from titan_tree.rl.server.client import Json
from titan_tree.tree.paths import ExpertSizes


def read_completions(
    answer: Json, prompt: int, limit: int, stop: int, experts: ExpertSizes | None = None
) -> Completion:
    """Returns the turn in an answer of OpenAI's completions API with vLLM's fields.

    Args:
        prompt: number of tokens of the context.
        limit: maximal number of tokens of the turn.
        stop: the id that ends a turn.
        experts: sizes of the model whose experts the answer must contain. None: it need not contain any.

    Raises:
        UserError: tokens, log-probs and experts do not form one whole turn.
    """
    try:
        (choice,) = answer["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        counted = answer["usage"]["completion_tokens"]
        finish = choice["finish_reason"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            "expected one choice with token_ids, logprobs.token_logprobs and finish_reason, and "
            f"usage.completion_tokens, got {shorten(answer)}; use a version of vLLM or SGLang that knows "
            "return_token_ids"
        ) from None
    _check_turn(tokens, logprobs, counted, finish, limit, stop)
    recorded = None
    if experts is not None:
        recorded = _checked(_vllm_experts(answer, choice), prompt + len(tokens), experts)
    return Completion(tokens, [float(logprob) for logprob in logprobs], recorded)


def read_generate(
    answer: Json, prompt: int, limit: int, stop: int, experts: ExpertSizes | None = None
) -> Completion:
    """Returns the turn in an answer of SGLang's /generate. See ``read_completions`` for arguments and errors.

    SGLang also ends a turn after any other end-of-text token of the model. Such a turn counts as cut off.
    """
    try:
        info = answer["meta_info"]
        logprobs, tokens = [], []
        for logprob, token, *_ in info["output_token_logprobs"]:
            logprobs.append(logprob)
            tokens.append(token)
        counted, finish = info["completion_tokens"], info["finish_reason"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            "expected meta_info with output_token_logprobs, completion_tokens and finish_reason, got "
            f"{shorten(answer)}; use a version of SGLang that knows return_logprob"
        ) from None
    is_other_end = isinstance(finish, dict) and finish.get("type") == "stop" and tokens
    other_end = tokens[-1] if is_other_end and finish.get("matched") == tokens[-1] else None
    _check_turn(tokens, logprobs, counted, finish, limit, stop, other_end)
    recorded = None
    if experts is not None:
        length = prompt + len(tokens)
        recorded = _checked(_sglang_experts(info, length - 1, experts), length, experts)
    return Completion(tokens, [float(logprob) for logprob in logprobs], recorded)


def _check_turn(
    tokens: Json,
    logprobs: Json,
    counted: Json,
    finish: Json,
    limit: int,
    stop: int,
    other_end: int | None = None,
) -> None:
    """Raises UserError unless tokens and log-probs form a whole turn. It may also end with ``other_end``."""
    if not _all_numbers(tokens, int) or not _all_numbers(logprobs, (int, float)):
        raise UserError(
            f"expected integer token_ids and numbers as token_logprobs, got {shorten(tokens)} and "
            f"{shorten(logprobs)}; use another version of the server"
        )
    if not len(tokens) == len(logprobs) == counted or not 1 <= counted <= limit:
        raise UserError(
            f"expected as many token_ids as token_logprobs and completion_tokens, from 1 to {limit}, got "
            f"{len(tokens)}, {len(logprobs)} and {counted}; the server loses tokens, so use another version"
        )
    is_ended = tokens[-1] in (stop, other_end) and stop not in tokens[:-1]
    is_cut_off = len(tokens) == limit and stop not in tokens
    if not (is_ended or is_cut_off):
        raise UserError(
            f"expected a turn that ends with the stop token {stop} or has {limit} tokens, got "
            f"{len(tokens)} tokens that end with {shorten(tokens[-3:])} (finish_reason {shorten(finish)}); "
            "start the server without other stop tokens, for example with --generation-config vllm"
        )


def _vllm_experts(answer: Json, choice: Json) -> np.ndarray | None:
    """Returns the experts in an answer of vLLM as an array, or None if the answer has none.

    Newer versions send one .npy file in base64 for the whole sequence. Older versions send two nested lists,
    one for the prompt and one for the turn.
    """
    encoded = choice.get("routed_experts")
    try:
        if isinstance(encoded, str):
            return np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        prompt = answer.get("prompt_routed_experts")
        return None if encoded is None or prompt is None else np.array(prompt + encoded)
    except (TypeError, ValueError, EOFError, OSError, binascii.Error) as error:
        raise UserError(f"routed_experts: {error}; use another version of vLLM") from None


def _sglang_experts(info: Json, rows: int, sizes: ExpertSizes) -> np.ndarray | None:
    """Returns the experts in an answer of SGLang as an array, or None. They arrive as int32 in base64."""
    encoded = info.get("routed_experts")
    if encoded is None:
        return None
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    except (TypeError, ValueError, binascii.Error) as error:
        raise UserError(f"routed_experts: {error}; use another version of SGLang") from None
    if numbers.size % (rows * sizes.top_k):
        raise UserError(
            f"routed_experts: expected {rows} rows of {sizes.num_layers} layers and {sizes.top_k} experts, "
            f"got {numbers.size} numbers; use another version of SGLang"
        )
    return numbers.reshape(rows, -1, sizes.top_k)


def _checked(experts: np.ndarray | None, length: int, sizes: ExpertSizes) -> np.ndarray:
    """Returns the experts of the first ``length`` - 1 tokens. The model has not read the last token.

    Some versions also send a row for the last token.
    """
    if experts is None:
        raise UserError(
            "expected routed_experts, got none; start the server with --enable-return-routed-experts, or "
            'set data.replay = "off"'
        )
    expected = (sizes.num_layers, sizes.top_k)
    if experts.ndim != 3 or experts.shape[1:] != expected or len(experts) not in (length - 1, length):
        raise UserError(
            f"routed_experts: expected {length - 1} rows of {expected[0]} layers and {expected[1]} experts, "
            f"got an array of shape {experts.shape}; check that the server serves this model"
        )
    if experts.dtype.kind not in "iu" or experts.min() < -1 or experts.max() >= sizes.num_experts:
        raise UserError(
            f"routed_experts: expected ids from 0 to {sizes.num_experts - 1}, or -1 for tokens without a "
            f"record, got {experts.dtype} from {experts.min()} to {experts.max()}; check that the server "
            "serves this model"
        )
    return experts[: length - 1].astype(np.int16)


def _all_numbers(values: Json, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and type(value) is not bool and math.isfinite(value)  # type: ignore[arg-type]
        for value in values
    )
