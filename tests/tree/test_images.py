"""Images in trees: what merges, image rows, positions, and values that are refused.

The oracle of positions is ``get_rope_index`` of transformers, on each path alone.
"""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from tests.data.test_token_store import assert_equal
from tests.support.cases import for_each
from titan_tree.certify.certified_step import _around_branch
from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.loader import from_bytes, to_bytes
from titan_tree.data.packing import longest_path, merged_trees
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.data.turns import Turns
from titan_tree.errors import UserError
from titan_tree.run.balance.splitting import split_tree
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.images import Image
from titan_tree.tree.partition import PartitionPlan, in_tree_order
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

PLACEHOLDER, END, PATCH = 90, 93, 8


def image(rows: int, columns: int, seed: int) -> Image:
    draw = np.random.default_rng(seed)
    return Image(draw.integers(0, 256, (rows * PATCH, columns * PATCH, 3), np.uint8), PATCH)


def path_of(*segments: int | Image, **fields) -> TokenPath:
    """Returns the path of tokens and images. Transformers needs a token between two images."""
    tokens: list[int] = []
    images = []
    for segment in segments:
        if isinstance(segment, Image):
            tokens += [END] if tokens[-1:] == [PLACEHOLDER] else []
            images.append((len(tokens), segment))
            tokens += [PLACEHOLDER] * len(segment)
        else:
            tokens.append(segment)
    return TokenPath(tokens, [token != PLACEHOLDER for token in tokens], images=images, **fields)


def identities(path: TokenPath) -> list[tuple[object, int]]:
    """Returns what identifies each token: its id, or the bytes of the image and the index in it."""
    tokens: list[tuple[object, int]] = [("text", int(token)) for token in path.tokens]
    for start, of_path in path.images:
        for index in range(len(of_path)):
            tokens[start + index] = (of_path.pixels.shape, of_path.pixels.tobytes()), index
    return tokens


def random_paths(seed: int) -> list[TokenPath]:
    """Returns paths over few tokens and images. They share prefixes, and some images have equal sizes."""
    r = random.Random(seed)
    symbols = [
        1,
        2,
        *(image(r.randint(1, 3), r.randint(1, 3), i) for i in range(3)),
        image(2, 2, 7),
        image(2, 2, 8),
    ]
    texts = [[r.choice(symbols) for _ in range(r.randint(1, 6))] for _ in range(r.randint(1, 6))]
    for _ in range(r.randint(0, 4)):
        other = r.choice(texts)
        texts.append(
            [*other[: r.randint(1, len(other))], *(r.choice(symbols) for _ in range(r.randint(0, 3)))]
        )
    # An equal image need not be the same object.
    return [
        path_of(*(Image(s.pixels.copy(), PATCH) if isinstance(s, Image) else s for s in text))
        for text in texts
    ]


