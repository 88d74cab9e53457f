"""titan-tree config: the keys that it shows, and the configurations that it writes."""

import csv
import json
import math
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from titan_tree.cli import main
from titan_tree.run.config import Config, load_config

ONE = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(capsys: pytest.CaptureFixture[str], *records: dict) -> tuple[dict, Config]:
    """Writes a configuration for records. Returns it as TOML has it, and as training loads it."""
    Path("own.jsonl").write_text("\n".join(map(json.dumps, records)))
    Path("my.toml").unlink(missing_ok=True)
    assert main(["config", "--model", "qwen3:debug", "--data", "own.jsonl", "-o", "my.toml"]) == 0
    assert capsys.readouterr().out == (
        "wrote my.toml; titan-tree plan my.toml estimates its memory, titan-tree train my.toml trains\n"
    )
    return tomllib.loads(Path("my.toml").read_text()), load_config("my.toml")


def test_a_key_is_shown_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "optimizer.lr", "export_hf"]) == 0
    assert capsys.readouterr().out == (
        "[optimizer]\n"
        "The optimizer of the fp32 weights. Weight decay applies to matrices, not to norms and biases.\n"
        "  optimizer.lr: number, at least 0; default 1e-05\n"
        "      Learning rate after the warm-up.\n"
        "\n"
        "[checkpoint]\n"
        "When checkpoints are written, and where (docs/trust.md).\n"
        "  checkpoint.export_hf: true or false; default false\n"
        "      Write the final weights as a Hugging Face snapshot into hf/.\n"
    )


