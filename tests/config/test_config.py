"""The configuration: TOML files and key=value arguments, and the errors for wrong ones."""

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import for_each
from titan_tree import errors
from titan_tree.components.tree_loss.settings import LOSSES, LossConfig
from titan_tree.config.checks import (
    Checked,
    boolean,
    list_of,
    natural_int,
    positive_int,
    positive_number,
    required,
    setting,
)
from titan_tree.config.toml import FORMER, dump_config, load_tables
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.errors import UserError
from titan_tree.rl.settings import RLRunConfig
from titan_tree.run.config import Config, load_any, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
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


def test_a_name_is_that_of_a_packaged_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config("demo").folder == "outputs/demo"
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(GOOD)
    known = ", ".join(["mine.toml", *(path.stem for path in CONFIGS)])
    for name, meant in (("demmo", "demo"), ("rl_demo.toml", "rl_demo"), ("mien.toml", "mine.toml")):
        with pytest.raises(UserError) as error:
            load_config(name)
        assert str(error.value) == (
            f"unknown configuration file {name!r}; did you mean {meant!r}? (known: {known})"
        )


def test_the_folder_of_a_run_names_its_configuration(file: Path) -> None:
    folder = file.parent
    file.rename(folder / "config.toml")
    with pytest.raises(UserError) as error:
        load_config(folder)
    expected = f"cannot be read: Is a directory; did you mean {folder}/config.toml?"
    assert str(error.value) == f"{folder}: {expected}"


def test_arguments_override_the_file_and_the_file_overrides_defaults(file: Path) -> None:
    config = load_config(file, ["optimizer.lr=2e-5", "--training.steps=7", "data.files=[a, b]"])
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.max_grad_norm == float("inf")
    assert config.optimizer.betas == [0.9, 0.95]
    assert config.training.steps == 7
    assert config.data.files == ["a", "b"]
    assert config.loss.options == {"clip_low": 0.1}
    assert load_config(file).data.files == ["demo"]


def test_an_empty_table_clears_a_key_and_other_tables_are_merged(file: Path) -> None:
    assert load_config(file, ["loss.options.clip_high=0.3"]).loss.options == {
        "clip_low": 0.1,
        "clip_high": 0.3,
    }
    assert load_config(file, ["loss.options={}"]).loss.options == {}
    assert load_config(file, ["loss.options={}", "loss.options.clip_high=0.3"]).loss.options == {
        "clip_high": 0.3
    }
    assert load_config(file, ["loss={}"]) == load_config(file)
    nested = ["data.sample.tool={name: a, size: 1}", "data.sample.tool.size=2"]
    assert load_config(file, nested).data.sample == {"tool": {"name": "a", "size": 2}}


@pytest.mark.parametrize(
    "arguments", [[], ["data.sample.turns=each", 'model.overrides={"x y": [1, 2.5, true]}']]
)
def test_a_dumped_configuration_loads_as_the_same_configuration(
    file: Path, tmp_path: Path, arguments: list[str]
) -> None:
    config = load_config(file, arguments)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_overrides_are_a_list(file: Path) -> None:
    message = r'load_config: overrides: expected a list of strs, got str; pass \["training.steps=10"\]'
    with pytest.raises(UserError, match=message):
        load_config(file, "training.steps=3")


