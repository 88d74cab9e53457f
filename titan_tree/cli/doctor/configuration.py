"""Whether a run could start here: its configuration, model, tokenizer, data, components and checkpoints."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path

import torch

from titan_tree.cli.doctor import Checked, Finding, Subject, attempt, problem
from titan_tree.cli.doctor.machine import existing, size_text
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.data_files import DataFiles
from titan_tree.data.sample_reader import SampleReader
from titan_tree.distributed.optimizers import optimizer_class
from titan_tree.distributed.settings import OPTIMIZERS
from titan_tree.integrations.lightning_settings import LightningRunConfig
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import read_weights
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import whole_weights
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.rl.settings import RLRunConfig
from titan_tree.run import build
from titan_tree.run.config import Config, load_any
from titan_tree.run.metrics.loggers import LOGGERS
from titan_tree.run.model_setup import add_configured_lora, build_model_without_weights

WEIGHT_BYTES = 4  # per parameter, in a checkpoint


def configuration(subject: Subject) -> Iterator[Finding]:
    """Checks what a run reads before its first step. Reads only the first records of data files."""
    assert subject.file is not None
    config = load_any(subject.file, subject.overrides)
    yield Finding("file", f"{subject.file} is valid")
    yield from attempt("components", _components, config)
    model = yield from attempt("model", _model, config)
    tokenizer = yield from attempt("tokenizer", _tokenizer, config)
    if model is not None and tokenizer is not None:
        yield from attempt("data", _data, config, model, *tokenizer)
    if isinstance(config, RLRunConfig):
        yield from attempt("rl", _rl, config)
    yield from attempt("checkpoints", _checkpoints, config, model)


def _components(config: Config) -> Checked[None]:
    """Imports the loss, the optimizer and the loggers."""
    build.build_loss(config.loss)
    optimizer_class(config.optimizer)
    for name in config.metrics.loggers:
        LOGGERS[name]
    if isinstance(config, LightningRunConfig):
        import_module("titan_tree.integrations.lightning")
    names = config.loss.name, config.optimizer.name, *config.metrics.loggers
    yield Finding("components", ", ".join(names))


def _model(config: Config) -> Checked[TreeModel]:
    """Builds the model without weights, and compares the snapshot's tensors with it."""
    folder = config.model.hf_path
    with torch.device("meta"):
        model = build_model_without_weights(config.model)
        if config.lora.is_on:
            add_configured_lora(model, config.lora)
    if folder and isinstance(model, Decoder):
        # This compares all names, shapes and dtypes before the first tensor.
        next(read_weights(folder, model, whole_weights(model)))
    weights = f"weights of {folder}" if folder else "random weights"
    yield Finding("model", f"{model.config.title}, {model.num_parameters():,} parameters, {weights}")
    return model


def _tokenizer(config: Config) -> Checked[tuple[TreeTokenizer | None]]:
    """Loads the tokenizer. There is none if the data must be token ids."""
    tokenizer = build.build_tokenizer(config.data, config.model.hf_path)
    text = "none; the data must be token ids"
    if tokenizer is not None:
        text = f"{config.data.tokenizer or config.model.hf_path}, {tokenizer.vocab_size:,} tokens"
    yield Finding("tokenizer", text)
    return (tokenizer,)


def _data(config: Config, model: TreeModel, tokenizer: TreeTokenizer | None) -> Checked[None]:
    """Reads, renders and tokenizes the first group of each data file."""
    for table, files in (("data", config.data.files), ("validation", config.validation.files)):
        if not files:  # no validation, or the data come from an environment
            continue
        data = replace(config.data, files=files, weights=None)
        reader = build.build_reader(data, tokenizer, model, config.loss)
        problems = list(chain(*(attempt(table, _first_group, reader, file) for file in reader.files.paths)))
        yield from problems
        if readable := len(reader.files.paths) - len(problems):
            size = size_text(reader.files.num_bytes())
            yield Finding(
                table, f"first group readable in {readable} of {len(reader.files.paths)} files; {size}"
            )


def _first_group(reader: SampleReader, file: str) -> Checked[None]:
    """Reads the first group of a file. Yields nothing; what is wrong raises UserError."""
    group = next(DataFiles(replace(reader.config, files=[file], weights=None)).groups())
    reader.paths(group)
    yield from ()


def _rl(config: RLRunConfig) -> Checked[None]:
    """Imports the environment, and compares [rl] with the model and the other tables."""
    from titan_tree.rl.run import check_without_weights  # takes seconds

    ENVIRONMENTS[config.rl.environment]
    check_without_weights(config)
    yield Finding("rl", f"environment {config.rl.environment}")


def _checkpoints(config: Config, model: TreeModel | None) -> Checked[None]:
    """Compares the size of checkpoints with the free space of the disk."""
    folder, keep, interval = Path(config.folder), config.checkpoint.keep, config.checkpoint.interval
    checkpoints = folder / config.checkpoint.folder
    for parent in dict.fromkeys(map(existing, (folder, checkpoints))):
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            yield problem("folder", f"{parent} is not a writable folder", "set folder to another path")
    if not interval or model is None:
        return
    state_bytes = OPTIMIZERS[config.optimizer.name].state_bytes
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    size = sum(WEIGHT_BYTES * n + state_bytes(n) for n in sizes)
    free = shutil.disk_usage(existing(checkpoints)).free
    fit = math.floor(free / size)
    needed = keep + 1  # a checkpoint is complete before an older one is deleted
    if config.training.steps is not None:
        written = math.ceil(config.training.steps / interval)
        needed = min(needed, written) if keep else written
    names = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*")]
    needed = max(needed - sum(name.isdecimal() for name in names), 1)
    text = f"{size_text(size)} each; {fit:,} more fit in {size_text(free)}; checkpoint.keep = {keep}"
    if fit >= needed:
        yield Finding("checkpoints", text)
    else:
        fix = "free some space, set folder to a path on another disk, or set checkpoint.keep=2"
        yield problem("checkpoints", f"{text} needs {needed}", fix)
