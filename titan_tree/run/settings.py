"""The settings of a run: [training], and what it writes: [checkpoint], [metrics] and [profiler]."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from titan_tree.config.checks import Checked, at_least, check, greater_than, list_of, one_of, require, setting
from titan_tree.run.metrics.loggers import LOGGERS

# What else a run writes into its folder; "." is the folder itself.
OTHER_OUTPUTS = (
    *(".", "hf", "adapter", "compiled", "tensorboard", "wandb", "profiling", "flight_recorder"),
    *("config.toml", "metrics.csv", "run.lock"),
)


@dataclass(kw_only=True)
class TrainingConfig(Checked, table="training"):
    """Length, precision and memory use of the run."""

    # Optimizer steps of the whole run, including resumed parts. Default: 1000, unless ``epochs`` is set.
    steps: int | None = setting(None, at_least(1))
    # Epochs of the whole run, instead of steps. An epoch trains on every group once. The last step may be
    # smaller.
    epochs: int | None = setting(None, at_least(1))
    # Compute dtype. Weights are fp32. "auto" is bfloat16 with a GPU, and float32, which is faster, on a CPU.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # Bad steps in a row after which training ends with an error. A step is bad if its loss or gradient is not
    # finite, or if the loss counts none of its tokens. It leaves weights and optimizer states unchanged, but
    # it counts as a step: data and learning rate advance.
    max_bad_steps: int = setting(3, at_least(1))
    seed: int = 0  # Seed of random initial weights.
    # Compile every block with torch.compile. Recommended on a GPU; it adds about a minute at the start.
    compile: bool = False
    # Recompute activations in the backward pass to save memory. "none" also keeps 2 bytes per edge and
    # vocabulary entry, which is 10 GB at 32k tokens.
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False  # Refuse operators whose results vary between runs.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "auto":
            import torch  # a set dtype is checked without it

            self.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        require(
            self.steps is None or self.epochs is None,
            "training.steps",
            "no value together with training.epochs (training.epochs=null unsets it)",
            self.steps,
        )


@dataclass(kw_only=True)
class CheckpointConfig(Checked, table="checkpoint"):
    """When checkpoints are written, and where (docs/trust.md)."""

    # Steps between checkpoints. The last step of the run always writes one. 0: no checkpoints.
    interval: int = setting(500, at_least(0))
    # Maximum minutes between checkpoints, by the clock of rank 0. Default: no limit.
    minutes: float | None = setting(None, greater_than(0))
    # Number of newest checkpoints to keep. 0 keeps all. 1 is refused, because the only checkpoint may be
    # damaged.
    keep: int = setting(3, check("0 (keeps all) or at least 2", lambda keep: keep == 0 or keep >= 2))
    folder: str = "checkpoints"  # Folder inside the run's folder, or an absolute path.
    resume: bool = True  # Continue from the newest good checkpoint in the folder.
    # Resume even if the data, the samples, the loss or the validation files have changed. One curve then
    # shows different experiments.
    allow_changes: bool = False
    # Write while training continues, from a copy in pinned host memory (docs/memory.md).
    async_save: bool = False
    export_hf: bool = False  # Write the final weights as a Hugging Face snapshot into hf/.

    def __post_init__(self) -> None:
        super().__post_init__()
        taken = os.path.normpath(self.folder) in OTHER_OUTPUTS
        expected = "a folder that nothing else uses, such as checkpoints"
        require(not taken, "checkpoint.folder", expected, self.folder)
        require(
            self.minutes is None or self.interval > 0,
            "checkpoint.minutes",
            "checkpoint.interval > 0 as well, because 0 turns checkpoints off",
            self.minutes,
        )


@dataclass(kw_only=True)
class MetricsConfig(Checked, table="metrics"):
    """How the values of a step are recorded (docs/metrics.md). Loggers write into the run's folder."""

    log_interval: int = setting(1, at_least(1))  # Steps between records. Each shows one step, no average.
    loggers: list[str] = setting(  # Where metrics are written.
        ["console", "csv", "tensorboard"],
        list_of(one_of(LOGGERS)),
        check("every logger once", lambda names: len(set(names)) == len(names)),
    )


@dataclass(kw_only=True)
class ProfilerConfig(Checked, table="profiler"):
    """Traces of the torch profiler."""

    enable: bool = False  # Write a Kineto trace of one step per ``interval`` into profiling/.
    # Steps between traces.
    interval: int = setting(10, check("at least 4 (3 warm-up steps and 1 traced step)", lambda n: n >= 4))
    memory_snapshot: bool = False  # Write the CUDA memory history every ``interval`` steps.
