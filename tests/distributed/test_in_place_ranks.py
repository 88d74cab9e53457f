"""A model that stays in place, sharded by somebody else: FSDP2 on two ranks equals one rank without it."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.models.test_transformers import PATHS
from tests.support.hf_families import hf_family
from tests.support.in_place import assert_bf16_is_as_exact
from tests.support.processes import process_group, run_ranks
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.transformers.in_place import InPlaceModel
from titan_tree.scoring.score_trees import score_paths
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

pytestmark = [pytest.mark.slow]
MAX_TOKENS = 12
SHARES = [PATHS[:4], PATHS[4:]]  # several partitions, and two


def gradients(
    name: str, lora: bool, num_ranks: int, shares: list[list[list[int]]]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the gradients after two steps, with a micro-batch per share, and the log-probs of all paths."""
    hf = hf_family(name)
    model = InPlaceModel(hf)
    root: Any = hf
    if lora:
        torch.manual_seed(1)
        root = get_peft_model(hf, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,))
        base: Any = hf.base_model
        heads = [] if hf.config.tie_word_embeddings else [hf.lm_head, base.embed_tokens]
        for module in (*base.layers, *heads, root):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    model.wrapped_by(root)
    weights = list(root.parameters())  # the shards, as an optimizer holds them
    step = TreeStep(model, TreeLoss("sft"), partitioner=TreePartitioner("redundancy_free", MAX_TOKENS))
    trees = [[TokenTree.from_paths([TokenPath(path) for path in share])] for share in shares]
    for _ in range(2):
        prepared = step.prepare(trees)
        assert prepared.counts.forwards > 1
        step.run(prepared)
    found = {key: p.grad for key, p in root.named_parameters() if p.grad is not None}
    paths = [TokenPath(path) for share in shares for path in share]
    scores = []
    for _ in range(2):  # before and after a change of the weights
        scores += [score.logprobs[1:] for score in score_paths(model, paths, MAX_TOKENS)]
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.1)
    return {key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in found.items()}, scores


def rank_run(rank: int, ports: list[int], name: str, lora: bool) -> None:
    with process_group(rank, 2, ports[0]):
        found, scores = gradients(name, lora, 2, [SHARES[rank]])
    want, all_scores = gradients(name, lora, 1, SHARES)
    ends = [0, *itertools.accumulate(map(len, SHARES))]
    half = len(all_scores) // 2
    own = [
        score
        for each in (all_scores[:half], all_scores[half:])
        for score in each[ends[rank] : ends[rank + 1]]
    ]
    for got, expected in zip(scores, own, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert found.keys() == want.keys()
    for key, expected in want.items():
        assert (found[key] - expected).norm() <= 1e-5 * expected.norm(), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", False),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("qwen3", False), ("llama", True))),
    ],
)
def test_ranks_with_different_numbers_of_partitions_sum_their_gradients(name: str, lora: bool) -> None:
    run_ranks(rank_run, 2, name, lora)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bf16_is_as_exact_as_that_of_the_model_itself(name: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert_bf16_is_as_exact(hf_family(name), PATHS, "cpu", MAX_TOKENS)
    finally:
        dist.destroy_process_group()
