"""Trees that ranks send to each other keep everything, also their recorded experts."""

import random

import numpy as np
import pytest

from tests.data.test_token_store import assert_same_tree
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay
from titan_tree.tree.token_tree import TokenTree


@pytest.mark.parametrize("replay", ["off", "first", "majority", "split"])
def test_a_tree_keeps_its_records(replay: Replay) -> None:
    draw = random.Random(0)
    paths = [
        TokenPath(
            [1, 2, *(draw.randrange(2) for _ in range(number))],
            routed_experts=[[[draw.randrange(3)]] for _ in range(number + 1)],
            policy_version=number,
            rollout_tokens=99.0,
            id=str(number),
        )
        for number in range(9)
    ]
    tree = TokenTree.from_paths(paths, replay)
    copy = tree_from_bytes(tree_to_bytes(tree))
    assert (copy.routed_experts is None) == (tree.routed_experts is None) == (replay == "off")
    if copy.routed_experts is not None and tree.routed_experts is not None:
        np.testing.assert_array_equal(copy.routed_experts.experts, tree.routed_experts.experts)
        assert copy.routed_experts[1:] == tree.routed_experts[1:]
        assert tree.routed_experts.num_disagreeing
    assert_same_tree(copy, tree)


def test_a_tree_keeps_its_images() -> None:
    draw = np.random.default_rng(0)
    first, second = (Image(draw.integers(0, 256, size, np.uint8)) for size in ((32, 64, 3), (64, 32, 3)))
    same = Image(first.pixels.copy())
    paths = [
        TokenPath([1, 9, 9, 2], [0, 0, 0, 1], images=[(1, first)]),
        TokenPath([1, 9, 9, 3, 9, 9], [0, 0, 0, 1, 0, 0], images=[(1, same), (4, second)]),
        TokenPath([1, 4]),
    ]
    tree = TokenTree.from_paths(paths)
    copy = tree_from_bytes(tree_to_bytes(tree))
    assert [image.key for image in copy.images] == [image.key for image in tree.images]
    assert len(copy.images) == 2
    np.testing.assert_array_equal(copy.image_row, tree.image_row)
    for path, expected in zip(copy.paths, tree.paths, strict=True):
        assert [(s, i.key) for s, i in path.images] == [(s, i.key) for s, i in expected.images]
    assert copy.paths[0].images[0][1] is copy.paths[1].images[0][1]
    assert TokenTree.from_paths(copy.paths).tokens.tolist() == tree.tokens.tolist()
