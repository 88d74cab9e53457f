"""Computes the table of savings in docs/performance.md, from trees of these sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_tree.cli.data_arguments import named_model
from titan_tree.cli.inspect.tables import TreeSizes
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
SHARED = {  # paths, tokens that all of them share, tokens of one alone
    "16 completions of 512 tokens, one prompt of 4,096": (16, 4096, 512),
    "16 completions of 512 tokens, one prompt of 512": (16, 512, 512),
    "8 sub-agents that continue one context of 32,000 tokens by 4,000 each": (8, 32_000, 4000),
    "6 compacted contexts of 32,768 tokens; system prompt, tools and task take 8,192": (6, 8192, 24_576),
}


@pytest.mark.slow
def test_the_table_of_savings_is_computed():
    models = [named_model(model).costs() for model in ("qwen3:0.6B", "qwen3:8B")]
    for row, (number, shared, own) in SHARED.items():
        paths = []
        for first in range(shared, shared + number * own, own):  # ids that differ
            mask = [0.0] * shared + [1.0] * own
            paths.append(TokenPath([*range(shared), *range(first, first + own)], loss_mask=mask))
        sizes = [TreeSizes.of("", TokenTree.from_paths(paths), costs) for costs in models]
        bounds = [sizes[0].stats.bound, *(size.operation_bound for size in sizes)]
        cells = PAGE.split(f"| {row} |")[1].split("\n")[0]
        assert re.findall(r"[\d.]+x", cells) == [f"{bound:.1f}x" for bound in bounds], row