@pytest.fixture(scope="module")
def get_rope_index():
    """Returns a function from a path to its positions [3, T] in transformers."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 1,
            "patch_size": PATCH // 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 8,
            "num_position_embeddings": 4,
            "deepstack_visual_indexes": [],
        },
        image_token_id=PLACEHOLDER,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=END,
    )
    model = Qwen3VLModel(config)

    def positions(path: TokenPath) -> np.ndarray:
        tokens = torch.from_numpy(path.tokens).long()[None]
        grids = [[1, 2 * of_path.rows, 2 * of_path.columns] for _, of_path in path.images]
        is_image = (tokens == PLACEHOLDER).int()
        return model.get_rope_index(tokens, is_image, torch.tensor(grids) if grids else None)[0][:, 0].numpy()

    return positions


def test_trees_merge_equal_pixels_and_have_the_positions_of_each_path_alone(get_rope_index):
    with_images = 0
    for seed in range(200):
        paths = random_paths(seed)
        tree = TokenTree.from_paths(paths)
        prefixes = {tuple(identities(path)[: n + 1]) for path in paths for n in range(len(path))}
        assert len(tree) == len(prefixes)
        positions = np.broadcast_to(tree.rope_positions, (3, len(tree)))
        for number, path in enumerate(paths):
            want = get_rope_index(path)
            tokens = tree.indices_of(number)
            assert np.array_equal(positions[:, tokens], want), seed
            assert path.num_positions == want.max() + 1
            assert np.array_equal(tree.positions[tokens], np.arange(len(path)))
            check_rows(tree, number)
        assert sum(map(len, tree.images)) == len(set(rows(tree))) - (not all(rows(tree) >= 0))
        if not tree.images:
            assert tree.rope_positions is tree.positions
        with_images += bool(tree.images)
    assert with_images > 150


def rows(tree: TokenTree) -> np.ndarray:
    return np.full(len(tree), -1) if tree.image_row is None else tree.image_row


def check_rows(tree: TokenTree, number: int) -> None:
    """Checks that the image rows of a path name the pixels of its own images, and are -1 for its text."""
    path = tree.paths[number]
    of_row = [(i.pixels.shape, i.pixels.tobytes(), n) for i in tree.images for n in range(len(i))]
    want = {
        start + n: (i.pixels.shape, i.pixels.tobytes(), n) for start, i in path.images for n in range(len(i))
    }
    for token, row in enumerate(rows(tree)[tree.indices_of(number)].tolist()):
        assert (of_row[row] if row >= 0 else None) == want.get(token)


def test_a_tree_of_text_has_no_images():
    tokens = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7]]
    tree = TokenTree.from_paths([TokenPath(path) for path in tokens])
    assert (tree.images, tree.image_row) == ((), None)
    assert tree.rope_positions.tolist() == [0, 1, 2, 3, 4, 3, 2]
    assert tree.tokens.tolist() == [1, 2, 3, 5, 6, 4, 7]
    assert TokenPath([1]).images == TokenPath([1], images=[]).images == ()
    batch = TreeBatch.from_trees([tree, tree])
    assert (batch.pixels, batch.image_row, batch.layout.positions.shape) == ((), None, (14,))


def test_images_of_one_size_do_not_merge_and_a_pixel_of_a_sibling_moves_nothing_else():
    first, second = image(2, 3, 0), image(2, 3, 1)
    changed = Image(second.pixels.copy(), PATCH)
    changed.pixels[0, 0, 0] ^= 1
    assert len({first.key, second.key, changed.key}) == 3
    assert image(2, 3, 1).key == second.key
    trees = [
        TokenTree.from_paths([path_of(1, first, 2), path_of(1, other, 3)]) for other in (second, changed)
    ]
    before, after = trees
    assert len(before) == 1 + 7 + 7
    assert [i.key for i in before.images] == [first.key, second.key]
    for name in ("tokens", "image_row", "rope_positions", "node_parent", "path_index"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    pixels = [TreeBatch.from_trees([tree]).pixels for tree in trees]
    assert torch.equal(pixels[0][0], pixels[1][0])
    assert (pixels[0][1] != pixels[1][1]).sum() == 1
    # The same pixels in another shape are another image.
    flat = Image(np.zeros((8, 16, 3), np.uint8), PATCH)
    assert flat.key != Image(flat.pixels.reshape(16, 8, 3), PATCH).key
    assert flat.key != Image(flat.pixels, 4).key


def test_an_image_twice_on_a_path_is_one_image_and_two_runs_of_tokens():
    shot = image(2, 1, 0)
    tree = TokenTree.from_paths([path_of(1, shot, 2, image(2, 1, 0), 3)])
    assert len(tree.images) == 1
    assert tree.image_row.tolist() == [-1, 0, 1, -1, 0, 1, -1]
    assert tree.rope_positions.tolist() == [
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 1, 3, 4, 4, 6],
    ]
    (pixels,) = TreeBatch.from_trees([tree]).pixels
    assert torch.equal(pixels, torch.tensor(shot.pixels))


def test_a_forest_shares_the_images_of_its_trees(get_rope_index):
    shots = [image(1, 2, 0), image(2, 2, 1), image(2, 1, 2)]
    trees = [
        TokenTree.from_paths([path_of(1, shots[0], 2), path_of(1, shots[1])]),
        TokenTree.from_paths([path_of(5, 6)]),
        TokenTree.from_paths([path_of(image(2, 2, 1), 3, shots[2]), path_of(1, image(1, 2, 0))]),
    ]
    forest = TokenTree.forest(trees)
    assert [i.key for i in forest.images] == [i.key for i in shots]
    for number, path in enumerate(forest.paths):
        check_rows(forest, number)
        assert np.array_equal(forest.rope_positions[:, forest.indices_of(number)], get_rope_index(path))
    assert TokenTree.forest([trees[1], trees[1]]).image_row is None


def test_replay_split_divides_an_image_where_records_differ(get_rope_index):
    """The image's tokens are then in two nodes, and its rows and positions stay the same."""
    shot = image(2, 3, 0)

    def recorded(differs_at: int, *end: int) -> TokenPath:
        path = path_of(1, shot, *end)
        path.routed_experts = np.zeros((len(path), 1, 1), np.int16)
        path.routed_experts[differs_at:] = 1
        return path

    paths = [recorded(4, 2, 3), recorded(99, 2, 3), recorded(99, 5), path_of(1, shot)]
    merged, split = TokenTree.from_paths(paths, "first"), TokenTree.from_paths(paths, "split")
    assert len(merged) == 1 + 6 + 3
    assert len(split) == 4 + 5 + (3 + 3) + 7  # shared, changed, unchanged, without records
    assert len(split.images) == 1
    for tree in (merged, split):
        for number, path in enumerate(paths):
            check_rows(tree, number)
            assert np.array_equal(tree.rope_positions[:, tree.indices_of(number)], get_rope_index(path))
    other = [recorded(99, 2), path_of(1, image(2, 3, 1), 2, routed_experts=np.zeros((8, 1, 1), int))]
    assert len(TokenTree.from_paths(other, "split")) == 1 + 7 + 7


