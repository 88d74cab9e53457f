"""The user's code that a configuration names: where it is found, what it registers, and how it fails."""

import json
import math
import os
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.rl_runs import DEMO as RL_DEMO
from tests.support.rl_runs import TINY, rows
from titan_tree import Trainer, TreeTokenizer
from titan_tree.cli import main
from titan_tree.components.tree_loss.settings import LOSSES
from titan_tree.config import plugins
from titan_tree.config.plugins import calling, import_plugins, imports_refused
from titan_tree.config.toml import dump_config, load_tables
from titan_tree.data import demo
from titan_tree.data.settings import ADVANTAGES
from titan_tree.errors import UserError
from titan_tree.rl.run import run as rl_run
from titan_tree.rl.settings import RLRunConfig
from titan_tree.run.config import load_any, load_config, load_stored
from titan_tree.run.metrics.step_metrics import METRICS
from titan_tree.run.rank_facts import _facts
from titan_tree.signals import Interrupted

PARTS = """
from titan_tree.run.metrics.step_metrics import METRICS

METRICS.register("answer", lambda report: {"answer": 42.0})


def focal(logprobs, pairs, gamma=2.0):
    return -((1 - logprobs.exp()) ** gamma) * logprobs
"""
ROOT = Path(__file__).parents[2]
RUN = ("model.flavor=debug", "data.files=demo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a package of the user's own. What it registers is forgotten afterwards."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text('plugins = ["own.parts"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with METRICS.registered("unused", lambda report: {}), ADVANTAGES.registered("unused", print):
        yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] in ("own", "other")]:
        del sys.modules[module]


def test_plugins_and_names_of_own_code_are_imported_from_the_current_directory(folder: Path) -> None:
    config = load_config("run.toml", [*RUN, "loss.name=own.parts:focal", "loss.options.gamma=1.0"])
    assert "answer" in list(METRICS)
    assert LOSSES["own.parts:focal"] is sys.modules["own.parts"].focal
    assert "own.parts:focal" not in list(LOSSES)
    Path("again.toml").write_text(dump_config(config))
    assert load_config("again.toml") == config
    assert sys.path[-1] == str(folder)  # last: it hides no installed package


