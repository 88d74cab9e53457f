"""Images in the messages of conversations: formats, files of real screenshots, and what is made of them."""

import json
import zipfile

import numpy as np
import pytest

from tests.data.test_images import HEADER, SCREENS, picture, url
from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_lines
from tests.support.traces import TRACE, node
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.images import load_image
from titan_tree.data.token_store import write_store
from titan_tree.errors import UserError
from titan_tree.scoring.scored_records import path_record, placed_paths
from titan_tree.xray.payload import Xray
from titan_tree.xray.rendering import USER, KindFinder, Renderer
from titan_tree.xray.sources import Sources

BYTES = TreeTokenizer.byte_level()
SAY = {"role": "assistant", "content": "done"}
SHOT, PAGE = url(picture(256, 256, seed=1)), url(picture(256, 288, seed=2))
ARGUMENTS = {"type": "click", "x": 3}


def text(words, kind="text"):
    return {"type": kind, "text": words}


def own(source, **fields):
    return {"type": "image", "image": source, **fields}


def messages(name="computer", shot=SHOT, page=PAGE):
    """Returns a conversation in titan_tree's own schema."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
    return [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [text("a"), own(shot), text("b")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("see"), own(page)]},
        SAY,
    ]


def chat(shot, page):
    """Returns the conversation as OpenAI's messages."""
    system, user, call, tool, say = messages()
    user = {**user, "content": [text("a"), {"type": "image_url", "image_url": shot}, text("b")]}
    return [
        system,
        user,
        call,
        {**tool, "content": [text("see"), {"type": "image_url", "image_url": page}]},
        say,
    ]


def block(source):
    kind, _, data = source.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


ANTHROPIC = [
    {"role": "user", "content": [text("a"), block(SHOT), text("b")]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "computer", "input": ARGUMENTS}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text("see"), block(PAGE)]}],
    },
]


def item(source):
    return {"type": "input_image", "image_url": source, "detail": "auto"}


ITEMS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [text("a", "input_text"), item(SHOT), text("b", "input_text")]},
]
SAYS = {"type": "message", "role": "assistant", "content": [text("done", "output_text")]}
CALL = {"type": "function_call", "call_id": "1", "name": "computer", "arguments": json.dumps(ARGUMENTS)}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [text("see", "input_text"), item(PAGE)]}
ROWS = {
    "own": ("jsonl", {"messages": messages()}),
    "own, recognized": ("auto", {"messages": messages()}),
    "files": ("auto", {"messages": messages(shot="a.png", page="b.png")}),
    "a task": ("auto", {"trajectories": [{"messages": messages()}]}),
    "OpenAI": ("auto", {"messages": chat({"url": SHOT, "detail": "high"}, {"url": PAGE})}),
    "OpenAI, text": ("auto", {"messages": chat(SHOT, "b.png")}),
    "OpenAI, a call": (
        "auto",
        {"request": {"messages": chat(SHOT, PAGE)[:-1]}, "response": {"choices": [{"message": SAY}]}},
    ),
    "prompt and completion": ("auto", {"prompt": chat(SHOT, PAGE)[:-1], "completion": [SAY]}),
    "Anthropic": ("auto", {"system": "S", "messages": [*ANTHROPIC, SAY]}),
    "Responses": ("auto", {"input": [*ITEMS, CALL, OUTPUT], "output": [SAYS]}),
    "a tree": ("auto", {"prompt": chat(SHOT, PAGE)[:-1], "nodes": [{"messages": [SAY]}]}),
}


def read(folder, row, format="auto"):
    reader = sample_reader(write_lines(folder / "rows.jsonl", [row]), BYTES, format=format)
    return [path for group in reader.files.groups() for path in reader.paths(group)]


def save(folder):
    picture(256, 256, seed=1).save(folder / "a.png")
    picture(256, 288, seed=2).save(folder / "b.png")


