"""The settings [optimizer], [lr_scheduler] and [parallel], and the registry of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan_tree.config.checks import (
    Checked,
    at_least,
    between,
    check,
    finite,
    greater_than,
    one_of,
    setting,
)
from titan_tree.config.registry import Registry

if TYPE_CHECKING:
    import torch

BETAS = check(
    "two numbers from 0 to below 1", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Describes an optimizer that ``optimizer.name`` can select.

    Args:
        import_class: imports and returns the class, a subclass of ``torch.optim.Optimizer``. Raises UserError
            if a package is missing. The class is called with a list of parameter groups, and with the keys of
            ``optimizer.options`` as keyword arguments. Each group has ``params``, ``lr``, ``betas``, ``eps``,
            ``weight_decay`` and further keys, which the class may ignore. Every value in its states must be a
            tensor.
        state_bytes: returns the bytes of the states of a shard with so many fp32 numbers. ``titan-tree plan``
            and ``titan-tree doctor`` use it. The default is two moments in fp32, as AdamW has.
        fused: whether its step reads ``grad_scale`` and ``found_inf``, see ``clip_and_step``.
        reshards_any_dim: checkpoints can redistribute its states along any dimension, not just the first.
    """

    import_class: Callable[[], Callable[..., torch.optim.Optimizer]]
    state_bytes: Callable[[int], float] = lambda numbers: 8 * numbers
    fused: bool = False
    reshards_any_dim: bool = True


OPTIMIZERS: Registry[OptimizerSpec] = Registry(
    "optimizer",
    {
        "adamw": "titan_tree.distributed.adamw:ADAMW",
        "adamw8bit": "titan_tree.distributed.adamw:ADAMW_8BIT",
    },
    interface=("import_class", "state_bytes"),
    key="optimizer.name",
)


@dataclass(kw_only=True)
class OptimizerConfig(Checked, table="optimizer"):
    """The optimizer of the fp32 weights. Weight decay applies to matrices, not to norms and biases."""

    # "adamw8bit" stores both moments in 8 bits: 2 bytes per parameter instead of 8. It needs torchao.
    name: str = setting("adamw", one_of(OPTIMIZERS))
    lr: float = setting(1e-5, finite, at_least(0))  # Learning rate after the warm-up.
    betas: list[float] = setting([0.9, 0.95], BETAS)  # Decay rates of the two moments.
    # Decay of matrices, multiplied by the learning rate.
    weight_decay: float = setting(0.1, finite, at_least(0))
    eps: float = setting(1e-8, finite, at_least(0))  # Term that AdamW adds to the denominator.
    max_grad_norm: float = setting(1.0, greater_than(0))  # Maximum of the global 2-norm. inf: no clipping.
    options: dict[str, Any] = setting({})  # Further keyword arguments of the optimizer's class.


@dataclass(kw_only=True)
class LRSchedulerConfig(Checked, table="lr_scheduler"):
    """Linear warm-up, then decay until the end of the run."""

    warmup_steps: int = setting(0, at_least(0))  # Steps of the warm-up.
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"  # Shape of the decay.
    min_lr_factor: float = setting(0.0, between(0, 1))  # Final learning rate as a fraction of optimizer.lr.


@dataclass(kw_only=True)
class ParallelConfig(Checked, table="parallel"):
    """How ranks share the work (docs/parallelism.md). These keys do not change results.
    FSDP2 shards weights, gradients and optimizer states over all ranks, or over the ranks of each replica.
    The ranks of a replica may also share the tokens of each tree, and the experts.
    """

    # Reduce gradients after the "last" or after "every" micro-batch. "last" gathers weights once per step. It
    # keeps 6 bytes per parameter on every rank. "every" gathers weights in each pass.
    reduce_gradients: Literal["last", "every"] = "last"
    # Number of replicas (HSDP). Each holds all weights, sharded over its ranks. One replica per machine needs
    # less communication between machines.
    replicate: int = setting(1, at_least(1))
    # Number of adjacent ranks that share the tokens of the same trees (docs/parallelism.md). torchtitan's
    # name, context_parallel, is accepted, too.
    sequence_parallel: int = setting(1, at_least(1))
    # Number of adjacent ranks that shard the experts of a layer, to which tokens are sent
    # (docs/parallelism.md).
    expert_parallel: int = setting(1, at_least(1))
    # Distribute the trees of each step so that all ranks finish at about the same time, and divide large
    # trees by paths. false: a rank trains on the groups that it reads, or trees are balanced by tokens if
    # data.merge is "batch".
    balance: bool = True
    # Seconds that a rank waits for the others, and for the input of a step, before the run ends: at the start
    # at least 30, and in the first step at least an hour, because compile times differ (docs/signals.md).
    timeout_s: float = setting(600.0, between(1, 1e6))
    # Steps between comparisons of weights, settings and data positions over all ranks. 0: no comparisons. The
    # first step of each start is also compared. A comparison gathers all weights once.
    check_interval: int = setting(100, at_least(0))