def test_ranks_compare_the_code_of_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module, its file, and of a package, all files of Python, but no others."""
    monkeypatch.setattr(plugins, "_imported", [])
    (folder / "own" / "__init__.py").write_text("# 123")
    (folder / "own" / "data.json").write_text("{}")
    config = load_config("run.toml", [*RUN, "plugins=[own, own.parts]"])
    found = {key: value for key, value in _facts(config) if "code of own" in key}
    assert found == {
        "the code of own": described(b"# 123" + PARTS.encode()),
        "the code of own.parts": described(PARTS.encode()),
    }


def described(code: bytes) -> str:
    return f"{len(code):,} bytes, checksum {zlib.crc32(code):08x}"


FAULTS = {
    "missing": ("", "other", "there is no module 'other' among the installed packages or in the current "
                "directory {folder}; install it, or start the command in the folder that contains it"),
    "syntax": ("def f(:\n", "own.bad",
               "cannot import own.bad: {folder}/own/bad.py:1: SyntaxError: invalid syntax"),
    "raises": ("\nimport json\njson.loads('x')\n", "own.bad", "cannot import own.bad: {folder}/own/bad.py:3: "
               "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    "exits": ("raise SystemExit(0)\n", "own.bad",
              "cannot import own.bad: {folder}/own/bad.py:1: SystemExit: 0"),
    "imports": ("import absent_package\n", "own.bad", "cannot import own.bad: {folder}/own/bad.py:1: "
                "ModuleNotFoundError: No module named 'absent_package'"),
    "replaces": ("from titan_tree.components.tree_loss.settings import LOSSES\n"
                 "LOSSES.register('sft', print)\n", "own.bad",
                 "cannot import own.bad: {folder}/own/bad.py:2: UserError: loss 'sft' is registered by "
                 "titan_tree already; choose another name, or pass replace=True to register"),
    "file": ("", "own/bad.py",
             "expected the dotted name of a module, such as my_package.parts, got 'own/bad.py'"),
}  # fmt: skip


@for_each(("code", "module", "message"), list(FAULTS.values()))
def test_a_plugin_that_cannot_be_imported_is_one_line(
    folder: Path, code: str, module: str, message: str
) -> None:
    (folder / "own" / "bad.py").write_text(code)
    with pytest.raises(UserError) as error:
        load_config("run.toml", [*RUN, f"plugins=[{module}]"])
    assert str(error.value) == f"argument 'plugins=[{module}]': plugins: {message.format(folder=folder)}"


def test_two_plugins_cannot_register_one_name(folder: Path) -> None:
    (folder / "other.py").write_text(PARTS)
    import_plugins(["own.parts"])
    with pytest.raises(UserError, match=r"metric 'answer' is registered by own\.parts already"):
        import_plugins(["other"])


def test_an_attribute_that_cannot_be_imported_is_one_line(folder: Path) -> None:
    (folder / "own" / "parts.py").write_text("def __getattr__(name):\n    raise RuntimeError('no GPU')\n")
    with pytest.raises(UserError) as error:
        load_config("run.toml", [*RUN, "plugins=[]", "loss.name=own.parts:focal"])
    place = f"{folder}/own/parts.py:2: RuntimeError: no GPU"
    expected = f"loss.name: cannot import own.parts:focal: {place}"
    assert str(error.value) == f"argument 'loss.name=own.parts:focal': {expected}"


def test_an_unknown_attribute_lists_those_of_the_module(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config("run.toml", [*RUN, "loss.name=own.parts:focla"])
    assert str(error.value) == (
        "argument 'loss.name=own.parts:focla': loss.name: "
        f"unknown attribute of {folder}/own/parts.py 'focla'; did you mean 'focal'? (known: METRICS, focal)"
    )


# Selections of own.parts:VALUE, which has no member of the kind that the key selects.
WRONG_KINDS = {
    "loss.name": ("loss", "__call__"),
    "model.attention": ("attention backend", "is_automatic, refusal"),
    "model.recurrence": ("recurrence backend", "is_automatic, refusal"),
    "model.name": ("model", "Config, flavors"),
    "data.format": ("data format", "recognizes, records"),
    "data.advantage": ("advantage estimator", "__call__"),
    "partition.strategy": ("partition strategy", "__call__"),
    "optimizer.name": ("optimizer", "import_class, state_bytes"),
    "rl.environment": ("environment", "episode or task"),
}


EVIL = "import pathlib\npathlib.Path('RAN').touch()\nVALUE = 0.5\n"
SHOWN = 'folder = "x"\nmodel.flavor = "debug"\n'


@for_each("key", ["plugins", "data.tokenizer", "metrics.loggers", *WRONG_KINDS])
def test_a_stored_configuration_imports_nothing(folder: Path, key: str) -> None:
    (folder / "own" / "parts.py").write_text(EVIL)
    name = "own.parts" if key == "plugins" else "own.parts:VALUE"
    value = f'["{name}"]' if key in ("plugins", "metrics.loggers") else f'"{name}"'
    files = "" if key.startswith("rl.") else 'data.files = "demo"\n'
    (folder / "config.toml").write_text(f"{key} = {value}\n{SHOWN}{files}")
    (folder / "RAN").unlink(missing_ok=True)
    plugins._imported.clear()
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
    path = list(sys.path)
    message = (
        f"{key}: names the code own.parts, and that of a stored configuration runs only with --plugins; read "
        "the code first"
    )
    if key.startswith("rl."):  # tables of single commands are left out
        load_stored("config.toml", plugins=True)
        assert (sys.path, (folder / "RAN").exists()) == (path, False)
        return
    with pytest.raises(UserError) as error:
        load_stored("config.toml")
    assert str(error.value) == f"config.toml: {message}"
    if key.startswith("data."):
        with pytest.raises(UserError, match=f"^config.toml: {message}"):
            load_stored("config.toml", data_only=True)
    elif files:
        assert load_stored("config.toml", data_only=True).data.files == ["demo"]
    assert (sys.path, (folder / "RAN").exists()) == (path, False)
    if key == "plugins":
        assert load_stored("config.toml", plugins=True).plugins == ["own.parts"]
        assert (folder / "RAN").exists()


def test_commands_import_the_code_of_a_run_only_with_plugins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own" / "parts.py").write_text(EVIL)
    (folder / "config.toml").write_text(f'plugins = ["own.parts"]\n{SHOWN}data.files = "demo"\n')
    score = ["score", "demo", "out.jsonl", "--config", "./config.toml"]
    (folder / "config.toml.until-step-3").write_bytes((folder / "config.toml").read_bytes())
    assert main(["plan", "config.toml.until-step-3"]) == 2  # a run sets earlier ones aside
    assert "names the code own.parts" in capsys.readouterr().err
    named = [["plan", "config.toml"], ["certify", "config.toml"], score]
    for command in (["chat", "."], ["export", ".", "out"], *named):
        assert main(command) == 2
        assert "config.toml: plugins: names the code own.parts" in capsys.readouterr().err
    assert main(["xray", ".", "--json"]) == 0
    assert not (folder / "RAN").exists()
    capsys.readouterr()
    for command in (["chat", "."], ["export", ".", "out"], ["xray", ".", "--json"], named[0]):
        (folder / "RAN").unlink(missing_ok=True)
        sys.modules.pop("own.parts", None)
        main([*command, "--plugins"])
        assert "names the code" not in capsys.readouterr().err
        assert (folder / "RAN").exists()


def test_code_that_the_user_named_is_no_further_code(folder: Path) -> None:
    import_plugins(["own.parts"])
    (folder / "own" / "other.py").write_text(EVIL)
    with imports_refused():
        import_plugins(["own.parts"])
        with pytest.raises(UserError, match=r"names the code own\.other"):
            import_plugins(["own.other"])
    assert not (folder / "RAN").exists()


def test_a_folder_with_the_name_of_code_is_a_folder(folder: Path) -> None:
    (folder / "own" / "parts.py").write_text(EVIL)
    (folder / "own.parts:VALUE").mkdir()
    (folder / "own.parts:VALUE" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        TreeTokenizer.load("own.parts:VALUE")
    assert not (folder / "RAN").exists()


@for_each(("key", "kind", "missing"), [(key, *expected) for key, expected in WRONG_KINDS.items()])
def test_a_value_of_the_wrong_kind_is_one_line(folder: Path, key: str, kind: str, missing: str) -> None:
    (folder / "own" / "parts.py").write_text("VALUE = 0.5\n")
    with pytest.raises(UserError) as error:
        load_any("run.toml", [*(RUN[:1] if key == "rl.environment" else RUN), f"{key}=own.parts:VALUE"])
    assert str(error.value) == (
        f"argument '{key}=own.parts:VALUE': {key}: own.parts:VALUE: expected a value of the kind {kind}, "
        f"got 0.5, which has no {missing}"
    )


TOKENIZERS = """
from titan_tree import TreeTokenizer


