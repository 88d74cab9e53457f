"""titan-tree: its commands, and how one is added."""

import argparse
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from titan_tree import cli
from titan_tree.errors import UserError

ROOT = Path(__file__).parents[2]


def test_help_lists_the_verbs_without_importing_them(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "convert", "a command whose module does not exist")
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "inspect" in out
    assert "a command whose module does not exist" in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_examples_and_every_default_but_no_source_file(command):
    parser = cli._parser([command])[1]
    text = " ".join(parser.format_help().split())
    assert f"\ntitan-tree {command}" in parser.description
    assert ".py" not in text
    for action in parser._actions:
        assert action.help
        default = action.default
        if action.option_strings and default not in (None, [], argparse.SUPPRESS) and default is not False:
            assert f"(default: {default})" in text, action.dest


def test_help_of_every_command_takes_little_time_and_imports_no_large_package():
    code = (
        "import sys, time\n"
        "from titan_tree import cli\n"
        "start = time.process_time()\n"
        "for command in ('', *cli.COMMANDS):\n"
        "    before = time.process_time()\n"
        "    assert cli.main([*command.split(), '--help']) == 0\n"
        "    seconds = start + time.process_time() - before\n"
        "    assert seconds < 0.5, f'{command}: {seconds} s of CPU time'\n"
        "large = {'torch', 'numpy', 'rich', 'yaml', 'tokenizers', 'jinja2', 'transformers'}\n"
        "sys.exit(str(large & set(sys.modules)) if large & set(sys.modules) else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_new_command_is_one_module_and_one_line(capsys, monkeypatch):
    module = types.ModuleType("titan_tree.cli.count", "Counts letters.")
    module.add_arguments = lambda parser: parser.add_argument("word")
    module.run = lambda args: print(len(args.word))
    monkeypatch.setitem(sys.modules, "titan_tree.cli.count", module)
    monkeypatch.setitem(cli.COMMANDS, "count", "count letters")
    assert cli.main(["count", "seven"]) == 0
    assert capsys.readouterr().out == "5\n"
    assert cli.main(["count", "--help"]) == 0
    assert "Counts letters." in capsys.readouterr().out


def test_ctrl_c_is_not_a_traceback(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=interrupt)
    monkeypatch.setitem(sys.modules, "titan_tree.cli.inspect", module)
    assert cli.main(["inspect"]) == 130


@pytest.mark.parametrize("arguments", [["count"], ["count", "--words", "3"], ["plan", "--gpus"], ["nothing"]])
def test_all_errors_begin_alike(arguments, capsys, monkeypatch):
    def refuse(args):
        raise UserError("wrong")

    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=refuse)
    monkeypatch.setitem(sys.modules, "titan_tree.cli.count", module)
    monkeypatch.setitem(cli.COMMANDS, "count", "count letters")
    assert cli.main(arguments) == 2
    assert re.fullmatch("titan-tree: error: [^\n]+\n", capsys.readouterr().err)


def test_code_of_the_user_that_calls_exit_is_an_error(capsys, monkeypatch):
    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: sys.exit(0))
    monkeypatch.setitem(sys.modules, "titan_tree.cli.inspect", module)
    assert cli.main(["inspect"]) == 2
    assert re.search(r"error: sys.exit\(0\) at .*test_main.py:\d+ ended the process", capsys.readouterr().err)


FULL, CLOSED = (
    f"titan-tree: error: stdout: {reason}\n" for reason in ("No space left on device", "Bad file descriptor")
)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("$PROGRAM config > /dev/full", 2, FULL),
        ("$PROGRAM train --help > /dev/full", 2, FULL),
        ("$PROGRAM --version >&-", 2, CLOSED),
        ("$PROGRAM --version > /dev/full 2>&1", 2, ""),
        ("$PROGRAM --print-completion bash | (exec true); exit ${PIPESTATUS[0]}", 1, ""),
        ("$PROGRAM inspect demo --tokenizer byte <&- > /dev/null", 0, ""),
        ("$PROGRAM inspect demo --tokenizer byte <&- >&- 2>&-", 2, ""),
    ],
)
def test_a_standard_stream_that_is_closed_or_full_costs_at_most_a_line(line, status, message):
    shell = ["bash", "-c", f"PROGRAM='{sys.executable} -m titan_tree'; {line}"]
    ended = subprocess.run(shell, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (status, message)


def test_modules_in_the_current_directory_are_not_imported(tmp_path):
    code = "import importlib.util, runpy, pkgutil, sys; print(*sys.modules)"  # what Python's -m needs
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = sys.stdlib_module_names - {name.partition(".")[0] for name in listed.stdout.split()}
    for name in ("shtab", "omegaconf", "rich", *own):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory ran')")
    command = [sys.executable, "-m", "titan_tree", "config", "optimizer.lr"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_removed_directory_is_one_line(tmp_path):
    line = f"rmdir ../gone; exec {sys.executable} -m titan_tree inspect demo"
    (tmp_path / "gone").mkdir()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=tmp_path / "gone",
        env=os.environ | {"PYTHONPATH": path},
    )
    message = "the current directory was removed; start the command in another one"
    assert (ended.returncode, ended.stderr) == (2, f"titan-tree: error: {message}\n")


def test_a_locale_of_ascii_starts_python_in_utf_8_mode():
    """torch reads its own files in the encoding of the locale."""
    code = "import sys; from titan_tree.cli import run_process; run_process.prepare_streams()"
    own = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}; print(sys.flags.utf8_mode, sys.argv[1], chr(233))", "ü"],
        capture_output=True,
        env=os.environ | own,
    )
    assert (ended.stdout.decode(), ended.stderr) == ("1 ü é\n", b"")


