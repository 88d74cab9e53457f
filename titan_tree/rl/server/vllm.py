"""VLLM: requests to a server of vLLM that sample, their answers, and commands that change its weights.

The commands are documented in docs/training/weight_transfer/ of vLLM's repository. A server needs
VLLM_SERVER_DEV_MODE=1 for them, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters. Token ids go in and out,
so nothing is tokenized twice.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_tree.data.images import png_url
from titan_tree.errors import UserError, shorten
from titan_tree.rl.server.client import Json, ServerClient
from titan_tree.rl.truncation import Truncation
from titan_tree.tree.context import Completion, Ids, context_images
from titan_tree.tree.path_fields import MAX_LOGPROB
from titan_tree.tree.paths import ExpertSizes

LEAST_LOGPROB = -1000.0  # of a sampled token. In fp32, it is at least -104. vLLM writes -9999 for a zero.


@dataclass
class VLLM:
    """A server of vLLM, which samples through OpenAI's completions API with vLLM's fields.

    OpenAI's own API has no token ids in its answers. The field return_token_ids adds them. Sampling masks
    come from vLLM's own endpoint /inference/v1/generate alone (docs/features/sampling_mask.md there), which
    also takes images beside token ids: in the field content_parts, as PNG files. The server replaces the one
    placeholder of each image by as many as the image has tokens, and returns all ids.

    Args:
        model: name under which vLLM serves the model.
        experts: sizes of the model whose experts answers must contain. None: experts are not recorded.
        truncation: which ids the server keeps; if not all, answers must contain them.
        adapter: name of the adapter that requests ask for. None: they ask for the model itself.
    """

    model: str
    experts: ExpertSizes | None
    truncation: Truncation
    adapter: str | None = None

    def sampling_path(self, context: Ids) -> str:
        """Returns the path of requests that sample."""
        uses_own = self.truncation.is_on or context_images(context)
        return "/inference/v1/generate" if uses_own else "/v1/completions"

    def sampling_request(self, context: Ids, limit: int, stops: Ids, seed: int) -> Json:
        """Returns the body of a request for one turn of at most ``limit`` tokens."""
        request: Json = {"model": self.adapter or self.model, "return_token_ids": True}
        settings = sampling_settings(self.truncation)
        settings |= {"max_tokens": limit, "n": 1, "logprobs": 1, "seed": seed, "stop_token_ids": list(stops)}
        if self.sampling_path(context) == "/v1/completions":
            return request | settings | {"prompt": list(context)}
        images = context_images(context)
        if images:
            request["content_parts"] = [{"type": "image_url", "url": png_url(image)} for _, image in images]
        repeated = {at for start, image in images for at in range(start + 1, start + len(image))}
        ids = [token for at, token in enumerate(context) if at not in repeated]
        return request | {"token_ids": ids, "sampling_params": settings}

    def completion(self, answer: Json, context: Ids, limit: int, stops: Ids) -> Completion:
        """Returns the turn in the JSON of the answer to such a request.

        Raises:
            UserError: fields are missing, or do not form one whole turn.
        """
        try:
            (choice,) = answer["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]
            if self.sampling_path(context) == "/v1/completions":
                logprobs = logprobs["token_logprobs"]
            else:
                logprobs = [token["logprob"] for token in logprobs["content"]]
            num_read, num_tokens = (answer["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion"))
            finish = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            missing = f"no {error} in " if isinstance(error, KeyError) else ""
            raise UserError(
                "expected one choice with token_ids, logprobs and finish_reason, and usage with "
                f"prompt_tokens and completion_tokens, got {missing}{shorten(answer)}; use a version of vLLM "
                f"that knows {'sampling_mask' if self.truncation.is_on else 'return_token_ids'}"
            ) from None
        if (model := answer.get("model", expected := self.adapter or self.model)) != expected:
            raise UserError(
                f"expected an answer of the model {shorten(expected)}, got one of {shorten(model)}; check "
                "rl.server.url"
            )
        if (images := context_images(context)) and (ids := answer.get("prompt_token_ids")) != list(context):
            sizes = ", ".join(f"{image.rows} x {image.columns}" for _, image in images)
            raise UserError(
                f"expected {len(context)} prompt_token_ids, with images of {sizes} tokens, got "
                f"{len(ids) if isinstance(ids, list) else ids!r:.40}; use vLLM 0.32 or later, and a snapshot "
                "whose preprocessor_config.json leaves these sizes as they are"
            )
        if num_read != len(context):
            raise UserError(
                f"expected the server to read all {len(context)} tokens of the context, got "
                f"{shorten(num_read)}; start it with a longer context and without truncation"
            )
        if (wrong := next((ids for ids in _context_ids(answer) if ids != list(context)), None)) is not None:
            raise UserError(
                f"expected the token ids of the context, {shorten(list(context))}, as prompt_token_ids, got "
                f"{shorten(wrong)}; the server changes tokens, use another version"
            )
        _check_all(tokens, (int,), 0, 2**31 - 1, "integer token_ids, at least 0")
        numbers = f"numbers as token_logprobs, from {LEAST_LOGPROB:g} to 0, of tokens that can be sampled"
        _check_all(logprobs, (int, float), LEAST_LOGPROB, MAX_LOGPROB, numbers)
        size = len(tokens)
        if not size == len(logprobs) == num_tokens or not 1 <= size <= limit:
            raise UserError(
                f"expected as many token_ids as token_logprobs and completion_tokens, from 1 to {limit}, "
                f"got {size}, {len(logprobs)} and {shorten(num_tokens)}; the server loses tokens, use "
                "another version"
            )
        is_whole = not {*stops} & {*tokens[:-1]} and (tokens[-1] in stops or size == limit)
        if not is_whole or finish not in ("stop", "length"):
            raise UserError(
                f"expected a turn that ends with a stop token of {list(stops)} or has {limit} "
                f"tokens, got {size} tokens that end with {shorten(tokens[-3:])} (finish_reason "
                f"{shorten(finish)}); start the server without other stop tokens, for example with "
                "--generation-config vllm"
            )
        return Completion(
            tokens,
            [float(logprob) for logprob in logprobs],
            None if self.experts is None else _experts(choice, answer, len(context) + size, self.experts),
            _kept_ids(choice, tokens, logprobs, self.truncation) if self.truncation.is_on else None,
        )

    def is_bound(self, answer: Json) -> bool:
        """Returns whether an answer that ``completion`` has read says which context it continues."""
        return bool(_context_ids(answer))

    def pause(self, client: ServerClient, version: str) -> None:
        """Stops sampling, and then names the weights before they arrive.

        A server that restarts during the update thereby loses the name, so its first weights cannot get it.
        """
        client.command("/pause?mode=wait")
        if client.find("/weight_info") is not None:  # newer versions
            client.command("/update_weight_version", {"new_version": version})

    def load(self, client: ServerClient, folder: Path) -> None:
        """Lets the server load a Hugging Face snapshot."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.command("/collective_rpc", body)

    def resume(self, client: ServerClient) -> None:
        """Starts sampling again."""
        client.command("/reset_prefix_cache")
        client.command("/resume")