def plain(template):
    return TreeTokenizer.byte_level(template or "qwen3")


class Silent(TreeTokenizer):
    def __init__(self, template):
        made = plain(template)
        super().__init__(made._vocabulary, made._template)


class Marked(Silent):
    def fingerprint(self):
        return "marked 1"


def nothing(template):
    return None


VALUE = 0.5
"""


def test_a_tokenizer_of_own_code_gets_the_template_and_is_known_by_its_fingerprint(folder: Path) -> None:
    (folder / "own" / "tokens.py").write_text(TOKENIZERS)
    builtin = TreeTokenizer.byte_level("qwen3")
    assert TreeTokenizer.load("own.tokens:plain").fingerprint() == builtin.fingerprint()
    chatml = TreeTokenizer.byte_level("chatml").fingerprint()
    assert TreeTokenizer.load("own.tokens:plain", "chatml").fingerprint() == chatml
    assert TreeTokenizer.load("own.tokens:Marked").fingerprint() == "marked 1"
    returned = "expected a function of the chat template that returns a TreeTokenizer, got"
    for name, message in {
        "nothing": f"{returned} None",
        "VALUE": f"{returned} 0.5",
        "Silent": "expected Silent to define fingerprint(), because stored token ids are compared by it; "
        "define it, or return a plain TreeTokenizer",
    }.items():
        with pytest.raises(UserError) as error:
            TreeTokenizer.load(f"own.tokens:{name}")
        assert str(error.value) == f"own.tokens:{name}: {message}"
    with pytest.raises(
        UserError, match=r"own\.tokens:plane: unknown attribute of .*'plane'; did you mean 'plain'"
    ):
        TreeTokenizer.load("own.tokens:plane")


def test_inspect_shows_the_tokens_of_an_own_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own" / "tokens.py").write_text(TOKENIZERS)
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    Path("chat.jsonl").write_text(json.dumps({"messages": turns}))
    shown = []
    for tokenizer in (["own.tokens:plain"], ["byte", "--template", "qwen3"]):
        main(["inspect", "chat.jsonl", "--tokenizer", *tokenizer])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


OWN_RUN = {
    "model.name": ("qwen3_5", "Hybrid"),
    "model.flavor": ("debug", None),
    "model.attention": ("reference", "ATTENTION"),
    "model.recurrence": ("reference", "RECURRENCE"),
    "data.tokenizer": ("byte", "tokenizer"),
    "data.format": ("jsonl", "Chats"),
    "partition.strategy": ("greedy", "cut"),
    "loss.name": ("reinforce", "reinforce"),
    "optimizer.name": ("adamw", "OPTIMIZER"),
}
SETTINGS = (
    *("model.overrides.num_hidden_layers=2", "model.overrides.full_attention_interval=2"),
    *("data.global_batch_groups=1", "data.max_tokens=1000", "data.files=demo.jsonl"),
    *("training.steps=2", "training.dtype=float32", "lr_scheduler.warmup_steps=0", "checkpoint.interval=0"),
)


@pytest.mark.slow
def test_every_kind_of_part_can_be_the_users_own(folder: Path) -> None:
    """The ordinary command trains with them, and computes what the built-in parts compute."""
    shutil.copy(ROOT / "tests" / "support" / "own_parts.py", folder / "own" / "kinds.py")
    demo.write("demo.jsonl")
    tables = [f'{key} = "own.kinds:{own}"' for key, (_, own) in OWN_RUN.items() if own]
    tables += ['plugins = ["own.kinds"]', 'data.advantage = "centred"']  # by its registered name
    tables += ['metrics.loggers = ["csv", "own.kinds:Steps"]', 'model.flavor = "mine"', 'folder = "out"']
    Path("own.toml").write_text("\n".join([*tables, "data.workers = 1"]))
    command = [sys.executable, "-m", "titan_tree", "train", "own.toml", *SETTINGS]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr

    builtin = [f"{key}={name}" for key, (name, _) in OWN_RUN.items()]
    builtin += ["plugins=[]", "data.advantage=mean", "metrics.loggers=[csv]", "folder=builtin"]
    trainer = Trainer(load_config("run.toml", [*SETTINGS, *builtin]))
    trainer.train()
    trainer.close()
    own, expected = rows(Path("out")), rows(Path("builtin"))
    assert [float(row["answer"]) for row in own] == [42, 42]
    losses = [[float(row["loss"]) for row in run] for run in (own, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 2
    assert all(map(math.isfinite, losses[0]))
    assert losses[0][0] != losses[0][1]

    rl = ["rl.environment=own.kinds:Shop", "folder=rl", *TINY, "training.steps=1", "metrics.loggers=[]"]
    rl_run(load_tables(RLRunConfig, RL_DEMO, rl))
    # The model is also made without weights, for the check of the memory.
    calls = Counter(Path("used.txt").read_text().split())
    once = {"model": 2, "tokenizer": 1, "optimizer": 2, "logger": 2, "strategy": 2}
    once |= {"metric": 3, "environment": 2}
    assert once.items() <= calls.items()
    assert calls.keys() - once == {"attention", "recurrence", "loss", "reader", "advantage"}


class OwnEnd(BaseException):
    """An exception of a plugin that does not derive from Exception."""


@pytest.mark.parametrize("error", [OwnEnd("now"), SystemExit(3), ValueError("wrong")])
def test_whatever_code_of_the_user_raises_is_one_line(error):
    with (
        pytest.raises(UserError, match=rf"^loss 'mine': .*: {type(error).__name__}: {error}$"),
        calling("loss 'mine'"),
    ):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted(15)])
def test_signals_pass_code_of_the_user(error):
    with pytest.raises((KeyboardInterrupt, Interrupted)), calling("loss 'mine'"):
        raise error