def test_json_has_every_key_that_the_page_lists(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert main(["config", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(key["key"].rpartition(".")[2] for key in keys) == sorted(rows)
    by_name = {key["key"]: key for key in keys}
    assert by_name["training.steps"]["default"] is None
    assert by_name["loss.kl.coefficient"]["default"] == 0.0
    assert [key["key"] for key in keys if key["required"]] == ["data.files"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["optimiser.lr"],
            "unknown key or table 'optimiser.lr'; did you mean 'optimizer.lr'? "
            "titan-tree config lists all keys",
        ),
        (
            ["--model", "qwen3:debug"],
            "--data FILE: missing; a written configuration has both a model and data, such as --model "
            "qwen3:debug --data demo",
        ),
        (
            ["--data", "demo"],
            "--model MODEL: missing; a written configuration has both a model and data, such as --model "
            "qwen3:debug --data demo",
        ),
        (["-o", "my.toml"], "--out: expected --model and --data as well; add them, or remove --out"),
        (
            ["lr", "--model", "qwen3:debug", "--data", "demo"],
            "lr: expected no keys and no --json together with --model; remove it",
        ),
        (
            ["--model", "qwen3:debug", "--data", "demo", "-o", "."],
            ".: expected the name of a file to write, got a folder",
        ),
        (
            ["--model", "0.6B", "--data", "demo"],
            "--model 0.6B: no such folder; expected that of a Hugging Face snapshot, or NAME:FLAVOR, such as "
            "qwen3:0.6B",
        ),
        (
            ["--model", "Qwen/Qwen3-0.6B", "--data", "demo"],
            "--model Qwen/Qwen3-0.6B: no such folder; expected that of a Hugging Face snapshot, or "
            "NAME:FLAVOR, such as qwen3:0.6B or the tiny qwen3:debug, with random weights; download it: "
            "hf download Qwen/Qwen3-0.6B --local-dir FOLDER, and name that folder",
        ),
    ],
    ids=["unknown", "data", "model", "out", "keys", "exists", "flavor", "hub"],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    assert capsys.readouterr().err == f"titan-tree: error: {message}\n"


def test_names_of_files_that_no_configuration_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in (("a${b}.jsonl", "'${'"), (os.fsdecode(b"\xff.jsonl"), "expected Unicode text")):
        Path(name).write_text(json.dumps(ONE))
        assert main(["config", "--model", "qwen3:debug", "--data", name, "-o", "my.toml"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("titan-tree: error: data.files: ")
        assert expected in error
        assert not Path("my.toml").exists()


def test_a_home_folder_after_an_equals_sign_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands ~ only at the beginning of a word."""
    Path("own.jsonl").write_text(json.dumps(ONE))
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    assert main(["config", "--model", "qwen3:debug", "--data", "own.jsonl", "--out=~/my.toml"]) == 0
    assert main(["xray", "own.jsonl", "--out=~/page.html"]) == 0
    assert main(["ingest", "own.jsonl", "~/store", "--tokenizer", "byte"]) == 0
    assert sorted(file.name for file in Path("home").iterdir()) == ["my.toml", "page.html", "store"]


def test_the_loss_is_one_that_the_data_has_the_fields_for(capsys: pytest.CaptureFixture[str]) -> None:
    scored = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "old_logprobs": [0, -1, -1], "group_id": "a"}
    for records, expected in (
        ([ONE], ("sft", "given", "byte", 1)),
        (
            [{"id": "a", "trajectories": [ONE | {"reward": 1}, ONE | {"reward": 0}]}],
            ("reinforce", "group", "byte", 1),
        ),
        ([scored | {"reward": 1.0}, scored | {"reward": 0.0}], ("grpo", "group", None, 1)),
        (
            [scored | {"advantage": 1.0}, scored | {"group_id": "b", "advantage": -1.0}],
            ("grpo", "given", None, 2),
        ),
    ):
        _, config = write(capsys, *records)
        data = config.data
        found = (config.loss.name, data.advantage, data.tokenizer, data.global_batch_groups)
        assert found == expected


def write_pair() -> None:
    """Writes own.jsonl with a preference pair, and its configuration."""
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    Path("own.jsonl").write_text(json.dumps({"prompt": ONE["messages"][:1]} | answers))
    assert main(["config", "--model", "qwen3:debug", "--data", "own.jsonl", "-o", "my.toml"]) == 0


def test_rejected_answers_are_trained_by_a_loss_of_preferences(capsys: pytest.CaptureFixture[str]) -> None:
    write_pair()
    config = load_config("my.toml")
    assert (config.loss.name, config.loss.reduction, config.training.epochs) == ("dpo", "path_token_mean", 1)
    first = " ".join(line.removeprefix("# ") for line in Path("my.toml").read_text().splitlines()[:3])
    score = "titan-tree score own.jsonl scored.jsonl --config my.toml --field ref_logprobs"
    what_next = f"{score} writes them, then titan-tree train my.toml data.files=scored.jsonl trains"
    assert f"{what_next}." in first
    assert capsys.readouterr().out.endswith(f"{what_next}\n")
    tokens = {"tokens": [1, 2], "shifted_ref_logprobs": [-1.0], "reward": 1.0, "group_id": "a"}
    _, config = write(capsys, tokens | {"preference": "chosen"}, tokens | {"preference": "rejected"})
    assert (config.loss.name, config.data.advantage) == ("dpo", "given")
    _, config = write(capsys, tokens | {"preference": "desirable"}, tokens | {"preference": "mismatched"})
    assert config.loss.name == "kto"


@pytest.mark.slow
def test_preferences_train_with_the_commands_that_config_names(capsys: pytest.CaptureFixture[str]) -> None:
    write_pair()
    assert main(["score", "own.jsonl", "scored.jsonl", "--config", "my.toml", "--field", "ref_logprobs"]) == 0
    assert main(["train", "my.toml", "data.files=scored.jsonl"]) == 0
    (row,) = csv.DictReader(Path("outputs/my/metrics.csv").read_text().splitlines())
    assert float(row["loss"]) == pytest.approx(math.log(2), abs=1e-6)  # the model is the reference
    capsys.readouterr()
    assert main(["inspect", "own.jsonl"]) == 0
    assert "1 sample is a rejected answer: train with a loss of preferences" in capsys.readouterr().out


def test_the_folder_of_a_written_configuration_is_made(tmp_path: Path) -> None:
    out = tmp_path / "new" / "my.toml"
    assert main(["config", "--model", "qwen3:debug", "--data", "demo", "-o", str(out)]) == 0
    assert load_config(out).folder == "outputs/my"


def test_a_written_configuration_has_a_comment_above_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    table, config = write(capsys, ONE)
    assert table["model"] == {"name": "qwen3", "flavor": "debug"}
    assert (table["folder"], config.data.files, config.training.epochs) == ("outputs/my", ["own.jsonl"], 1)
    lines = Path("my.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) == 15
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.slow
def test_a_written_configuration_trains(capsys: pytest.CaptureFixture[str]) -> None:
    from titan_tree.run.trainer import Trainer

    write(capsys, {"id": "a", "trajectories": [ONE | {"reward": 1}, ONE | {"reward": 0}]})
    trainer = Trainer(load_config("my.toml"))
    trainer.train()
    trainer.close()
    assert Path("outputs/my/hf/model.safetensors").exists()
    shutil.rmtree("outputs")