def check_partitions(plan: PartitionPlan) -> None:
    tree, batches = plan.tree, TreeBatch.from_plan(plan)
    for partition, batch in zip(plan.partitions, batches, strict=True):
        own = partition.own_tokens
        assert batch.image_row.dtype == torch.int64
        assert batch.image_row.tolist() == tree.image_row[own].tolist()
        assert batch.layout.positions.dtype == torch.int32
        assert batch.layout.positions.tolist() == tree.rope_positions[:, own].tolist()
    assert [len(batch.pixels) for batch in batches] == [len(tree.images)] + [0] * (len(batches) - 1)
    for pixels, of_tree in zip(batches[0].pixels, tree.images, strict=True):
        assert torch.equal(pixels, torch.tensor(of_tree.pixels))


@for_each("strategy", PARTITION_STRATEGIES)
def test_partitions_keep_image_rows_and_positions(strategy):
    num_partitions = 0
    for seed in range(30):
        tree = TokenTree.forest([TokenTree.from_paths(random_paths(seed + n)) for n in (0, 500)])
        if tree.image_row is None:
            continue
        longest = tree.stats.longest_path
        for max_tokens in (longest, 3) if strategy == "redundancy_free" else (longest,):
            plan = TreePartitioner(strategy, max_tokens).plan(tree)
            check_partitions(plan)
            num_partitions += len(plan)
    assert num_partitions >= (30 if strategy == "none" else 60)


@for_each("cut", [2, 4, 8, 9])
def test_a_partition_is_cut_before_inside_and_after_an_image(cut):
    tree = TokenTree.from_paths([path_of(1, 2, image(2, 3, 0), 3, 4)])
    tokens = np.arange(len(tree))
    parts = (
        in_tree_order(tree, -1, tokens[:cut], tokens[:0]),
        in_tree_order(tree, 0, tokens[cut:], tokens[:cut]),
    )
    check_partitions(PartitionPlan(tree, "", parts))


def assert_same_images(ours: TokenTree, theirs: TokenTree) -> None:
    assert [i.key for i in ours.images] == [i.key for i in theirs.images]
    assert_equal(ours.image_row, theirs.image_row, "image_row")
    for path, expected in zip(ours.paths, theirs.paths, strict=True):
        assert [(s, i.key) for s, i in path.images] == [(s, i.key) for s, i in expected.images]
    assert np.array_equal(ours.rope_positions, theirs.rope_positions)


