"""Serves a model to agents, and writes what it read and wrote as rows of token ids.

titan-tree serve train_configs/serve.toml model.hf_path=/models/Qwen3-0.6B
titan-tree serve train_configs/serve.toml model.hf_path=/models/Qwen3-0.6B serve.port=9000 folder=sessions
OPENAI_BASE_URL=http://127.0.0.1:8765/s/task7.0/v1 OPENAI_API_KEY=any my_agent
curl -d '{"reward": 1}' http://127.0.0.1:8765/s/task7.0/end

Clients speak OpenAI's Chat Completions or Responses, or Anthropic's Messages. A session is a rollout: its
name is in the address, and what precedes its last "." names the group. See docs/agents.md.
"""

from __future__ import annotations

import argparse

from titan_tree.cli.data_arguments import add_overrides
from titan_tree.cli.run_process import log_to_stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree serve``."""
    parser.add_argument("config", metavar="CONFIG.toml", help="a configuration of titan-tree rl")
    add_overrides(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree serve``. Raises UserError for wrong input."""
    from titan_tree.config.toml import load_tables
    from titan_tree.rl.settings import RLRunConfig

    log_to_stdout()
    config = load_tables(RLRunConfig, args.config, args.overrides)
    from titan_tree.rl.serving import serve  # takes seconds, so check the configuration first

    serve(config)
