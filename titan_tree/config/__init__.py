"""The configuration: one dataclass per TOML table, with defaults and checks.

    model.py      [model] [lora]
    data.py       [data] [partition] [validation]
    losses.py     [loss] [router_loss] [router_bias]
    training.py   [training] [optimizer] [lr_scheduler] [parallel]
    outputs.py    [checkpoint] [metrics] [profiler]
    rl.py         [rl] [rl.server] [warm_start], for python -m titan_tree.rl
    tables.py     Config, which has all tables
    checks.py     the base class of tables, and the checks of their fields
    toml.py       reads TOML files and key=value arguments, and writes TOML

A component receives the values of its own table, never the whole configuration. The comment beside a key is
its documentation, and docs/configuration.md is made from it. Names such as those of ``model.attention`` come
from titan_tree/registry.py.
"""

from titan_tree.config.data import DataConfig, PartitionConfig, ValidationConfig
from titan_tree.config.losses import LossConfig, RouterBiasConfig, RouterLossConfig
from titan_tree.config.model import LoRAConfig, ModelConfig
from titan_tree.config.outputs import CheckpointConfig, MetricsConfig, ProfilerConfig
from titan_tree.config.tables import Config
from titan_tree.config.training import LRSchedulerConfig, OptimizerConfig, ParallelConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LRSchedulerConfig",
    "LoRAConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PartitionConfig",
    "ProfilerConfig",
    "RouterBiasConfig",
    "RouterLossConfig",
    "TrainingConfig",
    "ValidationConfig",
]
