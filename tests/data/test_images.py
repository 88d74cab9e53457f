"""Images of data files against transformers' processor, and in rows of token ids."""

import base64
import io
import json
import random
import sys
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from tests.support.cases import for_each
from tests.support.datasets import REAL_DATA, sample_reader
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.images import MAX_PIXELS, MIN_PIXELS, load_image, resized_size
from titan_tree.data.token_store import write_store
from titan_tree.errors import UserError
from titan_tree.scoring.scored_records import path_record, placed_paths
from titan_tree.tree.images import Image
from titan_tree.xray.payload import Xray
from titan_tree.xray.rendering import Renderer
from titan_tree.xray.sources import Sources

SCREENS = REAL_DATA / "agentnet_screens.zip"
PAD, TEXT = 900, 901  # token ids of images, and of a text
HEADER = {"sample": {}, "advantage": "given", "tokenizer": None}  # of a token store
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16")


def picture(width, height, mode="RGB", seed=0):
    """Returns a random picture, smooth in part, so that resizing matters."""
    draw = np.random.default_rng(seed)
    small = Pillow.fromarray(draw.integers(0, 256, (9, 7, 4), np.uint8), "RGBA").resize((width, height))
    if mode == "I;16":
        return Pillow.fromarray(draw.integers(0, 65536, (height, width), np.uint16))
    if mode in ("RGBA", "LA"):
        return small.convert(mode)
    small = small.convert("RGB")
    return small.convert(mode)


