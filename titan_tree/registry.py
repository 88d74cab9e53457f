"""The extension points of titan_tree: names that a configuration can use, and their implementations.

A configuration can also name code of its own, as "module:attribute" (plugins.py). To extend titan_tree, write
one file and add one line below. docs/extending.md shows examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from titan_tree.errors import UserError, shorten, unknown_name
from titan_tree.plugins import import_attribute, importing, is_import_string

# At run time, nothing is imported before it is used. These types are the classes that extensions subclass,
# documented where they are; a protocol here would state each of them twice.
if TYPE_CHECKING:
    import torch

    from titan_tree.components.recurrence.operator import RecurrenceBackend
    from titan_tree.components.tree_attention.operator import AttentionBackend
    from titan_tree.components.tree_loss.spec import LossFunction
    from titan_tree.data.advantages import Estimator
    from titan_tree.data.readers import Reader
    from titan_tree.distributed.optimizers import OptimizerSpec
    from titan_tree.metrics.loggers import Logger
    from titan_tree.metrics.step_metrics import StepReport
    from titan_tree.models.decoder import Decoder
    from titan_tree.rl.environment import Environment
    from titan_tree.tree.partition import Partition
    from titan_tree.tree.token_tree import TokenTree

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to implementations of one kind.

    An entry is the implementation itself or an import string: "package.module" or "package.module:attribute".
    The registry imports it on first use. Iterating over the names imports nothing, so reading a configuration
    does not import torch. Everywhere a name is accepted, "module:attribute" selects an implementation that
    nobody registered; it is imported when the name is checked.

    Args:
        kind: the word for an entry in error messages, such as "loss".
        entries: implementations or import strings by name. Error messages list the names in this order.
        interface: attributes by which an implementation that "module:attribute" selects is checked.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T | str], interface: tuple[str, ...] = ("__call__",)
    ) -> None:
        self.kind = kind
        self.interface = interface
        self._entries: dict[str, T | str] = dict(entries)
        self._owners: dict[str, str | None] = dict.fromkeys(entries, "titan_tree")
        self._selected: dict[str, T] = {}  # by "module:attribute"

    def register(self, name: str, entry: T | str, replace: bool = False) -> None:
        """Adds an entry. Code may register its own name again, as a cell of a notebook does.

        Raises:
            UserError: the name belongs to titan_tree or to another plugin, and ``replace`` is false.
        """
        owner = self._owners.setdefault(name, importing())
        if owner != importing() and not replace:
            raise UserError(
                f"{self.kind} {name!r} is registered by {owner or 'the script'} already; choose another "
                "name, or pass replace=True to register"
            )
        self._owners[name] = importing()
        self._entries[name] = entry

    @contextmanager
    def registered(self, name: str, entry: T | str) -> Iterator[None]:
        """Registers an entry within a ``with`` statement. After it, the registry is as before."""
        before = dict(self._entries), dict(self._owners)
        self.register(name, entry, replace=True)
        try:
            yield
        finally:
            self._entries, self._owners = before

    def __getitem__(self, name: str) -> T:
        """Returns the implementation with this name. Raises UserError for an unknown name."""
        if name not in self._selected and name not in self:
            raise unknown_name(self.kind, name, self._entries)
        if name in self._selected:
            return self._selected[name]
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            loaded: Any = import_module(module)
            entry = self._entries[name] = getattr(loaded, attribute) if attribute else loaded
        return entry

    def name_of(self, implementation: type) -> str | None:
        """Returns the last name with which a class is registered, or None. Imports nothing."""
        imported_as = f"{implementation.__module__}:{implementation.__qualname__}"
        for name, entry in reversed((self._selected | self._entries).items()):
            if entry is implementation or entry == imported_as:
                return name
        return None

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names in the order of registration."""
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        """Returns whether a name exists. Imports and checks "module:attribute", or raises UserError."""
        if not isinstance(name, str):
            return False
        if is_import_string(name) and name not in self._entries:
            selected = import_attribute(name)
            if missing := [member for member in self.interface if not hasattr(selected, member)]:
                raise UserError(
                    f"{name}: expected a value of the kind {self.kind}, got {shorten(selected)}, "
                    f"which has no {', '.join(missing)}"
                )
            self._selected[name] = selected
        return name in self._entries or name in self._selected

    def __len__(self) -> int:
        return len(self._entries)


