"""The protocols of vLLM and SGLang: requests that sample, their answers, and commands that change weights.

The commands are documented in docs/advanced_features/sglang_for_rl.md of SGLang's repository, and in
docs/training/weight_transfer/ of vLLM's. A server of vLLM needs VLLM_SERVER_DEV_MODE=1 for them, and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters. Token ids go in and out, so nothing is tokenized twice.

Both protocols have the same attributes and methods:

    model             name under which vLLM serves the model
    has_experts       whether answers must contain the experts of tokens
    truncation        which ids the server keeps; if not all, answers must contain them
    adapter           name of the adapter that requests ask for. None: they ask for the model itself
    sampling_path     path of requests that sample
    version_paths     paths under which releases of the software report the version of their weights
    adapters_path     prefix of the commands for adapters
    broadcast         class that sends weights over a process group
    sampling_request  returns the body of a request for one turn
    read              returns the Answer in the JSON of an answer. Raises UserError if fields are missing.
    pause             stops sampling, so that weights can change, and names the new weights if it can
    load              lets the server load a Hugging Face snapshot
    resume            starts sampling again
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.rl.sampler import Completion
from titan_tree.rl.server.broadcast import SGLangBroadcast, VLLMBroadcast
from titan_tree.rl.server.client import Json, ServerClient
from titan_tree.rl.truncation import ALL_IDS, Truncation
from titan_tree.tree.path_fields import MAX_LOGPROB, MAX_NUMBER
from titan_tree.tree.paths import ExpertSizes


def sampling_settings(truncation: Truncation) -> Json:
    """Returns all settings at temperature 1. Some models' generation_config.json sets other defaults."""
    kept = {"top_p": truncation.top_p, "top_k": truncation.top_k or -1, "min_p": truncation.min_p}
    return {"temperature": 1.0, "repetition_penalty": 1.0} | kept


class Answer(NamedTuple):
    """The fields of an answer to a request that samples, as they arrived.

    Attributes:
        num_tokens: number of tokens that the server has counted.
        finish: reason why the turn ended.
        experts: an array, which may be flat, or None if the answer has none.
        other_end: another end-of-text token of the model, which may end the turn.
        version: name of the weights that sampled, or None if the answer does not name them.
        num_read: number of tokens of the context that the server has counted, or None.
        read: ids of the context that the server has read, or None if the answer does not repeat them.
        repeated: ids of the turn in another field, or None.
        mask: for each token the ids that the server kept, or None if the answer has none.
    """

    tokens: Json
    logprobs: Json
    num_tokens: Json
    finish: Json
    experts: np.ndarray | None
    other_end: Json = None
    version: Json = None
    num_read: Json = None
    read: Json = None
    repeated: Json = None
    mask: Json = None

    def completion(
        self,
        prompt: Sequence[int],
        limit: int,
        stop: int,
        experts: ExpertSizes | None,
        is_truncated: bool,
    ) -> Completion:
        """Returns the turn.

        Args:
            prompt: the context.
            limit: maximum number of tokens of the turn.
            stop: the id that ends a turn.
            experts: sizes of the model whose experts the answer must contain. None: experts are not recorded.
            is_truncated: whether the answer must contain the ids that the server kept.

        Raises:
            UserError: tokens, log-probs, experts and kept ids do not form one whole turn.
        """
        tokens, logprobs = self.tokens, self.logprobs
        _check_all(tokens, (int,), 0, 2**31 - 1, "integer token_ids, at least 0")
        _check_all(logprobs, (int, float), -MAX_NUMBER, MAX_LOGPROB, "numbers as token_logprobs, at most 0")
        size = len(tokens)
        if not size == len(logprobs) == self.num_tokens or not 1 <= size <= limit:
            raise UserError(
                f"expected as many token_ids as token_logprobs and completion_tokens, from 1 to {limit}, "
                f"got {size}, {len(logprobs)} and {shorten(self.num_tokens)}; the server loses tokens, use "
                "another version"
            )
        if self.num_read not in (None, len(prompt)):
            raise UserError(
                f"expected the server to read all {len(prompt)} tokens of the context, got "
                f"{shorten(self.num_read)}; start it with a longer context and without truncation"
            )
        for name, ids, sent in (("context", self.read, list(prompt)), ("turn", self.repeated, tokens)):
            if ids not in (None, sent):
                raise UserError(
                    f"expected one list of token ids of the {name}, {shorten(sent)}, got another one, "
                    f"{shorten(ids)}, too; the server changes tokens, use another version"
                )
        ends = {stop, self.other_end} if type(self.other_end) is int else {stop}
        is_ended = tokens[-1] in ends and not ends.intersection(tokens[:-1])
        is_cut_off = size == limit and stop not in tokens
        reason = self.finish.get("type") if isinstance(self.finish, dict) else self.finish
        if not (is_ended or is_cut_off) or reason not in ("stop", "length"):
            raise UserError(
                f"expected a turn that ends with the stop token {stop} or has {limit} tokens, got {size} "
                f"tokens that end with {shorten(tokens[-3:])} (finish_reason {shorten(self.finish)}); start "
                "the server without other stop tokens, for example with --generation-config vllm"
            )
        recorded = None if experts is None else self._recorded_experts(len(prompt) + size, experts)
        mask = self._checked_mask() if is_truncated else None
        return Completion(tokens, [float(logprob) for logprob in logprobs], recorded, mask)

    def _checked_mask(self) -> list[list[int]]:
        """Returns the ids that the server kept for each token."""
        mask = self.mask if isinstance(self.mask, list) else []
        if len(mask) != len(self.tokens):
            raise UserError(
                f"expected a sampling mask of {len(self.tokens)} tokens, got {shorten(self.mask)}; start "
                "vLLM with --return-sampling-mask, or use a version of SGLang that knows return_sampling_mask"
            )
        for token, ids, logprob in zip(self.tokens, mask, self.logprobs, strict=True):
            _check_all(ids, (int,), 0, 2**31 - 1, "lists of integers as sampling mask, at least 0")
            if token not in ids:
                raise UserError(
                    f"sampling mask: expected the sampled id {token} among the ids that sampling kept, got "
                    f"{shorten(ids)}; use another version of the server"
                )
            if len(ids) == 1 and logprob < -MAX_LOGPROB:
                raise UserError(
                    f"expected log-probs over the sampling mask, which are 0 for its only id, got {logprob}; "
                    "start vLLM with --logprobs-mode processed_logprobs"
                )
        return mask

    def _recorded_experts(self, length: int, sizes: ExpertSizes) -> np.ndarray:
        """Returns the experts of the first ``length`` - 1 tokens. The model has not read the last token.

        Some versions also send a row for the last token.
        """
        experts, per_token = self.experts, (sizes.num_layers, sizes.top_k)
        if experts is None:
            raise UserError(
                "expected routed_experts, got none; start the server with --enable-return-routed-experts, or "
                'set data.replay = "off"'
            )
        if experts.ndim == 1 and experts.size % math.prod(per_token) == 0:
            experts = experts.reshape(-1, *per_token)
        if experts.shape[1:] != per_token or len(experts) not in (length - 1, length):
            raise UserError(
                f"routed_experts: expected {length - 1} rows of {sizes.num_layers} layers and {sizes.top_k} "
                f"experts, got an array of shape {experts.shape}; check that the server serves this model"
            )
        are_ids = experts.dtype.kind in "iu"
        if not are_ids or experts.min() < -1 or experts.max() >= sizes.num_experts:
            values = f" from {experts.min()} to {experts.max()}" if are_ids else ""
            raise UserError(
                f"routed_experts: expected ids from 0 to {sizes.num_experts - 1}, or -1 for tokens without a "
                f"record, got {experts.dtype}{values}; check that the server serves this model"
            )
        return experts[: length - 1].astype(np.int16)


