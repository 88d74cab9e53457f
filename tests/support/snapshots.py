"""Shared helpers of the tests of Hugging Face snapshots."""

import json

import torch

from tests.support.oracle import path_logprobs, tree_batch
from titan_tree.tree.paths import TokenPath

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def edit_config(folder, **changes):
    """Changes fields of a snapshot's config.json. The value ``...`` removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def same_weights(model, hf):
    """Returns whether transformers' model has the same parameters, bit for bit."""
    want = {name.removeprefix("model."): p for name, p in hf.named_parameters()}
    got = dict(model.named_parameters())
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def assert_scores_like(model, hf):
    """Asserts that both models give the same log-probabilities on one path."""
    logprobs = model(tree_batch([[TokenPath(TOKENS)]])).logprobs
    torch.testing.assert_close(logprobs, path_logprobs(hf, TOKENS), rtol=1e-5, atol=1e-5)
