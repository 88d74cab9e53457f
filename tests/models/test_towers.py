"""Towers: snapshots, exports, costs, LoRA, runs, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.cases import slow_except
from tests.support.oracle import hf_model, tree_batch, tree_model
from tests.support.partitions import forest_of
from tests.support.tiny_run import tiny_config, train
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
from titan_tree.components.lora import LoRA
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.settings import DataConfig
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models import vision
from titan_tree.models.hf.names import model_name
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.vision import chunks, patches
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


def test_images_run_together_up_to_the_pixels_of_a_screen():
    screen, half, small = (1080, 1920), (540, 1920), (384, 640)
    for images, want in (
        ([], []),
        ([screen, screen], [[screen], [screen]]),
        ([(2160, 3840), small], [[(2160, 3840)], [small]]),
        ([half, half, small], [[half, half], [small]]),
        ([small] * 10, [[small] * 8, [small] * 2]),
    ):
        assert chunks(images, math.prod) == want


def test_images_that_run_together_have_the_rows_and_gradients_of_each_alone(exact, monkeypatch):
    """Chunks of 10,000 pixels hold the first three images, and the other two."""
    pixels = [image(*size, seed).pixels for seed, size in enumerate([(2, 3), (1, 1), (1, 2), (3, 3)])]
    results = []
    for most in (10_000, 0, 1 << 21):
        monkeypatch.setattr(vision, "MAX_PIXELS", most)
        exact.zero_grad()
        rows = exact.encode([*map(torch.from_numpy, pixels), torch.from_numpy(pixels[0])])
        torch.stack([x.sin().sum() for x in rows]).sum().backward()
        results.append([*rows, *(p.grad.clone() for p in exact.visual.parameters() if p.grad is not None)])
    exact.zero_grad()
    for got in results[1:]:
        for this, want in zip(got, results[0], strict=True):
            torch.testing.assert_close(this, want, rtol=1e-9, atol=1e-12)


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