class Backend(Protocol):
    """What backends of attention and of recurrences have in common. A backend is a module or an object."""

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``."""
        ...

    @property
    def refusal(self) -> Callable[..., str | None]:
        """The function of the inputs that returns why the backend cannot compute them, or None if it can."""
        ...


B = TypeVar("B", bound=Backend)

AUTO = "auto"


class BackendRegistry(Registry[B]):
    """A registry of backends, and the choice among them.

    Args:
        component: the class that uses the backends, as error messages name it.
        kind, entries: see ``Registry``.
    """

    def __init__(self, component: str, kind: str, entries: Mapping[str, B | str]) -> None:
        super().__init__(kind, entries, interface=("is_automatic", "refusal"))
        self.component = component

    def load(self, name: str) -> None:
        """Imports the backends that ``resolve`` may return for ``name``, because torch.compile cannot do it.

        Raises:
            UserError: ``name`` is neither "auto" nor a registered backend.
        """
        if name != AUTO and name not in self:
            raise unknown_name(f"{self.component} backend", name, [AUTO, *self])
        for candidate in self if name == AUTO else [name]:
            self[candidate]

    def automatic(self, device: torch.device) -> list[str]:
        """Returns the backends that "auto" tries for tensors on ``device``, in the order of registration."""
        return [name for name in self if self[name].is_automatic(device)]

    def resolve(self, name: str, device: torch.device, *inputs: object) -> str:
        """Returns the backend that computes ``inputs``: ``name``, or for "auto" the first without a refusal.

        Raises:
            UserError: the backend called ``name`` refuses the inputs, or for "auto" all automatic ones do.
        """
        reasons = []
        for candidate in self.automatic(device) if name == AUTO else [name]:
            reason = self[candidate].refusal(*inputs)
            if reason is None:
                return candidate
            reasons.append(f"backend {candidate!r} {reason}")
        raise UserError(f"{self.component}: {'; '.join(reasons) or f'no automatic backend for {device}'}")


MODELS: Registry[type[Decoder]] = Registry(
    "model",
    {
        "qwen3": "titan_tree.models.qwen3:Qwen3",
        "qwen3_moe": "titan_tree.models.qwen3:Qwen3Moe",
        "qwen3_5": "titan_tree.models.qwen3_5:Qwen35",
        "qwen3_5_moe": "titan_tree.models.qwen3_5_moe:Qwen35Moe",
        "qwen3_next": "titan_tree.models.qwen3_5_moe:Qwen3Next",
        "llama": "titan_tree.models.llama:Llama",
        "kimi_linear": "titan_tree.models.kimi_linear:KimiLinear",
    },
    interface=("Config", "flavors"),
)

ATTENTION_BACKENDS: BackendRegistry[AttentionBackend] = BackendRegistry(
    "TreeAttention",
    "attention backend",
    {
        "hopper": "titan_tree.components.tree_attention.hopper",
        "triton": "titan_tree.components.tree_attention.triton_kernels",
        "flash": "titan_tree.components.tree_attention.flash",
        "flex": "titan_tree.components.tree_attention.flex",
        "reference": "titan_tree.components.tree_attention.reference",
    },
)

RECURRENCE_BACKENDS: BackendRegistry[RecurrenceBackend] = BackendRegistry(
    "recurrence",
    "recurrence backend",
    {
        "hopper": "titan_tree.components.recurrence.hopper",
        "triton": "titan_tree.components.recurrence.triton_kernels",
        "reference": "titan_tree.components.recurrence.reference",
    },
)

# Functions (tree, max_tokens, max_chain_tokens) -> partitions.
PARTITION_STRATEGIES: Registry[Callable[[TokenTree, int, int | None], Iterable[Partition]]] = Registry(
    "partition strategy",
    {
        "none": "titan_tree.components.tree_partitioner:one_partition",
        "single_path": "titan_tree.components.tree_partitioner.single_path:partition",
        "multi_path": "titan_tree.components.tree_partitioner.multi_path:partition",
        "greedy": "titan_tree.components.tree_partitioner.greedy:partition",
        "redundancy_free": "titan_tree.components.tree_partitioner.redundancy_free:partition",
    },
)

# Functions (logprobs [F], pairs, **options) -> losses [F], where F counts the (edge, path) pairs of a batch;
# components/tree_loss/spec.py describes how they declare what they need.
LOSSES: Registry[LossFunction] = Registry(
    "loss",
    {
        "sft": "titan_tree.components.tree_loss.token_losses:sft",
        "reinforce": "titan_tree.components.tree_loss.token_losses:reinforce",
        "ppo": "titan_tree.components.tree_loss.token_losses:ppo",
        "grpo": "titan_tree.components.tree_loss.token_losses:grpo",
        "dr_grpo": "titan_tree.components.tree_loss.token_losses:dr_grpo",
        "dapo": "titan_tree.components.tree_loss.token_losses:dapo",
        "cispo": "titan_tree.components.tree_loss.token_losses:cispo",
        "sapo": "titan_tree.components.tree_loss.token_losses:sapo",
        "dppo_tv": "titan_tree.components.tree_loss.token_losses:dppo_tv",
        "dppo_kl": "titan_tree.components.tree_loss.token_losses:dppo_kl",
        "decoupled_ppo": "titan_tree.components.tree_loss.token_losses:decoupled_ppo",
        "distill": "titan_tree.components.tree_loss.token_losses:distill",
        "gspo": "titan_tree.components.tree_loss.sequence_ratios:gspo",
        "gspo_token": "titan_tree.components.tree_loss.sequence_ratios:gspo_token",
        "luspo": "titan_tree.components.tree_loss.sequence_ratios:luspo",
        "gmpo": "titan_tree.components.tree_loss.sequence_ratios:gmpo",
        "vespo": "titan_tree.components.tree_loss.sequence_ratios:vespo",
        "dpo": "titan_tree.components.tree_loss.preferences:dpo",
        "ipo": "titan_tree.components.tree_loss.preferences:ipo",
        "apo_zero": "titan_tree.components.tree_loss.preferences:apo_zero",
        "kto": "titan_tree.components.tree_loss.preferences:kto",
        "simpo": "titan_tree.components.tree_loss.preferences:simpo",
        "orpo": "titan_tree.components.tree_loss.preferences:orpo",
        "cpo": "titan_tree.components.tree_loss.preferences:cpo",
    },
)

# Functions (turns, **options) -> one array of advantages per path; data/advantages.py describes them.
ADVANTAGES: Registry[Estimator] = Registry(
    "advantage estimator",
    {
        name: f"titan_tree.data.advantages:{name}"
        for name in ("group", "mean", "loo", "gigpo", "tree_rl", "tree_grpo", "spo", "tree_po")
    },
)

# Readers of data files; data/readers/__init__.py describes their interface.
READERS: Registry[type[Reader]] = Registry(
    "data format",
    {
        "jsonl": "titan_tree.data.readers.own_schema:OwnSchemaReader",
        "openai_chat": "titan_tree.data.readers.openai_chat:OpenAIChatReader",
        "openai_responses": "titan_tree.data.readers.openai_responses:OpenAIResponsesReader",
        "anthropic": "titan_tree.data.readers.anthropic:AnthropicReader",
        "sharegpt": "titan_tree.data.readers.llama_factory:ShareGptReader",
        "alpaca": "titan_tree.data.readers.llama_factory:AlpacaReader",
        "text_rows": "titan_tree.data.readers.text_rows:TextRowReader",
        "token_rows": "titan_tree.data.readers.token_rows:TokenRowReader",
        "tree": "titan_tree.data.readers.explicit_trees:ExplicitTreeReader",
        "verifiers": "titan_tree.data.readers.verifiers:VerifiersReader",
        "nemo_gym": "titan_tree.data.readers.nemo_gym:NemoGymReader",
        "agent_lightning": "titan_tree.data.readers.agent_lightning:AgentLightningReader",
        "tau_bench": "titan_tree.data.readers.benchmarks:TauBenchReader",
        "tau2_bench": "titan_tree.data.readers.benchmarks:Tau2BenchReader",
        "swe_agent": "titan_tree.data.readers.benchmarks:SweAgentReader",
        "claude_code": "titan_tree.data.readers.claude_code:ClaudeCodeReader",
        "codex": "titan_tree.data.readers.codex:CodexReader",
        "pi": "titan_tree.data.readers.pi:PiReader",
        "openhands": "titan_tree.data.readers.openhands:OpenHandsReader",
        "token_store": "titan_tree.data.token_store:TokenStoreReader",
    },
    interface=("recognizes", "records"),
)

# Classes, or functions without arguments, that make the environments of reinforcement learning.
ENVIRONMENTS: Registry[Callable[[], Environment]] = Registry(
    "environment",
    {"desk": "titan_tree.rl.environment:Desk", "search": "titan_tree.rl.search:Search"},
    interface=("episode",),
)

OPTIMIZERS: Registry[OptimizerSpec] = Registry(
    "optimizer",
    {
        "adamw": "titan_tree.distributed.adamw:ADAMW",
        "adamw8bit": "titan_tree.distributed.adamw:ADAMW_8BIT",
    },
    interface=("import_class", "state_bytes"),
)

LOGGERS: Registry[type[Logger]] = Registry(
    "logger",
    {
        "console": "titan_tree.metrics.builtin_loggers:ConsoleLogger",
        "csv": "titan_tree.metrics.builtin_loggers:CsvLogger",
        "tensorboard": "titan_tree.metrics.builtin_loggers:TensorBoardLogger",
        "wandb": "titan_tree.metrics.wandb:WandbLogger",
        "mlflow": "titan_tree.metrics.mlflow:MlflowLogger",
    },
    interface=("log", "advance", "close"),
)

# Functions of a step's report that return numbers by name. A metric that does not apply returns {}.
METRICS: Registry[Callable[[StepReport], dict[str, float]]] = Registry(
    "metric",
    {
        "rollouts": "titan_tree.metrics.step_metrics:rollout_metrics",
        "tree": "titan_tree.metrics.step_metrics:tree_metrics",
        "partitions": "titan_tree.metrics.step_metrics:partition_metrics",
        "speed": "titan_tree.metrics.step_metrics:speed_metrics",
        "balance": "titan_tree.metrics.step_metrics:balance_metrics",
        "replay": "titan_tree.metrics.step_metrics:replay_metrics",
        "gpu": "titan_tree.metrics.step_metrics:gpu_metrics",
    },
)
