"""Qwen3 on token trees against transformers on every path alone."""

import copy

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.oracle import (
    KINDS,
    assert_same,
    flat,
    hf_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.models.qwen3 import Qwen3
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

NUM_FORESTS = 8


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def models(request):
    hf = hf_model(tied=request.param)
    return hf, tree_model(hf, "reference")


@pytest.mark.parametrize("seed", range(NUM_FORESTS))
def test_one_pass_over_the_tree_equals_every_path_alone(models, seed):
    hf, model = models
    groups = random_groups(seed)
    assert_same(in_one_pass(model, groups), per_path(hf, flat(groups)))


@pytest.mark.parametrize("reduction", ["token_mean", "path_token_mean"])
@pytest.mark.parametrize("seed", range(2))
def test_every_reduction_equals_every_path_alone(models, seed, reduction):
    hf, model = models
    groups = random_groups(seed)
    got = in_one_pass(model, groups, reduction=reduction)
    assert_same(got, per_path(hf, flat(groups), reduction))


def test_the_random_forests_contain_every_trap():
    seen = set()
    for seed in range(NUM_FORESTS):
        groups = random_groups(seed)
        paths = flat(groups)
        tokens = [path.tokens.tolist() for path in paths]
        children = np.bincount(tree_batch(groups).edge_source)
        traps = {
            "duplicate": any(tokens.count(t) > 1 for t in tokens),
            "prefix of another": any(a != b and b[: len(a)] == a for a in tokens for b in tokens),
            "one token": any(len(t) == 1 for t in tokens),
            "empty mask": any(not path.loss_mask[1:].any() for path in paths),
            "weight 0": any(path.weight == 0 for path in paths),
            "wide": children.max() >= 8,
            "deep": max(TokenTree.from_paths(group).stats.max_depth for group in groups) >= 12,
            "forest": len(groups) > 1,
        }
        seen |= {trap for trap, present in traps.items() if present}
    assert seen == traps.keys()


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_scoring_only_loss_edges_changes_no_gradient(models, seed):
    _, model = models
    groups = random_groups(seed)
    _, loss, gradients = in_one_pass(model, groups, edges="all")
    _, loss_only, gradients_only = in_one_pass(model, groups, edges="loss")
    assert abs(loss - loss_only) < 1e-6 * loss
    for name, gradient in gradients.items():
        assert relative_error(gradients_only[name], gradient) < 5e-6, name


def test_entropy_is_that_of_the_next_tokens_distribution(models):
    hf, model = models
    tokens = [5, 9, 9, 2, 40]
    entropy = model(tree_batch([[TokenPath(tokens)]]), entropy=True).entropy
    log_p = hf(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    assert model(tree_batch([[TokenPath(tokens)]])).entropy is None


def test_a_siblings_tokens_do_not_leak(models):
    """Results are equal bit for bit. The sibling is left of this branch, right of it, or in another tree."""
    _, model = models
    prompt, mine = [1, 2, 3, 4], [5, 6, 7]
    before = [10, 11, 12, 13, 14]  # longer, so it is left of mine
    after = [20, 21]

    def logprobs(before, after):
        paths = [TokenPath(prompt + branch) for branch in (before, mine, after)]
        batch = tree_batch([paths, [TokenPath(after)]])
        return model(batch).logprobs[batch.pairs.edge[batch.pairs.path == 1]]

    want = logprobs(before, after)
    assert torch.equal(logprobs([30, 31, 32, 33, 34], after), want)
    assert torch.equal(logprobs(before, [40, 41]), want)
    assert torch.equal(logprobs([30, 31, 32, 33, 34], [40, 41]), want)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_the_order_of_the_paths_changes_nothing(models, seed):
    _, model = models
    for paths in random_groups(seed):
        order = np.random.default_rng(seed).permutation(len(paths))
        logprobs, _, gradients = in_one_pass(model, [paths])
        shuffled, _, shuffled_gradients = in_one_pass(model, [[paths[i] for i in order]])
        for got, i in zip(shuffled, order, strict=True):
            assert torch.equal(got, logprobs[i])
        for name, gradient in gradients.items():
            assert relative_error(shuffled_gradients[name], gradient) < 1e-5, name


def test_a_single_token_gives_every_parameter_a_zero_gradient(models):
    _, model = models
    model.zero_grad(set_to_none=True)
    out = model(tree_batch([[TokenPath([3])]]))
    assert out.logprobs.shape == (0,)
    out.logprobs.sum().backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_checkpointed_blocks_give_the_same_gradients(models):
    _, model = models
    checkpointed = copy.deepcopy(model)
    for name, block in list(checkpointed.layers.named_children()):
        checkpointed.layers.register_module(name, checkpoint_wrapper(block))
    groups = random_groups(3)
    got, want = in_one_pass(checkpointed, groups), in_one_pass(model, groups)
    assert got[1] == want[1]
    for mine, theirs in zip(got[2].values(), want[2].values(), strict=True):
        assert torch.equal(mine, theirs)
    assert checkpointed.state_dict().keys() == model.state_dict().keys()


# Parameters and registry


def test_parameter_names_are_those_of_hugging_face(models):
    hf, model = models
    names = {name.removeprefix("model.") for name, _ in hf.named_parameters()}
    assert {name for name, _ in model.named_parameters()} == names


def test_weights_can_be_drawn_after_the_meta_device():
    with torch.device("meta"):
        model = build_model("qwen3", "debug", "reference", tie_word_embeddings=False)
    model.to_empty(device="cpu")
    model.init_weights(seed=1)
    again = Qwen3(model.config)
    again.init_weights(seed=1)
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std() - 0.02) < 1e-3, name
            assert abs(parameter.mean()) < 1e-3, name


def test_training_flops_equal_a_count_by_hand():
    model = build_model("qwen3", "debug", num_hidden_layers=3)
    paths = [TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 5], loss_mask=[0, 0, 0]), TokenPath([7, 8])]
    visible_pairs = (1 + 2 + 3 + 4) + 3 + (1 + 2)
    d, hidden, heads, kv_heads, head_dim = 128, 384, 4, 2, 32
    matrices = 3 * (2 * d * heads * head_dim + 2 * d * kv_heads * head_dim + 3 * d * hidden)
    attention = 12 * 3 * heads * head_dim * visible_pairs
    for edges, num_edges in (("all", 5), ("loss", 4)):
        flops = model.costs().training_flops(tree_batch([paths], edges=edges))
        assert flops == 6 * matrices * 7 + 6 * 512 * d * num_edges + attention


def test_token_ids_in_place_of_a_batch_are_refused(models):
    with pytest.raises(UserError, match=r"^model: expected a TreeBatch, got Tensor; .*use tree_logprobs"):
        models[1](torch.tensor([[1, 2, 3]]))
