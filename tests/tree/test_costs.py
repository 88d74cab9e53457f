"""The cost model: costs of models, and what partitioning, balance and plan derive from them."""

import re
from pathlib import Path

import pytest
import torch

from titan_tree import TreePartitioner, build_model
from titan_tree.models.tree_model import Execution
from titan_tree.tree.costs import QWEN3_1_7B, ModelCosts
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def costs_of(name: str, flavor: str) -> ModelCosts:
    with torch.device("meta"):
        model = build_model(name, flavor)
    model.execution = Execution(torch.bfloat16)
    return model.costs()


def test_the_default_costs_are_those_of_qwen3_1_7b() -> None:
    assert costs_of("qwen3", "1.7B") == QWEN3_1_7B


def test_tree_costs_are_those_of_the_published_rates() -> None:
    """Qwen3-8B without recomputation: 7.4e-5 s per token, 4.1e-9 s per pair, 6.7e-6 s per edge."""
    costs = costs_of("qwen3", "8B").tree_costs()
    assert costs.token == pytest.approx(7.4e-5, rel=0.02)
    assert costs.visible_pair == pytest.approx(4.1e-9, rel=0.02)
    assert costs.edge == pytest.approx(6.7e-6, rel=0.02)
    assert costs.chunk == 0 < costs_of("qwen3_5", "debug").tree_costs().chunk
    assert costs.forward == pytest.approx(36 * 4e-3)


def test_auto_repeats_tokens_in_a_small_model_that_it_does_not_repeat_in_a_large_one() -> None:
    """A token takes 5 us in Qwen3-0.6B and 53 us in Qwen3-30B-A3B; a partition adds 15 and 26 ms."""
    prefix = list(range(1000))
    paths = [TokenPath([*prefix, *range(1000 * leaf, 1000 * leaf + 500)]) for leaf in range(10, 19)]
    tree = TokenTree.from_paths(paths)  # 5,500 tokens
    plans = {
        flavor: TreePartitioner("auto", 3100).plan(tree, costs_of(name, flavor))
        for name, flavor in (("qwen3", "0.6B"), ("qwen3", "1.7B"), ("qwen3_moe", "30B-A3B"))
    }
    assert plans["0.6B"].reason == (
        "greedy 0.09 s (7,500 tokens, 3 forward passes) against redundancy_free 0.10 s (5,500 tokens, "
        "4 forward passes), estimated for one H200"
    )
    assert plans["30B-A3B"].strategy == "redundancy_free"
    assert TreePartitioner("auto", 3100).plan(tree).reason == plans["1.7B"].reason


@pytest.mark.slow
def test_the_table_of_tokens_in_a_step_follows_from_parameters_and_rates() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    rows = re.findall(r"^\| Qwen(3|3\.5)-(\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [f"{family}-{flavor}" for family, flavor, *_ in rows] == [
        "3-0.6B", "3-1.7B", "3-8B", "3-30B-A3B", "3.5-2B"
    ]  # fmt: skip
    for family, flavor, *shown in rows:
        name = {"3.5": "qwen3_5", "3": "qwen3_moe" if "A3B" in flavor else "qwen3"}[family]
        with torch.device("meta"):
            model = build_model(name, flavor)
        costs, parameters = model.costs(), sum(p.numel() for p in model.parameters())
        token = costs.flops_per_token / (330e12 if "A3B" in flavor else 560e12)
        token += costs.flops_per_edge / 560e12
        tokens = [0.97 / 0.03 * size * parameters / 4e12 / token for size in (32, 20)]
        operations = costs.flops_per_token + costs.flops_per_edge
        expected = [f"{parameters / 1e9:.1f}", f"{operations / 1e9:.1f}"]
        assert shown == expected + [f"{round(n / 1000)},000" for n in tokens], flavor