def test_images_survive_bytes_pickles_and_other_devices():
    for seed in range(20):
        tree = TokenTree.from_paths(random_paths(seed))
        copy = tree_from_bytes(tree_to_bytes(tree))
        assert_same_images(copy, tree)
        assert_same_images(TokenTree.from_paths(copy.paths), tree)
        assert_same_images(pickle.loads(pickle.dumps(tree)), tree)
        batch = TreeBatch.from_trees([copy])
        for other in (from_bytes(to_bytes(batch)), batch.to("cpu"), batch.without_edges()):
            assert all(map(torch.equal, other.pixels, batch.pixels))
            assert len(other.pixels) == len(tree.images)
            assert torch.equal(other.layout.positions, batch.layout.positions)
            if tree.images:
                assert torch.equal(other.image_row, batch.image_row)
        moved = batch.to("meta")
        assert {tensor.device.type for tensor in (*moved.pixels, moved.tokens)} == {"meta"}
    shot = image(40, 40, 0)
    content = tree_to_bytes(TokenTree.from_paths([path_of(n, shot, image(40, 40, 0)) for n in range(3)]))
    assert len(content) < 1.5 * shot.pixels.nbytes  # each image once


def test_pieces_of_a_tree_hold_the_images_of_their_own_paths():
    for seed in range(40):
        tree = TokenTree.from_paths(random_paths(seed))
        if len(tree.leaves) < 3:
            continue
        pieces = split_tree(tree, [1, len(tree.leaves) - 1])
        assert {i.key for piece in pieces for i in piece.images} == {i.key for i in tree.images}
        for piece in pieces:
            assert {i.key for i in piece.images} == {i.key for path in piece.paths for _, i in path.images}
            assert (piece.image_row is None) == (not piece.images)
            rope = np.broadcast_to(piece.rope_positions, (3, len(piece)))
            whole = np.broadcast_to(tree.rope_positions, (3, len(tree)))
            for number, path in enumerate(piece.paths):
                check_rows(piece, number)
                (same,) = [n for n, p in enumerate(tree.paths) if p is path]
                assert np.array_equal(rope[:, piece.indices_of(number)], whole[:, tree.indices_of(same)])


def test_turns_prefixes_and_merged_batches_compare_pixels():
    first, second = image(2, 2, 0), image(2, 2, 1)
    paths = [path_of(1, first, 2, 3), path_of(1, second, 2, 3), path_of(1, image(2, 2, 0), 2, 4)]
    trees = merged_trees(paths, 100)
    assert [len(tree) for tree in trees] == [1 + 6 + 6 + 1]
    assert sorted(len(tree) for tree in merged_trees(paths, 8)) == [7, 8]
    chosen = longest_path([path_of(1, second), path_of(1, first), path_of(1, second, 2)])
    assert [path.images[0][1] for path in chosen] == [second, second]
    assert len({turn.node for turn in Turns(paths, [0, 0, 0]).turns}) == 3  # placeholders would make it 2


def test_certify_cuts_paths_around_images():
    """Its smaller case of two paths is the tokens around the branch, and never a part of an image."""
    first, second = image(2, 2, 0), image(2, 2, 1)
    tail = range(5, 25)
    paths = [path_of(0, first, 1, 2, shot, 3, *tail, id=str(i)) for i, shot in enumerate((second, first))]
    parts = _around_branch(paths, 6)  # the branch is at token 7
    assert [[(start, i.key) for start, i in part.images] for part in parts] == [
        [(0, first.key), (6, second.key)],
        [(0, first.key), (6, first.key)],
    ]
    assert [part.tokens.tolist() for part in parts] == [[90] * 4 + [1, 2] + [90] * 4] * 2
    assert [part.id for part in parts] == ["0[1:11]", "1[1:11]"]
    assert len(TokenTree.from_paths(parts)) == 6 + 4 + 4


def test_models_count_the_positions_of_images():
    path = path_of(1, image(3, 2, 0), 2, id="p")  # 8 tokens, positions 0, 1 to 3, 4
    path.check_limits(ModelLimits(max_positions=5))
    with pytest.raises(UserError, match=r"^path p: it has 5 positions, but the model has 4 positions"):
        path.check_limits(ModelLimits(max_positions=4))


