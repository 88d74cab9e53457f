"""titan-tree: its commands, and how one is added."""

import argparse
import subprocess
import sys
import types

import pytest

from titan_tree import cli


def test_help_lists_the_verbs_without_importing_them(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "convert", "a command whose module does not exist")
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0
    assert "inspect" in out
    assert "a command whose module does not exist" in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_examples_and_every_default_but_no_source_file(command):
    parser = cli._parser([command])._subparsers._group_actions[0].choices[command]
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
        "import contextlib, sys, time\n"
        "from titan_tree import cli\n"
        "start = time.process_time()\n"
        "for command in ('', *cli.COMMANDS):\n"
        "    before = time.process_time()\n"
        "    with contextlib.suppress(SystemExit): cli.main([*command.split(), '--help'])\n"
        "    seconds = start + time.process_time() - before\n"
        "    assert seconds < 0.5, f'{command}: {seconds} s of CPU time'\n"
        "large = {'torch', 'numpy', 'rich', 'omegaconf', 'tokenizers', 'jinja2', 'transformers'}\n"
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
    with pytest.raises(SystemExit):
        cli.main(["count", "--help"])
    assert "Counts letters." in capsys.readouterr().out


def test_overrides_may_follow_options(capsys, monkeypatch):
    def add_arguments(parser):
        parser.add_argument("config")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--gpus")

    module = types.SimpleNamespace(add_arguments=add_arguments, run=lambda args: print(args.overrides))
    monkeypatch.setitem(sys.modules, "titan_tree.cli.plan", module)
    assert cli.main(["plan", "c.toml", "a=1", "--gpus", "8", "b=2", "c=3"]) == 0
    assert capsys.readouterr().out == "['a=1', 'b=2', 'c=3']\n"
    with pytest.raises(SystemExit):
        cli.main(["plan", "c.toml", "--gpu-s", "8", "b=2"])
    assert capsys.readouterr().err == (
        "titan-tree plan: error: unrecognized arguments: --gpu-s; keys are set as optimizer.lr=1e-3; "
        "titan-tree plan --help lists the arguments\n"
    )


def test_ctrl_c_is_not_a_traceback(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=interrupt)
    monkeypatch.setitem(sys.modules, "titan_tree.cli.inspect", module)
    assert cli.main(["inspect"]) == 130


def test_an_unknown_command_exits_with_status_2_and_names_the_command_that_was_meant(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["inspekt"])
    assert exit.value.code == 2
    assert "unknown command 'inspekt'; did you mean 'inspect'?" in capsys.readouterr().err


def test_a_missing_command_exits_with_status_2_and_shows_an_example_of_each(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([])
    assert exit.value.code == 2
    shown = capsys.readouterr().err
    assert all(f"\n  titan-tree {command} " in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_print_completion_covers_every_command(shell, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--print-completion", shell])
    assert exit.value.code == 0
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


def test_code_that_exits_is_no_success(capsys):
    assert cli.call("titan-tree", sys.exit) == 1
    assert capsys.readouterr().err == "titan-tree: error: code of a plugin ended the run by sys.exit(None)\n"
