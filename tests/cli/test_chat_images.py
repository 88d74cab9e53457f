"""titan-tree chat with images: greedy answers are those of ``generate`` of transformers."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from titan_tree.cli import main
from titan_tree.cli.chat import Speaker
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model, load_pretrained
from titan_tree.run.checkpoint.export import export_hf
from titan_tree.tree.context import Context

Pillow = pytest.importorskip("PIL.Image")
TOKENIZER = TreeTokenizer.byte_level()
IMAGE = TOKENIZER.special_tokens["<|image_pad|>"]
ANSWER = 24  # tokens


def snapshot(folder, name):
    """Writes a small random model in which all weights matter, with a tower and the byte tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENIZER.vocab_size, "tie_word_embeddings": False}
    model = build_model(name, "debug", vision="train", **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        model.norm.weight.add_(2.0)
    export_hf(model, folder, "1", torch.float32, None, TOKENIZER)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": IMAGE}))
    return folder


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def model(request, tmp_path_factory):
    return snapshot(tmp_path_factory.mktemp("snapshot") / request.param, request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns two pictures of other sizes, and one of the size of the first."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, size, most in (("a", (256, 288), 40), ("b", (320, 224), 256), ("c", (256, 288), 256)):
        Pillow.fromarray(draw.integers(0, most, (*size, 3), np.uint8)).save(folder / f"{name}.png")
    return folder


def messages(files, *names):
    parts = [{"type": "image", "image": str(files / f"{name}.png")} for name in names]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]},
        {"role": "assistant", "content": "none", "finish_reason": "stop"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}, *parts[:1]]},
    ]


def generated(folder, files, names, context):
    """Returns the greedy continuation by the unmodified model of transformers."""
    hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    process = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    pictures = [Pillow.open(files / f"{name}.png") for name in (*names, names[0])]
    tokens = torch.tensor([context])
    out = hf.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        mm_token_type_ids=(tokens == IMAGE).int(),
        **process(pictures, return_tensors="pt"),
        do_sample=False,
        max_new_tokens=ANSWER,
        eos_token_id=[],
    )
    return out[0, len(context) :].tolist()


def test_greedy_answers_are_those_of_transformers(model, files, monkeypatch):
    speaker = Speaker(load_pretrained(model, torch.float32, vision="frozen"), TOKENIZER)
    said = []
    monkeypatch.setattr(speaker.chat, "text", lambda tokens: said.append(tokens) or "")
    speaker.chat.ends = [10**6]  # no answer ends early
    for names in (("a", "b"), ("c", "b"), ("b",)):
        asked = messages(files, *names)
        context = speaker.chat.prompt(None, asked)
        assert len(context.images) == len(names) + 1
        speaker.answer(asked, ANSWER, 0)
        assert said[-1] == generated(model, files, names, context)
    assert said[0] != said[1]  # pictures of one size
    with pytest.raises(UserError, match=f"expected token id {IMAGE}, .*image_token_id, only in images"):
        speaker.continued(Context([5, IMAGE]), 1)


def test_a_line_names_the_image_of_the_next_message(model, files, capsys, monkeypatch):
    lines = [
        f"/image {files}/a.png",
        "which?",
        "/reset",
        f"/image {files}/c.png",
        "/image none.png",
        "which?",
    ]
    lines += [f"/image {files}/b.png", "/reset", f"/image  {files}/a.png", "which?", "/help"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", str(model), "--max-tokens", "8"]) == 0
    printed = capsys.readouterr()
    first, other, again = printed.out.splitlines()
    assert first == again != other
    errors = [line for line in printed.err.splitlines() if not line.startswith("(cut off")]
    assert errors[0] == f"{model}; /image FILE, /reset, /quit"
    assert errors[1].startswith("/image: ")
    assert errors[1].endswith("/none.png: cannot be read: No such file or directory")
    assert errors[2:] == ["unknown command /help; expected /image FILE or /reset or /quit"]