def sampling_settings(truncation: Truncation) -> Json:
    """Returns all settings at temperature 1. Some models' generation_config.json sets other defaults."""
    kept = {"top_p": truncation.top_p, "top_k": truncation.top_k or -1, "min_p": truncation.min_p}
    return {"temperature": 1.0, "repetition_penalty": 1.0} | kept


def _context_ids(answer: Json) -> list[Json]:
    """Returns the ids that the server has read, as the answer and its choice report them."""
    reported = (part.get("prompt_token_ids") for part in (*answer["choices"], answer))
    return [ids for ids in reported if ids is not None]


def _kept_ids(
    choice: Json, tokens: list[int], logprobs: list[float], truncation: Truncation
) -> list[list[int]]:
    """Returns the ids that the server kept for each token."""
    mask = choice.get("sampling_mask")
    if not isinstance(mask, list) or len(mask) != len(tokens):
        raise UserError(
            f"expected a sampling mask of {len(tokens)} tokens, got {shorten(mask)}; start vLLM with "
            "--return-sampling-mask"
        )
    for token, ids, logprob in zip(tokens, mask, logprobs, strict=True):
        _check_all(ids, (int,), 0, 2**31 - 1, "lists of integers as sampling mask, at least 0")
        if token not in ids:
            raise UserError(
                f"sampling mask: expected the sampled id {token} among the ids that sampling kept, got "
                f"{shorten(ids)}; use another version of the server"
            )
        if len(set(ids)) < len(ids) or len(ids) > truncation.top_k:
            raise UserError(
                f"sampling mask: expected at most rl.top_k = {truncation.top_k} different ids, got "
                f"{len(ids)}: {shorten(ids)}; if ids tie with the last one that is kept, set rl.top_p below 1"
            )
        if len(ids) == 1 and logprob < -MAX_LOGPROB:
            raise UserError(
                f"expected log-probs over the sampling mask, which are 0 for its only id, got {logprob}; "
                "start vLLM with --logprobs-mode processed_logprobs"
            )
    return mask


def _experts(choice: Json, answer: Json, length: int, sizes: ExpertSizes) -> np.ndarray:
    """Returns the experts of the first ``length`` - 1 tokens. The model has not read the last token.

    Newer versions send one .npy file in base64 for the whole sequence. Older versions send two nested lists,
    one for the prompt and one for the turn. Some also send a row for the last token.
    """
    encoded, experts = choice.get("routed_experts"), None
    try:
        if isinstance(encoded, str):
            file = io.BytesIO(base64.b64decode(encoded, validate=True))
            experts = np.lib.format.read_array(file, allow_pickle=False)
        elif encoded is not None and (prompt := answer.get("prompt_routed_experts")) is not None:
            experts = np.array(prompt + encoded)
    except Exception as error:  # NumPy evaluates the header as Python, with errors of the tokenizer
        raise UserError(f"routed_experts: {error!s:.200}; use another version of vLLM") from None
    if experts is None:
        raise UserError(
            "expected routed_experts, got none; start the server with --enable-return-routed-experts, or "
            'set data.replay = "off"'
        )
    if experts.shape[1:] != (sizes.num_layers, sizes.top_k) or len(experts) not in (length - 1, length):
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


def _check_all(values: Json, kinds: tuple[type, ...], low: float, high: float, expected: str) -> None:
    """Raises UserError unless ``values`` is a list of numbers of these types, from ``low`` to ``high``."""
    wrong: list[Json] = [values]
    if isinstance(values, list):
        wrong = [value for value in values if type(value) not in kinds or not low <= value <= high]
    if wrong:
        raise UserError(f"expected {expected}, got {shorten(wrong[0])}; use another version of the server")
