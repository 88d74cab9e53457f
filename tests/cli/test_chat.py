"""titan-tree chat, and the byte tokenizer of exports."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from titan_tree.cli import main
from titan_tree.cli.chat import Speaker
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.data import demo
from titan_tree.models.pretrained import build_model
from titan_tree.run.checkpoint.export import export_hf
from titan_tree.run.saved_model import SavedModel

CONFIG = Path(__file__).parents[2] / "train_configs" / "demo.toml"
TEXTS = ("Hello world", " Ünï 🌲\n\tx <|im_end|><think> a</think>", "\x00don't 12  3 ", "")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of random weights, with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("export") / "hf"
    model = build_model("qwen3", "debug")
    model.init_weights(0)
    export_hf(model, folder, "1234", torch.float32, None, TreeTokenizer.byte_level())
    return folder


def test_exported_byte_tokenizers_read_back_with_the_same_ids(export: Path) -> None:
    ours, back = TreeTokenizer.byte_level(), TreeTokenizer.from_hf(export)
    for text in TEXTS:
        assert back.encode(text) == ours.encode(text)
        assert back.decode(back.encode(text)) == text


def test_an_export_ends_where_answers_of_the_template_end(export: Path, tmp_path: Path) -> None:
    """A base model that learns a chat template would otherwise generate up to its limit."""
    ids = TreeTokenizer.byte_level().special_tokens
    end, of_text = ids["<|im_end|>"], ids["<|endoftext|>"]
    base = tmp_path / "base"
    shutil.copytree(export, base)
    for known, ends in ((of_text, [end, of_text]), ([end, of_text], [end, of_text]), (None, [end])):
        file = base / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": known, "top_k": 7}))
        tokenizer = TreeTokenizer.from_hf(base)
        out = tmp_path / str(known)
        export_hf(SavedModel(base).model(torch.device("cpu")), out, "1", torch.float32, str(base), tokenizer)
        assert json.loads((out / file.name).read_text()) == {"eos_token_id": ends, "top_k": 7}


@pytest.mark.slow
def test_transformers_encodes_decodes_and_renders_as_the_byte_tokenizer(export: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = TreeTokenizer.byte_level(), transformers.AutoTokenizer.from_pretrained(export)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.special_tokens["<|im_end|>"]
    record = next(demo.records())
    for trajectory in record["trajectories"]:
        messages = normalize_messages(trajectory["messages"], "messages")
        rendered = theirs.apply_chat_template(
            messages, tools=record["tools"], tokenize=False, add_generation_prompt=True
        )
        assert rendered == ours.render(messages, record["tools"], add_generation_prompt=True)


def test_chat_answers_lines_of_a_pipe(
    export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\n/reset\nHi\n/help\n/quit\nnever read\n"))
    assert main(["chat", str(export), "--max-tokens", "3", "--seed", "5"]) == 0
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first == second  # greedy, and after /reset the same conversation
    assert printed.err.splitlines() == [
        f"{export}; /reset, /quit",
        *["(the answer has no visible text)", "(cut off after --max-tokens 3)"] * 2,
        "unknown command /help; expected /reset or /quit",
    ]


def test_an_answer_of_white_space_is_named(
    export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    monkeypatch.setattr(Speaker, "answer", lambda *_: (" \n", True))
    assert main(["chat", str(export)]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == ["(the answer has no visible text)"]


def test_chat_refuses_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = (
        "expected the folder of a run (config.toml), a checkpoint inside of one (checkpoints/step-N) or a "
        "snapshot (config.json), got"
    )
    assert main(["chat", str(tmp_path)]) == 2
    assert main(["chat", f"{tmp_path}/missing"]) == 2
    assert main(["chat", __file__]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"titan-tree: error: {tmp_path}: {expected} a folder without them",
        f"titan-tree: error: {tmp_path}/missing: {expected} no such folder",
        f"titan-tree: error: {__file__}: {expected} a file; give the folder",
    ]
    (tmp_path / "adapter_config.json").touch()
    assert main(["chat", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"titan-tree: error: {tmp_path}: {expected} an adapter; give the run that wrote it\n"
    )
    (tmp_path / "config.toml").write_text('[model]\nflavor = "debug"\n[data]\nfiles = "demo"\n')
    assert main(["chat", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"titan-tree: error: {tmp_path}: this run has no checkpoint and no export yet; train it first\n"
    )


@pytest.mark.slow
def test_the_model_of_a_run_is_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "training.steps=2",
        "checkpoint.interval=1",
        "lr_scheduler.warmup_steps=1",
        "data.global_batch_groups=1",
    ]
    arguments = [*overrides, f"folder={tmp_path}", "checkpoint.export_hf=true"]
    assert main(["train", str(CONFIG), *arguments]) == 0
    cpu = torch.device("cpu")
    exported = SavedModel.at(f"{tmp_path}/hf").model(cpu).float().state_dict()
    newest = SavedModel.at(str(tmp_path))
    start, saved = newest.start_model(cpu).state_dict(), newest.model(cpu).state_dict()
    earlier = SavedModel.at(f"{tmp_path}/checkpoints/step-1").model(cpu).state_dict()
    for name, weight in exported.items():
        assert torch.equal(saved[name].bfloat16().float(), weight)
    assert any(not torch.equal(saved[name], earlier[name]) for name in saved)
    assert any(not torch.equal(start[name], earlier[name]) for name in saved)
    capsys.readouterr()
    assert main(["chat", str(tmp_path), "--task"]) == 0
    printed = capsys.readouterr().out
    # The log that training has turned on names the attention of the model that answers.
    heads = [line for line in printed.splitlines() if not line.startswith((" ", "TreeAttention:"))]
    assert heads == ["task:", "answer in the data:", "untrained model:", "after training (step-2):"]
