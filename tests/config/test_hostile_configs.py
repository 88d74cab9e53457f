"""Wrong configurations of every kind: each one is refused in one line, and nothing in it is expanded."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import for_each
from titan_tree.config.toml import dump_config
from titan_tree.errors import UserError
from titan_tree.run.config import Config, load_config

GOOD = 'folder = "outputs/x"\n[model]\nflavor = "debug"\n[data]\nfiles = "demo"\n'
SECRET = "${oc.env:SECRET}"

FILES = [  # content, and words of the error
    ("", "missing, without a default: data.files; model.flavor"),
    ("[training]\nsteps = 1", "data.files; model.flavor"),
    (b'folder = "\xe9"', "not valid TOML: 'utf-8' codec"),
    (GOOD.encode("utf-16"), "; it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
    (b'folder = "\0"', "not valid TOML"),
    (b'folder = "\x1b[31m"', "not valid TOML"),
    (
        '{"folder": "x"}',
        "not valid TOML: Invalid statement (at line 1, column 1); a configuration has lines such as "
        "steps = 10; data files belong in data.files",
    ),
    (f"{GOOD}[model]\nname = 'qwen3'", "the table occurs twice; write its keys into one of them"),
    (f"{GOOD}files = 'x'", "the key is set twice; remove one of them"),
    (GOOD.replace('"demo"', "demo"), "text needs quotes; true and false are lower case"),
    (GOOD.replace("demo", r"C:\Users\a"), "in double quotes, write"),
    (GOOD.replace("demo", r"C:\data"), "in double quotes, write"),
    ("training:\n  steps: 3", "write key = value"),
    ("x = " + "[" * 100_000, "nested too deeply"),
    ("x = " + "{a=" * 100_000, "nested too deeply"),
    ("folder = 3", "folder: expected a string, got 3; write it in quotes"),
    ("folder = ['a']", "folder: expected a string"),
    ("model = [1]", "model: expected a table, got [1]"),
    ('model = "x"', "model: expected a table, got 'x'"),
    ('model = "${data}"', "model: expected a table, got '${data}'"),
    (f"'model.name' = 'qwen3'\n{GOOD}", "unknown key 'model.name'"),
    (f"seed = 3\n{GOOD}", "did you mean 'data.seed' or 'training.seed'?"),
]

LINES = {  # lines after the table [data] of GOOD -> words of the error
    f"[loss.options]\n{'.'.join('a' * 3000)} = 1": "nested too deeply",
    f"[training]\nsteps = {'9' * 5000}": "not valid TOML",
    f"[training]\nsteps = 0x{'f' * 6000}": "training.steps: expected an integer",
    f"[training]\nseed = {'9' * 400}": "training.seed: expected an integer of at most 64",
    f"[optimizer]\nlr = {'9' * 400}": "optimizer.lr: expected an integer of",
    "[optimizer]\nlr = true": "optimizer.lr: expected a number, got True",
    "[checkpoint]\ninterval = true": "interval: expected an integer, got True",
    "[checkpoint]\ninterval = 1e3": "interval: expected an integer, got 1000.0",
    "[training]\nsteps = '3'": "training.steps: expected an integer, got '3'",
    "[checkpoint]\nresume = 'yes'": "resume: expected true or false, got 'yes'",
    "[training]\nsteps = 2020-01-01": "training.steps: expected an integer",
    "[loss.options]\na = 2020-01-01": "loss.options.a: expected a string",
    '[checkpoint]\nfolder = "a\\u0000b"': "checkpoint.folder: expected text without",
    '[loss.options]\n"a\\u0000" = 1': "loss.options: expected text without NUL",
    "[training.steps]\na = 1": "training.steps: expected an integer, got {'a'",
    "[[training]]\nsteps = 1": "training: expected a table, got [{'steps'",
    f"[model.overrides]\na = '{SECRET}'": "model.overrides.a: expected a lit",
    f"[model.overrides]\n'{SECRET}' = 1": "model.overrides: expected a literal",
    "[training]\nsteps = '???'": "training.steps: expected an integer, got '???'",
    "weights = [nan]": "data.weights: expected a list in which every item",
    "weights = 'a'": "data.weights: expected a list, got 'a'",
    "workers = 1.5": 'data.workers: expected "auto" or an integer',
    "[data.sample]\nmessages = 1": "data.sample: expected no messages and no tools",
    "[router_loss]\nbalance = nan": "router_loss.balance: expected a finite",
    "[router_bias]\nrate = inf": "router_bias.rate: expected a finite number",
    "[partition]\nhost_gb = inf": "partition.host_gb: expected a finite number",
    "[metrics]\nloggers = 'csv'": "expected a list, got 'csv'; write it in brackets: ['csv']",
    "[metrics]\nloggers = [['csv']]": "metrics.loggers[0]: expected a string",
    "[training]\ndtype = ['a']": "training.dtype: ",
    '"" = 1': "unknown key 'data.'; the keys of [data] are files, weights",
    '["a.b"]\nc = 1': "unknown key 'a.b'; the tables are model, data",
    "[optimizer]\nsteps = 3": "did you mean 'training.steps'?",
    "[training]\nlearning_rate = 3": "the keys of [training] are steps, epochs",
}
FILES += [(f"{GOOD}{lines}", words) for lines, words in LINES.items()]

NO_FILES = "data.files: expected a path or a non-empty list"
REPLACEMENTS = [  # text of GOOD, its replacement, and words of the error
    ("outputs/x", " ", "folder: expected a path"),
    ("outputs/x", SECRET, "folder: expected a literal value without '${'"),
    ("outputs/x", "${", "folder: expected a literal value without '${'"),
    ("demo", f"x{SECRET}", "data.files: expected a literal value"),
    ("demo", "???", "missing, without a default: data.files"),
    ('"demo"', "3", NO_FILES),
    ('"demo"', "{a = 1}", NO_FILES),
    ('"demo"', '["a", 1]', NO_FILES),
    ('"demo"', '[["a"]]', NO_FILES),
    ("[data]", "overrides = [1]\n[data]", "overrides: expected a table"),
    ("[data]", "hf_path = 'x'\n[data]", "model.flavor=null"),
]
FILES += [(GOOD.replace(old, new), words) for old, new, words in REPLACEMENTS]

ARGUMENTS = {  # argument -> words of the error
    "": "expected key=value",
    "=": "expected key=value",
    "=1": "expected key=value",
    "--": "expected key=value",
    "training.steps": "expected key=value",
    "model.hf_path=": "expected a value after =",
    "model.hf_path= ": "expected a value after =",
    ".steps=1": "expected key=value",
    "training..steps=1": "expected key=value",
    "a.b.c.d=1": "unknown key 'a'; the tables are",
    "a" * 100_000 + "=1": "unknown key 'aaa",
    "checkpoint.folder=hf/": "checkpoint.folder: expected a folder that nothing else uses, such as",
    "checkpoint.folder=": "expected a value after =",
    "lora.targets=[q_proj]": "lora.targets: expected no value without lora.rank, got ['q_proj']",
    "lora.alpha=8": "lora.alpha: expected no value without lora.rank, got 8",
    "lr=1": "did you mean 'optimizer.lr'?",
    "training[steps]=3": "unknown key 'training[steps]'",
    "model.__class__=1": "unknown key 'model.__class__'; the keys of [model] are name",
    "data.files[0]=x": "did you mean 'data.files'?",
    "model=3": "model: expected a table, got 3",
    "model=null": "model: expected a table, got None",
    "model.flavor=": "expected a value after =",
    "training.steps=1.0": "expected an integer, got 1.0",
    "training.steps=[1, 2]": "expected an integer, got [1, 2]",
    "training.steps=2020-01-01": "expected an integer",
    "training.steps=!!int x": "not valid YAML",
    "training.steps=" + "9" * 5000: "not valid YAML",
    "training.steps=" + "a" * 5000: "expected an integer",
    "training.seed=" + "9" * 50: "an integer of at most 64 bits",
    "optimizer.lr=1e400": "a finite number, got inf",
    "checkpoint.resume.x=1": "expected true or false",
    "optimizer.betas.0=1": "optimizer.betas: expected a list, got {'0': 1}",
    "optimizer.betas=[a, b]": "optimizer.betas[0]: expected a number, got 'a'",
    "data.files=[a, b": "not valid YAML",
    "data.files={a: 1, a: 2}": "not valid YAML",
    "data.files=!!python/object/apply:os.system [ls]": "not valid YAML",
    "data.files=" + "[" * 3000: "not valid YAML",
    "model.overrides={1: 2}": "expected names as the keys",
    "model.overrides={null: 2}": "not valid YAML",
    "model.overrides={a: !!binary aGk=}": "expected a string, a number",
    f"folder={SECRET}": "folder: expected a literal value without '${'",
    'folder="\\x24{oc.env:SECRET}"': "folder: expected a literal value without '${'",
    "folder=${": "folder: expected a literal value without '${'",
    "training=???": "training: expected a table, got '???'",
    "folder=\udcff": "folder: expected Unicode text",
    "folder=a: b": "folder: expected a string, got {'a': 'b'}",
}


@for_each(("content", "words"), FILES)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(file)
    assert str(file) in message
    assert words in message


@for_each(("argument", "words"), ARGUMENTS.items())
def test_a_hostile_argument_is_refused_in_one_line(tmp_path: Path, argument: str, words: str) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    message = refusal(tmp_path / "x.toml", argument)
    assert "argument " in message or "missing" in message
    assert words in message


@pytest.mark.parametrize("path", ["", "none.toml", "a\0b", "a" * 5000, "/dev/null"])
def test_a_path_that_is_no_configuration_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    refusal(tmp_path / path)


def test_unusual_but_valid_configurations_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("demo", "part-???.jsonl").encode())
    assert load_config(file).data.files == ["part-???.jsonl"]
    arguments = ["folder=été $HOME {x}", "optimizer.max_grad_norm=inf", "data.seed=-9223372036854775808"]
    config = load_config(file, arguments)
    assert config.folder == "été $HOME {x}"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config
    assert isinstance(config, Config)


def test_the_command_prints_one_line_and_exits_with_status_2(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(GOOD)
    code = (
        "from titan_tree.cli import main\n"
        "for arguments in (['folder=${oc.env:SECRET}'], ['--a.x=y'], ['steps=3'], ['model=3']):\n"
        f"    assert main(['train', {str(file)!r}, *arguments]) == 2\n"
    )
    environment = {"SECRET": "hunter2", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert [line[:18] for line in run.stderr.splitlines()] == ["titan-tree: error:"] * 4
    assert "hunter2" not in run.stderr + run.stdout


def refusal(file: Path, *arguments: str) -> str:
    """Returns the message of the UserError that loading raises: one short line."""
    with pytest.raises(UserError) as error:
        load_config(file, arguments)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 500 + len(str(file))
    return message
