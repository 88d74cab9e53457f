"""titan-tree certify with images: it passes, and planted faults of images fail and are named."""

import base64
import io
import itertools
import json
import re

import numpy as np
import PIL.Image
import pytest
import torch

from tests.support.cases import slow_except
from tests.support.tiny_run import SMALL, tiny_config
from titan_tree.certify import certify
from titan_tree.certify.certified_step import opened
from titan_tree.certify.checks import leaks
from titan_tree.certify.report import text
from titan_tree.errors import UserError
from titan_tree.models import tree_model
from titan_tree.models.pretrained import build_model, save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree import token_tree
from titan_tree.tree.token_tree import TokenTree

IMAGE, SIZE = 9, 64  # the placeholder, and the tokens of each image, 4 x 16


def url(name):
    """Returns an image as a data: URL."""
    pixels = np.random.default_rng(ord(name)).integers(0, 256, (128, 512, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# The loss counts the last two tokens. "a" and "b" have one size; the second path shows "a" again.
PATHS = [
    [1, 2, 3, "a", 20, 21, 22, 23],
    [1, 2, 3, "a", 20, 30, "a", 31, 32, 33],
    [1, 2, 3, "b", 40, 41, 42],
]


def configured(tmp_path, paths=PATHS, **options):
    tmp_path.mkdir(exist_ok=True)
    with (tmp_path / "data.jsonl").open("w") as file:
        for parts in paths:
            tokens, images = [], []
            for part in parts:
                if isinstance(part, str):
                    images.append({"start": len(tokens), "image": url(part)})
                tokens += [IMAGE] * SIZE if isinstance(part, str) else [part]
            mask = [0] * (len(tokens) - 2) + [1, 1]
            record = {"group_id": "g", "tokens": tokens, "loss_mask": mask, "images": images}
            file.write(json.dumps(record) + "\n")
    if "model__name" in options:
        options |= SMALL[options["model__name"]] | {"model__overrides__head_dim": 32}
    return tiny_config(tmp_path, **{"model__vision": "train", "data__max_tokens": 1000} | options)


FROZEN = {"model__vision": "frozen", "training__activation_checkpoint": "full"}
KINDS = {"qwen3": "Qwen3VL", "qwen3_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}


@pytest.mark.parametrize(
    ("family", "options"),
    slow_except(
        [("qwen3_5", {})],
        [(family, options) for family in KINDS for options in ({}, {"data__max_tokens": 100}, FROZEN)],
    ),
)
def test_images_pass(family, options, tmp_path):
    certificate = certify(configured(tmp_path, model__name=family, **options))
    assert certificate.passed, text(certificate)
    assert certificate.facts["against"] == (
        f"the unmodified {KINDS[family]}ForConditionalGeneration of transformers"
    )
    assert all(check.passed for check in certificate.checks)
    assert 0 < certificate.checks[3].error < 1e-5


def later_use(image_row):
    """Returns [N], whether a token shows an image row that a token before it shows."""
    first = torch.zeros(len(image_row), dtype=torch.bool)
    first[torch.from_numpy(np.unique(image_row.numpy(), return_index=True)[1])] = True
    return ~first & (image_row >= 0)


def merged_by_placeholder(patch):
    made = token_tree.merge_keys

    def merge_keys(paths):
        keys, images = made(paths)
        return [np.where(key < 0, -1 - (-1 - key) % SIZE, key).astype(np.int32) for key in keys], images

    patch.setattr(token_tree, "merge_keys", merge_keys)


def positions_by_tokens(patch):
    patch.setattr(TokenTree, "rope_positions", property(lambda tree: np.stack([tree.positions] * 3)))


def features_of_another_image(patch):
    made = TreeModel.encode
    patch.setattr(
        TreeModel, "encode", lambda model, pixels: [rows.roll(SIZE, 0) for rows in made(model, pixels)]
    )


def lost_gradient(patch):
    made = tree_model._of_tokens

    def of_tokens(rows, image_row):
        found = made(rows, image_row)
        return torch.where(later_use(image_row)[:, None], found.detach(), found)

    patch.setattr(tree_model, "_of_tokens", of_tokens)


def deepstack_on_one_branch(patch):
    made, is_deepstack = tree_model._of_tokens, itertools.cycle([False, True])

    def of_tokens(rows, image_row):
        found = made(rows, image_row)
        return found.masked_fill(later_use(image_row)[:, None] & next(is_deepstack), 0)

    patch.setattr(tree_model, "_of_tokens", of_tokens)


APART = [[1, 2, "a", 20, 21, 22], [1, 3, "a", 30, 31, 32]]  # two branches show "a"
FIRST_LAYER = r"outputs of layers: layers.0 \(self_attn\), largest at token"
FAULTS = [  # how it is planted, the paths, a pattern of what the verdict says
    (
        "placeholder",
        merged_by_placeholder,
        PATHS,
        FIRST_LAYER + ".* of path g/3:",
    ),
    ("positions", positions_by_tokens, APART, FIRST_LAYER),
    ("features", features_of_another_image, PATHS, FIRST_LAYER),
    ("gradient", lost_gradient, APART, r"gradients: largest: visual\."),
    (
        "deepstack",
        deepstack_on_one_branch,
        APART,
        r"outputs of layers: layers.1 .* of path g/2:",
    ),
]


@pytest.mark.parametrize(
    ("plant", "paths", "named"),
    [
        pytest.param(*fault, id=name, marks=pytest.mark.slow if name in ("positions", "features") else [])
        for name, *fault in FAULTS
    ],
)
def test_a_planted_fault_of_images_fails_and_is_named(plant, paths, named, tmp_path, monkeypatch):
    plant(monkeypatch)
    certificate = certify(configured(tmp_path, paths, model__name="qwen3"))
    assert not certificate.passed
    assert re.match(rf"FAILED in float32: {named}", certificate.verdict), text(certificate)


def test_a_leak_from_images_of_another_branch_is_found(tmp_path, monkeypatch):
    made = tree_model._of_tokens

    def of_tokens(rows, image_row):
        found = made(rows, image_row)
        return found + found.mean(0)

    monkeypatch.setattr(tree_model, "_of_tokens", of_tokens)
    with opened(configured(tmp_path, PATHS[::2], model__name="qwen3"), 1000) as subject:
        check = leaks(subject.tree_step, subject.micro_batches)
    assert check.passed is False
    assert check.error > 1e-4
    assert check.found == "layers.0, path g/1: other tokens there change the output"


@pytest.mark.slow
def test_images_of_a_snapshot_need_its_placeholder_and_text_between_them(tmp_path):
    model = build_model("qwen3_5", "debug", vision="train", num_hidden_layers=4, vocab_size=64)
    save_pretrained(model, tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    options = {"model__flavor": "null", "model__overrides": "{}", "model__hf_path": tmp_path / "hf"}

    def certified(image_token_id, paths):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_token_id": image_token_id}))
        return certify(configured(tmp_path, paths, **options))

    certificate = certified(IMAGE, APART)
    assert certificate.passed, text(certificate)
    with pytest.raises(UserError) as error:
        certified(IMAGE + 1, APART)
    assert str(error.value) == (
        "path g/1: images: expected the id 10 (image_token_id of config.json) at their tokens and nowhere "
        "else, got 9 at token 2"
    )
    with pytest.raises(UserError) as error:
        certified(IMAGE, [[1, "a", "b", 5, 6, 7], [1, "a", 5, 6, 7]])
    assert str(error.value) == (
        "path g/1: images: expected text between images, without which transformers takes them for one, got "
        "one that begins at token 65, right after another; certify other paths"
    )
