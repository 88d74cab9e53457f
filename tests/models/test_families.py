"""What holds for each native family: published sizes, refused names and sizes, partitions of its trees."""

from typing import Any

import pytest
import torch

from tests.support.oracle import (
    hf_model,
    hybrid_model,
    in_one_pass,
    random_groups,
    relative_error,
    tree_model,
)
from tests.support.partitions import RandomCuts, forest_of, in_partitions
from titan_tree.components.moe.layer import MoE
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model

# Family and flavor -> billions of parameters, and of those that act on a token. Names of Qwen3.5 count them
# without vision and multi-token prediction. test_llama.py has the sizes of Llama.
PUBLISHED = {
    ("qwen3", "0.6B"): (0.596, 0.596),
    ("qwen3", "1.7B"): (1.721, 1.721),
    ("qwen3", "4B"): (4.022, 4.022),
    ("qwen3", "8B"): (8.191, 8.191),
    ("qwen3", "14B"): (14.768, 14.768),
    ("qwen3", "32B"): (32.762, 32.762),
    ("qwen3_moe", "30B-A3B"): (30.532, 3.353),
    ("qwen3_moe", "235B-A22B"): (235.094, 22.191),
    ("qwen3_5", "0.8B"): (0.752, 0.752),
    ("qwen3_5", "2B"): (1.882, 1.882),
    ("qwen3_5", "4B"): (4.206, 4.206),
    ("qwen3_5", "9B"): (8.954, 8.954),
    ("qwen3_5", "27B"): (26.896, 26.896),
    ("qwen3_5_moe", "35B-A3B"): (34.661, 3.455),
    ("qwen3_5_moe", "122B-A10B"): (122.112, 9.771),
    ("qwen3_5_moe", "397B-A17B"): (396.346, 17.349),
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_published_sizes(family: str, flavor: str) -> None:
    with torch.device("meta"):
        model = build_model(family, flavor)
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(experts) == (model.config.num_hidden_layers if family.endswith("moe") else 0)
    idle = sum(sum(p.numel() for p in moe.experts.parameters()) - moe.active_parameters for moe in experts)
    sizes = model.num_parameters(), model.num_parameters() - idle
    assert tuple(round(size / 1e9, 3) for size in sizes) == PUBLISHED[family, flavor]


@pytest.mark.parametrize(
    ("arguments", "overrides", "message"),
    [
        (("qwen", "debug"), {}, r"unknown model 'qwen'; did you mean 'qwen3'\?"),
        (("qwen3", "0.6b"), {}, r"unknown flavor of qwen3 '0.6b'; did you mean '0.6B'\?"),
        (("qwen3", "debug", "magic"), {}, "unknown TreeAttention backend 'magic'"),
        (("qwen3", "debug"), {"num_layers": 2}, "unknown field of qwen3's config 'num_layers'; did you mean"),
        (("qwen3", "debug"), {"num_key_value_heads": 3}, "heads: expected a divisor of num_attention_heads"),
        (("qwen3", "debug"), {"head_dim": 31}, "head_dim: expected an even number, got 31"),
        (("qwen3", "debug"), {"vocab_size": 0}, "vocab_size: expected an integer > 0, got 0"),
        (("qwen3_moe", "debug"), {"num_experts_per_tok": 9}, r"expected at most num_experts \(8\), got 9"),
        (("qwen3_moe", "debug"), {"mlp_only_layers": [-1]}, r"every item is an integer >= 0, got \[-1\]"),
        (("qwen3_moe", "debug"), {"mlp_only_layers": 3}, "mlp_only_layers: expected a list .*, got 3"),
        (("qwen3_moe", "debug"), {"num_experts": 0}, "num_experts: expected an integer > 0, got 0"),
        (("qwen3_moe", "debug"), {"num_experts": 32_769}, "expected at most 32768, .* got 32769"),
        (("qwen3_5", "debug"), {"linear_num_key_heads": 3}, "expected a divisor of linear_num_value_heads"),
        (("qwen3_5", "debug"), {"partial_rotary_factor": 0.1}, "expected a factor that rotates an even"),
        (("qwen3_5", "debug"), {"linear_conv_kernel_dim": 0}, "expected an integer > 0, got 0"),
    ],
)
def test_wrong_names_and_sizes_are_refused(
    arguments: tuple[str, ...], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_model(*arguments, **overrides)
    assert all(name in str(error.value) for name in overrides)


MODELS = {
    "experts": lambda seed: hf_model(tied=True, kind="Qwen3Moe", seed=seed),
    "hybrid": lambda seed: hybrid_model(tied=seed % 2 == 0, seed=seed),
    "hybrid with experts": lambda seed: hybrid_model(tied=True, kind="Qwen3_5Moe", seed=seed),
}
CUTS = {
    "some": lambda seed: RandomCuts(0.4, seed),
    "many": lambda seed: RandomCuts(0.6),
    "one token each": lambda seed: RandomCuts(1.0),
    "redundancy_free": lambda seed: TreePartitioner("redundancy_free", 1),
    "greedy": lambda seed: TreePartitioner("greedy", 20),
    "single_path": lambda seed: TreePartitioner("single_path", 20),
}
HYBRID = [("many", 0), ("one token each", 1), ("redundancy_free", 3), ("greedy", 2), ("single_path", 3)]


@pytest.mark.parametrize(
    ("model", "cuts", "seed"),
    [
        *(("hybrid", *case) for case in HYBRID),
        *(("experts", "some", seed) for seed in (0, 1, 2)),
        *(("hybrid with experts", "some", seed) for seed in (0, 2)),
    ],
)
def test_partitions_equal_one_pass(model: str, cuts: str, seed: int) -> None:
    """Exported states, exported inputs of the convolution and their gradients are equal, too, in float64."""
    made = tree_model(MODELS[model](seed)).double()
    groups = random_groups(seed)
    _, want_loss, want = in_one_pass(made, groups)
    plan = CUTS[cuts](seed).plan(forest_of(groups))
    loss, got = in_partitions(made, plan)
    assert len(plan) > 1
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < 1e-9, name
