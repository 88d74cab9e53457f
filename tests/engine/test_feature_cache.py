"""Features of a frozen tower are computed once, and equal those that are computed anew, bit for bit."""

import copy

import pytest
import torch

from tests.support.partitions import forest_of
from tests.support.vision import image, our_model, path_of, screen_paths, vision_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine import feature_cache
from titan_tree.engine.tree_step import TreeStep
from titan_tree.tree.token_tree import TokenTree

TREES = [[forest_of(screen_paths())]]  # a to d: 4 images


@pytest.fixture
def model(tmp_path):
    """A frozen tower, whose weights are cast in each step."""
    made = our_model(vision_model("Qwen3VL"), tmp_path, "frozen")
    return parallelize(made, OneRank(), dtype=torch.bfloat16)


@pytest.fixture
def encoded(model, monkeypatch):
    """The sizes of all images that the towers of ``model`` and of its copies encode."""
    sizes, kind = [], type(model.visual)
    made = kind.features
    monkeypatch.setattr(
        kind, "features", lambda self, images: sizes.extend(map(len, images)) or made(self, images)
    )
    return sizes


def gradients_of(model, trees=TREES, size=None):
    partitioner = None if size is None else TreePartitioner("redundancy_free", size)
    step = TreeStep(model, TreeLoss("sft", "path_mean"), partitioner=partitioner)
    model.zero_grad(set_to_none=True)
    step.run(step.prepare(trees))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_images_are_encoded_once_in_several_steps(model, encoded):
    first = gradients_of(model)
    assert len(encoded) == 4
    for _ in range(2):
        assert_equal(gradients_of(model), first)
    cut = gradients_of(model, size=7)
    step = TreeStep(model, TreeLoss("sft", "path_mean"))
    step.evaluate([step.prepare(TREES)])
    assert len(encoded) == 4
    gradients_of(model, [[TokenTree.from_paths([path_of([1], image(2, 5, 9), [2, 3], loss_tokens=1)])]])
    assert len(encoded) == 5
    del encoded[:]
    fresh = copy.deepcopy(model)
    assert_equal(gradients_of(fresh, size=7), cut)
    assert len(encoded) == 4  # a copy has features of its own


@pytest.mark.parametrize("load", ["load_state_dict", "copy_", "assign"])
def test_other_weights_of_the_tower_forget_the_features(model, encoded, load):
    before = gradients_of(model)
    other = {name: weight * 1.5 for name, weight in model.visual.state_dict().items()}
    if load == "copy_":  # as checkpoints and snapshots are read
        for name, weight in model.visual.state_dict().items():
            weight.copy_(other[name])
    else:
        model.visual.load_state_dict(other, assign=load == "assign")
    model.visual.requires_grad_(False)
    after = gradients_of(model)
    assert len(encoded) == 8
    assert not all(torch.equal(after[name], gradient) for name, gradient in before.items())
    assert_equal(gradients_of(copy.deepcopy(model)), after)


@pytest.mark.parametrize("change", ["to", "data"])
def test_weights_with_other_data_forget_the_features(tmp_path, change):
    model = our_model(vision_model("Qwen3VL"), tmp_path, "frozen")  # without casts
    gradients_of(model)
    if change == "to":  # neither changes the parameters' ids and versions
        model.to(torch.float64)
    else:
        for weight in model.visual.parameters():
            weight.data = weight.data * 1.5
    assert_equal(gradients_of(model), gradients_of(copy.deepcopy(model)))


def test_a_trained_tower_encodes_every_time(model, encoded):
    model.visual.requires_grad_(True)
    for number in (1, 2):
        gradients_of(model)
        assert len(encoded) == 8 * number  # its backward pass encodes again


def test_what_was_not_used_for_the_longest_time_is_forgotten(model, encoded, monkeypatch):
    def trees(*seeds):
        return [[TokenTree.from_paths([path_of([1], image(2, 2, s), [2, 3], loss_tokens=1)])] for s in seeds]

    size = 4 * 32 * 2 * 3  # tokens, width, bytes; two deepstack outputs
    monkeypatch.setattr(feature_cache, "MAX_BYTES", 2 * size)
    gradients_of(model, trees(0, 1, 0, 2))  # forgets 1
    assert len(encoded) == 3
    gradients_of(model, trees(0, 2))
    assert len(encoded) == 3
    gradients_of(model, trees(1))
    assert len(encoded) == 4
    monkeypatch.setattr(feature_cache, "MAX_BYTES", 0)  # larger micro-batches than the bound work, too
    want = gradients_of(copy.deepcopy(model))
    assert_equal(gradients_of(model), want)
