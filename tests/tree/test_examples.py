"""The worked examples in docstrings are right."""

import doctest
from importlib import import_module

import pytest

EXAMPLES = [
    "titan_tree.errors",
    "titan_tree.tree.token_tree",
    "titan_tree.tree.layout",
    "titan_tree.tree.gateway",
    "titan_tree.tree.batch",
    "titan_tree.components.tree_partitioner.subtree_cut",
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples_print_what_they_say(module):
    result = doctest.testmod(import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
