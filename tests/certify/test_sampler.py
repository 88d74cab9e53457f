"""The sampler against the trainer: the certificate names the cause of each token's difference."""

import copy

import numpy as np
import pytest
import torch

from tests.certify.test_certify import configured
from tests.support.cases import for_each
from titan_tree.certify.certified_step import opened
from titan_tree.certify.numbers import score
from titan_tree.certify.sampler import compare_sampler
from titan_tree.tree.path_fields import SamplingMask
from titan_tree.tree.token_tree import TokenTree


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    config = configured(tmp_path_factory.mktemp("sampler"), model__name="qwen3_moe")
    with opened(config, 1000) as opened_subject:
        with torch.no_grad():  # the initial weights give all tokens nearly equal log-probs
            for name, weight in opened_subject.tree_step.model.named_parameters():
                weight.mul_(4 if weight.ndim > 1 and "embed" not in name else 1)
        yield opened_subject


def compared(subject, sampled, trained, change):
    """Returns the check of paths like ``trained`` with log-probs of paths like ``sampled``, then changed."""
    subject = copy.copy(subject)
    micro_batches = subject.micro_batches
    subject.micro_batches = [[with_paths(tree, sampled, "first") for tree in micro_batches[0]]]
    logprobs = score(subject.tree_step, subject.micro_batches).logprobs
    subject.micro_batches = [[with_paths(tree, trained) for tree in micro_batches[0]]]
    for path, values in zip(subject.paths, logprobs, strict=True):
        path.rollout_logprobs = np.append(np.float32(np.nan), values.numpy())
        change(path)
    own = score(subject.tree_step, subject.micro_batches)
    return compare_sampler(subject, own, own, own)


def with_paths(tree, change, replay="off"):
    return TokenTree.from_paths([change(path) for path in tree.paths], replay)


def with_fields(**fields):
    def changed(path):
        path = copy.copy(path)
        for name, value in fields.items():
            setattr(path, name, value(path) if callable(value) else value)
        return path

    return changed


def kept_ids(path):
    """Returns a sampling mask of three quarters of the vocabulary, and the token itself."""
    ids = [np.union1d(np.arange(16, 64), [token]).astype(np.int32) for token in path.tokens]
    is_counted = path.loss_mask > 0
    sizes = np.array([len(i) if c else 0 for i, c in zip(ids, is_counted, strict=True)], np.int32)
    return SamplingMask(sizes, np.concatenate([i for i, c in zip(ids, is_counted, strict=True) if c]))


def other_experts(path):
    """Returns experts 6 and 7 for all tokens of all layers."""
    return np.tile(np.array([6, 7], np.int16), (len(path), 2, 1))


def unchanged(path):
    pass


def zeroed(path):
    path.rollout_logprobs[np.flatnonzero(path.loss_mask)[:1]] = 0


def shifted(path):
    path.rollout_logprobs[1:] = np.roll(path.rollout_logprobs[1:], 1)


def of_other_weights(path):
    path.rollout_logprobs = path.rollout_logprobs - 1 - np.arange(len(path), dtype=np.float32) % 3


SAME = with_fields()
MASKED = with_fields(sampling_mask=kept_ids)
RECORDED = with_fields(routed_experts=other_experts)


@pytest.mark.slow
@for_each(
    "sampled, trained, change, cause",
    [
        (SAME, SAME, unchanged, None),
        (with_fields(temperature=0.7), SAME, unchanged, "temperature = 0.7"),
        (SAME, with_fields(temperature=0.7), unchanged, "temperature = 1.0"),
        (SAME, MASKED, unchanged, "sampling support"),
        (MASKED, SAME, unchanged, "sampling support"),
        (RECORDED, RECORDED, unchanged, "routing"),
        (SAME, SAME, zeroed, "loss mask"),
        (SAME, SAME, shifted, "alignment"),
        (SAME, SAME, of_other_weights, "unknown"),
    ],
)
def test_each_difference_has_its_cause(subject, sampled, trained, change, cause):
    check = compared(subject, sampled, trained, change)
    assert {token["cause"] for token in check.tokens} == ({cause} - {None}), check
    assert check.passed is {None: True, "unknown": None}.get(cause, False)
