"""The configuration of a run: the settings of the core's components, one dataclass per TOML table.

A component receives the values of its own table, never the whole configuration. The comment beside a key is
its documentation, and docs/configuration.md is made from it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path

from titan_tree.components.moe.routing import RouterBias, RouterLoss
from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.config.checks import require
from titan_tree.config.plugins import import_attribute, imports_refused, is_import_string
from titan_tree.config.registry import Registry
from titan_tree.config.toml import load_tables, read_tables
from titan_tree.data.readers import find_files
from titan_tree.data.settings import DataConfig, PartitionConfig, ValidationConfig
from titan_tree.distributed.settings import LRSchedulerConfig, OptimizerConfig, ParallelConfig
from titan_tree.errors import UserError, errors_at, missing_snapshot, require_list
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.run.settings import CheckpointConfig, MetricsConfig, ProfilerConfig, TrainingConfig

# Keys that may be a path, which may begin with ~: (table, key). ``find_files`` expands those of data files.
PATHS = (
    ("", "folder"),
    ("model", "hf_path"),
    ("data", "tokenizer"),
    ("data", "template"),
    ("lora", "adapter"),
)


def paths_read(config: Config) -> list[str]:
    """Returns the files and folders that a run with a configuration reads."""
    named = [getattr(getattr(config, table), name) for table, name in PATHS if table]
    data = [*(config.data.files or ()), *(config.validation.files or ())]
    return [*(find_files(data) if data else ()), *filter(None, named)]


def require_inputs(config: Config) -> None:
    """Raises UserError if a data file or the snapshot of a run is missing. It does not import torch."""
    paths_read(config)
    if (folder := config.model.hf_path) and not os.path.isdir(folder):
        raise UserError(f"{folder}: {missing_snapshot(folder)}")


@dataclass(kw_only=True)
class Config:
    """All tables of a configuration. Rules that involve several tables are checked here."""

    # Modules of your own that are imported before the tables are checked, such as ["my_package.parts"]
    # (docs/extending.md).
    plugins: list[str] = field(default_factory=list)
    folder: str = "outputs/run"  # Folder that receives everything that the run writes.
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    router_loss: RouterLoss = field(default_factory=RouterLoss)
    router_bias: RouterBias = field(default_factory=RouterBias)
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
        for table, name in PATHS:
            owner = getattr(self, table) if table else self
            if isinstance(path := getattr(owner, name), str):
                setattr(owner, name, os.path.expanduser(path))
        require(
            self.lora.quantize == "none" or not self.training.compile,
            "training.compile",
            "false with lora.quantize, because compiled graphs would store dequantized weights for the "
            "backward pass",
            "true; set it to false",
        )
        require(self.folder.strip(), "folder", "a path", repr(self.folder))
        # ModelConfig cannot check this: the default of the key is ModelConfig(), where both are unset.
        require(
            bool(self.model.flavor) != bool(self.model.hf_path),
            "model",
            "either flavor (random weights) or hf_path (a local snapshot, with model.flavor=null)",
            f"flavor = {self.model.flavor}, hf_path = {self.model.hf_path}",
        )


# Tables that only one command has, and the configuration of that command. ``load_stored`` leaves them out.
CONFIGURATIONS: Registry[type[Config]] = Registry(
    "configuration",
    {
        "lightning": "titan_tree.integrations.lightning_settings:LightningRunConfig",
        "rl": "titan_tree.rl.settings:RLRunConfig",
        "serve": "titan_tree.rl.settings:RLRunConfig",
        "warm_start": "titan_tree.rl.settings:RLRunConfig",
    },
)
STORED = "config.toml"  # begins the names of the configurations in the folder of a run
# Values that replace the names in a stored [model], which may be code.
NAMES_OF_CODE = "model.name=qwen3", "model.attention=auto", "model.recurrence=auto"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a training run from a TOML file, with overrides applied.

    Args:
        path: the TOML file, or the name of one in train_configs/, such as ``demo``.
        overrides: ``table.key=value`` arguments; leading dashes are ignored. Values follow YAML: ``3``,
            ``1e-4``, ``true``, ``null``, ``[a, b]``. ``model.overrides={}`` removes the file's overrides.

    Raises:
        UserError: the file cannot be read, or it or an override contains a wrong key or value.
    """
    require_list(overrides, str, "load_config: overrides", 'pass ["training.steps=10"]')
    return load_tables(Config, path, overrides)


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration with the tables of the command that it is for. See ``load_tables``."""
    return load_tables(_tables_of(path, overrides), path, overrides)


def stored_code_refused(path: str | Path | None, plugins: bool) -> AbstractContextManager[None]:
    """Returns the context that imports no code if a run stored ``path``, unless ``plugins``.

    Commands that do not train load a configuration and use it within: some names are imported at first use.
    """
    is_stored = path is not None and Path(path).name.startswith(STORED)
    return imports_refused() if is_stored and not plugins else nullcontext()


def load_stored(path: str | Path, plugins: bool = False, data_only: bool = False) -> Config:
    """Returns the configuration in the folder of a run, which a stranger may have written.

    Tables of single commands, such as [rl], are left out.

    Args:
        plugins: import the code that it names.
        data_only: read only [data], [model] and [training], and not the names in [model], which may be code.

    Raises:
        UserError: see ``load_tables``; or what is read names code, and ``plugins`` is false.
    """
    tables = _tables_of(path)
    skip = set(CONFIGURATIONS)
    if data_only:
        skip |= {field.name for field in fields(tables)} - {"data", "model", "training"}
    try:
        with nullcontext() if plugins else imports_refused():
            config = load_tables(tables, path, NAMES_OF_CODE if data_only else (), skip)
            if is_import_string(tokenizer := config.data.tokenizer):  # tables check other names of code
                with errors_at(f"{path}: data.tokenizer"):
                    import_attribute(str(tokenizer))
    except UserError:
        if data_only:
            load_stored(path, plugins)  # its error is better if plugins would register what is missing
        raise
    return config


def _tables_of(path: str | Path, overrides: Sequence[str] = ()) -> type[Config]:
    names = {name for _, table in read_tables(path, overrides) for name in table}
    return next((CONFIGURATIONS[name] for name in CONFIGURATIONS if name in names), Config)