@for_each("format, row", ROWS.values())
def test_all_formats_give_the_same_samples(format, row, tmp_path):
    save(tmp_path)
    images = [load_image(source, ".") for source in (SHOT, PAGE)]
    want = BYTES.samples(messages(shot=images[0], page=images[1]), turns="last")[0]
    path = read(tmp_path, row, format)[-1]
    assert path.tokens.tolist() == want.tokens.tolist()
    assert path.loss_mask.tolist() == want.loss_mask.tolist()
    assert [(start, image.key) for start, image in path.images] == [
        (start, image.key) for start, image in want.images
    ]
    assert len(path.images) == 2


@for_each("action, arguments", [({"action": ARGUMENTS}, ARGUMENTS), ({"actions": [1]}, {"actions": [1]})])
def test_calls_of_a_computer_are_calls_of_a_tool(action, arguments, tmp_path):
    """Its result is the screenshot alone."""
    shot = {"type": "computer_screenshot", "image_url": PAGE}
    call = {"type": "computer_call", "call_id": "1", "status": "completed", **action}
    output = {"type": "computer_call_output", "call_id": "1", "output": shot}
    path = read(tmp_path, {"input": [*ITEMS, call, output], "output": [SAYS]})[-1]
    images = [load_image(source, ".") for source in (SHOT, PAGE)]
    system, user, called, tool, say = messages(shot=images[0])
    called["tool_calls"][0]["function"]["arguments"] = arguments
    given = [system, user, called, {**tool, "content": [own(images[1])]}, say]
    assert path.tokens.tolist() == BYTES.samples(given, turns="last")[0].tokens.tolist()


def test_file_urls_and_absolute_paths_are_files(tmp_path):
    save(tmp_path)
    (tmp_path / "a b.png").write_bytes((tmp_path / "a.png").read_bytes())
    row = {"messages": chat(f"file://{tmp_path}/a%20b.png", str(tmp_path / "b.png"))}
    assert [image.source for _, image in read(tmp_path, row)[-1].images] == [
        str(tmp_path / "a b.png"),
        str(tmp_path / "b.png"),
    ]


def ask(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}, SAY]}


IN_PART = r"messages\[0\].content\[0\]"
MISTAKES = {
    "a URL": (
        ask({"type": "image_url", "image_url": "https://x.org/a.png"}),
        f"{IN_PART}.image: .*, got https",
    ),
    "no file": (ask(own("c.png")), rf"{IN_PART}.image: .*/c.png: cannot be read: No such file"),
    "a field": (ask(own("a.png", size=3)), f"{IN_PART}.size: unknown field; expected type, image, hash"),
    "hash": (ask(own("a.png", hash="ab")), f"{IN_PART}.hash: expected [0-9a-f]{{64}}, that of the resized"),
    "no source": (
        ask({"type": "image"}),
        f"{IN_PART}: expected an image as a file beside the data or as a da",
    ),
    "video": (ask({"type": "video_url"}), f"{IN_PART}: got a part of type 'video_url'; expected text, or an"),
    "audio": (ask({"type": "input_audio"}), f"{IN_PART}: got a part of type 'input_audio'; expected text"),
    "document": (ask({"type": "document"}), f"{IN_PART}: got a part of type 'document'; expected text"),
    "assistant": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [own("a.png")]}]},
        r"messages\[1\].content\[0\]: expected no image of an assistant",
    ),
    "a column": (
        {**ask(text("a")), "images": ["a.png"]},
        r"images: expected a part .* of a message for each of 1, got 0",
    ),
}


@for_each("row, message", MISTAKES.values())
def test_mistakes_name_file_row_and_part(row, message, tmp_path):
    save(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path}/rows.jsonl:1: {message}") as caught:
        read(tmp_path, row)
    assert "\n" not in str(caught.value)


def test_a_right_hash_is_accepted(tmp_path):
    (path,) = read(tmp_path, ask(own(SHOT, hash=load_image(SHOT, ".").key)))
    assert len(path.images) == 1


