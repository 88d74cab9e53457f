"""From the table [rl.server] to a ServerSampler."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from titan_tree.config.rl import RLRunConfig
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.server.broadcast import BroadcastTransfer
from titan_tree.rl.server.client import Server
from titan_tree.rl.server.engines import VLLM, Engine, SGLang
from titan_tree.rl.server.server_sampler import ServerSampler
from titan_tree.rl.server.vllm_transfer import VLLMTransfer
from titan_tree.rl.server.weight_push import AdapterPush, FolderTransfer, ModelPush, Transfer, WeightPush


def build_server_sampler(config: RLRunConfig, model: TreeModel, run: str) -> ServerSampler:
    """Returns the sampler that ``config.rl.server`` describes.

    Each call makes names of its own for versions of the weights, because a run that was killed may have left
    its versions on the server.

    Args:
        model: that is trained.
        run: id of the run, with which the names begin.

    Raises:
        UserError: the settings do not fit the model or the environment.
    """
    table = config.rl.server
    assert table.url is not None
    api_key = None
    if table.api_key_env is not None and (api_key := os.environ.get(table.api_key_env)) is None:
        raise UserError(
            f"rl.server.api_key_env: expected the name of an environment variable, got "
            f"{table.api_key_env!r}, which is not set; export it"
        )
    names = f"{run}-{secrets.token_hex(2)}"
    server = Server(table.url, api_key, table.timeout_s, table.attempts)
    replays = config.data.replay != "off"
    if model.experts and model.experts.router_biases() and not replays:
        raise UserError(
            "rl.server.url: expected a model without router biases, which servers do not know, so they would "
            'choose other experts; remove router_bias.rate, or set data.replay = "first"'
        )
    return ServerSampler(
        table.url,
        table.model,
        api_key,
        table.concurrency,
        table.timeout_s,
        table.attempts,
        api=table.api,
        push=_push(config, model, VLLM(server) if table.api == "vllm" else SGLang(server), names),
        experts=model.experts.sizes if replays and model.experts else None,
    )


def _push(config: RLRunConfig, model: TreeModel, engine: Engine, run: str) -> WeightPush:
    table, source, dtype = config.rl.server, config.model.hf_path, getattr(torch, config.training.dtype)
    folder = Path(config.folder) / "rollout_weights"
    if table.weights == "adapter":
        if model.lora is None:
            raise UserError(
                'rl.server.weights: expected "folder" or "broadcast" for a model without LoRA, got '
                '"adapter"; or set lora.rank'
            )
        return AdapterPush(engine, folder, source, run)
    transfer: Transfer
    if table.weights == "folder":
        transfer = FolderTransfer(engine, folder, dtype, source)
    elif table.api == "vllm":
        transfer = VLLMTransfer(engine, dtype, source)
    else:
        transfer = BroadcastTransfer(engine, dtype, source)
    return ModelPush(engine, transfer, run)
