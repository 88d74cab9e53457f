"""Runs Claude Code and Codex, unchanged, against titan_tree's server, and counts what they repeat.

    python examples/coding_agents.py FOLDER --tokenizer /models/Qwen3-0.6B

npm installs both into FOLDER (650 MB). A script takes the place of the model: it runs two commands and
reports. Each agent has two rollouts: the task, and the same task again in the same conversation.
FOLDER/sessions/rows.jsonl holds their token ids, for titan-tree inspect, xray and train. Nothing needs a
network after the installation:

    unshare -rn bash -c 'ip link set lo up; python examples/coding_agents.py FOLDER'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.settings import ServeConfig
from titan_tree.tree.context import Completion, Context, Ids
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

PACKAGES = {"claude": "@anthropic-ai/claude-code@2.1.197", "codex": "@openai/codex@0.171.0"}
TASK = "Run the thing twice and report."
# The tools that run commands: name -> arguments of the turn's number.
TOOLS = {
    "Bash": '{"command": "echo thing%d", "description": "Echo the thing"}',
    "exec_command": '{"cmd": "echo thing%d"}',
    "shell": '{"command": ["bash", "-lc", "echo thing%d"]}',
    "shell_command": '{"command": "echo thing%d"}',
}


class Script:
    """A sampler that runs two commands, whatever agent it drives, and then reports."""

    def __init__(self, tokenizer: TreeTokenizer) -> None:
        self.tokenizer = tokenizer

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        turns = []
        for context, limit in zip(contexts, max_tokens, strict=True):
            tokens = [*self.tokenizer.encode(self._turn(self.tokenizer.decode(context))), stops[0]][:limit]
            turns.append(Completion(tokens, [-0.5] * len(tokens)))
        return turns

    def _turn(self, prompt: str) -> str:
        done = len(re.findall("<tool_response>", prompt))
        name = next((name for name in TOOLS if f'"name": "{name}"' in prompt), None)
        if name is None or done >= 2:
            return "<think>\nEnough.\n</think>\n\nThe thing printed both strings."
        call = f'{{"name": "{name}", "arguments": {TOOLS[name] % done}}}'
        return f"<think>\nI run the thing {done}.\n</think>\n\nRunning.\n<tool_call>\n{call}\n</tool_call>"


def install(folder: Path) -> None:
    """Installs both agents by npm, unless they are there."""
    if all((folder / "node_modules" / ".bin" / name).exists() for name in PACKAGES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES.values()], cwd=folder, check=True)


def command(name: str, folder: Path, url: str, home: Path, again: bool) -> tuple[list[str], dict[str, str]]:
    """Returns the command that gives the task to an agent, and its environment variables.

    Args:
        again: whether it continues the conversation in ``home``.
    """
    program = str((folder / "node_modules" / ".bin" / name).resolve())
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "IS_SANDBOX": "1"}
    if name == "claude":
        environment |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": "policy"}
        environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
        return [program, "-p", TASK, "--allowedTools", "Bash", *["--continue"] * again], environment
    (home / ".codex").mkdir(exist_ok=True)
    provider = {
        "name": "titan_tree",
        "base_url": f"{url}/v1",
        "wire_api": "responses",
        "env_key": "TITAN_KEY",
    }
    settings = {f"model_providers.titan.{key}": json.dumps(value) for key, value in provider.items()}
    settings |= {"model_provider": '"titan"', "model": '"policy"', "analytics.enabled": "false"}
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    environment |= {"CODEX_HOME": str(home / ".codex"), "TITAN_KEY": "any"}
    return [program, "exec", *flags, *options, *["resume", "--last"] * again, TASK], environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default="byte", help="a folder or a file; its ids are counted")
    parser.add_argument("--mode", choices=["faithful", "append"], default="faithful")
    args = parser.parse_args()
    install(args.folder)
    chat = Chat(TreeTokenizer.load(args.tokenizer, "qwen3"))
    limits = RLConfig(max_rollout_tokens=10**6)
    recorder = ModelRecorder(chat, limits, args.mode, folder=args.folder / "sessions")
    server = AgentServer(recorder, ServeConfig(port=0), "policy")
    url, until = server.start(), threading.Event()
    sampling = threading.Thread(target=recorder.run, args=(Script(chat.tokenizer), until))
    sampling.start()
    for name in PACKAGES:
        paths: list[TokenPath] = []
        calls: list[Context] = []
        for rollout in range(2):
            session = f"{name}.{rollout}"
            home = (args.folder / "home" / session).resolve()
            home.mkdir(parents=True, exist_ok=True)
            for again in (False, True):
                words, environment = command(name, args.folder, f"{url}/s/{session}", home, again)
                ran = subprocess.run(
                    words,
                    cwd=home,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=180,
                )
                if ran.returncode:
                    raise SystemExit(f"{session}: {ran.stderr.decode()[-1000:]}")
            found = recorder.session(session)
            paths += [TokenPath(path.tokens, path.mask) for path in found.paths()]
            calls += [call.tokens for call in found.calls]
            print(f"{session}: {len(found.calls)} calls, forks: {dict(found.forks()) or 'none'}")
        tree = TokenTree.from_paths(paths)
        flat, leaf = sum(map(len, calls)), sum(len(path.tokens) for path in paths)
        print(f"{name}: tokens of calls {flat:,}, of paths {leaf:,}, distinct {len(tree):,}")
    until.set()
    sampling.join()
    server.close()
    recorder.close()


if __name__ == "__main__":
    main()
