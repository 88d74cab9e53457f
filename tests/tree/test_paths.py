"""TokenPath: log-probs by either name, tokens that were not scored, and values that are refused."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import LOGPROBS, TokenPath
from titan_tree.tree.token_tree import TokenTree

NAN = float("nan")


@pytest.mark.parametrize("name", LOGPROBS)
def test_log_probs_of_t_and_of_t_minus_1_entries_have_different_names(name):
    full = TokenPath([5, 6, 7], **{name: [0, -1, -2]})
    shifted = TokenPath([5, 6, 7], **{f"shifted_{name}": [-1, -2]})
    np.testing.assert_array_equal(getattr(full, name), [0, -1, -2])
    np.testing.assert_array_equal(getattr(shifted, name), np.float32([NAN, -1, -2]))
    fields = [getattr(TreeBatch.from_trees([TokenTree.from_paths([p])]).pairs, name) for p in (full, shifted)]
    assert [field.tolist() for field in fields] == [[-1, -2]] * 2
    copy = dataclasses.replace(shifted, id="copy")
    np.testing.assert_array_equal(getattr(copy, name), getattr(shifted, name))

    short = rf"{name}: expected 3 entries, one per token, got 2; if entry t belongs to tokens\[t \+ 1\]"
    with pytest.raises(UserError, match=rf"^path p: {short}, name the field shifted_{name}$"):
        TokenPath([5, 6, 7], id="p", **{name: [-1, -2]})
    long = (
        rf"shifted_{name}: expected 2 entries, one per token after the first, got 3; .* name the field {name}"
    )
    with pytest.raises(UserError, match=rf"^path p: {long}$"):
        TokenPath([5, 6, 7], id="p", **{f"shifted_{name}": [0, -1, -2]})
    with pytest.raises(UserError, match=rf"{name}: expected 3 entries, one per token, got 5$"):
        TokenPath([5, 6, 7], **{name: [0] * 5})
    with pytest.raises(UserError, match=rf"expected either {name} or shifted_{name}, got both"):
        TokenPath([5, 6], **{name: [0, -1], f"shifted_{name}": [-1]})


def test_tokens_outside_of_the_loss_need_no_log_probs():
    path = TokenPath([5, 6, 7, 8], [1, 0, 1, 0], old_logprobs=[None, None, -1, NAN], advantage=1)
    np.testing.assert_array_equal(path.old_logprobs, np.float32([NAN, NAN, -1, NAN]))
    pairs = TreeBatch.from_trees([TokenTree.from_paths([path])]).pairs
    assert pairs.old_logprobs.tolist() == [0, -1, 0]
    with pytest.raises(
        UserError, match=r"old_logprobs: .* got nan at token 2; only tokens with loss mask 0 may"
    ):
        TokenPath([5, 6, 7], [0, 0, 1], old_logprobs=[0, 0, None])
    with pytest.raises(UserError, match=r"shifted_ref_logprobs: .* got nan at token 1; only"):
        TokenPath([5, 6], shifted_ref_logprobs=[None])
    with pytest.raises(
        UserError, match=r"old_logprobs: expected numbers from -1e12 to 0, got -inf at token 1$"
    ):
        TokenPath([5, 6], [0, 0], old_logprobs=[0, -math.inf])


def test_one_policy_version_or_one_per_token():
    assert TokenPath([5, 6], policy_version=3).policy_version.tolist() == [3, 3]
    assert TokenPath([5, 6], policy_version=[3, 4]).policy_version.tolist() == [3, 4]
    prompt = TokenPath([5, 6, 7], [1, 0, 1], policy_version=[None, -1, 4])  # the first mask is not read
    assert prompt.policy_version.tolist() == [-1, -1, 4]


@for_each(
    ("fields", "message"),
    [
        ({"weight": "1"}, "weight: expected a number from 0 to 1e12, got '1'"),
        ({"weight": True}, "weight: expected a number from 0 to 1e12, got True"),
        ({"weight": 10**310}, "weight: expected a number from 0 to 1e12, got 1000"),
        ({"weight": 1e39}, r"weight: expected a number from 0 to 1e12, got 1e\+39"),
        ({"weight": 2e12}, r"weight: expected a number from 0 to 1e12, got 2000000000000\.0"),
        ({"temperature": 2e12}, "temperature: expected a number > 0 and up to 1e12, got 2000000000000.0"),
        ({"advantage": [0, -2e12]}, "advantage: expected numbers from -1e12 to 1e12, got -1999"),
        ({"loss_mask": [0, 2e12]}, "loss_mask: expected every entry from 0 to 1e12, got 1999"),
        (
            {"old_logprobs": [0, -2e12]},
            "old_logprobs: expected numbers from -1e12 to 0, got -1999",
        ),
        (
            {"old_logprobs": [0, 0.9]},
            "old_logprobs: expected log-probs, which are at most 0, got 0.9 at token 1; these may be",
        ),
        (
            {"sampling_mask": [None, [5, 7]]},
            r"sampling_mask of token 1: expected the sampled id 6 among the ids",
        ),
        (
            {"sampling_mask": [[6]]},
            "sampling_mask: expected 2 lists of token ids, one per token, got 1 lists of 1",
        ),
        (
            {"sampling_mask": [6, 7]},
            r"sampling_mask: expected a list of token ids for each token, got \[6, 7\]",
        ),
        ({"sampling_mask": [[5], [6.5]]}, "sampling_mask: expected integer ids, got dtype float64"),
        ({"sampling_mask": [[5], [6, -1]]}, r"sampling_mask: expected ids from 0 to 2\*\*31 - 1, got -1"),
        ({"sampling_mask": "ab"}, "sampling_mask: expected a list of token ids for each token, got 'ab'"),
        ({"temperature": 1e-46}, "temperature: expected a number > 0 and up to 1e12, got 1e-46"),
        ({"temperature": 0}, "temperature: expected a number > 0 and up to 1e12, got 0"),
        ({"temperature": math.inf}, "temperature: expected a number > 0 and up to 1e12, got inf"),
        ({"temperature": "warm"}, "temperature: expected a number > 0 and up to 1e12, got 'warm'"),
        ({"advantage": "1"}, "advantage: expected numbers, got '1'"),
        ({"advantage": True}, "advantage: expected numbers, got True"),
        ({"advantage": [0, 10**310]}, "advantage: expected numbers up to 1e12"),
        ({"advantage": 1e300}, r"advantage: expected numbers up to 1e12, got 1e\+300"),
        ({"advantage": [1]}, "advantage: expected one value, or 2 entries, one per token, got 1"),
        ({"advantage": [None, 1]}, r"advantage: expected numbers, got \[None, 1\]"),
        ({"loss_mask": ["1", "0"]}, r"loss_mask: expected numbers, got \['1', '0'\]"),
        ({"loss_mask": [NAN, 1]}, "loss_mask: expected every entry from 0 to 1e12, got nan at token 0"),
        ({"loss_mask": 1}, r"loss_mask: expected 2 entries, one per token, got shape \(\)"),
        ({"old_logprobs": ["-1", "-2"]}, "old_logprobs: expected numbers"),
        ({"old_logprobs": [[0, -1]]}, r"old_logprobs: expected 2 entries, one per token, got shape \(1, 2\)"),
        ({"policy_version": 1.5}, "policy_version: expected integer versions, got dtype float64"),
        ({"policy_version": -2}, r"policy_version: expected versions from -1 to 2\*\*31 - 1, got -2"),
        ({"policy_version": [3, None]}, "policy_version: expected versions >= 0, got none at token 1"),
        ({"policy_version": [None, "4"]}, "policy_version: expected integer versions, got dtype object"),
        ({"policy_version": 10**30}, r"policy_version: expected versions from -1 to 2\*\*31 - 1, got 1000"),
        ({"policy_version": [1]}, "policy_version: expected one value, or 2 entries, one per token, got 1"),
        ({"rollout_tokens": 0.5}, "rollout_tokens: expected at least the path's own 1 loss tokens, got 0.5"),
        ({"tokens": [True, False]}, "tokens: expected integer ids, got dtype bool"),
        ({"tokens": [1, 10**30]}, r"tokens: expected ids from 0 to 2\*\*31 - 1, got 1000"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(UserError, match=f"^path p: {message}") as error:
        TokenPath(**({"tokens": [5, 6], "id": "p"} | fields))
    assert len(str(error.value)) < 150


def test_numbers_that_do_not_count_may_be_large():
    """Some engines report the smallest float for tokens that they did not score."""
    path = TokenPath([5, 6, 7], [0, 0, 1], old_logprobs=[0, -3e38, -1], weight=1e-50)
    assert path.old_logprobs[1] == np.float32(-3e38)
    assert path.weight == 0  # as in the float32 of a batch


def test_tensors_with_gradients_are_refused():
    values = torch.zeros(2, requires_grad=True)
    for field in ("old_logprobs", "shifted_ref_logprobs", "advantage", "loss_mask", "tokens"):
        with pytest.raises(UserError, match=rf"path \?: {field}: .* grad.*; pass {field}\.detach\(\)"):
            TokenPath(**{"tokens": [5, 6], field: values})


def test_booleans_are_masks_in_python():
    assert TokenPath([5, 6], np.array([False, True])).loss_mask.tolist() == [0, 1]
