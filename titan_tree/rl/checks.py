"""What must hold before reinforcement learning starts. A warm start of minutes may come before it."""

from __future__ import annotations

import torch

from titan_tree.config.rl import RLRunConfig
from titan_tree.config.tables import check_warmup
from titan_tree.data.advantages import WITHOUT_BRANCHES, check_options
from titan_tree.distributed.parallelize import check_quantize
from titan_tree.errors import UserError
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.reference_policy import check_reference, check_vocabulary
from titan_tree.rl.sampler import RemoteSampler, Sampler
from titan_tree.rl.server.served import build_server_sampler
from titan_tree.run.build import DEFAULT_STEPS, build_loss, build_router_bias
from titan_tree.run.model_setup import build_lora, build_model_without_weights


def check_without_weights(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError for all that ``RLTrainer`` would refuse and that does not depend on weights.

    Args:
        sampler: see ``check_settings``.
    """
    check_settings(config, sampler)
    if config.lora.quantize != "none":
        check_quantize(config.training.float8, config.training.compile)
    with torch.device("meta"):
        model = build_model_without_weights(config.model)
    updates, _ = build_lora(config.lora, model)
    if updates is not None:
        add_lora(model, updates)
    build_router_bias(config.router_bias, model)
    check_model(config, model, sampler)
    if config.rl.server.url is not None:
        build_server_sampler(config, model, run="")  # sends no request


def check_settings(config: RLRunConfig, sampler: Sampler | None = None) -> None:
    """Raises UserError if settings do not fit together, whatever the model is.

    Args:
        sampler: that Python code gives, see ``EpisodeTrainer``.
    """
    rl = config.rl
    check_options(rl.advantage, rl.advantage_options, "rl")
    if rl.branches and rl.advantage in WITHOUT_BRANCHES:
        raise UserError(
            f"rl.branches: expected 0, because rl.advantage = {rl.advantage!r} would take branches for "
            f'independent rollouts, got {rl.branches}; set rl.advantage = "spo", or rl.branches = 0'
        )
    if rl.server.url is not None and sampler is not None:
        raise UserError(
            "rl.server.url: expected none together with a sampler that Python code gives; remove one"
        )
    if rl.async_steps and rl.server.url is None and not isinstance(sampler, RemoteSampler):
        raise UserError(
            "rl.async_steps: expected 0, because the sampler has no weights of its own to sample from while "
            "the model trains; set rl.server.url"
        )
    if config.data.replay != "off" and rl.server.url is None and sampler is None:
        raise UserError(
            "data.replay: expected 'off' without a server, because the model that is trained records no "
            f"experts when it samples, got {config.data.replay!r}; set it to 'off', or set rl.server.url"
        )
    check_warmup(config.lr_scheduler.warmup_steps, config.training.steps or DEFAULT_STEPS)
    check_reference(config, build_loss(config.loss))


def check_model(config: RLRunConfig, model: TreeModel, sampler: Sampler | None = None) -> None:
    """Raises UserError if settings do not fit the model, which may be on the meta device.

    Args:
        sampler: see ``check_settings``. Its contexts may be shorter than ``rl.max_rollout_tokens``.
    """
    limit, positions = config.rl.max_rollout_tokens, model.config.max_position_embeddings
    if sampler is None and limit > positions:
        raise UserError(
            f"rl.max_rollout_tokens: expected at most the model's {positions:,} positions, got {limit:,}; "
            "lower it"
        )
    if config.data.replay != "off" and model.experts is None:
        raise UserError(
            f"data.replay: expected 'off' for a model without experts, got {config.data.replay!r}"
        )
    check_vocabulary(config, model)
