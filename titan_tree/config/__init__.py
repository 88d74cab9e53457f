"""The configuration tables. ``titan_tree.config.toml`` reads them from a file and the command line."""

from titan_tree.config.tables import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoRAConfig,
    LossConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    ProfilerConfig,
    RouterBiasConfig,
    RouterLossConfig,
    TrainingConfig,
    ValidationConfig,
)

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