def test_an_unknown_command_exits_with_status_2_and_names_the_command_that_was_meant(capsys):
    assert cli.main(["inspekt"]) == 2
    assert "unknown command 'inspekt'; did you mean 'inspect'?" in capsys.readouterr().err


def test_a_missing_command_exits_with_status_2_and_shows_an_example_of_each(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n  titan-tree {command} " in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_print_completion_covers_every_command(shell, capsys):
    assert cli.main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in [*cli.COMMANDS, "adapter"])
    if shell == "bash":
        complete = """
            COMP_WORDS=(titan-tree "$@") COMP_CWORD=$#
            read -ra entry <<< "$(complete -p titan-tree)"
            "${entry[-2]}" titan-tree "${@: -1}"
            echo "${COMPREPLY[*]}"
        """
        for words, expected in ((["x"], "xray"), (["export", "--a"], "--adapter")):
            command = ["bash", "-c", script + complete, "bash", *words]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            assert run.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("inspect demo --sample turns=last", "; write data.sample.NAME=VALUE;"),
        ("inspect demo --ignore-fields ts trial", "; write data.ignore_fields=[VALUE, ...];"),
        ("xray demo --ignore-fields ts", "; write data.ignore_fields=[VALUE, ...];"),
        ("ingest --advantage group demo out", "; write data.advantage=VALUE;"),
        ("ingest demo out --advantage-options omega=1", "; write data.advantage_options.NAME=VALUE;"),
        ("inspect demo --merge batch", "; write data.merge=VALUE;"),
        ("score demo out --set loss.name=dpo", "; write key=value without it;"),
        ("train demo --lr 1e-3", "; write optimizer.lr=VALUE; titan-tree"),
        ("train demo --seed 1", "; write data.seed=VALUE or training.seed=VALUE; titan-tree"),
        ("train demo --lora-rank 8", "; write lora.rank=VALUE; titan-tree"),
        ("train demo --rollouts 1", "; write rl.rollouts=VALUE; titan-tree"),
        ("train demo --training.steps 3", "; write training.steps=VALUE;"),
        ("inspect demo --limt 3", "; did you mean '--limit'?;"),
        ("export a b --adaptor", "; did you mean '--adapter'?;"),
    ],
)
def test_an_option_that_is_a_key_is_refused_with_the_name_of_the_key(words, says, capsys):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --" in error
    assert says in error


@pytest.mark.parametrize(
    "words",
    [
        "train c.toml --nproc 2 data.seed=1 --data.format=tree",
        "certify data.seed=1 c.toml --tokens 9 --data.format=tree",
        "plan c.toml --gpus=8 data.seed=1 --json --data.format=tree",
        "inspect data.seed=1 a b --show x=1 --data.format=tree",
        "xray a b --max-tokens 4 8 data.seed=1 --data.format=tree",
        "ingest a data.seed=1 b --data.format=tree",
        "score a b data.seed=1 --model m --data.format=tree",
    ],
)
def test_every_command_takes_keys_at_any_place(words):
    args = cli.parse(words.split())
    assert args.overrides == ["data.seed=1", "--data.format=tree"]
    if hasattr(args, "files"):
        out = [args.out] if args.words[0] in ("ingest", "score") else []
        assert args.files + out == ["a", "b"]
    assert getattr(args, "show", None) in (None, "x=1")


def test_a_file_whose_name_looks_like_a_key_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.jsonl").touch()
    args = cli.parse(["inspect", "year=2024/*.jsonl", "year=2024/a.jsonl", "data.seed=1"])
    assert args.files == ["year=2024/*.jsonl", "year=2024/a.jsonl"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "inspect demo data.files=x",
            "data.files: set twice, by an argument of its own and as",
        ),
        ("inspect demo --format tree data.format=tree", "data.format: set twice"),
        ("score demo o --model m model.hf_path=n", "model.hf_path: set twice"),
        ("inspect demo model.name=qwen3", "unknown key 'model'; the tables are data"),
        (
            "inspect demo ignore_fields=[ts]",
            "'ignore_fields'; did you mean 'data.ignore_fields'?",
        ),
    ],
)
def test_wrong_keys_of_commands_that_read_data(words, says, capsys):
    assert cli.main(words.split()) == 2
    assert says in capsys.readouterr().err
