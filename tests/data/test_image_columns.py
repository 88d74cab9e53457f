"""Images of data sets as the library datasets stores them: content and paths in Parquet and Arrow files."""

import io
import json

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.support.datasets import sample_reader
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError
from titan_tree.scoring.scored_records import path_record, placed_paths

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
Image, List, Value = datasets.Image(), datasets.List, datasets.Value
COLOURS = ("red", "lime", "blue")


def content(colour, format="PNG"):
    file = io.BytesIO()
    Pillow.new("RGB", (256, 256), colour).save(file, format)
    return file.getvalue()


def store(folder, rows, features, how):
    data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    if how == "parquet":
        data.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    data.save_to_disk(folder / "rows")
    return folder / "rows"


def paths_of(file):
    reader = sample_reader(file, TreeTokenizer.byte_level())
    return [path for group in reader.files.groups() for path in reader.paths(group)]


def colours(path):
    """Returns the colours of a path's images, and where they begin."""
    channels = [image.pixels.mean((0, 1)) for _, image in path.images]
    assert all(channel.max() > 250 for channel in channels)
    return [COLOURS[channel.argmax()] for channel in channels], [start for start, _ in path.images]


@pytest.mark.parametrize("how", ["parquet", "folder"])
def test_rows_of_token_ids_name_stored_images(tmp_path, how):
    """A path, the content of a file, and both: the content counts then."""
    Pillow.new("RGB", (256, 256), "red").save(tmp_path / "a.png")
    sources = [
        {"bytes": None, "path": str(tmp_path / "a.png")},
        {"bytes": content("lime"), "path": None},
        {"bytes": content("blue", "JPEG"), "path": "a.png"},
    ]
    tokens, images = [1], []
    for source in sources:
        images.append({"start": len(tokens), "image": source})
        tokens += [9] * 64 + [2]
    row = {"tokens": tokens, "loss_mask": [0] * (len(tokens) - 1) + [1], "images": images}
    entry = {"start": Value("int64"), "image": Image}
    features = {"tokens": List(Value("int64")), "loss_mask": List(Value("int64")), "images": List(entry)}
    file = store(tmp_path, [row], features, how)
    (path,) = paths_of(file)
    assert colours(path) == (["red", "lime", "blue"], [1, 66, 131])
    reader = sample_reader(file)
    (group,) = reader.files.groups()
    ((path, fields),) = placed_paths(reader, group)
    scored = tmp_path / "scored.jsonl"
    scored.write_text(path_record(group, "g", path, fields, {}) + "\n")
    (copy,) = paths_of(scored)
    assert [image.key for _, image in copy.images] == [image.key for _, image in path.images]


@pytest.mark.parametrize("how", ["parquet", "folder"])
def test_a_column_of_images_fills_the_parts_of_messages_in_order(tmp_path, how):
    text = {"type": "text", "text": "which?"}
    prompt = [{"role": "user", "content": [{"type": "image"}, text, {"type": "image"}, {"type": "image"}]}]
    completion = [{"role": "assistant", "content": [{"type": "text", "text": "the last"}]}]
    row = {"prompt": prompt, "completion": completion, "images": list(map(content, COLOURS))}
    row["images"] = [{"bytes": item, "path": None} for item in row["images"]]
    message = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    features = {"prompt": List(message), "completion": List(message), "images": List(Image)}
    file = store(tmp_path, [row], features, how)
    ((_, record),) = read_records(str(file))
    assert "images" not in record
    parts = record["messages"][0]["content"]
    assert [part.get("text") or part["image"]["bytes"] for part in parts] == [
        content("red"),
        "which?",
        content("lime"),
        content("blue"),
    ]
    (path,) = paths_of(file)
    assert colours(path)[0] == ["red", "lime", "blue"]
    assert np.diff(colours(path)[1])[1] == 64 + 2  # the ends of one image and the beginning of the next


def test_images_beyond_the_parts_are_refused(tmp_path):
    Pillow.new("RGB", (256, 256)).save(tmp_path / "a.png")
    answer = {"role": "assistant", "content": "a"}

    def refusal(question, images):
        row = {"messages": [{"role": "user", "content": question}, answer], "images": images}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError) as caught:
            paths_of(tmp_path / "rows.jsonl")
        return str(caught.value).removeprefix(f"{tmp_path}/rows.jsonl:1: ")

    assert refusal([{"type": "image"}], ["a.png", "a.png"]) == (
        'images: expected a part {"type": "image"} of a message for each of 2, got 1; add it where the model '
        "saw the image"
    )
    assert refusal("<image>which?", ["a.png"]).endswith(
        "for each of 1, got 0; add it where the model saw the image"
    )
    assert "messages[0].content[1]: expected an image" in refusal([{"type": "image"}] * 2, ["a.png"])
    missing = {"bytes": None, "path": None}
    assert refusal([{"type": "image"}], [missing]).endswith(
        "messages[0].content[0].image: expected the path of an image or a data: URL, got None"
    )
