"""TOML files and key=value arguments -> Config, and what the user reads when they are wrong."""

from pathlib import Path

import pytest

from titan_tree.config import dump_config, load_config
from titan_tree.errors import UserError

CONFIGS = sorted((Path(__file__).parents[1] / "train_configs").glob("*.toml"))
GOOD = """
folder = "outputs/x"
[model]
flavor = "debug"
[data]
files = "demo"
[optimizer]
lr = 1e-3
max_grad_norm = inf
[loss.options]
clip_low = 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(GOOD)
    return path


def test_arguments_over_file_over_defaults(file: Path) -> None:
    config = load_config(file, ["optimizer.lr=2e-5", "--training.steps=7", "data.files=[a, b]"])
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.max_grad_norm == float("inf")
    assert config.optimizer.betas == [0.9, 0.95]
    assert config.training.steps == 7
    assert config.data.files == ["a", "b"]
    assert config.loss.options == {"clip_low": 0.1}
    assert load_config(file).data.files == ["demo"]


@pytest.mark.parametrize(
    "arguments", [[], ["data.sample.turns=each", 'model.overrides={"x y": [1, 2.5, true]}']]
)
def test_what_is_dumped_reads_back(file: Path, tmp_path: Path, arguments: list[str]) -> None:
    config = load_config(file, arguments)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[training]\nstepz = 3", ["x.toml", "'training.stepz'", "'training.steps'"]),
        ("[trainin]\nsteps = 3", ["x.toml", "'trainin'", "'training'"]),
        ("[zzz]\nsteps = 3", ["x.toml", "'zzz'", "model, data, partition, loss"]),
        ('[training]\nsteps = "many"', ["x.toml", "training.steps", "many"]),
        ("[training]\nsteps = 1.5", ["x.toml", "training.steps", "1.5"]),
        ('[training]\ndtype = "fp8"', ["x.toml", "training.dtype", "bfloat16", "fp8"]),
        ("[training]\nsteps = 0", ["x.toml", "training.steps", "at least 1", "0"]),
        ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 6", ["lr_scheduler.warmup_steps", "5", "6"]),
        ("[checkpoint]\nkeep = 1", ["checkpoint.keep", "at least 2"]),
        ("training = 3", ["x.toml", "TrainingConfig"]),
        ("[training]\nsteps = = 3", ["x.toml", "not valid TOML", "line"]),
    ],
)
def test_a_wrong_file_is_named_with_its_key(file: Path, toml: str, says: list[str]) -> None:
    head, tables = ("", toml) if toml.startswith("[") else (toml, "")
    file.write_text("\n".join([head, GOOD, tables]))
    assert_says(lambda: load_config(file), says)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("training.stepz=3", ["'training.stepz=3'", "'training.steps'"]),
        ("training.steps=many", ["'training.steps=many'", "training.steps"]),
        ("training.steps", ["'training.steps'", "key=value"]),
        ("training.steps=[1", ["training.steps", "YAML"]),
        ("optimizer.betas.0=0.5", ["optimizer.betas.0=0.5"]),
        ("data.files=[]", ["data.files", "non-empty"]),
        ("optimizer.lr=inf", ["optimizer.lr", "finite number >= 0", "inf"]),
        ("optimizer.weight_decay=nan", ["optimizer.weight_decay", "finite number >= 0", "nan"]),
        ("optimizer.eps=-1e-8", ["optimizer.eps", "finite number >= 0", "-1e-08"]),
        ("loss.entropy=nan", ["loss.entropy", "finite number", "nan"]),
        ("loss.options={clip_low: '0.1'}", ["loss.options.clip_low", "finite number", "'0.1'"]),
        ("loss.options={name: ppo}", ["loss.options.name", "loss.name", "ppo"]),
        ("router_bias.counts=tokens", ["router_bias.counts", "router_bias.rate beside it", "tokens"]),
        ("model.flavor=null", ["flavor", "hf_path"]),
        ("model.hf_path=dir", ["flavor", "hf_path"]),
    ],
)
def test_a_wrong_argument_is_named(file: Path, argument: str, says: list[str]) -> None:
    assert_says(lambda: load_config(file, [argument]), says)


def test_required_keys_and_missing_files_are_named(file: Path) -> None:
    file.write_text('[model]\nflavor = "debug"')
    assert_says(lambda: load_config(file), ["x.toml", "data.files", "required"])
    assert_says(lambda: load_config(file.with_name("none.toml")), ["none.toml", "No such file"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    fine_tuning = "model.hf_path" in path.read_text()
    config = load_config(path, ["model.hf_path=weights", "data.files=mine.jsonl"] if fine_tuning else [])
    assert config.folder.startswith("outputs/")


def assert_says(action: object, says: list[str]) -> None:
    assert callable(action)
    with pytest.raises(UserError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    for word in says:
        assert word in message, f"{word!r} not in {message!r}"
