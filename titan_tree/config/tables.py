"""The configuration: one dataclass per TOML table, with defaults and checks.

This file has the tables of the model, the data and the loss; run_tables.py has all others.

A component receives the values of its own table, never the whole configuration. The comment beside a key is
its documentation. Names such as ``model.attention`` come from titan_tree/registry.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_tree.config.checks import (
    MISSING,
    Checked,
    at_least,
    check,
    finite,
    list_of,
    one_of,
    positive_number,
    require,
    setting,
)
from titan_tree.config.run_tables import (
    PATHS,
    CheckpointConfig,
    LRSchedulerConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfilerConfig,
    TrainingConfig,
    ValidationConfig,
)
from titan_tree.registry import (
    ADVANTAGES,
    ATTENTION_BACKENDS,
    GDN_BACKENDS,
    LOSSES,
    MODELS,
    PARTITION_STRATEGIES,
    READERS,
)

OPTIONS = check(
    "no messages and no tools", lambda options: not {"self", "messages", "tools"} & options.keys()
)


@dataclass
class ModelConfig(Checked, table="model"):
    """The model. Set either ``flavor`` (random weights) or ``hf_path`` (weights of a snapshot)."""

    name: str = setting("qwen3", one_of(MODELS))  # model family; a snapshot overrides it
    flavor: str | None = None  # a published size such as "0.6B", or "debug"; random weights
    hf_path: str | None = None  # local Hugging Face snapshot: sizes and initial weights
    # Of a snapshot: "native", titan_tree's own model; "transformers", the layers of that library; "auto":
    # native if there is such a model.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    attention: str = setting("auto", one_of("auto", ATTENTION_BACKENDS))  # backend of TreeAttention
    gdn: str = setting("auto", one_of("auto", GDN_BACKENDS))  # backend of TreeGDN, in models that have it
    overrides: dict[str, Any] = setting({})  # sizes that replace those of the flavor


@dataclass
class LoRAConfig(Checked, table="lora"):
    """Trains low-rank updates of frozen weights, see LoRA. Set either ``rank`` or ``adapter``, or neither."""

    rank: int = setting(0, at_least(0))  # of the updates; 0: all weights are trained
    alpha: float = setting(16.0, positive_number)  # an update is multiplied by alpha / rank
    # Names of linears, such as "q_proj", or ends of their names, such as "self_attn.q_proj". Routed experts
    # are "experts.gate_up_proj" and "experts.down_proj". Default: all linears of the layers, without routers
    # and routed experts.
    targets: list[str] = setting([])
    rslora: bool = False  # multiply by alpha / sqrt(rank) instead
    adapter: str | None = None  # folder of a PEFT adapter to start from; it sets the keys above
    quantize: Literal["none", "nf4"] = "none"  # "nf4": frozen linears of the layers have 4 bits per weight

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None:
            default = LoRAConfig()
            for name in ("rank", "alpha", "targets", "rslora"):
                value = getattr(self, name)
                require(
                    value == getattr(default, name),
                    f"lora.{name}",
                    "no value together with lora.adapter, which sets it",
                    value,
                )
        require(
            self.quantize == "none" or self.is_on,
            "lora.quantize",
            "'none' without lora.rank or lora.adapter, because only frozen weights can be quantized",
            self.quantize,
        )

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or self.adapter is not None


@dataclass
class DataConfig(Checked, table="data"):
    """Data files, and how their samples become token trees and micro-batches."""

    # A path, a glob pattern or a list of them; "demo" is the bundled sample.
    files: Any = setting(MISSING, PATHS)
    # How often an epoch contains each group: one number per entry of ``files``; default: once. 0.5 draws half
    # of the groups, anew in each epoch.
    weights: list[float] | None = setting(
        None, list_of(check("a number > 0 and at most 1e6", lambda weight: 0 < weight <= 1e6))
    )
    format: str = setting("auto", one_of("auto", READERS))  # "auto" recognizes the content of a file
    # Fields of records and messages that are not read. Any other unknown field is an error, except for usual
    # bookkeeping such as "task", "source" or "metadata" (data/schema.py). ["*"] ignores all unknown fields.
    ignore_fields: list[str] = setting([])
    tokenizer: str | None = None  # "byte", a Hugging Face folder or a .tiktoken file; default: model.hf_path
    template: str | None = None  # chat template (.jinja) that replaces the tokenizer's
    sample: dict[str, Any] = setting({}, OPTIONS)  # of TreeTokenizer.samples, such as turns = "last"
    merge: Literal["group", "batch"] = "group"  # one tree per group; "batch" also merges groups of a batch
    layout: Literal["tree", "flat"] = "tree"  # "flat" trains every path separately, as a baseline
    # "given" in the data, or computed from the rewards of each group, such as "group" in GRPO (docs/data.md).
    advantage: str = setting("given", one_of("given", ADVANTAGES))
    advantage_options: dict[str, Any] = setting({})  # numbers that the estimator takes, such as once = true
    # Train with the routed_experts recorded in the samples. If paths record different experts for a token
    # they share, use those of the "first" path or of the "majority", or "split" the paths (docs/routing.md).
    replay: Literal["off", "first", "majority", "split"] = "off"
    # Tokens of one forward pass; larger trees are partitioned, see [partition].
    max_tokens: int = setting(32_768, at_least(1))
    global_batch_groups: int = setting(8, at_least(1))  # groups per optimizer step, over all ranks
    # Groups from which the next one is drawn at random; 0 keeps the order of the files.
    shuffle_buffer: int = setting(256, at_least(0))
    seed: int = 0  # seed of the shuffling
    # Processes per rank that make the inputs of steps ahead of training; 0 uses a thread of the training
    # process. "auto" chooses up to 4 on a GPU, and 0 on a CPU.
    workers: Any = setting(
        "auto", check('"auto" or an integer >= 0', lambda n: n == "auto" or (type(n) is int and n >= 0))
    )

    def __post_init__(self) -> None:
        if isinstance(self.files, str) and self.files != MISSING:
            self.files = [self.files]
        super().__post_init__()
        require(
            self.weights is None or len(self.weights) == len(self.files),
            "data.weights",
            f"one weight for each of the {len(self.files)} entries of data.files",
            self.weights,
        )


@dataclass
class PartitionConfig(Checked, table="partition"):
    """How TreePartitioner splits trees above ``data.max_tokens``, and where activations are stored."""

    # "none" never splits: a tree of more than data.max_tokens tokens is an error.
    strategy: str = setting("auto", one_of("auto", PARTITION_STRATEGIES))
    # Maximum tokens whose activations are live at once.
    # Default: the larger of data.max_tokens and the longest path.
    max_chain_tokens: int | None = setting(None, at_least(1))
    # Activations of partitions that wait for the partitions below them (docs/partitioning.md). "auto" keeps
    # up to device_gb on the GPU, offloads up to host_gb to host memory, and recomputes the rest.
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    # Budget of "auto" per GPU. Default: no limit.
    device_gb: float | None = setting(None, finite, at_least(0))
    # Budget of "auto" in host memory, per GPU. Default: half of the available memory, divided by the number
    # of ranks on the host.
    host_gb: float | None = setting(None, finite, at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("device_gb", "host_gb"):
            require(
                getattr(self, name) is None or self.activations == "auto",
                f"partition.{name}",
                'partition.activations = "auto" when a budget is set',
                repr(self.activations),
            )


@dataclass
class KLConfig(Checked, table="loss.kl"):
    """A penalty for diverging from the reference policy, see KLPenalty. Needs ref_logprobs."""

    coefficient: float = setting(0.0, finite, at_least(0))  # 0: no penalty
    estimator: Literal["k1", "k2", "k3"] = "k3"  # of the KL divergence
    importance: bool = False  # multiply the estimate by p / p_old, for tokens of an older policy
    as_reward: bool = False  # subtract the penalty from the advantages; usual with k1


@dataclass
class CorrectionConfig(Checked, table="loss.correction"):
    """Weights for rollout_logprobs that differ from old_logprobs, see RolloutCorrection."""

    # The weight is p_old / p_rollout of the "token", of its path ("sequence"), or the "geometric" mean of its
    # path. "max" is the largest of its path, for the estimators "k2" and "k3". "off": all weights are 1.
    level: Literal["off", "token", "sequence", "geometric", "max"] = "off"
    # "truncate" clamps weights to [low, high], "mask" sets those outside to 0, and "reject" also sets those
    # inside to 1.
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = setting(0.0, finite, at_least(0))
    high: float = setting(2.0, finite)
    # What is compared with the bounds: the "ratio" above, or an estimate of KL(rollout || old), which needs
    # mode = "reject".
    estimator: Literal["ratio", "k2", "k3"] = "ratio"


@dataclass
class LossConfig(Checked, table="loss"):
    """The loss that TreeLoss computes."""

    name: str = setting("sft", one_of(LOSSES))
    # How token losses are added up. "path_mean" (sum over tokens, mean over samples) and "token_mean" (mean
    # over tokens) weigh all counted tokens of a step alike and differ only in the scale of the gradient.
    # "path_token_mean" gives every sample the same weight. "rollout_token_mean" gives every rollout the same
    # weight, that is, all samples of a conversation, or of the records with one rollout_id, together.
    reduction: Literal["path_mean", "token_mean", "path_token_mean", "rollout_token_mean"] = "path_mean"
    entropy: float = setting(0.0, finite)  # coefficient of an entropy bonus
    whiten: bool = False  # normalize advantages over the tokens of the global batch (TreePO, REINFORCE++)
    options: dict[str, Any] = setting({})  # numbers that the loss function takes, such as a clip range
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            key = f"loss.options.{name}"
            require(name not in vars(self), key, f"no such option (set loss.{name} instead)", repr(value))
            require(finite(value) is None, key, "a finite number", repr(value))


@dataclass
class RouterLossConfig(Checked, table="router_loss"):
    """Auxiliary losses on the router of a mixture of experts, see RouterLoss. A coefficient of 0 is off."""

    balance: float = setting(0.0, finite)  # of the load-balancing loss; about 1e-3 in pre-training
    z: float = setting(0.0, finite)  # of the z-loss
    # Tokens over which expert loads are balanced. "global_batch" does not depend on how trees are packed into
    # micro-batches and ranks. If a rank needs several forward passes per scope, the balancing loss runs each
    # of them twice: first to count the tokens per expert, then to train.
    scope: Literal["global_batch", "micro_batch"] = "global_batch"


@dataclass
class RouterBiasConfig(Checked, table="router_bias"):
    """Balances the experts by a bias on the router's choice, without a loss. See RouterBias."""

    # Change of a bias per optimizer step; DeepSeek-V3 uses 1e-3.
    # Unset: no biases are added, and those of a snapshot stay constant. 0: biases are added, and stay
    # constant.
    rate: float | None = setting(None, finite)
    # How often a token counts in the load of an expert: "paths": once per path; "tokens": once.
    counts: Literal["paths", "tokens"] = "paths"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rate is not None or self.counts == "paths",
            "router_bias.counts",
            "router_bias.rate to be set as well",
            repr(self.counts),
        )


def check_warmup(warmup_steps: int, steps: int) -> None:
    """Raises UserError if the warm-up is longer than the run."""
    expected = f"at most the {steps} steps of the run"
    require(warmup_steps <= steps, "lr_scheduler.warmup_steps", expected, warmup_steps)


@dataclass
class Config:
    """All tables of a configuration. Rules that involve several tables are checked here."""

    folder: str = "outputs/run"  # receives everything that the run writes
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    router_loss: RouterLossConfig = field(default_factory=RouterLossConfig)
    router_bias: RouterBiasConfig = field(default_factory=RouterBiasConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        if self.training.steps is not None:
            check_warmup(self.lr_scheduler.warmup_steps, self.training.steps)
        require(self.folder.strip(), "folder", "a path", repr(self.folder))
        # ModelConfig cannot check this: omegaconf constructs it with defaults, where both are unset.
        require(
            bool(self.model.flavor) != bool(self.model.hf_path),
            "model",
            "either flavor (random weights) or hf_path (a local snapshot, with model.flavor=null)",
            f"flavor = {self.model.flavor}, hf_path = {self.model.hf_path}",
        )
