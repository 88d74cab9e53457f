"""Serves a model to agents, and writes their sessions as rows of token ids."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titan_tree.distributed.mesh import OneRank
from titan_tree.errors import UserError, secret_of
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.sampler import LockedSampler, Sampler
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.truncation import Truncation
from titan_tree.run.build import build_tokenizer
from titan_tree.run.model_setup import (
    build_base,
    build_model_without_weights,
    build_parallel_model,
    share_base,
)
from titan_tree.serve.agent_server import AgentServer
from titan_tree.signals import Signals

if TYPE_CHECKING:
    from titan_tree.serve.tinker.api import TinkerAPI

logger = logging.getLogger(__name__)


def serve(config: RLRunConfig) -> None:
    """Serves until a signal arrives. Sessions that did not end then get rows without a reward.

    The folder gets ``calls.jsonl`` and ``rows.jsonl``. A server that is started again with the same folder
    continues the sessions that did not end.

    Raises:
        UserError: the configuration has no tokenizer, contexts may become longer than the model, or the port
            is taken.
    """
    tokenizer = build_tokenizer(config.data, config.model.hf_path)
    if tokenizer is None:
        raise UserError("data.tokenizer: expected a tokenizer, got none; set it, or model.hf_path")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chat, lock = Chat(tokenizer, config.data.sample), threading.Lock()
    sampler, base = _sampler(config, device, lock)
    recorder = ModelRecorder(chat, config.rl, config.serve.mode, str(config.data.seed), Path(config.folder))
    name = Path(config.model.hf_path).name if config.model.hf_path else f"{config.model.flavor}"
    secret = config.serve.secret_env and secret_of(config.serve.secret_env, "serve.secret_env")
    tinker = None if base is None else _tinker(config, chat, base, lock, secret)
    server = AgentServer(recorder, config.serve, name, secret, tinker.routes() if tinker else ())
    url, stopped = server.start(), threading.Event()
    logger.info("%s: OPENAI_BASE_URL=%s/s/SESSION/v1 or ANTHROPIC_BASE_URL=%s/s/SESSION", name, url, url)
    logger.info("sessions are written to %s", config.folder)
    if tinker:
        tinker.start()
        logger.info('training: tinker.ServiceClient(base_url="%s", api_key="tml-any")', url)
    with Signals("the server ends after the turns under way") as signals:
        watch = threading.Thread(target=_watch, args=(signals, stopped), daemon=True)
        watch.start()
        try:
            while not stopped.is_set():
                try:
                    recorder.run(sampler, stopped)
                except UserError as error:  # of another server; agents may try the turn again
                    logger.error("a turn failed: %s", error)
        finally:
            stopped.set()
            server.close()
            if tinker:
                tinker.close()
            logger.info("%s", _report(recorder.close()))


def _sampler(
    config: RLRunConfig, device: torch.device, lock: threading.Lock
) -> tuple[Sampler, TreeModel | None]:
    """Returns a sampler of the configured model, or of the server that samples in its place.

    It comes with the base that clients of Tinker's API adapt, see ``build_base``. None: they cannot, because
    another server samples, or the configured model has LoRA.
    """
    truncation, table = Truncation.of(config.rl), config.rl.server
    if table.url is None:
        base = None
        if config.lora.is_on:
            mesh = OneRank(device.type)
            model = build_parallel_model(config.model, config.training, config.parallel, mesh, config.lora)
        else:
            base = build_base(config.model, config.training, device.type)
            model = share_base(base, config.training)
        _check_limit(config, model.config.max_position_embeddings, "model's")
        return LockedSampler(default_sampler(model, truncation), lock), base
    from titan_tree.rl.server.server_sampler import ServerSampler  # imports httpx

    with torch.device("meta"):
        sizes: TreeModel = build_model_without_weights(config.model)
    experts = sizes.experts.sizes if sizes.experts and config.data.replay != "off" else None
    sampler = ServerSampler(**asdict(table), experts=experts, truncation=truncation)
    for client in sampler.clients:
        for served in (client.find("/v1/models") or {}).get("data", ()):
            if served["id"] == table.model and "max_model_len" in served:
                _check_limit(config, served["max_model_len"], "server's")
    return sampler, None


def _tinker(
    config: RLRunConfig, chat: Chat, base: TreeModel, lock: threading.Lock, secret: str | None
) -> TinkerAPI | None:
    """Returns Tinker's API, or None without the package ``tinker``, whose messages it reads and writes."""
    if find_spec("tinker") is None:
        logger.info("Tinker's API is off, because its package is missing: pip install 'titan_tree[tinker]'")
        return None
    from titan_tree.rl.tinker.tenants import Tenants
    from titan_tree.serve.tinker.api import TinkerAPI

    name = config.model.hf_path or f"{config.model.name}/{config.model.flavor}"
    folder = Path(config.folder) / "tinker"
    return TinkerAPI(Tenants(config, chat, base, lock), name, folder, config.serve.max_sessions, secret)


def _check_limit(config: RLRunConfig, limit: int, whose: str) -> None:
    """Raises UserError if contexts may become so long that the sampler refuses them, which would end it."""
    if (got := config.rl.max_rollout_tokens) > limit:
        raise UserError(
            f"rl.max_rollout_tokens: expected at most the {whose} {limit:,} tokens, got {got:,}; lower it"
        )


def _watch(signals: Signals, stopped: threading.Event) -> None:
    while not stopped.wait(0.1):
        if signals.received:
            stopped.set()


def _report(forks: Counter[str]) -> str:
    if not forks:
        return "no session forked"
    causes = "; ".join(f"{number} x {cause}" for cause, number in forks.most_common())
    return f"forks: {causes}"
