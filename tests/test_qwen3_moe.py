"""Qwen3-MoE on token trees: against transformers on every path alone, experts first."""

import pytest
import torch

from tests.oracle import assert_same, hf_model, in_one_pass, per_path, random_groups, tree_batch, tree_model
from titan_tree.components.moe import MoE
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree
from titan_tree.errors import UserError
from titan_tree.models.registry import build_model

LAYERS = {
    "all": {},
    "not renormalised": {"norm_topk_prob": False},
    "every second": {"decoder_sparse_step": 2},
    "not the first": {"mlp_only_layers": [0]},
}


def flat(groups):
    return [path for group in groups for path in group]


def chosen_experts(model, groups):
    """[N, layers, k] of each token of the tree, in ascending order."""
    seen = []
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]

    def see(moe, arguments):
        seen.append((arguments[0] @ moe.gate.weight.t()).topk(moe.top_k).indices.sort().values)

    hooks = [moe.register_forward_pre_hook(see) for moe in mixtures]
    with torch.no_grad():
        model(tree_batch(groups))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def path_experts(hf, tokens):
    """The same of a path run alone."""
    with torch.no_grad():
        logits = hf(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([x.topk(hf.config.num_experts_per_tok).indices.sort().values for x in logits], dim=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(4))
def test_one_pass_equals_every_path_alone(seed, layers, tied):
    hf = hf_model(tied, kind="Qwen3Moe", seed=seed, **LAYERS[layers])
    model = tree_model(hf)
    groups = random_groups(seed)
    first, experts = 0, chosen_experts(model, groups)
    for group in groups:
        trie = TokenTree.from_paths(group)
        for i, path in enumerate(group):
            ours = experts[first + trie.indices_of(i)]
            assert torch.equal(ours, path_experts(hf, path.tokens.tolist()))
        first += len(trie)
    assert_same(in_one_pass(model, groups), per_path(hf, flat(groups)))


@pytest.mark.parametrize(
    ("flavor", "billions", "active"), [("30B-A3B", 30.532, 3.35), ("235B-A22B", 235.09, 22.2)]
)
def test_published_sizes(flavor, billions, active):
    with torch.device("meta"):
        model = build_model("qwen3_moe", flavor)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=1e-4)
    experts = [moe for moe in model.modules() if isinstance(moe, MoE)]
    assert len(experts) == model.config.num_hidden_layers
    idle = sum(sum(p.numel() for p in moe.experts.parameters()) - moe.active_parameters for moe in experts)
    assert (model.num_parameters() - idle) / 1e9 == pytest.approx(active, rel=1e-2)


def test_layers_without_experts():
    model = build_model("qwen3_moe", "debug", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)] == [1, 5]


def test_flops_count_the_experts_that_a_token_has():
    """By hand: of 4 experts 2; the router's matrix; attention's matrices and pairs."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": 4}
    model = build_model("qwen3_moe", "debug", **sizes)
    batch = tree_batch([[TokenPath([1, 2, 3]), TokenPath([1, 4])]])
    attention = 2 * 64 * 4 * 32 + 2 * 64 * 2 * 32
    matrices = attention + 4 * 64 + 2 * 3 * 32 * 64
    pairs = 1 + 2 + 3 + 2
    assert model.training_flops(batch) == 6 * (4 * matrices + 3 * 512 * 64) + 12 * 4 * 32 * pairs


def test_fresh_weights():
    torch.manual_seed(0)
    model = build_model("qwen3_moe", "debug")
    weights = dict(model.named_parameters())
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert weights[f"layers.0.mlp.{name}"].std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok: expected at most num_experts \(8\), got 9"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers: expected a list of integers >= 0, got \[-1\]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: expected a list of integers >= 0, got 3"),
        ({"num_experts": 0}, "num_experts: expected int > 0, got 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        build_model("qwen3_moe", "debug", **sizes)
