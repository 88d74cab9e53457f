"""tree_logprobs against transformers on every list alone."""

import pytest
import torch

from tests.support.oracle import hf_model, path_logprobs, random_groups, relative_error, tree_model
from titan_tree.errors import UserError
from titan_tree.scoring.score_trees import tree_logprobs


@pytest.fixture(scope="module")
def models():
    hf = hf_model(tied=True)
    return hf, tree_model(hf)


@pytest.mark.parametrize("seed", range(8))
def test_every_list_gets_its_log_probs_in_the_order_given(models, seed):
    """Lists are duplicates, prefixes of one another or single tokens. Gradients are compared as well."""
    hf, model = models
    lists = [path.tokens.tolist() for paths in random_groups(seed) for path in paths]
    assert len({tuple(tokens) for tokens in lists}) < len(lists)
    got = tree_logprobs(model, lists)
    want = [path_logprobs(hf, tokens) for tokens in lists]
    assert [len(x) for x in got] == [len(tokens) - 1 for tokens in lists]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)

    # Any function of the log-probs differentiates: here, squares weighted by the place in the list.
    def gradients(logprobs, model):
        loss = sum((i + 1) * x.square().sum() for i, x in enumerate(logprobs))
        names, parameters = zip(*model.named_parameters(), strict=True)
        stripped = [name.removeprefix("model.") for name in names]
        return dict(zip(stripped, torch.autograd.grad(loss, parameters), strict=True))

    mine, theirs = gradients(got, model), gradients(want, hf)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative_error(mine[name], gradient) < 1e-5, name


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_partitions_score_alike(models, max_tokens):
    _, model = models
    for seed in range(4):
        lists = [path.tokens.tolist() for paths in random_groups(seed) for path in paths]
        with torch.no_grad():
            whole, pieces = tree_logprobs(model, lists), tree_logprobs(model, lists, max_tokens)
        for mine, theirs in zip(pieces, whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_partitions_have_no_gradients(models):
    with pytest.raises(UserError, match=r"max_tokens: expected gradients to be disabled.*torch.no_grad\(\)"):
        tree_logprobs(models[1], [[1, 2]], max_tokens=1)


def test_tensors_arrays_and_lists_are_alike(models):
    _, model = models
    tokens = [4, 8, 15, 16, 23]
    results = tree_logprobs(model, [tokens, torch.tensor(tokens), torch.tensor(tokens).numpy()])
    assert all(torch.equal(results[0], x) for x in results)


def test_nothing_gives_nothing(models):
    assert tree_logprobs(models[1], []) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "path 1: tokens: expected a non-empty list"),
        (5, "path 1: tokens: expected a non-empty list of token ids, got 5"),
        ("hello", "path 1: tokens: expected a non-empty list of token ids, got 'hello'"),
        ([1, -2], "path 1: tokens: expected ids from 0"),
        ([1, 61], "path 1: token id 61 at token 1: expected ids below the model's vocabulary size 61"),
        ([1] * 513, "path 1: it has 513 tokens, but the model has 512 positions"),
    ],
)
def test_bad_lists_are_named(models, tokens, message):
    with pytest.raises(UserError, match=message):
        tree_logprobs(models[1], [[1, 2], tokens])
