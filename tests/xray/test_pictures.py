"""Pictures of images on the X-ray page: one for each distinct image, within a bound; none with --no-text."""

import base64
import io
import json
import sys

import numpy as np
import pytest

from tests.support.datasets import sample_reader
from titan_tree.tree.images import Image
from titan_tree.xray import pictures
from titan_tree.xray.payload import Xray
from titan_tree.xray.pictures import Pictures
from titan_tree.xray.rendering import Renderer
from titan_tree.xray.secrets import Secrets
from titan_tree.xray.sources import Sources

Pillow = pytest.importorskip("PIL.Image")
COLOURS = {"a": "red", "b": "lime", "c": "blue"}
SIZES = {"a": (256, 256), "b": (512, 256), "c": (256, 512)}  # width and height


@pytest.fixture
def rows(tmp_path):
    """Returns a file of two groups. The images a and b stand side by side; both groups show a."""
    for name, colour in COLOURS.items():
        Pillow.new("RGB", SIZES[name], colour).save(tmp_path / f"{name}.png")

    def row(group, names):
        tokens, images = [1], []
        for name in names:
            images.append({"start": len(tokens), "image": f"{name}.png"})
            tokens += [9] * (SIZES[name][0] * SIZES[name][1] // 1024)
        tokens += [2, 3]
        mask = [0] * (len(tokens) - 1) + [1]
        return {"group_id": group, "tokens": tokens, "loss_mask": mask, "images": images}

    lines = [row("g", "ab"), row("g", "aba"), row("h", "ca"), row("i", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "rows.jsonl")


def payload_of(file, **options):
    return Xray(Sources([file]), Renderer(sample_reader(file)), "rows", **options).payload()


def test_each_distinct_image_has_one_picture(rows):
    payload = payload_of(rows)
    names = []
    for image in payload["images"]:
        head, _, data = image["picture"].partition(",")
        assert head == "data:image/jpeg;base64"
        shown = Pillow.open(io.BytesIO(base64.b64decode(data)))
        channels = np.array(shown).mean((0, 1))
        names.append("abc"[channels.argmax()])
        assert channels.max() > 250
        assert max(shown.size) == 256
        width, height = SIZES[names[-1]]
        assert (image["size"], image["tokens"]) == ([width, height], width * height // 1024)
        assert shown.width * height == shown.height * width
    assert sorted(names) == ["a", "b", "c"]
    trees = {tree["id"]: tree for tree in payload["trees"]}
    shown = {
        group: [(names[image], trees[group]["tokens"][i]) for i, image in enumerate(column) if image >= 0]
        for group in "gh"
        for column in [trees[group]["image"]]
    }
    assert shown == {"g": [("a", 64), ("b", 128), ("a", 64)], "h": [("c", 128), ("a", 64)]}
    assert [i for i in trees["g"]["image"] if i < 0] == [-1] * 5  # the beginning, and the ends of both paths
    assert "image" not in trees["i"]
    assert (payload["totals"]["path_images"], payload["totals"]["images"]) == (7, 4)
    assert payload["sentences"][3] == "Trees encode 4 images: 1.8 times less than every sample by itself (7)."
    assert payload["notes"] == [
        "The page holds 3 pictures; nothing in them is hidden. --no-text leaves them out."
    ]


def test_beyond_the_bound_there_are_no_pictures(rows, monkeypatch):
    size = len(payload_of(rows)["images"][0]["picture"])
    monkeypatch.setattr(pictures, "PAGE_PICTURES", size + 10)
    payload = payload_of(rows)
    assert [image["picture"] is None for image in payload["images"]] == [False, True, True]
    assert [image["size"] for image in payload["images"][1:]] == [[512, 256], [256, 512]]
    assert payload["notes"][0].startswith("The page holds 1 picture; nothing")
    assert payload["notes"][1].startswith("2 images without a picture: those of a page have at most 0.00")


def test_without_texts_or_pillow_there_are_no_pictures(rows, monkeypatch):
    payload = payload_of(rows, has_text=False)
    assert [image["picture"] for image in payload["images"]] == [None] * 3
    assert payload["notes"] == ["3 images without a picture: --no-text leaves them out."]
    monkeypatch.setitem(sys.modules, "PIL", None)
    without = Pictures(True)
    assert without.number(Image(np.zeros((64, 32, 3), np.uint8))) == 0
    assert without.images == [{"size": [32, 64], "tokens": 2, "picture": None}]
    assert without.notes() == [
        "1 image without a picture: pictures need the package pillow; run pip install 'titan_tree[images]'."
    ]


def test_pictures_are_not_searched_for_secrets():
    """Base64 may look like a key, and a changed picture would be damaged."""
    secret = "AKIAIOSFODNN7EXAMPLE"
    assert Secrets(True).payload({"name": secret, "picture": secret}) == {"name": "***", "picture": secret}
