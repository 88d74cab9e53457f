"""The lines that a run logs at its start and at its end."""

from __future__ import annotations

import math

import torch

from titan_tree.config import Config
from titan_tree.data.data_files import DataSizes
from titan_tree.engine.step_io import StepCounts
from titan_tree.models.tree_model import TreeModel


def introduction(
    config: Config, model: TreeModel, world_size: int, device: torch.device, steps: int, steps_done: int
) -> str:
    """Returns one line that says what is trained, on what hardware, for how long, and where results go."""
    done = f", {steps_done} of them done" if steps_done else ""
    trained = "" if model.lora is None else f", {model.num_trained():,} of them trained (LoRA)"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return (
        f"{model.family} {config.model.flavor or config.model.hf_path}, "
        f"{model.num_parameters():,} parameters{trained}, on {world_size} x {name} in "
        f"{config.training.dtype}; {steps} steps{done}; results in {config.folder}"
    )


def data_sizes(sizes: DataSizes, groups_per_step: int) -> str:
    """Returns one line on the sizes of the data."""
    steps = math.ceil(sizes.groups / groups_per_step)
    return (
        f"data: {sizes.groups:,} groups with {sizes.samples:,} samples; an epoch takes {steps:,} steps of "
        f"{groups_per_step} groups"
    )


def summary(steps: int, total: StepCounts, bad_steps: int) -> str:
    """Returns one line on what the steps of this process have trained on.

    Args:
        steps: number of the steps that changed the weights.
        total: their counts, summed.
        bad_steps: number of the other steps.
    """
    skipped = f"skipped {bad_steps} bad step{'s' * (bad_steps > 1)}" if bad_steps else ""
    if not steps and bad_steps:
        return f"trained no step; {skipped}"
    if not steps:
        return (
            "nothing left to train: raise training.steps or training.epochs to continue, or set a new folder "
            "to start a new run"
        )
    return (
        f"trained {steps} steps on {total.num_trees:,} trees of {total.num_paths:,} paths: "
        f"{total.logical_tokens:,} logical tokens, {total.executed_tokens:,} executed "
        f"(POR {100 * total.por:.1f}%, {total.logical_tokens / total.executed_tokens:.2f}x fewer)"
        f"{'; ' if skipped else ''}{skipped}"
    )
