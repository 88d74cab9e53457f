"""A model of transformers in place, sharded by FSDP2 as verl does it, in bf16."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.transformers.in_place import InPlaceModel
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Gradients = dict[str, Tensor]


def sharded_in_bf16(hf: PreTrainedModel, device: str) -> Any:
    """Shards layers, embedding and head of ``hf`` as units over one rank, and checkpoints layers."""
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf.train().to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    base: Any = hf.base_model
    units = [*base.layers, *([] if hf.config.tie_word_embeddings else [base.embed_tokens, hf.lm_head]), hf]
    for module in units:
        fully_shard(module, mesh=init_device_mesh(device, (1,)), mp_policy=policy)
    return hf


def path_gradients(model: Any, paths: list[list[int]], device: str) -> Gradients:
    """Returns the gradients of the mean loss per token, path by path."""
    total = sum(len(path) - 1 for path in paths)
    for path in paths:
        ids = torch.tensor([path], device=device)
        log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        (-log_p.gather(1, ids[0, 1:, None]).sum() / total).backward()
    return gradients(model)


def tree_gradients(
    hf: PreTrainedModel, paths: list[list[int]], device: str, max_tokens: int | None
) -> Gradients:
    """Returns the same gradients, from a tree."""
    model = InPlaceModel(hf)
    model.wrapped_by(sharded_in_bf16(hf, device), torch.bfloat16)
    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(model, TreeLoss("sft", reduction="token_mean"), device, partitioner)
    prepared = step.prepare([[TokenTree.from_paths([TokenPath(path) for path in paths])]])
    assert (prepared.counts.forwards > 1) == (max_tokens is not None)
    step.run(prepared)
    return gradients(hf)


def gradients(model: Any) -> Gradients:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(g, "full_tensor", lambda g=g: g)().float().cpu() for name, g in found.items()}


def assert_bf16_is_as_exact(
    hf: PreTrainedModel, paths: list[list[int]], device: str, max_tokens: int
) -> None:
    """Compares errors of gradients with those of the sharded model itself, path by path in bf16."""
    exact = path_gradients(copy.deepcopy(hf).to(device), paths, device)

    def error(found: Gradients) -> float:
        assert found.keys() == exact.keys()
        squares = sum(float((found[name] - want).square().sum()) for name, want in exact.items())
        return (squares / sum(float(want.square().sum()) for want in exact.values())) ** 0.5

    own = error(path_gradients(sharded_in_bf16(copy.deepcopy(hf), device), paths, device))
    for budget in (None, max_tokens):
        assert error(tree_gradients(copy.deepcopy(hf), paths, device, budget)) < 1.2 * own
