"""ServerSampler: samples turns from servers of vLLM, which get the trained weights."""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from titan_tree.distributed.collectives import call_on_rank_0, rank
from titan_tree.errors import UserError, errors_at, shorten, unknown_name
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.server.client import LARGEST_ANSWER, ServerClient, StoppedError
from titan_tree.rl.server.vllm import VLLM
from titan_tree.rl.settings import RLRunConfig, ServerConfig
from titan_tree.rl.truncation import ALL_IDS, Truncation
from titan_tree.run.checkpoint.export import gathered_factors, save_shares
from titan_tree.tree.context import Completion, Ids
from titan_tree.tree.paths import ExpertSizes

logger = logging.getLogger(__name__)

# Bounds of an answer: bytes for the text, the id and the log-probs of a token, and for every other id.
TOKEN_BYTES, ID_BYTES = 1024, 16


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How the trained weights of a run are sent to servers.

    Attributes:
        run: the prefix of the names of all versions.
        folder: a folder for the newest snapshot or adapter. Its earlier contents are deleted. All ranks and
            servers must see it under the same path.
        dtype: the dtype of sent weights. An adapter keeps its own dtype.
        source: the snapshot from which the model started, or None.
    """

    run: str
    folder: Path
    dtype: torch.dtype
    source: str | None


class ServerSampler:
    """Samples each turn with a request of its own. Every context gets its turn, or an error ends the run.

    Failed requests are sent again with the same seed, see ``ServerClient``. The server must report log-probs
    at temperature 1, as vLLM does in the logprobs modes "raw_logprobs" and "processed_logprobs". With
    ``truncation``, they must be those over the kept ids, as in the second mode.

    Args:
        url: address of the server, such as "http://localhost:8000", or of several servers. Contexts that
            begin alike are sent to the same one, whose prefix cache then has what they share.
        model: name under which vLLM serves the model.
        api_key: the key that is sent as a bearer token, see ``ServerClient``.
        push: how the trained weights are sent to the server. None: the server keeps its own.
        experts: sizes of the model whose experts to record. None: experts are not recorded.
        truncation: which ids the server keeps. It must return them, so ``top_k`` must bound their number.
        settings: other keys of the table [rl.server], see ``ServerConfig``.

    Raises:
        UserError: a setting is wrong.
    """

    reads_images = True

    def __init__(
        self,
        url: str | list[str],
        model: str,
        api_key: str | None = None,
        *,
        push: PushSettings | None = None,
        experts: ExpertSizes | None = None,
        truncation: Truncation = ALL_IDS,
        **settings: Any,
    ) -> None:
        names = [field.name for field in fields(ServerConfig)]
        for key in settings.keys() - set(names):
            raise unknown_name("key of [rl.server]", key, names)
        self.config = config = ServerConfig(url=url, model=model, **settings)
        urls = [url] if isinstance(url, str) else url
        self.clients = [ServerClient(url, config, api_key) for url in urls]
        self.vllm = VLLM(model, experts, truncation)
        if truncation.is_on and not truncation.top_k:
            raise UserError(
                "rl.top_k: expected at least 1 with rl.top_p or rl.min_p and a server, to bound the size of "
                "its answers, got 0; set it, for example to 512"
            )
        self.push, self.experts, self.truncation = push, experts, truncation
        self._loaded_adapter: str | None = None
        self._version: str | None = None  # name of the weights that the server must report. None: any
        self._requests = threading.Semaphore(self.config.concurrency)  # of all threads that sample
        self._failure: BaseException | None = None  # the first one, which ends the requests of all threads
        self._is_closed = False
        self._are_bound = True  # whether all answers have named the contexts that they continue
        self._warnings: set[str] = set()  # each is logged once

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``. Servers get 31 bits of each seed.

        Raises:
            UserError: the server refuses a request, answers it wrongly, or answers none of the attempts, or
                it samples from other weights than the last ``update`` gave it.
            StoppedError: ``close`` ended it.
        """
        with ThreadPoolExecutor(self.config.concurrency, "sampler") as threads:
            turns = [
                threads.submit(self._sample_turn, client, context, limit, stops, seed % 2**31)
                for client, context, limit, seed in zip(
                    self._clients_of(contexts), contexts, max_tokens, seeds, strict=True
                )
            ]
            try:
                completions = [turn.result() for turn in turns]
            except BaseException as error:
                self._failure = self._failure or error
                threads.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise self._failure from None
        if not self._are_bound:
            self._warn_once(
                "its answers have no prompt_token_ids, so nothing checks that an answer continues the "
                "context of its request; name every server in rl.server.url, without a router or proxy"
            )
        self._ask_version()
        return completions

    def update(self, model: TreeModel, step: int) -> None:
        """See ``RemoteSampler``. Without ``push``, servers must get their weights in another way.

        Ranks write the weights, and rank 0 lets the servers read them. If this fails, a server may hold
        weights of two versions. It therefore stays paused.

        Raises:
            UserError: a server did not take over the weights. All ranks raise it.
        """
        if self.push is None:
            self._warn_once("nothing sends the trained weights to it, so its own may be stale")
            return
        version, is_adapter = f"{self.push.run}-{step}", self.config.weights == "adapter"
        push = self._push_adapter if is_adapter else self._push_weights
        try:
            push(model, version, self.push)
        except UserError as error:
            problem = f"weights of step {step}: the server did not take them over, and may stay paused"
            if is_adapter:
                problem = f"adapter of step {step}: the server did not load it"
            raise UserError(f"{problem}: {error}") from None
        if is_adapter:
            self.vllm.adapter = version
        else:
            self._version = version
        self._ask_version()

    def close(self) -> None:
        """Ends all requests, and undoes what ``update`` did. Later calls of ``sample`` raise StoppedError.

        Rank 0 deletes its files, and servers unload its adapter.
        """
        self._is_closed = True
        self._stop()
        if rank():
            return
        if self.push is not None:
            _emptied(self.push.folder)
        try:
            self._unload_adapter()
        except UserError as error:
            logger.warning("adapter %s stays loaded: %s", self._loaded_adapter, error)

    def _clients_of(self, contexts: Sequence[Sequence[int]]) -> list[ServerClient]:
        """Returns the server of each context.

        Each server gets equally many contexts, which are neighbours in lexicographic order. The order of
        rollouts stays the same while their contexts grow.
        """
        order = sorted(range(len(contexts)), key=lambda i: list(contexts[i]))
        place = {i: number for number, i in enumerate(order)}
        return [self.clients[place[i] * len(self.clients) // len(order)] for i in range(len(order))]

    def _stop(self) -> None:
        for client in self.clients:
            client.stop()

    def _sample_turn(
        self, client: ServerClient, context: Ids, limit: int, stops: Ids, seed: int
    ) -> Completion:
        if self._is_closed:
            raise StoppedError(client.url)
        request = self.vllm.sampling_request(context, limit, stops, seed)
        size = self._largest(len(context) + limit)
        with self._requests:
            answer = client.post(self.vllm.sampling_path(context), request, size)
        with errors_at(client.url):
            completion = self.vllm.completion(answer, context, limit, stops)
        if not self.vllm.is_bound(answer):
            self._are_bound = False
        return completion

    def _largest(self, num_tokens: int) -> int:
        """Returns the maximum number of bytes of an answer about so many tokens."""
        ids = self.truncation.top_k + (self.experts.num_layers * self.experts.top_k if self.experts else 0)
        return LARGEST_ANSWER + num_tokens * (TOKEN_BYTES + ID_BYTES * ids)

    def _push_weights(self, model: TreeModel, version: str, push: PushSettings) -> None:
        """Sends all weights while the servers are paused. Collective."""

        def pause() -> Path:
            for client in self.clients:
                self.vllm.pause(client, version)
            return _emptied(push.folder) / version

        folder = call_on_rank_0(pause)
        save_shares(model, folder, push.dtype, push.source)

        def load() -> None:
            for client in self.clients:
                self.vllm.load(client, folder)
            for client in self.clients:
                self.vllm.resume(client)

        call_on_rank_0(load)

    def _push_adapter(self, model: TreeModel, name: str, push: PushSettings) -> None:
        """Loads LoRA as an adapter. Collective.

        The adapter's name is its version, so no request gets another step's adapter.
        """
        factors = gathered_factors(model)

        def load() -> None:
            folder = _emptied(push.folder) / name
            save_adapter(model, folder, factors, source=push.source)
            self._unload_adapter()
            self._command_adapter("load", {"lora_name": name, "lora_path": str(folder)})
            self._loaded_adapter = name

        call_on_rank_0(load)

    def _unload_adapter(self) -> None:
        if self._loaded_adapter is not None:
            self._command_adapter("unload", {"lora_name": self._loaded_adapter})
            self._loaded_adapter = None

    def _command_adapter(self, verb: str, body: dict[str, object]) -> None:
        for client in self.clients:
            client.command(f"/v1/{verb}_lora_adapter", body)

    def _ask_version(self) -> None:
        """Raises UserError if a server reports that it has other weights than those of the last push."""
        if self._version is None:
            return
        for client in self.clients:
            reported = (client.find("/weight_info") or {}).get("weight_version")
            self._check_version(client, reported)
            if reported is None:
                self._warn_once(
                    "this version of the server does not report the version of its weights, so nothing "
                    "checks that it samples from the trained ones"
                )

    def _check_version(self, client: ServerClient, reported: object) -> None:
        if self._version is not None and reported not in (None, self._version):
            raise UserError(
                f"{client.url}: weight version: expected {self._version!r}, which this run sent, got "
                f"{shorten(reported)}; does another program send weights to this server?"
            )

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warnings:
            self._warnings.add(problem)
            logger.warning("%s: %s", self.clients[0].url, problem)


def build_server_sampler(config: RLRunConfig, model: TreeModel, run: str) -> ServerSampler:
    """Returns the sampler that the table [rl.server] describes. Collective.

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
            'rl.server.weights: expected "folder" for a model without LoRA, got "adapter"; or set lora.rank'
        )
    push = PushSettings(
        run=call_on_rank_0(lambda: f"{run}-{secrets.token_hex(2)}"),
        folder=Path(config.folder) / "rollout_weights",
        dtype=getattr(torch, config.training.dtype),
        source=config.model.hf_path,
    )
    experts = model.experts.sizes if replays and model.experts else None
    truncation = Truncation.of(config.rl)
    return ServerSampler(**asdict(table), push=push, experts=experts, truncation=truncation)


def _emptied(folder: Path) -> Path:
    """Deletes a folder with all its contents, and returns its absolute path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder.resolve()