@for_each(
    ("toml", "says"),
    [
        ("[training]\nstepz = 3", ["x.toml", "'training.stepz'", "'training.steps'"]),
        ("[trainin]\nsteps = 3", ["x.toml", "'trainin'", "'training'"]),
        ("[zzz]\nsteps = 3", ["x.toml", "'zzz'", "model, data, partition, loss"]),
        ('[training]\nsteps = "many"', ["x.toml", "training.steps", "many"]),
        ("[training]\nsteps = 1.5", ["x.toml", "training.steps", "1.5"]),
        ('[training]\ndtype = "fp8"', ["x.toml", "training.dtype", "bfloat16", "fp8"]),
        ("[training]\nsteps = 0", ["x.toml", "training.steps", "at least 1", "0"]),
        ("[lr_scheduler]\nmin_lr_factor = 1.1", ["lr_scheduler.min_lr_factor", "from 0 to 1", "1.1"]),
        ("[checkpoint]\nkeep = 1", ["checkpoint.keep", "at least 2"]),
        ("[partition]\ndevice_gb = -1", ["partition.device_gb", "at least 0"]),
        ('[partition]\nhost_gb = 1\nactivations = "keep"', ["partition.host_gb", '"auto"', "'keep'"]),
        ("training = 3", ["x.toml", "training: expected a table", "3"]),
        ("[training]\nsteps = = 3", ["x.toml", "not valid TOML", "line"]),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_key(file: Path, toml: str, says: list[str]) -> None:
    head, tables = ("", toml) if toml.startswith("[") else (toml, "")
    file.write_text("\n".join([head, GOOD, tables]))
    assert_says(lambda: load_config(file), says)


@for_each(
    ("argument", "says"),
    [
        ("training.stepz=3", ["'training.stepz=3'", "'training.steps'"]),
        ("training.steps=many", ["'training.steps=many'", "training.steps"]),
        ("training.steps=0", ["argument 'training.steps=0': training.steps", "at least 1"]),
        ("training.steps", ["'training.steps'", "key=value"]),
        ("training.steps=[1", ["training.steps", "YAML"]),
        ("optimizer.betas.0=0.5", ["optimizer.betas.0=0.5"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "two numbers", "[0.9]"]),
        ("data.files=[]", ["data.files", "non-empty"]),
        ("optimizer.lr=inf", ["optimizer.lr", "a finite number", "inf"]),
        ("optimizer.weight_decay=nan", ["optimizer.weight_decay", "a finite number", "nan"]),
        ("optimizer.eps=-1e-8", ["optimizer.eps", "at least 0", "-1e-08"]),
        ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm", "> 0", "0"]),
        ("loss.entropy=nan", ["loss.entropy", "finite number", "nan"]),
        ("loss.options={clip_low: '0.1'}", ["loss.options.clip_low", "finite number", "'0.1'"]),
        ("loss.options={name: ppo}", ["loss.options.name", "loss.name", "ppo"]),
        ("router_bias.counts=tokens", ["router_bias.counts", "router_bias.rate", "tokens"]),
        ("model.flavor=null", ["flavor", "hf_path"]),
        ("model.hf_path=dir", ["flavor", "hf_path"]),
        ("metrics.loggers=[csv, csv]", ["metrics.loggers", "every logger once"]),
    ],
)
def test_an_error_in_an_argument_names_the_key(file: Path, argument: str, says: list[str]) -> None:
    assert_says(lambda: load_config(file, [argument]), says)


@pytest.mark.parametrize(
    "key", ["rl.server.api_key", "training.password", "hf_token", "rl.server.headers.Authorization"]
)
def test_the_value_of_a_key_that_names_a_secret_is_not_shown(
    file: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_secrets", {})
    with pytest.raises(UserError, match=rf"^argument '{key}=\*\*\*': unknown key"):
        load_config(file, [f"{key}=sk-0123"])


def test_the_values_of_other_keys_are_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_secrets", {})
    load_config(file, ["data.max_tokens=4096", "data.tokenizer=byte", "loss.reduction=token_mean"])
    assert errors.hide("4096 byte token_mean") == "4096 byte token_mean"


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("model.name=qwen9", "qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next llama"),
        ("model.attention=fast", "auto hopper triton flash flex reference"),
        ("model.recurrence=fast", "auto hopper triton reference"),
        ("data.format=xml", "auto jsonl"),
        ("partition.strategy=best", "auto none single_path multi_path"),
        ("loss.name=dqo", "sft reinforce ppo grpo dr_grpo"),
        ("optimizer.name=sgd", "adamw adamw8bit"),
        ("metrics.loggers=[csv, file]", "console csv tensorboard wandb"),
    ],
)
def test_names_come_from_the_registries(file: Path, argument: str, names: str) -> None:
    """``names`` come with titan_tree. Others may stand between them."""
    key, _, value = argument.partition("=")
    with pytest.raises(UserError, match=r" one of .*, got .*") as error:
        load_config(file, [argument])
    start, _, rest = str(error.value).partition(" one of ")
    accepted, _, got = rest.partition(", got ")
    assert start.startswith(f"argument '{argument}': {key}: expected")
    assert set(names.split()) <= set(accepted.split(", "))
    assert got.partition("; did you mean")[0].replace("'", "") == value


@for_each(
    ("argument", "name"),
    [
        ("loss.name=SFT", "sft"),
        ("data.advantage=gruop", "group"),
        ("data.format=openai-chat", "openai_chat"),
        ("training.dtype=bf16", "bfloat16"),
        ("metrics.loggers=[csv, consol]", "console"),
        ("lr_scheduler.decay_type=cosin", "cosine"),
        ("loss.reduction=tokens_mean", "token_mean"),
    ],
)
def test_the_name_that_was_probably_meant_is_suggested(file: Path, argument: str, name: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(file, [argument])
    assert str(error.value).endswith(f"; did you mean {name!r}?")


@pytest.mark.parametrize(("gpu", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_is_that_of_the_device_unless_it_is_set(
    file: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert load_config(file).training.dtype == dtype
    assert load_config(file, ["training.dtype=bfloat16"]).training.dtype == "bfloat16"


def test_a_name_registered_later_is_accepted(file: Path) -> None:
    LOSSES.register("mine", lambda logprobs, pairs: -logprobs)
    assert load_config(file, ["loss.name=mine"]).loss.name == "mine"


def test_a_family_that_only_transformers_runs_is_refused(file: Path) -> None:
    says = ["model.name: expected a family", 'model.implementation = "transformers"', "got 'kimi_linear'"]
    assert_says(lambda: load_config(file, ["model.name=kimi_linear"]), says)


@pytest.mark.parametrize("key", FORMER)
def test_a_key_of_an_earlier_version_fails_with_what_became_of_it(file: Path, key: str) -> None:
    says = [f"{key!r} {FORMER[key]}"]
    config = "rl_demo" if key.startswith("rl.") else file
    assert_says(lambda: load_any(config, [f"{key}=true"]), [f"argument '{key}=true'", *says])
    file.write_text(f"{key} = true")
    assert_says(lambda: load_any(file), ["x.toml", *says])


def test_context_parallel_is_another_name_of_sequence_parallel(file: Path) -> None:
    file.write_text(f"{GOOD}\n[parallel]\ncontext_parallel = 4")
    config = load_config(file)
    assert config.parallel.sequence_parallel == 4
    assert "\nsequence_parallel = 4\n" in dump_config(config)
    assert "context_parallel" not in dump_config(config)
    assert load_config(file, ["parallel.sequence_parallel=2"]).parallel.sequence_parallel == 2
    assert load_config(file, ["parallel.context_parallel=2"]).parallel.sequence_parallel == 2
    file.write_text(f"{file.read_text()}\nsequence_parallel = 2")
    says = (
        "expected the value of parallel.sequence_parallel, which is the same key; remove one of them, got 4"
    )
    assert_says(lambda: load_config(file), [f"{file}: parallel.context_parallel: {says}"])
    file.write_text(file.read_text().replace("sequence_parallel = 2", "sequence_parallel = 4"))
    assert load_config(file) == config
    wrong = [
        "argument 'parallel.context_parallel=x': parallel.sequence_parallel: expected an integer, got 'x'"
    ]
    assert_says(lambda: load_config(file, ["parallel.context_parallel=x"]), wrong)


def test_a_table_of_another_command_is_named(file: Path) -> None:
    file.write_text("[lightning.trainer]\nmax_steps = 3")
    command = "titan-tree train --trainer lightning"
    wrong = ["x.toml", f"unknown key 'lightning'; this table is for {command}; start that, or remove"]
    assert_says(lambda: load_config(file), wrong)


def test_required_keys_and_missing_files_are_named(file: Path) -> None:
    file.write_text('[model]\nflavor = "debug"')
    assert_says(lambda: load_config(file), ["x.toml", "data.files", "missing"])
    assert_says(lambda: load_config(file.with_name("none.toml")), ["none.toml", "No such file"])


@for_each("path", CONFIGS)
def test_shipped_configs_are_valid(path: Path) -> None:
    is_rl = path.stem.startswith(("rl_", "serve"))
    overrides = ["model.hf_path=weights"] if path.stem == "serve" else []
    if "model.hf_path" in path.read_text() and not is_rl:
        overrides = ["model.hf_path=weights", "data.files=mine.jsonl"]
    config = load_tables(RLRunConfig if is_rl else Config, path, overrides)
    assert config.folder.startswith("outputs/")


def test_tables_check_their_values_without_a_file() -> None:
    assert_says(lambda: OptimizerConfig(lr=-1.0), ["optimizer.lr: expected at least 0, got -1.0"])
    assert_says(lambda: LossConfig(name="dqo"), ["loss.name: expected one of sft"])
    for field in fields(Config):
        table = field.default_factory
        if isinstance(table, type) and issubclass(table, Checked):
            assert table._prefix == f"{field.name}."  # messages name the table as the file does


def test_a_table_does_not_share_its_default_with_another() -> None:
    OptimizerConfig().betas.append(1.0)
    assert OptimizerConfig().betas == [0.9, 0.95]


@dataclass(frozen=True, kw_only=True)
class Sizes(Checked):
    hidden: int = required(positive_int)
    scale: float = setting(1.0, positive_number)
    tied: bool = setting(False, boolean)
    dense_layers: list[int] = setting([], list_of(natural_int))
    heads: int | None = setting(None, positive_int)


@for_each(
    ("wrong", "says"),
    [
        ({"hidden": 0}, "hidden: expected an integer > 0, got 0"),
        ({"hidden": True}, "hidden: expected an integer > 0, got True"),
        ({"hidden": 8.0}, "hidden: expected an integer > 0, got 8.0"),
        ({"hidden": None}, "hidden: expected an integer > 0, got None"),
        ({"scale": float("inf")}, "scale: expected a finite number > 0, got inf"),
        ({"scale": "1"}, "scale: expected a finite number > 0, got '1'"),
        ({"tied": 1}, "tied: expected true or false, got 1"),
        ({"dense_layers": 3}, "dense_layers: expected a list in which every item is an integer >= 0, got 3"),
        (
            {"dense_layers": [0, -1]},
            "dense_layers: expected a list in which every item is an integer >= 0, got [0, -1]",
        ),
        ({"heads": 0}, "heads: expected an integer > 0, got 0"),
    ],
)
def test_declared_checks_refuse_values_of_the_wrong_kind(wrong: dict[str, Any], says: str) -> None:
    assert Sizes(hidden=8, scale=2).heads is None
    with pytest.raises(UserError) as error:
        Sizes(**{"hidden": 8} | wrong)
    assert str(error.value) == says


@for_each(
    ("argument", "value"),
    [
        ("data.ignore_fields=[*]", ["*"]),
        ("data.ignore_fields=[ts, *]", ["ts", "*"]),
        ("data.files=*.jsonl", ["*.jsonl"]),
        ("data.files=[a/**/*.jsonl, b]", ["a/**/*.jsonl", "b"]),
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr=.5", 0.5),
        ("optimizer.betas=[0.9, 1e-1]", [0.9, 0.1]),
        ("training.steps=1_000", 1000),
        ("checkpoint.resume=no", False),
        ("data.replay=off", "off"),
        ("folder='3'", "3"),
        ("folder=2020-01-01", "2020-01-01"),
        ("model.overrides={layers: 2, rope: [1, 2.5]}", {"layers": 2, "rope": [1, 2.5]}),
    ],
)
def test_values_of_arguments_are_yaml_without_aliases(file: Path, argument: str, value: object) -> None:
    config: Any = load_config(file, [argument])
    for name in argument.partition("=")[0].split("."):
        config = getattr(config, name)
    assert config == value


def test_a_wrong_config_needs_no_torch(file: Path) -> None:
    code = (
        "import sys\n"
        "from titan_tree.cli import main\n"
        f"assert main(['train', {str(file)!r}, 'loss.name=dqo']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "loss.name: expected one of" in run.stderr


def assert_says(action: object, says: list[str]) -> None:
    assert callable(action)
    with pytest.raises(UserError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    for words in says:
        assert words in message, f"{words!r} not in {message!r}"


def test_an_interval_of_validations_needs_files(file: Path) -> None:
    with pytest.raises(UserError, match=r"validation\.files: expected files beside validation\.interval"):
        load_config(file, ["validation.interval=5"])
    assert load_config(file, ["validation.interval=0"]).validation.files is None
