"""Models of transformers on trees, against the unmodified models on every path alone."""

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.hf_families import VOCAB, hf_family, hf_logprobs
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.engine.scoring import tree_logprobs
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.transformers import TransformersModel
from titan_tree.models.transformers.support import SUPPORTED
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def random_paths() -> list[list[int]]:
    """Returns paths that branch twice and are longer than the windows. One ends where another goes on."""
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(number)]

    trunk = tokens(12)
    stem = trunk + tokens(5)
    return [stem + tokens(6), stem + tokens(3), stem, trunk + tokens(9), trunk[:7] + tokens(8)]


PATHS = random_paths()


def oracle(model: PreTrainedModel) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Returns log-probs of all paths, the mean loss, and its gradients by parameter, path by path."""
    model.zero_grad()
    logprobs = [hf_logprobs(model, path) for path in PATHS]
    loss = -torch.cat(logprobs).sum() / sum(map(len, logprobs))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [each.detach() for each in logprobs], loss.detach(), gradients


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_trees_equal_paths_through_the_unmodified_model(name: str) -> None:
    """In float64, although transformers computes softmax and rotary embeddings in float32."""
    hf = hf_family(name, torch.float64)
    logprobs, loss, gradients = oracle(hf)
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    model = TransformersModel(hf)
    for max_tokens in (None, 12):
        for got, want in zip(tree_logprobs_of(model, max_tokens), logprobs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)
        partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
        step = TreeStep(model, TreeLoss("sft", reduction="token_mean"), partitioner=partitioner)
        prepared = step.prepare([[TokenTree.from_paths([TokenPath(path) for path in PATHS])]])
        assert (prepared.counts.forwards > 1) == (max_tokens is not None)
        torch.testing.assert_close(step.run(prepared).loss, loss, rtol=1e-5, atol=0, check_dtype=False)
        found = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
        assert found.keys() == gradients.keys()
        for key, want in gradients.items():
            assert (found[key] - want).norm() <= 1e-5 * want.norm(), key
        model.zero_grad()


def tree_logprobs_of(model: TransformersModel, max_tokens: int | None) -> list[Tensor]:
    with torch.no_grad():
        return tree_logprobs(model, PATHS, max_tokens)
