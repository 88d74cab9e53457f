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
    first = "wrote my.toml; titan-tree plan my.toml estimates its memory, titan-tree train my.toml trains\n"
    assert capsys.readouterr().out.startswith(first)
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
            "unknown key or table 'optimiser.lr' (titan-tree config lists all keys); did you mean "
            "'optimizer.lr'?",
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
        assert error.startswith("titan-tree: error: argument data.files: data.files[0]: ")
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
            ("grpo", "given", None, 1),
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
    assert (config.loss.name, config.loss.reduction, config.training.epochs) == ("dpo", "path_token_mean", 8)
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
    row, *_ = csv.DictReader(Path("outputs/my/metrics.csv").read_text().splitlines())
    assert float(row["loss"]) == pytest.approx(math.log(2), abs=1e-6)  # the model is the reference
    capsys.readouterr()
    assert main(["inspect", "own.jsonl"]) == 0
    assert "1 sample is a rejected answer: train with a loss of preferences" in capsys.readouterr().out


def noted(capsys: pytest.CaptureFixture[str], *records: dict, overrides: tuple[str, ...] = ()) -> list[str]:
    """Returns what config says of records beside what to do next; the file begins with the same."""
    Path("own.jsonl").write_text("\n".join(map(json.dumps, records)))
    Path("my.toml").unlink(missing_ok=True)
    command = ["config", "--model", "qwen3:debug", "--data", "own.jsonl", *overrides, "-o", "my.toml"]
    assert main(command) == 0
    _, *notes = capsys.readouterr().out.splitlines()
    head = " ".join(line[2:] for line in Path("my.toml").read_text().splitlines() if line.startswith("# "))
    assert all(note in head for note in notes)
    return notes


def test_unknown_fields_are_listed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [ONE["messages"][0] | {"mood": "bad"}, ONE["messages"][1]]
    records = [ONE | {"zebra": 1, "rewrd": 1, "model": "m"}] * 2 + [{"messages": turns, "trial": None}]
    task = {"trajectories": [{"tokens": [1, 2]}], "quartz": 3, "step": None}
    assert noted(capsys, *records, task) == [
        "fields that are ignored: mood (1), quartz (1), rewrd (2; did you mean 'reward'?), zebra (2)"
    ]
    assert load_config("my.toml").data.ignore_fields == ["mood", "quartz", "rewrd", "zebra"]
    (note,) = noted(capsys, *records, task, overrides=("data.ignore_fields=[zebra, quartz]",))
    assert note == "fields that are ignored: mood (1), rewrd (2; did you mean 'reward'?)"
    assert load_config("my.toml").data.ignore_fields == ["zebra", "quartz", "mood", "rewrd"]
    assert noted(capsys, *records, task, overrides=("data.ignore_fields=[*]",)) == []
    assert load_config("my.toml").data.ignore_fields == ["*"]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (
            [ONE, ONE | {"reward": 0.0}, ONE],
            "reward: on 1 of 3 trajectories, not used; advantages need the rewards of all",
        ),
        (
            [ONE | {"reward": 1.0}],
            "reward: on 1 of 1 trajectories, not used; each is alone in its group: give tries of the same "
            "task one group_id",
        ),
        (
            [{"tokens": [1, 2], "advantage": 1.0}, {"tokens": [1, 3]}],
            "advantage: on 1 of 2 trajectories, not used; a loss of reinforcement learning needs one on all",
        ),
        (
            [{"tokens": [1, 2], "shifted_rollout_logprobs": [-1.0]}],
            "rollout_logprobs: on 1 of 1 trajectories, not used; loss.correction uses them",
        ),
    ],
    ids=["some rewards", "one try", "some advantages", "log-probs"],
)
def test_what_is_left_unused_is_said(
    records: list[dict], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = noted(capsys, *records)
    assert note.startswith(says)
    assert load_config("my.toml").loss.name == "sft"


@pytest.mark.parametrize(
    ("records", "overrides", "says"),
    [
        ([ONE, ONE | {"preference": "chosen"}], [], "preference: on 1 of 2 trajectories; expected it on all"),
        ([ONE], ["loss.name=dpo"], "the loss 'dpo' compares chosen and rejected answers, and this answer"),
        (
            [ONE | {"preference": "rejected"}],
            ["loss.name=sft"],
            "marked 'rejected', and the loss 'sft' would",
        ),
        ([ONE | {"labels": [1]}], [], "labels: not read; give unpadded tokens"),
        ([ONE], ["data.template=none.jinja"], "chat template none.jinja: expected chatml, qwen3, a file"),
        ([ONE], ["data.files=x"], "data.files: set twice"),
        ([{"tokens": [1, 999]}], [], "999"),
    ],
    ids=["mixed", "dpo", "sft", "labels", "template", "files", "ids"],
)
def test_nothing_is_written_that_would_not_train(
    records: list[dict], overrides: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.jsonl").write_text("\n".join(map(json.dumps, records)))
    command = ["config", "--model", "qwen3:debug", "--data", "own.jsonl", *overrides, "-o", "my.toml"]
    assert main(command) == 2
    assert says in capsys.readouterr().err
    assert not Path("my.toml").exists()


def test_keys_that_the_user_chooses_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    keys = "training.steps=3", "data.sample.turns=last", "optimizer.lr=1e-4", "data.global_batch_groups=2"
    assert noted(capsys, *[ONE] * 4, overrides=keys) == []
    config = load_config("my.toml")
    assert (config.training.steps, config.training.epochs, config.optimizer.lr) == (3, None, 1e-4)
    assert (config.data.sample, config.data.global_batch_groups) == ({"turns": "last"}, 2)


@pytest.mark.parametrize(
    ("groups", "batch", "epochs"), [(1, 1, 8), (3, 1, 3), (8, 1, 1), (20, 2, 1), (64, 8, 1), (70, 8, 1)]
)
def test_a_run_has_several_steps(
    groups: int, batch: int, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = write(capsys, *[{"tokens": [1, 2]}] * groups)
    assert (config.data.global_batch_groups, config.training.epochs) == (batch, epochs)


def test_the_folder_of_a_written_configuration_is_made(tmp_path: Path) -> None:
    out = tmp_path / "new" / "my.toml"
    assert main(["config", "--model", "qwen3:debug", "--data", "demo", "-o", str(out)]) == 0
    assert load_config(out).folder == "outputs/my"


def test_a_written_configuration_has_a_comment_above_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    table, config = write(capsys, ONE)
    assert table["model"] == {"name": "qwen3", "flavor": "debug"}
    assert (table["folder"], config.data.files, config.training.epochs) == ("outputs/my", ["own.jsonl"], 8)
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
