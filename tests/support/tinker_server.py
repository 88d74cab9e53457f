"""A server of Tinker's API with a tiny model, and clients of the real package for it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types

from titan_tree.config.toml import load_tables
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.tinker.tenants import Tenants
from titan_tree.run.build import build_tokenizer
from titan_tree.run.model_setup import build_base
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.tinker.api import TinkerAPI

CONFIG = Path(__file__).parents[2] / "train_configs" / "serve.toml"
RANDOM = (
    *("model.name=qwen3", "model.flavor=debug", "model.overrides.vocab_size=282", "data.tokenizer=byte"),
    *("model.overrides.hidden_size=64", "model.overrides.num_hidden_layers=2"),
    "model.overrides.intermediate_size=96",
)
KEYS = (
    *("data.template=chatml", "training.dtype=float32", "serve.port=0", "rl.max_rollout_tokens=512"),
    *("rl.max_turn_tokens=16", "data.max_tokens=4096"),
)


def tenants(folder: Path, *keys: str, model: tuple[str, ...] = RANDOM) -> Tenants:
    """Returns the engine of a model, by default of a tiny one with random weights."""
    config = load_tables(RLRunConfig, CONFIG, [*model, *KEYS, f"folder={folder}", *keys])
    tokenizer = build_tokenizer(config.data, config.model.hf_path)
    assert tokenizer is not None
    base = build_base(config.model, config.training, "cpu")
    return Tenants(config, Chat(tokenizer), base, threading.Lock())


_clients: list[tinker.ServiceClient] = []


@contextmanager
def serving(
    folder: Path, snapshot: str | None = None, secret: str | None = None
) -> Iterator[tuple[str, TinkerAPI]]:
    """Serves the model of a snapshot, or a tiny one, at the address that it yields."""
    engine = tenants(folder, model=(f"model.hf_path={snapshot}",) if snapshot else RANDOM)
    api = TinkerAPI(
        engine, snapshot or "debug/tiny", folder / "tinker", engine.config.serve.max_sessions, secret
    )
    recorder = ModelRecorder(engine.chat, engine.config.rl)
    server = AgentServer(recorder, engine.config.serve, "tiny", secret, api.routes())
    api.start()
    try:
        yield server.start(), api
    finally:
        while _clients:  # else their threads would warn of missing heartbeats in other tests
            with suppress(tinker.NotFoundError):  # the session has ended
                _clients.pop().close("success").result()
        server.close()
        api.close()


def connect(url: str, key: str = "tml-a") -> tinker.ServiceClient:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _clients.append(tinker.ServiceClient(base_url=url, api_key=key))
    return _clients[-1]


def datum(tokens: list[int], targets: object = None, **inputs: object) -> types.Datum:
    """Returns a datum whose targets are the tokens that follow, unless others are given."""
    follow = np.array(tokens[1:]) if targets is None else np.array(targets)
    arrays = {"target_tokens": follow, **{name: np.array(x, np.float32) for name, x in inputs.items()}}
    text = types.ModelInput.from_ints(tokens[:-1] if targets is None else tokens)
    # Sparse matrices are what the client sends for two dimensions.
    given = {name: torch.from_numpy(x) if x.ndim == 2 else x for name, x in arrays.items()}
    return types.Datum(model_input=text, loss_fn_inputs=given)
