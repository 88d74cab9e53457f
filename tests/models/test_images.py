"""Images in trees: against unmodified transformers on every path alone."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.cases import exhaustive, slow_except
from tests.support.oracle import (
    assert_same,
    flat,
    hf_model,
    in_one_pass,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import forest_of, in_partitions
from tests.support.tiny_run import tiny_config, train
from tests.support.vision import PATCH, image, our_model, path_of, per_path, screen_paths, vision_model
from titan_tree.components.lora import LoRA
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.settings import DataConfig
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.hf.names import model_name
from titan_tree.models.layers import Rope
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.vision import patches
from titan_tree.run.balance.splitting import unit_sizes
from titan_tree.run.build import build_reader
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.costs import DENSE_FLOPS, PAIR_FLOPS, leaf_sizes, tree_sizes
from titan_tree.tree.images import Image
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# transformers' recurrence, always in fp32, differs from float64 by this much.
TOLERANCE = 2e-5
KINDS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3VL", "Qwen3VLMoe")


@pytest.fixture(scope="module")
def hf():
    return vision_model()


@pytest.fixture(scope="module")
def exact(hf, tmp_path_factory):
    """Our model in float64, with the tower trained."""
    return our_model(hf, tmp_path_factory.mktemp("snapshot"), "train").double()


@pytest.mark.parametrize("size", [(64, 96), (32, 32), (160, 64)])
def test_patches_are_those_of_the_image_processor(size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    process = Qwen2VLImageProcessorPil(
        do_resize=False, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    want = process(pixels, return_tensors="pt")
    got, grid = patches(torch.from_numpy(pixels), 16, 2, 2)
    assert got.dtype == torch.float32
    assert torch.equal(got, want["pixel_values"])
    assert torch.equal(grid, want["image_grid_thw"])


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


def run_step(model, micro_batches, partitioner=None):
    """Returns loss and gradients of a step."""
    step = TreeStep(model, TreeLoss("sft", "path_mean"), partitioner=partitioner)
    model.zero_grad(set_to_none=True)
    result = step.run(step.prepare(micro_batches))
    return result.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


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


@pytest.mark.parametrize("kind", slow_except(["Qwen3_5", "Qwen3VLMoe"], KINDS))
@pytest.mark.parametrize("has_source", [True, False])
def test_a_snapshot_is_loaded_and_saved_unchanged(tmp_path, kind, has_source):
    hf = vision_model(kind)
    model = our_model(hf, tmp_path / "hf", "frozen")
    save_pretrained(model, tmp_path / "ours", source=tmp_path / "hf" if has_source else None)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    want, got = hf.state_dict(), again.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    paths = screen_paths()[0][:1]
    assert torch.equal(per_path(again, paths)[0][0], per_path(hf, paths)[0][0])


def test_an_export_without_the_tower_keeps_it(hf, tmp_path):
    save_pretrained(our_model(hf, tmp_path / "hf", "off"), tmp_path / "ours", source=tmp_path / "hf")
    want, got = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "ours"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("vision", ["off", "frozen"])
def test_experts_of_qwen3_vl_are_read_and_written_as_published(tmp_path, vision):
    """The published experts have rows and columns exchanged. Like transformers, we read both orders."""
    hf = vision_model("Qwen3VLMoe")
    hf.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    stored = load_file(file)
    experts = [name for name in stored if ".experts." in name]
    model = hf.state_dict()
    assert len(experts) == 6
    for is_published in (False, True):
        for name in experts:
            stored[name] = (model[name].mT if is_published else model[name]).contiguous()
        save_file(stored, file, metadata={"format": "pt"})
        ours = load_pretrained(tmp_path / "hf", torch.float32, vision=vision)
        for name in experts:
            assert torch.equal(ours.get_parameter(model_name(name)), model[name])
    save_pretrained(ours, tmp_path / "ours", source=tmp_path / "hf")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())


def test_routers_of_qwen3_vl_that_do_not_divide_are_refused(tmp_path):
    vision_model("Qwen3VLMoe").save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edited(tmp_path, text_config=text | {"norm_topk_prob": False})
    with pytest.raises(
        UserError, match="norm_topk_prob: titan_tree's Qwen3-MoE supports true only, got False"
    ):
        load_pretrained(tmp_path, vision="frozen", implementation="native")


@pytest.mark.parametrize("kind", ["Qwen3VL", "Qwen3_5"])
@pytest.mark.parametrize("vision", ["train", "frozen"])
def test_operations_of_the_tower_are_those_that_torch_counts(tmp_path, kind, vision):
    model = our_model(vision_model(kind), tmp_path, vision)
    model.visual.config._attn_implementation = "eager"  # of which torch counts all
    costs, shown = model.costs(), image(3, 5, 0)
    with FlopCounterMode(display=False) as counter:
        rows = model.encode([torch.from_numpy(shown.pixels)])
        if vision == "train":
            torch.autograd.backward(rows, list(map(torch.ones_like, rows)))
    area = 15 * PATCH**2
    tower = costs.flops_per_pixel * area + costs.flops_per_pixel_pair * area**2
    if vision == "train":  # the forward pass runs twice, up to the last matrix; pixels need no gradients
        tokens, visual = area / PATCH**2, model.visual
        unneeded = 8 * tokens * visual.patch_embed.proj.weight.numel()  # 4 patches are a token
        unneeded += 2 * tokens * visual.merger.linear_fc2.weight.numel()
        assert counter.get_total_flops() == pytest.approx(tower * 4 / 3 - unneeded, rel=1e-12)
    else:
        assert counter.get_total_flops() == pytest.approx(tower, rel=1e-12)
    recomputed = 4 / 3 if vision == "train" else 1
    assert costs.tree_costs().pixel == pytest.approx(recomputed * costs.flops_per_pixel / DENSE_FLOPS)
    assert costs.tree_costs().pixel_pair == pytest.approx(
        recomputed * costs.flops_per_pixel_pair / PAIR_FLOPS
    )


@pytest.mark.parametrize("size", [None, 7])
def test_costs_count_each_distinct_image_of_a_micro_batch_once(exact, hf, tmp_path, size):
    """Of text, they are those of a model without tower."""
    groups, costs = screen_paths(), exact.costs()
    areas = [images * PATCH**2 for images in (6, 6, 4, 4)]  # a to d
    pixels, pairs = sum(areas), sum(area**2 for area in areas)
    forest = forest_of(groups)
    plan = one_pass(forest) if size is None else TreePartitioner("redundancy_free", size).plan(forest)
    batches = TreeBatch.from_plan(plan, "loss")
    text_costs = our_model(hf, tmp_path, "off").costs()
    tower = costs.flops_per_pixel * pixels + costs.flops_per_pixel_pair * pairs
    found = [sum(map(each.training_flops, batches)) for each in (costs, text_costs)]
    assert found[0] - found[1] == round(tower) > 0
    trees = [TokenTree.from_paths(paths) for paths in groups]
    assert tree_sizes(trees)[:, 4:].tolist() == [[pixels, pairs], [areas[0], areas[0] ** 2]]
    for tree in trees:
        np.testing.assert_array_equal(unit_sizes(leaf_sizes(tree), []), tree_sizes([tree]))
    lone = TokenTree.from_paths([groups[1][1]])
    assert costs.training_flops_of_trees([lone]) == text_costs.training_flops_of_trees([lone])
    sizes = tree_sizes([lone])
    assert costs.tree_costs().seconds(sizes) == text_costs.tree_costs().seconds(sizes)
    assert (
        costs.tree_costs().seconds(tree_sizes(trees))[0]
        > text_costs.tree_costs().seconds(tree_sizes(trees))[0]
    )


def test_random_towers_depend_on_the_seed_alone():
    table, training = (
        ModelConfig(name="qwen3_5", flavor="debug", vision="train"),
        TrainingConfig(dtype="float32"),
    )
    first, second = (build_parallel_model(table, training, ParallelConfig(), OneRank()) for _ in range(2))
    weights = dict(first.visual.named_parameters())
    assert all(torch.equal(weight, second.visual.get_parameter(name)) for name, weight in weights.items())
    assert (weights["blocks.0.norm1.weight"] == 1).all()
    assert not weights["blocks.0.attn.qkv.bias"].any()
    assert weights["patch_embed.proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    screen = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)
    (rows,), (others,) = (model.encode([torch.from_numpy(screen)]) for model in (first, second))
    assert rows.shape == (2, 128)
    assert torch.equal(rows, others)
    assert rows.isfinite().all()


def test_lora_leaves_a_frozen_tower_alone(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    table, training = ModelConfig(hf_path=str(tmp_path), vision="frozen"), TrainingConfig(dtype="float32")
    lora = LoRAConfig(rank=2)
    model = build_parallel_model(table, training, ParallelConfig(), OneRank(), lora)
    factors = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(factors) > 10
    assert all(name.startswith("layers.") for name in factors)
    _, got = run_step(model, [[TokenTree.from_paths(paths) for paths in screen_paths()]])
    assert got.keys() == set(factors)
    table.vision = "train"
    with pytest.raises(UserError, match='expected "off" or "frozen" with LoRA'):
        build_parallel_model(table, training, ParallelConfig(), OneRank(), lora)


def test_sections_in_the_old_spelling_are_read_and_kept(hf, exact, tmp_path):
    hf.save_pretrained(tmp_path / "hf")
    text = json.loads((tmp_path / "hf/config.json").read_text())["text_config"]
    rope = text.pop("rope_parameters")
    old = {name: rope.pop(name) for name in ("rope_type", "mrope_section", "mrope_interleaved")}
    model = load_pretrained(
        edited(tmp_path / "hf", text_config=text | rope | {"rope_scaling": old}),
        torch.float64,
        vision="frozen",
    )
    batch = tree_batch(screen_paths())
    assert torch.equal(model(batch).logprobs, exact(batch).logprobs)
    save_pretrained(model, tmp_path / "ours", source=tmp_path / "hf")
    saved = json.loads((tmp_path / "ours/config.json").read_text())["text_config"]
    assert saved["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert "rope_scaling" not in saved


def edited(folder: Path, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= fields
    path.write_text(json.dumps(config))
    return folder


def test_towers_that_do_not_fit_are_refused_in_one_line(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    tower = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    for changed, message in [
        (tower | {"out_hidden_size": 48}, "expected out_hidden_size 32"),
        (tower | {"hidden_size": 17}, "shape|17"),
        (None, "vision_config: expected the tower of qwen3_5"),
        (tower | {"depth": "three"}, "transformers cannot make it: "),
    ]:
        with pytest.raises(UserError, match=message) as error:
            load_pretrained(edited(tmp_path, vision_config=changed), vision="frozen")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"expected 'off' for the flavor 0\.8B, whose tower is unknown"):
        build_model("qwen3_5", "0.8B", vision="frozen")
    with pytest.raises(UserError, match='expected "off" for a Llama model, which has no tower'):
        build_model("llama", "debug", vision="frozen")
    with pytest.raises(UserError, match="norm_topk_prob: expected true with a tower"):
        build_model("qwen3_moe", "debug", vision="frozen", norm_topk_prob=False)


def test_images_of_other_patches_are_refused(exact):
    with pytest.raises(UserError, match="height and width in multiples of 8 pixels, got 12 x 8"):
        exact.encode([torch.zeros(12, 8, 3, dtype=torch.uint8)])
    with pytest.raises(UserError, match="no tower"):
        tree_model(hf_model(tied=True)).encode([])
    batch = dataclasses.replace(tree_batch(screen_paths()), pixels=())
    with pytest.raises(UserError, match="expected those of the first batch's pixels, from encode"):
        exact(batch)
    wide = Image(np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(UserError, match="expected 8 pixels per token in each direction"):
        TreeStep(exact, TreeLoss()).prepare(
            [[TokenTree.from_paths([TokenPath([1, 2, 3], images=[(0, wide)])])]]
        )


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


@pytest.mark.parametrize("vision", slow_except(["train"], ["train", "frozen"]))
def test_a_run_resumes_and_exports_its_tower(tmp_path, vision):
    """Its data have no images. AdamW decays the weights of a trained tower all the same."""
    options = {"model__name": "qwen3_5", "model__vision": vision, "checkpoint__interval": 1}
    options |= {"optimizer__weight_decay": 0.5, "checkpoint__export_hf": True}
    straight = train(tiny_config(tmp_path / "straight", training__steps=3, **options)).model.state_dict()
    train(tiny_config(tmp_path / "resumed", training__steps=1, **options))
    resumed = train(tiny_config(tmp_path / "resumed", training__steps=3, **options)).model.state_dict()
    assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())
    config = tiny_config(tmp_path / "straight", **options)
    first = build_parallel_model(config.model, config.training, config.parallel, OneRank())
    name = "visual.merger.linear_fc1.weight"
    assert torch.equal(first.get_parameter(name), straight[name]) == (vision == "frozen")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "resumed/run/hf").model.visual
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, straight[f"visual.{name}"].to(weight.dtype)), name


def test_placeholders_without_image_and_images_without_tower_are_refused(exact, hf, tmp_path):
    shown, lone = path_of([1], image(2, 2, 0), [2, 3], loss_tokens=1), TokenPath([1, 58, 2, 3], id="b")
    shown.id = "c"
    reader = build_reader(DataConfig(files=[__file__], format="token_rows"), None, exact)
    message = r"path b: images: expected token id 58, .* got it at token 1, too; list all images"
    shown.check_limits(reader.limits)
    with pytest.raises(UserError, match=message):
        lone.check_limits(reader.limits)
    TreeStep(exact, TreeLoss()).prepare([[TokenTree.from_paths([lone])]])  # a policy may sample it
    without = our_model(hf, tmp_path, "off")
    with pytest.raises(UserError, match=r"path c: .*has no tower"):
        shown.check_limits(
            build_reader(DataConfig(files=[__file__], format="token_rows"), None, without).limits
        )
    with pytest.raises(UserError, match=r"path c: .*has no tower"):
        TreeStep(without, TreeLoss()).prepare([[TokenTree.from_paths([shown])]])


def test_an_adapter_without_snapshot_names_the_layers_as_the_export_does(tmp_path):
    model = build_model("qwen3_5", "debug", vision="frozen")
    model.init_weights(0)
    save_pretrained(model, tmp_path / "base")
    add_lora(model, LoRA(rank=2, targets=("q_proj", "out_proj")))
    save_adapter(model, tmp_path / "adapter")
    named = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = {name.split(".lora_")[0].removeprefix("base_model.model.") + ".weight" for name in named}
    assert len(named) >= 4
    assert wanted <= set(load_file(tmp_path / "base" / "model.safetensors"))
