"""The table [serve] of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_tree.config.checks import Checked, at_least, between, setting


@dataclass(kw_only=True)
class ServeConfig(Checked, table="serve"):
    """The server for agents (docs/agents.md). In titan-tree rl, each rank takes a free port, and has keys."""

    host: str = "127.0.0.1"  # Address to listen on. Others than loopback need serve.secret_env.
    port: int = setting(8765, between(0, 65535))  # 0: a free one.
    # Environment variable that holds a secret, from which the key of each session follows. Default: clients
    # need no key.
    secret_env: str | None = None
    max_body_mb: int = setting(64, at_least(1))  # Maximum size of the body of a request.
    max_sessions: int = setting(4096, at_least(1))  # Maximum number of sessions at a time.
    # What prompts have of earlier turns. "faithful": what the chat template prints. Where it prints them in
    # another way than the model wrote them, for example without thoughts, the session forks. "append": the
    # turns themselves.
    mode: Literal["faithful", "append"] = "faithful"
    # Merge equal prefixes of the data of a training request (docs/tinker.md). false computes each datum
    # alone, for comparison: the results are the same.
    merge: bool = True
