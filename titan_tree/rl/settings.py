"""The tables of ``titan-tree rl``: those of training, [rl], [rl.server], [serve] and [warm_start]."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_tree.components.tree_tokenizer.templates import SETTINGS
from titan_tree.config.checks import (
    Checked,
    at_least,
    between,
    check,
    finite,
    list_of,
    one_of,
    positive_number,
    require,
    setting,
)
from titan_tree.data.settings import ADVANTAGES, DataConfig
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.run.config import Config
from titan_tree.serve.settings import ServeConfig

URLS = check(
    "an address or a non-empty list of addresses",
    lambda url: isinstance(url, str) or (isinstance(url, list) and url and {*map(type, url)} == {str}),
)
TEACHERS = check(
    "a table of folders and addresses by name, such as {large = '/models/large'}",
    lambda models: isinstance(models, dict) and {*map(type, models.values())} <= {str},
)
REWARD = re.compile(r"exit|file:.+|[\w.]+:\w+")  # a value of rl.agent.reward
NO_FILES = "no files, because the environment makes the tasks (titan-tree train reads files)"
# Keys of [data] that say how files are read. An environment has no files.
OF_FILES = (*("weights", "format", "ignore_fields", "paths", "advantage", "shuffle_buffer", "workers"),)


@dataclass(kw_only=True)
class RLDataConfig(DataConfig, table="data"):
    """The table [data] for tasks of an environment. A group is a task with all its rollouts."""

    files: Any = setting(  # Must stay empty.
        [], check(NO_FILES, lambda files: not files)
    )
    seed: int = 0  # Seed of the tasks and of sampling.

    def __post_init__(self) -> None:
        super().__post_init__()
        default = DataConfig(files="")
        for name in OF_FILES:
            got, expected = getattr(self, name), getattr(default, name)
            reason = "an environment has no files" + ("; set rl.advantage" if name == "advantage" else "")
            require(got == expected, f"data.{name}", f"no value, because {reason}", got)
        for name in SETTINGS:
            require(name not in self.sample, f"data.sample.{name}", "only variables of the template", name)


@dataclass(kw_only=True)
class ServerConfig(Checked, table="rl.server"):
    """Servers of vLLM that sample the rollouts with copies of the trained weights (docs/rl.md)."""

    # Address such as "http://localhost:30000", or a list of the addresses of several servers. Default:
    # rollouts are sampled from the trained weights.
    url: Any = setting(None, URLS)
    model: str = ""  # Name under which vLLM serves the model.
    # How the server gets the trained weights. "folder": it reads a snapshot from rollout_weights/ in the
    # run's folder. "adapter": it loads LoRA from rollout_weights/.
    weights: Literal["folder", "adapter"] = "folder"
    concurrency: int = setting(64, at_least(1))  # Maximum number of requests of a rank at a time.
    timeout_s: float = setting(600.0, between(0.1, 1e6))  # Seconds within which a whole answer must arrive.
    attempts: int = setting(5, at_least(1))  # Maximum number of times that a request is sent.
    api_key_env: str | None = None  # Environment variable that holds the server's key.

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.url is None or self.model,
            "rl.server.model",
            "the name under which vLLM serves the model, such as model.hf_path",
            repr(self.model),
        )


@dataclass(kw_only=True)
class TeacherConfig(Checked, table="rl.teacher"):
    """Teachers of the loss "distill_topk" (docs/rl.md)."""

    # By name: the folder of a snapshot, or the address of a server of vLLM, such as "http://localhost:8000".
    # If there are several, each task names its own as its teacher.
    models: dict[str, Any] = setting({}, TEACHERS)
    top_k: int = setting(64, at_least(1))  # Number of likeliest tokens that a teacher scores.
    api_key_env: str | None = None  # Environment variable that holds the key of the teachers' servers.


def is_address(text: str) -> bool:
    """Returns whether a teacher is a server, and not a folder."""
    return text.startswith(("http://", "https://"))


@dataclass(kw_only=True)
class AgentConfig(Checked, table="rl.agent"):
    """Rollouts that programs play: the environment "agent", and others of this kind (docs/rl.md)."""

    # Program and arguments. {FIELD} stands for a field of the task, {url} for the address of the model.
    command: list[Any] = setting([], list_of(check("text", lambda word: isinstance(word, str))))
    tasks: str | None = None  # JSON Lines file with an object per task, which the program finds in task.json.
    folder: str | None = None  # Folder whose content is copied to the working folder of each program.
    time_limit_s: float = setting(600.0, positive_number)  # Seconds until a program is killed, with reward 0.
    concurrency: int = setting(16, at_least(1))  # Maximum number of programs of a rank at a time.
    # "exit": 1 for exit status 0, else 0. "file:NAME": the number in this file of the working folder. Or
    # "module:function", which is called with the task, the working folder and the exit status.
    reward: str = setting("exit", check('"exit", "file:NAME" or "module:function"', REWARD.fullmatch))


@dataclass(kw_only=True)
class RLConfig(Checked, table="rl"):
    """How rollouts are sampled in each step, and what they are worth."""

    environment: str = setting("desk", one_of(ENVIRONMENTS))  # Source of tasks and rewards.
    rollouts: int = setting(8, at_least(2))  # Independent rollouts per task.
    # Further rollouts per task. Each continues a random one of the task's rollouts from a random later turn.
    branches: int = setting(0, at_least(0))
    advantage: str = setting("group", one_of(ADVANTAGES))  # Estimator of advantages (docs/advantages.md).
    advantage_options: dict[str, Any] = setting({})  # Options of the estimator.
    # Snapshot of the reference policy, or of the teacher of the loss "distill". Default: the weights at the
    # start of the run, also after a resume. Only for losses that read ref_logprobs.
    reference: str | None = None
    # Sampling keeps the fewest likeliest token ids whose probabilities add up to top_p (docs/data.md).
    top_p: float = setting(1.0, between(1e-6, 1.0))
    top_k: int = setting(0, at_least(0))  # Sampling keeps the top_k likeliest token ids. 0: all.
    # Sampling keeps token ids with at least min_p times the largest probability. 0: all.
    min_p: float = setting(0.0, between(0.0, 1.0))
    # Maximum tokens of one turn. A rollout that is cut off has reward 0, unless a program plays it.
    max_turn_tokens: int = setting(1024, at_least(1))
    max_rollout_tokens: int = setting(8192, at_least(2))  # Maximum tokens of each context, prompt included.
    # Number of steps whose rollouts are sampled ahead of training. The weights that sampled a token are at
    # most so many steps older than those that train on it. Above 0, this needs a server, or another sampler
    # with weights of its own.
    async_steps: int = setting(0, at_least(0))
    server: ServerConfig = field(default_factory=ServerConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)


@dataclass(kw_only=True)
class WarmStartConfig(Checked, table="warm_start"):
    """Supervised training on the environment's demonstrations, until sampled rollouts reach a mean reward."""

    steps: int = setting(0, at_least(0))  # Maximum number of steps. 0: no warm start.
    reward: float = setting(0.0, finite)  # Mean reward at which the warm start ends.
    interval: int = setting(25, at_least(1))  # Steps between measurements of the reward.
    measured_tasks: int = setting(256, at_least(1))  # Rollouts per measurement, each of another task.
    lr: float = setting(1e-3, positive_number)  # Learning rate. It decays linearly to a tenth over ``steps``.
    tasks: int = setting(16, at_least(1))  # Tasks per step.


@dataclass(kw_only=True)
class RLRunConfig(Config):
    """All tables of a configuration for ``titan-tree rl``."""

    data: RLDataConfig = field(default_factory=RLDataConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (
            ("validation.files", self.validation.files),
            ("training.epochs", self.training.epochs),
        ):
            require(
                value is None, key, "no value, because the environment makes new tasks in each step", value
            )
        require(
            self.partition.strategy != "none",
            "partition.strategy",
            "another one than 'none', because the sizes of sampled trees are not known before",
            "'none'",
        )