def test_paths_keep_images_beside_other_fields_and_share_them(tmp_path):
    row = {"trajectories": [{"messages": messages()}, {"messages": messages(shot=PAGE)}], "temperature": 0.5}
    first, second, third, _ = read(tmp_path, row)
    assert first.temperature == 0.5
    assert [len(path.images) for path in (first, second, third)] == [1, 2, 1]
    assert third.images[0][1] is second.images[1][1]


def recorded(shot, answer="done"):
    """Returns a call whose response records token ids, with placeholders as the model read them."""
    given = messages(shot=load_image(shot, "."), page=load_image(PAGE, "."))
    path = BYTES.samples(given, turns="last")[0]
    start, end = np.flatnonzero(path.loss_mask)[[0, -1]].tolist()
    ids = {
        "prompt_token_ids": path.tokens[:start].tolist(),
        "token_ids": path.tokens[start : end + 1].tolist(),
    }
    choice = {"message": SAY, "finish_reason": "stop", **ids}
    row = {"request": {"messages": chat(shot, PAGE)[:-1]}, "response": {"choices": [choice]}}
    return row, path


def test_recorded_token_ids_get_the_images_of_their_messages(tmp_path):
    """Calls of one group show one image; the ids alone do not tell images apart."""
    other = url(picture(256, 256, seed=3))
    calls = [recorded(shot) for shot in (SHOT, other, SHOT)]
    reader = sample_reader(write_lines(tmp_path / "rows.jsonl", [row for row, _ in calls]), BYTES)
    first, second = (reader.paths(group) for group in reader.files.groups())
    assert (len(first), len(second)) == (2, 1)
    for path, (_, want) in zip([*first, *second], [calls[0], calls[2], calls[1]], strict=True):
        assert path.tokens.tolist() == want.tokens[: len(path)].tolist()
        assert [(s, i.key) for s, i in path.images] == [(s, i.key) for s, i in want.images]
    cut = recorded(SHOT)[0]
    del cut["response"]["choices"][0]["prompt_token_ids"][-70:]
    with pytest.raises(UserError, match=r"images\[1\]: expected all tokens, 176 to 247, of an image"):
        read(tmp_path, cut)
    with pytest.raises(UserError, match=r"images\[0\]: expected .* or <\|image_pad\|> of data.tokenizer"):
        read(tmp_path, {"tokens": [5, 6], "images": [{"image": SHOT}]})


def test_a_trace_of_verifiers_has_images_in_its_messages(tmp_path):
    path = BYTES.samples(messages(shot=load_image(SHOT, "."), page=load_image(PAGE, ".")), turns="last")[0]
    start, end = np.flatnonzero(path.loss_mask)[[0, -1]].tolist()
    shown = chat({"url": SHOT}, {"url": PAGE})
    cuts = [0, 5, start, end + 1]
    contents = [shown[1]["content"], shown[3]["content"], "done"]
    trace = dict(TRACE, calls=[], rewards={}, nodes=[])
    for number, content in enumerate(contents):
        ids = path.tokens[cuts[number] : cuts[number + 1]].tolist()
        made = node(number - 1 if number else None, ids, [-0.5] * len(ids) if content == "done" else ())
        trace["nodes"].append(made | {"message": {"role": "user", "content": content}})
    (read_path,) = read(tmp_path, trace)
    assert read_path.tokens.tolist() == path.tokens[: end + 1].tolist()
    assert [(s, i.key) for s, i in read_path.images] == [(s, i.key) for s, i in path.images]


def test_scored_records_name_images_and_a_store_keeps_them(tmp_path):
    save(tmp_path)
    row = {"messages": messages(shot="a.png"), "group_id": "g"}
    reader = sample_reader(write_lines(tmp_path / "rows.jsonl", [row]), BYTES)
    (group,) = reader.files.groups()
    placed = placed_paths(reader, group)
    (tmp_path / "scored").mkdir()
    lines = [json.loads(path_record(group, "g", path, fields, {})) for path, fields in placed]
    assert [entry["image"] for entry in lines[1]["images"]] == [str(tmp_path / "a.png"), PAGE]
    again = sample_reader(write_lines(tmp_path / "scored/rows.jsonl", lines))
    paths = [path for group in again.files.groups() for path in again.paths(group)]
    write_store(tmp_path / "rows.store", [("g", [path for path, _ in placed])], HEADER)
    store = sample_reader(tmp_path / "rows.store")
    (stored,) = (store.paths(group) for group in store.files.groups())
    for (path, _), *copies in zip(placed, paths, stored, strict=True):
        for copy in copies:
            assert np.array_equal(copy.tokens, path.tokens)
            assert [(s, i.key) for s, i in copy.images] == [(s, i.key) for s, i in path.images]