@dataclass
class SGLang:
    """The protocol of SGLang, which samples through its own endpoint /generate."""

    model: str
    has_experts: bool
    truncation: Truncation = ALL_IDS
    adapter: str | None = None

    sampling_path = "/generate"
    version_paths = ("/get_weight_version", "/model_info", "/get_model_info")
    adapters_path = ""
    broadcast = SGLangBroadcast

    def sampling_request(self, context: Sequence[int], limit: int, stop: int, seed: int) -> Json:
        limits = {"max_new_tokens": limit, "stop_token_ids": [stop], "skip_special_tokens": False}
        request = {
            "input_ids": list(context),
            "sampling_params": sampling_settings(self.truncation) | limits | {"sampling_seed": seed},
            "return_logprob": True,
        }
        if self.truncation.is_on:
            request["return_sampling_mask"] = True
        if self.adapter is not None:
            request["lora_path"] = self.adapter
        if self.has_experts:
            request["return_routed_experts"] = True
        return request

    def read(self, answer: Json) -> Answer:
        """Reads an answer. SGLang also ends a turn after any other end-of-text token of the model."""
        try:
            info = answer["meta_info"]
            pairs = [(logprob, token) for logprob, token, *_ in info["output_token_logprobs"]]
            size, finish = info["completion_tokens"], info["finish_reason"]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "expected meta_info with output_token_logprobs, completion_tokens and finish_reason, got "
                f"{shorten(answer)}; use a version of SGLang that knows return_logprob"
            ) from None
        encoded = info.get("routed_experts") if self.has_experts else None
        try:
            experts = None if encoded is None else np.frombuffer(_decoded(encoded), "<i4")
        except (TypeError, ValueError) as error:
            raise UserError(f"routed_experts: {error}; use another version of SGLang") from None
        is_stopped = isinstance(finish, dict) and finish.get("type") == "stop"
        return Answer(
            tokens=[token for _, token in pairs],
            # Those in output_token_logprobs are over the whole vocabulary.
            logprobs=info.get("output_token_sampling_logprobs")
            if self.truncation.is_on
            else [logprob for logprob, _ in pairs],
            num_tokens=size,
            finish=finish,
            experts=experts,
            other_end=finish.get("matched") if is_stopped else None,
            version=info.get("weight_version"),
            num_read=info.get("prompt_tokens"),
            repeated=answer.get("output_ids"),
            mask=info.get("output_token_sampling_mask"),
        )

    def pause(self, client: ServerClient, version: str) -> None:
        client.command("/pause_generation", {"mode": "abort"})
        client.command("/flush_cache", retried=(400,))  # its status while requests are ending

    def load(self, client: ServerClient, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": folder.name}
        client.command("/update_weights_from_disk", body)

    def resume(self, client: ServerClient) -> None:
        client.command("/continue_generation")


@dataclass
class VLLM:
    """The protocol of vLLM, which samples through OpenAI's completions API with vLLM's fields.

    OpenAI's own API has no token ids in its answers. The field return_token_ids adds them. SGLang knows this
    field, too. Sampling masks come from vLLM's own endpoint /inference/v1/generate alone
    (docs/features/sampling_mask.md of its repository).
    """

    model: str
    has_experts: bool
    truncation: Truncation = ALL_IDS
    adapter: str | None = None

    version_paths = ("/weight_info",)
    adapters_path = "/v1"
    broadcast = VLLMBroadcast

    @property
    def sampling_path(self) -> str:
        return "/inference/v1/generate" if self.truncation.is_on else "/v1/completions"

    def sampling_request(self, context: Sequence[int], limit: int, stop: int, seed: int) -> Json:
        model, settings = {"model": self.adapter or self.model}, sampling_settings(self.truncation)
        settings |= {"max_tokens": limit, "n": 1, "logprobs": 1, "seed": seed, "stop_token_ids": [stop]}
        if self.truncation.is_on:
            return model | {"token_ids": list(context), "sampling_params": settings}
        return model | settings | {"prompt": list(context), "return_token_ids": True}

    def read(self, answer: Json) -> Answer:
        """Reads an answer.

        Newer versions send experts as one .npy file in base64 for the whole sequence. Older versions send two
        nested lists, one for the prompt and one for the turn.
        """
        try:
            (choice,) = answer["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]
            if self.truncation.is_on:
                logprobs = [token["logprob"] for token in logprobs["content"]]
            else:
                logprobs = logprobs["token_logprobs"]
            size, finish = answer["usage"]["completion_tokens"], choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "expected one choice with token_ids, logprobs and finish_reason, and "
                f"usage.completion_tokens, got {shorten(answer)}; use a version of vLLM or SGLang that knows "
                f"{'sampling_mask' if self.truncation.is_on else 'return_token_ids'}"
            ) from None
        encoded, experts = choice.get("routed_experts") if self.has_experts else None, None
        try:
            if isinstance(encoded, str):
                experts = np.lib.format.read_array(io.BytesIO(_decoded(encoded)), allow_pickle=False)
            elif encoded is not None and (prompt := answer.get("prompt_routed_experts")) is not None:
                experts = np.array(prompt + encoded)
        except Exception as error:  # NumPy evaluates the header as Python, with errors of the tokenizer
            raise UserError(f"routed_experts: {error!s:.200}; use another version of vLLM") from None
        if (model := answer.get("model", expected := self.adapter or self.model)) != expected:
            raise UserError(
                f"expected an answer of the model {shorten(expected)}, got one of {shorten(model)}; check "
                "rl.server.url"
            )
        num_read = answer["usage"].get("prompt_tokens")
        reads = [ids for part in (choice, answer) if (ids := part.get("prompt_token_ids")) is not None]
        if reads[1:] not in ([], reads[:1]):
            raise UserError(
                "prompt_token_ids: expected one list, got two that differ; use another version of vLLM"
            )
        return Answer(
            tokens,
            logprobs,
            size,
            finish,
            experts,
            num_read=num_read,
            read=reads[0] if reads else None,
            mask=choice.get("sampling_mask"),
        )

    def pause(self, client: ServerClient, version: str) -> None:
        """Stops sampling, and then names the weights before they arrive.

        A server that restarts during the update thereby loses the name, so its first weights cannot get it.
        """
        client.command("/pause?mode=wait")
        if client.find("/weight_info") is not None:  # newer versions
            client.command("/update_weight_version", {"new_version": version})

    def load(self, client: ServerClient, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.command("/collective_rpc", body)

    def resume(self, client: ServerClient) -> None:
        client.command("/reset_prefix_cache")
        client.command("/resume")


PROTOCOLS: dict[str, type[SGLang] | type[VLLM]] = {"vllm": VLLM, "sglang": SGLang}


def _decoded(encoded: str) -> bytes:
    """Returns the bytes that base64 encodes. Raises TypeError or ValueError (binascii.Error) otherwise."""
    return base64.b64decode(encoded, validate=True)


def _check_all(values: Json, kinds: tuple[type, ...], low: float, high: float, expected: str) -> None:
    """Raises UserError unless ``values`` is a list of numbers of these types, from ``low`` to ``high``."""
    wrong: list[Json] = [values]
    if isinstance(values, list):
        wrong = [value for value in values if type(value) not in kinds or not low <= value <= high]
    if wrong:
        raise UserError(f"expected {expected}, got {shorten(wrong[0])}; use another version of the server")