def url(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def processor():
    """Returns what transformers' processor makes of a picture: patches and sizes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, image_mean=half, image_std=half)


def assert_as_processed(image, picture, processor):
    """Asserts that the pixels of an image, normalised and cut into patches, are those of the processor."""
    rows, columns = image.rows, image.columns
    want = processor(ImageOps.exif_transpose(picture), return_tensors="np")
    assert want["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    values = (image.pixels.astype(np.float64) * np.float64(1 / 255)).astype(np.float32)
    values = (values - np.float32(0.5)) / np.float32(0.5)
    patches = values.reshape(rows, 2, 16, columns, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = np.repeat(patches[:, :, :, :, :, None], 2, axis=5)
    assert np.array_equal(patches.reshape(4 * rows * columns, -1), want["pixel_values"])


def test_pixels_are_those_of_transformers_processor_for_random_pictures(processor):
    draw = random.Random(0)
    sizes = [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(12)]
    for number, size in enumerate([*sizes, (1, 1), (200, 1), (3, 590)]):
        mode = MODES[number % len(MODES)]
        if min(size) * 200 < max(size):
            continue
        shown = picture(*size, mode, seed=number)
        format = "PNG" if mode != "CMYK" else "JPEG"
        source = url(shown, format)
        read = Pillow.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
        assert_as_processed(load_image(source, "."), read, processor)


def test_sizes_are_those_of_transformers_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    draw = random.Random(1)
    for _ in range(2000):
        height, width = (round(10 ** draw.uniform(0, 4.3)) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            want = smart_resize(height, width, 32, MIN_PIXELS, MAX_PIXELS)
            assert resized_size(height, width) == want


def test_resized_sizes_stay():
    """So that images of rollouts, which are files after resizing, can be read again."""
    draw = random.Random(2)
    sizes = [(round(10 ** draw.uniform(0, 3)), draw.uniform(1, 200)) for _ in range(2000)]
    for height, width in [(47, 6580), *((side, int(side * ratio)) for side, ratio in sizes)]:
        resized = resized_size(height, width)
        assert resized_size(*resized) == resized


def test_orientation_and_transparent_colors_are_applied(processor):
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    source = url(picture(640, 320), "JPEG", exif=exif)
    image = load_image(source, ".")
    assert (image.rows, image.columns) == (20, 10)
    assert_as_processed(image, Pillow.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))), processor)
    palette = Pillow.new("P", (256, 256))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    image = load_image(url(palette, transparency=0), ".")
    assert np.unique(image.pixels.reshape(-1, 3), axis=0).tolist() == [[255, 255, 255]]


@pytest.mark.skipif(not SCREENS.exists(), reason="needs agentnet_screens.zip")
def test_pixels_are_those_of_transformers_processor_for_screenshots(processor, tmp_path):
    with zipfile.ZipFile(SCREENS) as screens:
        names = [name for name in screens.namelist() if name.endswith(".jpg")][::8]
        screens.extractall(tmp_path, names)
    assert len(names) == 5
    for name in names:
        assert_as_processed(load_image(name, str(tmp_path)), Pillow.open(tmp_path / name), processor)


def row(*sources, **fields):
    """Returns a record of token ids: each image has 8 x 8 tokens, between texts."""
    tokens, images = [TEXT], []
    for source in sources:
        images.append({"start": len(tokens), "image": source})
        tokens += [PAD] * 64 + [TEXT]
    mask = [0] * (len(tokens) - 1) + [1]
    return {"tokens": tokens, "loss_mask": mask, "images": images} | fields


def write(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sample_reader(folder / "rows.jsonl", TreeTokenizer.byte_level())


def read(folder, *rows):
    reader = write(folder, *rows)
    return [path for group in reader.files.groups() for path in reader.paths(group)]


def test_rows_of_a_group_share_decoded_images(tmp_path, monkeypatch):
    picture(256, 256, seed=1).save(tmp_path / "a.png")
    picture(256, 256, seed=1).save(tmp_path / "same.bmp")
    picture(256, 256, seed=2).save(tmp_path / "b.png")
    opened = []
    monkeypatch.setattr(Pillow, "open", lambda *a, old=Pillow.open, **k: opened.append(a) or old(*a, **k))
    rows = [row("a.png", "b.png", group_id="g"), row(str(tmp_path / "a.png"), "same.bmp", group_id="g")]
    first, second = read(tmp_path, *rows)
    assert len(opened) == 3
    (start, image), (_, other) = first.images
    assert [start for start, _ in second.images] == [1, 66]
    assert second.images[0][1] is image
    assert second.images[1][1] is image
    assert other is not image
    assert np.array_equal(image.pixels, np.array(picture(256, 256, seed=1)))
    assert start == 1


def test_padding_and_prompts_move_images(tmp_path):
    picture(256, 256).save(tmp_path / "a.png")
    prompt = [0, 0, 5] + [PAD] * 64
    fields = {"attention_mask": [0, 0] + [1] * 65 + [1, 0], "images": [{"start": 3, "image": "a.png"}]}
    (path,) = read(tmp_path, {"prompt_ids": prompt, "completion_ids": [7, 0], **fields})
    assert path.tokens.tolist() == [5, *[PAD] * 64, 7]
    assert [start for start, _ in path.images] == [1]
    (path,) = read(tmp_path, {"tokens": [5], "images": []})
    assert path.images == ()


def test_rows_are_recognized_by_a_long_prompt(tmp_path):
    """Recognition sees the first 256 KiB of a file, where a prompt of many images hides the response."""
    picture(256, 256).save(tmp_path / "a.png")
    images = [{"start": start, "image": "a.png"} for start in range(0, 40_960, 64)]
    (path,) = read(tmp_path, {"prompt_ids": [151_655] * 40_960, "completion_ids": [7], "images": images})
    assert len(path.images) == 640
    assert path.loss_mask.sum() == path.loss_mask[-1] == 1
    with pytest.raises(UserError, match="prompt_ids: expected ids of a prompt and a response, or of both"):
        read(tmp_path, {"prompt_ids": [1, 2]})


def changed(**entry):
    made = row("a.png")
    made["images"][0] |= entry
    return made


ABOUT_HASH = r"images\[0\].hash: expected [0-9a-f]{64}, that of the resized pixels, got 'ab'; the file has c"
MISTAKES = {
    "no list": (row("a.png", images={"start": 1}), r"images: expected a list of objects, got {'start': 1}"),
    "no start": (changed(start=None), r"images\[0\]: expected {\"start\": integer"),
    "a field": (changed(detail="low"), r"images\[0\].detail: unknown field; expected start, image, hash"),
    "no image": (changed(image=None), r"images\[0\].image: expected the path of an image or a data: URL, "),
    "a URL": (row("https://x.org/a.png"), r"images\[0\].image: expected a path .*, got https://...; downl"),
    "no file": (row("b.png"), r"images\[0\].image: .*/b.png: cannot be read: No such file"),
    "a folder": (row("."), r"images\[0\].image: .*: cannot be read: Is a directory"),
    "no base64": (row("data:image/png;base64,a$b="), r"images\[0\].image: data:image/png;base64,.*: expecte"),
    "a video": (row("data:video/mp4;base64,aa=="), r"images\[0\].image: expected data:image/png;base64,"),
    "damage": (row("cut.png"), r"images\[0\].image: .*/cut.png: expected an image \(PNG, .*truncated"),
    "text": (
        row("rows.jsonl"),
        r"images\[0\].image: .*/rows.jsonl: expected an image \(.*\): cannot identify image file$",
    ),
    "a long name": (row("x" * 5000), r"images\[0\].image: .{300}\.\.\.: cannot be read: File name too long$"),
    "a bomb": (row("bomb.png"), r"images\[0\].image: .*/bomb.png: expected an image .* exceeds limit of 17"),
    "a line": (row("line.png"), r"images\[0\].image: .*/line.png: expected sides of at most 200 : 1, got 2"),
    "hash": (changed(hash="ab"), ABOUT_HASH),
    "too few": (row("wide.png", "a.png"), r"images\[0\]: expected one placeholder id at tokens 1 to 96 of"),
    "too many": (
        row("a.png", tokens=[TEXT] + [PAD] * 65),
        r"images: expected the token id 900 only in images, of 8 x 8 tokens .* got it at token 65, too",
    ),
    "trained": (row("a.png", loss_mask=[1] * 66), r"images\[0\]: expected loss mask 0 at its tokens, got 1"),
    "messages": (
        {"messages": [{"role": "user", "content": "a"}], "images": [{"start": 0, "image": "a.png"}]},
        r"images: expected a part {\"type\": \"image\"} of a message for each of 1, got 0; add it where the",
    ),
    "messages in a task": (
        {"trajectories": [{"messages": [{"role": "user", "content": "a"}], "images": [{"start": 0}]}]},
        r"trajectories\[0\]: images: not read; give images as parts of messages",
    ),
    "a text": ({"text": "a", "images": [{"start": 0}]}, r"images: not read; give images as parts"),
    "pixels": (
        {"prompt_ids": [1], "completion_ids": [2], "pixel_values": [[0.5]]},
        r"pixel_values: not read; name the files of images in the field images \(docs/images.md\)",
    ),
    "a tree": (
        {"nodes": [{"tokens": [1], "images": []}, {"tokens": [1, 2]}]},
        r"nodes\[0\].images: unknown field",
    ),
    "a call": (
        {
            "request": {"prompt": [1], "features": {"mm_hashes": {}}},
            "response": {"choices": [{"token_ids": [2]}]},
        },
        r"request.features: not read; give images as parts",
    ),
}


@for_each("made, message", MISTAKES.values())
def test_mistakes_name_file_row_and_field(made, message, tmp_path):
    picture(256, 256).save(tmp_path / "a.png")
    picture(380, 256).save(tmp_path / "wide.png")
    Pillow.new("RGB", (201, 1)).save(tmp_path / "line.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    huge = bytearray(whole)
    huge[16:24] = (60_000).to_bytes(4, "big") * 2
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(huge)
    with pytest.raises(UserError, match=f"^{tmp_path}/rows.jsonl:1: .*{message}") as caught:
        read(tmp_path, made)
    assert "\n" not in str(caught.value)


def test_a_hash_is_that_of_size_patch_and_resized_pixels(tmp_path):
    picture(256, 256).save(tmp_path / "a.png")
    key = Image(np.array(picture(256, 256))).key
    (path,) = read(tmp_path, changed(hash=key))
    assert path.images[0][1].key == key


def test_scored_records_name_the_images_in_another_folder(tmp_path):
    picture(256, 256).save(tmp_path / "a.png")
    inline = url(picture(256, 256, seed=1))
    reader = write(tmp_path, row("a.png", inline, group_id="g"))
    (group,) = reader.files.groups()
    ((path, fields),) = placed_paths(reader, group)
    (tmp_path / "scored").mkdir()
    line = path_record(group, "g", path, fields, {})
    assert [entry["image"] for entry in json.loads(line)["images"]] == [str(tmp_path / "a.png"), inline]
    (copy,) = read(tmp_path / "scored", json.loads(line))
    assert [(start, image.key) for start, image in copy.images] == [
        (start, image.key) for start, image in path.images
    ]
    picture(256, 256, seed=2).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"images\[0\].hash: expected"):
        read(tmp_path / "scored", json.loads(line))


def test_a_store_keeps_images_and_says_that_their_files_are_unknown(tmp_path):
    picture(256, 256).save(tmp_path / "a.png")
    paths = read(tmp_path, row("a.png", "a.png", group_id="g"), row("a.png", group_id="g"))
    write_store(tmp_path / "rows.store", [("g", paths)], HEADER)
    reader = sample_reader(tmp_path / "rows.store")
    (group,) = reader.files.groups()
    (image,) = reader.tree(group).images
    assert np.array_equal(image.pixels, paths[0].images[0][1].pixels)
    with pytest.raises(UserError, match="images: a token store does not name their files; score the sources"):
        placed_paths(reader, group)


def shared_rows(folder):
    """Returns rows of one group with three images, two of them shared, one twice on a path; and a reader."""
    for number, name in enumerate("abc"):
        picture(256, 288 if name == "c" else 256, seed=number).save(folder / f"{name}.png")
    rows = [row("a.png", "a.png", group_id="g", id="1"), row("a.png", "b.png", group_id="g", id="2")]
    wide = {"tokens": [TEXT, *[PAD] * 72, TEXT], "loss_mask": [0] * 73 + [1], "id": "3", "group_id": "g"}
    rows.append(wide | {"images": [{"start": 1, "image": "c.png"}]})
    return write(folder, *rows)


def test_inspect_counts_images_and_shows_each_as_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    shared_rows(tmp_path)
    file = str(tmp_path / "rows.jsonl")
    main(["inspect", file])
    shown = capsys.readouterr().out
    assert "images: 5 on all paths, 3 distinct, of 200 tokens; encodings saved: 2\n" in shown
    main(["inspect", file, "--json"])
    tree = json.loads(capsys.readouterr().out)["all"]
    assert (tree["path_images"], tree["images"], tree["image_tokens"]) == (5, 3, 200)
    assert tree["n_tree"] == 1 + (64 + 1) + 2 * (64 + 1) + (72 + 1)
    main(["inspect", file, "--show", "g/2"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith("901 ⟨image 256 x 256⟩ 901 ⟨image 256 x 256⟩ ⟦ 901 ⟧")
    main(["inspect", file, "--report", "g"])
    shown = capsys.readouterr().out
    assert "2 x another image\n" in shown
    assert '"⟨image 256 x 288⟩"  another image\n' in shown


def test_xray_shows_each_image_as_one(tmp_path):
    shared_rows(tmp_path)
    file = str(tmp_path / "rows.jsonl")
    payload = Xray(Sources([file]), Renderer(sample_reader(file)), "rows").payload()
    (tree,) = payload["trees"]
    kinds = [payload["kinds"][kind] for kind in tree["kind"]]
    found = [(kind, text, size) for kind, text, size in zip(kinds, tree["text"], tree["tokens"], strict=True)]
    small, large = "⟨image 256 x 256⟩", "⟨image 256 x 288⟩"
    assert [item for item in found if item[0] == "image"] == [
        *[("image", small, 64)] * 3,
        ("image", large, 72),
    ]
    assert payload["repeats"][payload["kinds"].index("image")] == 64
    assert payload["reasons"][0][:2] == ("another image", 2)


def test_without_pillow_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"needs the package pillow; run pip install 'titan_tree\[images\]'"):
        load_image("data:image/png;base64,", ".")