def test_inspect_shows_images_of_messages(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = write_lines(tmp_path / "rows.jsonl", [{"messages": messages(), "id": "g"}])
    main(["inspect", file, "--show", "g/2"])
    shown = capsys.readouterr().out
    assert "a<|vision_start|>⟨image 256 x 256⟩<|vision_end|>b<|im_end|>" in shown
    assert "see<|vision_start|>⟨image 256 x 288⟩<|vision_end|>" in shown


@for_each("tokenizer", [None, BYTES])
def test_xray_shows_images_of_messages(tokenizer, tmp_path):
    rows = [{"messages": messages(shot=shot), "group_id": "g"} for shot in (SHOT, SHOT, PAGE)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    payload = Xray(Sources([file]), Renderer(sample_reader(file, tokenizer)), "rows").payload()
    (tree,) = payload["trees"]
    kinds = [payload["kinds"][kind] for kind in tree["kind"]]
    images = [
        (text, size)
        for kind, text, size in zip(kinds, tree["text"], tree["tokens"], strict=True)
        if kind == "image"
    ]
    small, large = ("⟨image 256 x 256⟩", 64), ("⟨image 256 x 288⟩", 72)
    assert sorted(images) == [small, large, large, large]
    assert payload["reasons"][0][0] == "another image"
    users = [text for kind, text in zip(kinds, tree["text"], strict=True) if kind == "user"]
    assert any("a" in text for text in users)
    assert any(text.strip().removeprefix("<|vision_end|>").startswith("b") for text in users)


def test_xray_finds_messages_of_images_alone(tmp_path):
    ask = {"role": "user", "content": "a"}
    row = {"messages": [ask, SAY, {"role": "user", "content": [own(SHOT)]}, SAY]}
    reader = sample_reader(write_lines(tmp_path / "rows.jsonl", [row]), BYTES)
    (group,) = reader.files.groups()
    rendered = Renderer(reader).paths(group)[-1]
    ends = np.flatnonzero(rendered.path.tokens == BYTES.special_tokens["<|vision_end|>"])
    assert KindFinder(BYTES).kinds(rendered)[ends].tolist() == [USER]


REAL = {  # file -> paths, images on them, tokens (bytes) of paths, and of trees
    "rollouts.jsonl": (38, 204, 222_969, 40_286),
    "rollouts_last3.jsonl": (38, 102, 200_093, 115_941),
    "rollouts_last5.jsonl": (38, 150, 210_813, 130_584),
}


@pytest.mark.skipif(not SCREENS.exists(), reason="needs agentnet_screens.zip")
def test_real_rollouts_with_screenshots_are_read(tmp_path):
    with zipfile.ZipFile(SCREENS) as screens:
        screens.extractall(tmp_path)
    for name, (num_paths, num_images, tokens, distinct) in REAL.items():
        reader = sample_reader(tmp_path / name, BYTES)
        trees = [reader.tree(group) for group in reader.files.groups()]
        paths = [path for tree in trees for path in tree.paths]
        assert (len(paths), sum(len(path.images) for path in paths)) == (num_paths, num_images)
        assert sum(map(len, paths)) == tokens
        assert sum(tree.stats.n_tree for tree in trees) == distinct
        assert sum(len(tree.images) for tree in trees) == 38
        assert sum(len(image) for tree in trees for image in tree.images) == 9_180
        answers = [BYTES.decode(path.tokens[path.loss_mask > 0]) for path in paths]
        assert all(text.startswith("## Thought:") and text.endswith("<|im_end|>") for text in answers)
