"""titan-tree export: the files are those that training writes, and transformers loads them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titan_tree import tree_logprobs
from titan_tree.cli import main
from titan_tree.run.saved_model import SavedModel

CONFIG = Path(__file__).parents[2] / "train_configs" / "demo.toml"


def trained(folder: Path, *overrides: str) -> Path:
    keys = "training.steps=1", "lr_scheduler.warmup_steps=0", "training.dtype=float32"
    exports = f"folder={folder}", "checkpoint.export_hf=true"
    assert main(["train", str(CONFIG), *exports, *keys, *overrides]) == 0
    return folder


@pytest.mark.slow
def test_an_export_is_what_training_writes_and_transformers_computes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run, out = trained(tmp_path / "run"), tmp_path / "new" / "export"
    capsys.readouterr()
    assert main(["export", str(run), str(out)]) == 0
    assert capsys.readouterr().out.endswith(  # after what training lets the logger show
        f"wrote {out}: a Hugging Face snapshot in float32, from {run}/checkpoints/step-1\n"
        f'load it: transformers.AutoModelForCausalLM.from_pretrained("{out}") or titan-tree chat {out}\n'
    )
    names = sorted(file.name for file in (run / "hf").iterdir())
    assert "tokenizer.json" in names
    assert sorted(file.name for file in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (run / "hf" / name).read_bytes(), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(60, 90)
    with torch.no_grad():
        (ours,) = tree_logprobs(SavedModel.at(str(run)).model(torch.device("cpu")), [tokens.tolist()])
        expected = theirs(tokens[None]).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(torch.as_tensor(ours), expected.gather(1, tokens[1:, None])[:, 0])
    capsys.readouterr()
    for arguments, message in (
        ((run, out), f"{out}: this folder exists; name another one, or replace it with --force"),
        ((run, run, "--force"), f"{run}: the command reads files in this folder; name another one to write"),
        ((out, tmp_path / "other"), f"{out}: {out} is a snapshot already; use it as it is, or copy it"),
        (
            (run, tmp_path / "other", "--adapter"),
            f"--adapter: {run} was trained without LoRA; remove --adapter",
        ),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        assert capsys.readouterr().err == f"titan-tree: error: {message}\n"
    (out / "notes").write_text("mine")
    assert main(["export", str(run), str(out), "--force"]) == 0
    assert sorted(file.name for file in out.iterdir()) == names
    assert (tmp_path / "new" / "export.earlier" / "notes").read_text() == "mine"


@pytest.mark.slow
def test_lora_is_exported_as_an_adapter_or_added_to_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", "lora.rank=2")
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert f'load it: peft.PeftModel.from_pretrained(model, "{tmp_path}/adapter")' in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    for ours, trains in (("adapter", "adapter"), ("merged", "hf")):
        (file,) = (tmp_path / ours).glob("*.safetensors")
        found, expected = load_file(file), load_file(run / trains / file.name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
