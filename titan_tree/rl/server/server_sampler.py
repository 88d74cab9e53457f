"""ServerSampler: samples turns from a server of vLLM or SGLang, which gets the trained weights."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from titan_tree.config.rl import RLRunConfig, ServerConfig
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import Completion
from titan_tree.rl.server.client import ServerClient, StoppedError
from titan_tree.rl.server.engines import VLLM, Engine, PushSettings, SGLang
from titan_tree.tree.paths import ExpertSizes

logger = logging.getLogger(__name__)

ENGINES: dict[str, type[Engine]] = {"vllm": VLLM, "sglang": SGLang}


class ServerSampler:
    """Samples each turn with a request of its own. Every context gets its turn, or an error ends the run.

    Failed requests are sent again with the same seed, see ``ServerClient``. The server must report log-probs
    at temperature 1 without truncation. SGLang does so by default, and vLLM in the logprobs modes
    "raw_logprobs" and "processed_logprobs".

    Args:
        url: address of the server, such as "http://localhost:8000".
        model: name under which vLLM serves the model. SGLang needs none.
        api_key: the key that is sent as a bearer token, see ``ServerClient``.
        push: sends the trained weights to the server. None: the server keeps its own.
        experts: sizes of the model whose experts to record. None: experts are not recorded.
        settings: other keys of the table [rl.server], see ``ServerConfig``.

    Raises:
        UserError: a setting is wrong.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str | None = None,
        *,
        push: PushSettings | None = None,
        experts: ExpertSizes | None = None,
        **settings: Any,
    ) -> None:
        config = ServerConfig(url=url, model=model, **settings)
        self.client, self.concurrency = ServerClient(config, api_key), config.concurrency
        self.engine = ENGINES[config.api](config, self.client, push, experts)
        self._is_closed = self._has_warned = False

    def sample(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seed: int
    ) -> list[Completion]:
        """See ``Sampler``. Each request has a seed of its own, so that equal contexts get different turns.

        Raises:
            UserError: the server refuses a request, answers it wrongly, or answers none of the attempts, or
                it samples from other weights than the last ``update`` gave it.
            StoppedError: ``close`` ended it.
        """
        draw = random.Random(seed)
        seeds = [draw.getrandbits(31) for _ in contexts]
        with ThreadPoolExecutor(self.concurrency, "sampler") as threads:
            turns = [
                threads.submit(self._sample_turn, context, limit, stop, turn_seed)
                for context, limit, turn_seed in zip(contexts, max_tokens, seeds, strict=True)
            ]
            try:
                completions = [turn.result() for turn in turns]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.client.stop()
                raise
        self.engine.check_version()
        return completions

    def update(self, model: TreeModel, step: int) -> None:
        """See ``RemoteSampler``. Without ``push``, the server must get its weights in another way.

        Raises:
            UserError: the server did not take over the weights.
        """
        if self.engine.settings is not None:
            self.engine.push(model, step)
        elif not self._has_warned:
            self._has_warned, url = True, self.client.url
            logger.warning("%s: nothing sends the trained weights to it, so its own may be stale", url)

    def close(self) -> None:
        """Ends all requests. Later calls of ``sample`` raise StoppedError."""
        self._is_closed = True
        self.client.stop()
        self.engine.close()

    def _sample_turn(self, context: Sequence[int], limit: int, stop: int, seed: int) -> Completion:
        if self._is_closed:
            raise StoppedError(self.client.url)
        return self.engine.sample(context, limit, stop, seed)


def build_server_sampler(config: RLRunConfig, model: TreeModel, run: str) -> ServerSampler:
    """Returns the sampler that the table [rl.server] describes.

    Each call makes new names for versions of the weights, because a run that was killed may have left its
    versions on the server.

    Args:
        model: the model that is trained.
        run: the run's id, with which the names begin.

    Raises:
        UserError: the settings do not fit the model or the environment.
    """
    table = config.rl.server
    replays = config.data.replay != "off"
    if model.experts and model.experts.router_biases() and not replays:
        raise UserError(
            "rl.server.url: expected a model without router biases, which servers do not know, so they would "
            'choose other experts; remove router_bias.rate, or set data.replay = "first"'
        )
    if table.weights == "adapter" and model.lora is None:
        raise UserError(
            'rl.server.weights: expected "folder" or "broadcast" for a model without LoRA, got '
            '"adapter"; or set lora.rank'
        )
    push = PushSettings(
        run=f"{run}-{secrets.token_hex(2)}",
        folder=Path(config.folder) / "rollout_weights",
        dtype=getattr(torch, config.training.dtype),
        source=config.model.hf_path,
    )
    experts = model.experts.sizes if replays and model.experts else None
    return ServerSampler(**asdict(table), push=push, experts=experts)