SHOT = image(1, 2, 0)
TOKENS = [1, 90, 90, 2, 90, 90]
REFUSED = {
    "a list of (index of the image's first token, Image), got 3": 3,
    "images[0]: expected (index of the image's first token, Image), got 5": [5],
    "images[0]: expected (index of the image's first token, Image), got ('1', 2)": [("1", 2)],
    "images[0]: expected (index of the image's first token, Image), got (True, ": [(True, SHOT)],
    "images[0]: expected an image that begins at token 0 or later, the beginning of the path, got token -1": [
        (-1, SHOT)
    ],
    "images[1]: expected an image that begins at token 3 or later, the end of the image before it, got token "
    "2": [(1, SHOT), (2, SHOT)],
    "images[1]: expected an image that begins at token 6 or later, the end of the image before it, got token "
    "1": [(4, SHOT), (1, SHOT)],
    "images[0]: expected all tokens, 5 to 6, of an image of 1 x 2 tokens, got a path of 6 tokens, which cuts "
    "it; remove the image and all of its tokens": [(5, SHOT)],
    "images[0]: expected one placeholder id at tokens 2 to 3 of an image of 1 x 2 tokens, got 90 at token 2 "
    "and 2 at token 3": [(2, SHOT)],
}


@for_each("message", REFUSED)
def test_wrong_images_of_a_path_are_refused(message):
    with pytest.raises(UserError) as error:
        TokenPath(TOKENS, [1, 0, 0, 1, 0, 0], id="p", images=REFUSED[message])
    assert str(error.value).startswith("path p: images")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_images_must_not_be_trained():
    message = r"^path p: images\[1\]: expected loss mask 0 at its tokens, got 0.5 at token 5$"
    with pytest.raises(UserError, match=message):
        TokenPath(TOKENS, [1, 0, 0, 1, 0, 0.5], id="p", images=[(1, SHOT), (4, SHOT)])
    TokenPath([90, 90, 1], [1, 0, 1], images=[(0, SHOT)])  # nothing predicts the first token
    with pytest.raises(
        UserError, match=r"images\[0\]: expected loss mask 0 at its tokens, got 1 at token 1$"
    ):
        TokenPath([90, 90, 1], images=[(0, SHOT)])


def test_wrong_pixels_are_refused():
    wrong: list[tuple[Any, str]] = [
        (np.zeros((8, 8, 3)), r"float64 of shape \(8, 8, 3\)"),
        (np.zeros((8, 8), np.uint8), r"uint8 of shape \(8, 8\)"),
        (np.zeros((8, 8, 4), np.uint8), r"uint8 of shape \(8, 8, 4\)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), "Tensor"),
        ([[[0, 0, 0]]], "list"),
    ]
    for pixels, got in wrong:
        message = rf"^Image: pixels: expected an array \[height, width, 3\] of uint8, got {got}$"
        with pytest.raises(UserError, match=message):
            Image(pixels, PATCH)
    for patch in (0, -8, 8.0):
        with pytest.raises(UserError, match=f"^Image: patch: expected a number of pixels, got {patch}$"):
            Image(np.zeros((8, 8, 3), np.uint8), patch)  # type: ignore[arg-type]
    for shape in ((8, 12, 3), (0, 8, 3)):
        size = f"{shape[0]} x {shape[1]}; resize the image"
        with pytest.raises(UserError, match=f"^Image: expected .* in multiples of 8 pixels, got {size}$"):
            Image(np.zeros(shape, np.uint8), PATCH)


def test_views_of_pixels_are_read_as_they_look():
    """Such as colors in reverse order, with which OpenCV begins."""
    pixels = np.random.default_rng(0).integers(256, size=(8, 16, 3), dtype=np.uint8)
    for view in (pixels[:, :, ::-1], pixels[::-1], np.asfortranarray(pixels)):
        shot = Image(view, PATCH)
        path = TokenPath([90, 90, 1], [0, 0, 1], images=[(0, shot)])
        (got,) = TreeBatch.from_trees([TokenTree.from_paths([path])]).pixels
        assert np.array_equal(got.numpy(), view)
        assert shot.key == Image(view.copy(), PATCH).key


def test_ranks_do_not_divide_the_tokens_of_images():
    batch = TreeBatch.from_trees([TokenTree.from_paths([path_of(1, SHOT, 2)])])
    assert TokenShard(0, 1).of(batch) is batch
    with pytest.raises(
        UserError, match=r"^images: expected none, because 2 ranks divide .* parallel.sequence_parallel = 1$"
    ):
        TokenShard(1, 2).of(batch)
