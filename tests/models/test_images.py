"""Images in trees: against unmodified transformers on every path alone."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.cases import exhaustive, slow_except
from tests.support.oracle import assert_same, flat, in_one_pass, relative_error, tree_batch
from tests.support.partitions import forest_of, in_partitions
from tests.support.vision import (
    KINDS,
    PATCH,
    image,
    our_model,
    path_of,
    per_path,
    run_step,
    screen_paths,
    vision_model,
)
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.layers import Rope
from titan_tree.tree.images import Image
from titan_tree.tree.token_tree import TokenTree

# transformers' recurrence, always in fp32, differs from float64 by this much.
TOLERANCE = 2e-5


CUTS = [
    (kind, *cut)
    for kind in KINDS
    for cut in [*(("redundancy_free", size) for size in (1, 3, 8, 20)), ("greedy", 40)]
]
EVERYDAY_CUTS = [
    ("Qwen3_5", "redundancy_free", 3),
    ("Qwen3_5", "greedy", 40),
    ("Qwen3VL", "redundancy_free", 8),
]


def test_equal_positions_on_all_axes_are_positions_of_text():
    positions = torch.tensor([0, 1, 2, 7, 100_000], dtype=torch.int32)
    text = Rope.at(positions, 64, 1e7)
    same = Rope.at(positions.expand(3, -1), 64, 1e7, sections=(11, 11, 10))
    assert torch.equal(text.cos, same.cos)
    assert torch.equal(text.sin, same.sin)


@pytest.mark.parametrize(
    ("kind", "seed"),
    slow_except([("Qwen3_5", 0), ("Qwen3VLMoe", 0)], [(kind, seed) for kind in KINDS for seed in range(3)]),
)
def test_one_pass_equals_every_path_alone(tmp_path, kind, seed):
    hf, groups = vision_model(kind, tied=seed != 1, seed=seed), screen_paths(10 * seed)
    got = in_one_pass(our_model(hf, tmp_path, "train"), groups)
    assert sum(name.startswith("visual.") for name in got[2]) == (57 if "VL" in kind else 45)
    assert_same(got, per_path(hf, flat(groups)), TOLERANCE)


@pytest.mark.slow
def test_gradients_in_bf16_have_the_errors_of_transformers_in_bf16(tmp_path):
    errors = {}  # sums of squared errors by parameter: ours, and those of transformers
    for seed in range(4):
        noisy, groups = vision_model(seed=seed).bfloat16(), screen_paths(10 * seed)
        want = per_path(copy.deepcopy(noisy).float(), flat(groups))[2]
        runs = (
            in_one_pass(our_model(noisy, tmp_path / f"{seed}", "train"), groups),
            per_path(noisy, flat(groups)),
        )
        for name, gradient in want.items():
            squares = [relative_error(run[2][name].float(), gradient) ** 2 for run in runs]
            errors[name] = [a + b for a, b in zip(errors.get(name, (0, 0)), squares, strict=True)]
    for name, (error, floor) in errors.items():
        assert error <= 1.6**2 * floor, name


@pytest.mark.parametrize(("kind", "strategy", "size"), slow_except(EVERYDAY_CUTS, CUTS))
def test_partitions_equal_one_pass(tmp_path, kind, strategy, size):
    """Cuts are before, after and inside images."""
    exact = our_model(vision_model(kind), tmp_path, "train").double()
    groups = screen_paths()
    _, want_loss, want = in_one_pass(exact, groups)
    plan = TreePartitioner(strategy, size).plan(forest_of(groups))
    assert len(plan) > 4
    loss, got = in_partitions(exact, plan)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < 1e-9, name


@pytest.mark.parametrize(
    "partitioner", [None, TreePartitioner("redundancy_free", 7)], ids=["one pass", "cut"]
)
def test_two_micro_batches_share_an_image(hf, exact, partitioner):
    groups = screen_paths()
    loss, got = run_step(exact, [[TokenTree.from_paths(paths)] for paths in groups], partitioner)
    _, want_loss, want = per_path(hf, flat(groups))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < TOLERANCE, name


def test_a_partitioned_loss_of_whole_paths_has_one_copy_of_the_pixels(exact):
    """What the loss reads of a micro-batch has no images. Loss and gradients are those of one pass."""
    groups = [[copy.copy(path) for path in paths] for paths in screen_paths()]
    for path in flat(groups):
        path.advantage = path.old_logprobs = np.linspace(-1.5, -0.5, len(path), dtype=np.float32)
    trees = [[TokenTree.from_paths(paths) for paths in groups]]
    results = []
    for partitioner in (None, TreePartitioner("redundancy_free", 7)):
        step = TreeStep(
            exact, TreeLoss("gspo", "path_mean", clip_low=9, clip_high=9), partitioner=partitioner
        )
        exact.zero_grad(set_to_none=True)
        prepared = step.prepare(trees)
        results.append((step.run(prepared).loss.item(), exact.visual.patch_embed.proj.weight.grad))
    (want_loss, want), (loss, got) = results
    assert loss == pytest.approx(want_loss, rel=1e-9)
    assert relative_error(got, want) < 1e-9
    assert sum(len(batch.pixels) for batch in prepared.micro_batches[0]) == 4
    assert (prepared.unpartitioned[0].pixels, prepared.unpartitioned[0].image_row) == ((), None)


def test_a_frozen_tower_changes_nothing_but_its_own_gradients(exact):
    """Recomputed activations of a partition read the same features."""
    groups = screen_paths()
    trees = [[TokenTree.from_paths(paths) for paths in groups]]
    frozen = copy.deepcopy(exact)
    frozen.visual.requires_grad_(False)
    for partitioner in (None, TreePartitioner("redundancy_free", 7)):
        want_loss, want = run_step(exact, trees, partitioner)
        loss, got = run_step(frozen, trees, partitioner)
        assert loss == want_loss
        assert got.keys() == {name for name in want if not name.startswith("visual.")}
        assert all(torch.equal(gradient, want[name]) for name, gradient in got.items())


def test_a_siblings_pixels_do_not_leak(exact):
    """The screens of two branches differ by one pixel. Only log-probs after the changed one move."""
    a, b = image(2, 2, 0), image(2, 3, 1)
    pixels = b.pixels.copy()
    pixels[5, 7, 1] ^= 1
    batches = [
        tree_batch(
            [[path_of([1, 2], a, [3, 4], loss_tokens=2), path_of([1, 2], screen, [5, 6], loss_tokens=2)]]
        )
        for screen in (b, Image(pixels, PATCH))
    ]
    first, second = (exact(batch).logprobs.detach() for batch in batches)
    is_moved = (first != second).tolist()
    begin = batches[0].pairs.edge[batches[0].pairs.path == 1].tolist()
    # The tokens 1, 2 and the beginning of an image are shared, and the first image token follows them.
    assert [edge for edge, moved in enumerate(is_moved) if moved] == begin[3:]


def random_screens(seed):
    """Returns parts of the paths of a random tree, see ``path_of``, and an image that some of them show.

    Siblings may begin with images of one size. A path may show an image again.
    """
    draw = np.random.default_rng(seed)
    made, paths = [], []

    def grow(parts, shown, depth):
        for _ in range(draw.integers(1, 4)):
            if shown and draw.random() < 0.3:
                parts = [*parts, shown[draw.integers(len(shown))]]
            elif draw.random() < 0.6:
                made.append(image(*draw.integers(1, 4, 2), seed=[seed, len(made)]))
                parts, shown = [*parts, made[-1]], [*shown, made[-1]]
            parts = [*parts, draw.integers(1, 50, draw.integers(1, 4)).tolist()]
        children = draw.integers(2, 4) if depth < 2 else 0
        for _ in range(children):
            grow(parts, shown, depth + 1)
        if not children:
            paths.append(parts)

    for _ in range(draw.integers(1, 3)):
        first = image(2, 2, seed=[seed, len(made)])
        made.append(first)
        grow([first], [first], 0)
    return paths, made[draw.integers(len(made))], draw


def assert_that_a_pixel_moves_only_what_follows(model, seed):
    """One pixel of an image changes. Log-probs before and beside it, and their gradients, keep every bit."""
    paths, changed, draw = random_screens(seed)
    pixels = changed.pixels.copy()
    pixels[tuple(draw.integers(pixels.shape))] ^= 1 << draw.integers(3, 8)
    other, results = Image(pixels, PATCH), []
    for shown in (changed, other):
        own = [
            path_of(*(shown if part is changed else part for part in parts), loss_tokens=1) for parts in paths
        ]
        batch = tree_batch([own])
        is_moved = torch.zeros(len(batch.edge_label), dtype=torch.bool)
        for number, path in enumerate(own):
            starts = [start for start, each in path.images if each is shown]
            edges = batch.pairs.edge[batch.pairs.path == number]
            assert len(edges) == len(path) - 1
            if starts:
                is_moved[edges[starts[0] :]] = True
        model.zero_grad(set_to_none=True)
        logprobs = model(batch).logprobs
        weights = torch.linspace(0.5, 1.5, len(logprobs))
        (logprobs * weights)[~is_moved].sum().backward()
        results.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}, is_moved))
    (want, want_gradients, is_moved), (got, gradients, is_moved_too) = results
    assert torch.equal(is_moved, is_moved_too), seed
    assert torch.equal(got[~is_moved], want[~is_moved]), seed
    assert (got[is_moved] != want[is_moved]).any(), seed
    for name, gradient in want_gradients.items():
        assert torch.equal(gradients[name], gradient), (seed, name)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3VL"])
@pytest.mark.parametrize("seeds", exhaustive([range(10, 100)], [range(10), range(10, 100)]))
def test_a_pixel_of_a_random_tree_moves_only_what_follows(tmp_path, kind, seeds):
    model = our_model(vision_model(kind), tmp_path, "train")
    for seed in seeds:
        assert_that_a_pixel_moves_only_what_follows(model, seed)


def test_a_change_of_the_placeholder_changes_nothing(exact):
    """Its embedding is not read."""
    batch = tree_batch(screen_paths())
    want = exact(batch).logprobs
    is_image = batch.image_row >= 0
    others = dataclasses.replace(batch, tokens=torch.where(is_image, 7, batch.tokens))
    assert is_image.sum() > 20
    assert torch.equal(exact(others).logprobs, want)


def test_text_has_the_log_probs_of_a_model_without_tower(hf, exact, tmp_path):
    text = our_model(hf, tmp_path, "off").double()
    assert not any("visual" in name for name in text.state_dict())
    batch = tree_batch([[path_of([1, 2, 3], [4, 5], loss_tokens=2)]])
    assert torch.equal(text(batch).logprobs, exact(batch).logprobs)
    with pytest.raises(UserError, match="has no tower"):
        text(tree_batch(screen_paths()))


def test_layers_that_run_compiled_or_are_recomputed_compute_the_same(exact):
    groups = screen_paths()
    trees = [[TokenTree.from_paths(paths) for paths in groups]]
    want_loss, want = run_step(exact, trees)
    model = parallelize(copy.deepcopy(exact), OneRank(), dtype=torch.float64, activation_checkpoint="full")
    loss, got = run_step(model, trees)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert len(got) == len(want)
    for (name, gradient), other in zip(got.items(), want.values(), strict=True):
        assert relative_error(gradient, other) < 1e-9, name


@pytest.mark.slow
def test_batches_with_images_run_the_compiled_layers_of_text(hf, tmp_path):
    model = parallelize(our_model(hf, tmp_path, "train"), OneRank(), dtype=torch.float32, compile=True)
    groups = screen_paths()
    text, screens = ([[TokenTree.from_paths(paths)]] for paths in ([groups[1][1]], groups[0]))
    torch._dynamo.reset()
    step = TreeStep(model, TreeLoss("sft", "path_mean"))
    step.warm_up(64)
    run_step(model, text)
    counters.clear()
    _, got = run_step(model, screens)
    assert not counters["stats"]["unique_graphs"]
    _, _, want = per_path(hf, groups[0])
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < TOLERANCE, name
