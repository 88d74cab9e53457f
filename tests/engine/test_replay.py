"""Training with forced experts equals transformers on every path alone."""

import copy
import dataclasses
import itertools

import pytest
import torch

from tests.support.oracle import (
    assert_same,
    hf_model,
    hybrid_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import RandomCuts, in_partitions
from tests.support.records import LAYERS, MODES, TOP_K, expected_records, with_records
from titan_tree.components.moe.layer import MoE
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

MODELS = {
    "Qwen3-MoE": lambda seed: hf_model(True, kind="Qwen3Moe", seed=seed),
    "weights that are not normalized": lambda seed: hf_model(
        True, kind="Qwen3Moe", seed=seed, norm_topk_prob=False
    ),
    "Qwen3.5-MoE": lambda seed: hybrid_model(True, "Qwen3_5Moe", num_layers=LAYERS, seed=seed),
}


@pytest.mark.parametrize(
    ("model", "mode", "seed"),
    [(model, mode, i % 4) for i, (model, mode) in enumerate(itertools.product(MODELS, MODES))],
)
def test_replay_equals_every_path_alone_with_the_same_experts(model, mode, seed):
    """The router would choose other experts than nearly all of the random records."""
    hf = MODELS[model](seed)
    groups = with_records(random_groups(seed), seed)
    experts = [rows for paths in groups for rows in expected_records(paths, mode)[0]]
    want = per_path(hf, [path for paths in groups for path in paths], experts=experts)
    got = in_one_pass(tree_model(hf), groups, replay=mode)
    assert_same(got, want, 2e-5 if model == "Qwen3.5-MoE" else 1e-5)
    name = "layers.0.mlp.experts.down_proj"
    assert relative_error(in_one_pass(tree_model(hf), groups)[2][name], want[2][name]) > 0.1


@pytest.mark.parametrize("max_tokens", [None, 6, 15])  # at 15, some tokens run several times
def test_replaying_the_models_own_experts_changes_no_bit(max_tokens):
    """After a change of the router, replay equals transformers with the recorded experts."""
    hf = hf_model(True, kind="Qwen3Moe")
    model = tree_model(hf)
    groups = random_groups(2)
    lists = [path.tokens for path in groups[0]]
    with torch.no_grad():
        plain = tree_logprobs(model, lists, max_tokens)
        logprobs, experts = tree_logprobs(model, lists, max_tokens, return_routed_experts=True)
    assert all(map(torch.equal, logprobs, plain))
    assert [tuple(x.shape) for x in experts] == [(len(tokens), LAYERS, TOP_K) for tokens in lists]
    groups = [
        [dataclasses.replace(p, routed_experts=x.numpy()) for p, x in zip(groups[0], experts, strict=True)]
    ]
    assert TokenTree.from_paths(groups[0], "first").routed_experts.num_disagreeing == 0
    own = in_one_pass(model, groups)
    for mode in MODES:
        got = in_one_pass(model, groups, replay=mode)
        assert all(map(torch.equal, got[0], own[0]))
        assert got[1] == own[1]
        assert all(torch.equal(got[2][name], gradient) for name, gradient in own[2].items())

    with torch.no_grad():
        for router in (m for m in hf.modules() if type(m).__name__.endswith("TopKRouter")):
            router.weight += 0.05 * torch.randn_like(router.weight)
    changed = tree_model(hf)
    got = in_one_pass(changed, groups, replay="first")
    assert_same(got, per_path(hf, groups[0], experts=experts))
    # The changed router would choose different experts.
    assert abs(in_one_pass(changed, groups)[1] - got[1]) > 1e-4 * abs(got[1])


def test_recording_needs_a_model_with_experts():
    model = build_model("qwen3", "debug")
    with pytest.raises(UserError, match="return_routed_experts: expected a model with experts"):
        tree_logprobs(model, [[1, 2]], return_routed_experts=True)
    assert tree_logprobs(build_model("qwen3_moe", "debug"), [], return_routed_experts=True) == ([], [])


@pytest.mark.parametrize("mode", MODES)
def test_replay_over_partitions_equals_one_pass(mode):
    """The comparison is in float64, for random cuts."""
    model = tree_model(hf_model(True, kind="Qwen3Moe")).double()
    for seed in (0, 2):
        groups = with_records(random_groups(seed), seed)
        _, want_loss, want = in_one_pass(model, groups, replay=mode)
        forest = TokenTree.forest([TokenTree.from_paths(paths, mode) for paths in groups])
        loss, got = in_partitions(model, RandomCuts(0.4, seed).plan(forest))
        assert loss == pytest.approx(want_loss, rel=1e-12)
        for name, gradient in want.items():
            assert relative_error(got[name], gradient) < 1e-9, name


def test_routing_counts_forced_experts():
    model = build_model("qwen3_moe", "debug")
    paths = [TokenPath([1, 2, 3], routed_experts=[[[0, 1]] * 2] * 2), TokenPath([1, 2, 4])]
    routing = model(tree_batch([paths], replay="first")).routing
    liked = model(tree_batch([paths])).routed_experts
    for layer in range(2):
        others = torch.bincount(liked[layer][2:].flatten().long(), minlength=8)
        want = others + torch.tensor([2, 2] + [0] * 6)
        assert routing.tokens[layer].tolist() == want.tolist()
        assert routing.chosen[layer].tolist() == (others + torch.tensor([4, 4] + [0] * 6)).tolist()


@pytest.mark.slow
def test_forced_experts_compile_to_one_more_graph():
    made = MoE(8, 16, 5, 2, True)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    compiled = copy.deepcopy(made)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=counted, fullgraph=True, dynamic=True)
    for num_tokens in (5, 40, 2, 17):
        x, num_paths = torch.randn(num_tokens, 8), torch.rand(num_tokens)
        rows = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)]).to(torch.int16)
        rows[0] = -1
        for forced_experts in (None, rows):
            torch.testing.assert_close(
                compiled(x, num_paths, forced_experts), made(x, num_paths, forced_experts)
            )
    assert counted.frame_count == 2


def test_records_of_another_model_are_refused():
    batch = tree_batch([[TokenPath([1, 2], routed_experts=[[[0, 1]] * 3])]], replay="first")
    for name, message in (
        ("qwen3", "this model has no experts"),
        ("qwen3_moe", "as the model has, got 3 and 2"),
    ):
        with pytest.raises(UserError, match=message):
            build_model(name, "debug")(batch)
