"""Whether a run could start here: its configuration, model, tokenizer, data, components and checkpoints."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from titan_tree.cli.doctor import Finding, Subject, attempt, problem
from titan_tree.cli.doctor.machine import existing, size_text
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config import Config
from titan_tree.config.toml import load_config
from titan_tree.data.data_files import DataFiles
from titan_tree.data.sample_reader import SampleReader
from titan_tree.distributed.optimizers import optimizer_class
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import read_weights
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import whole_weights
from titan_tree.registry import LOGGERS, OPTIMIZERS
from titan_tree.run import build
from titan_tree.run.model_setup import build_lora, build_model_without_weights

WEIGHT_BYTES = 4  # per parameter, in a checkpoint


def configuration(subject: Subject) -> Iterator[Finding]:
    """Checks what a run reads before its first step. Reads only the first records of data files."""
    assert subject.file is not None
    config = load_config(subject.file, subject.overrides)
    yield Finding("file", f"{subject.file} is valid")
    run = _Run(config)
    for name in ("components", "model", "tokenizer", "data", "checkpoints"):
        yield from attempt(name, getattr(run, name))


class _Run:
    """The checks of one configuration. Those that need a result which failed before yield nothing."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._model: TreeModel | None = None  # without weights
        self._tokenizer: TreeTokenizer | None = None
        self._has_tokenizer = False  # True also if the data need none

    def components(self) -> Iterator[Finding]:
        """Imports the loss, the optimizer and the loggers."""
        config = self.config
        build.build_loss(config.loss)
        optimizer_class(config.optimizer)
        for name in config.metrics.loggers:
            LOGGERS[name]
        yield Finding(
            "components", ", ".join((config.loss.name, config.optimizer.name, *config.metrics.loggers))
        )

    def model(self) -> Iterator[Finding]:
        """Builds the model without weights, and compares the snapshot's tensors with it."""
        folder = self.config.model.hf_path
        with torch.device("meta"):
            model = self._model = build_model_without_weights(self.config.model)
            lora, _ = build_lora(self.config.lora, model)
            if lora is not None:
                add_lora(model, lora)
        weights = f"weights of {folder}" if folder else "random weights"
        if folder and isinstance(model, Decoder):
            # This compares all names, shapes and dtypes before the first tensor.
            next(read_weights(folder, model, whole_weights(model)))
        yield Finding("model", f"{model.config.title}, {model.num_parameters():,} parameters, {weights}")

    def tokenizer(self) -> Iterator[Finding]:
        """Loads the tokenizer."""
        self._tokenizer = build.build_tokenizer(self.config.data, self.config.model.hf_path)
        self._has_tokenizer = True
        text = "none; the data must be token ids"
        if self._tokenizer is not None:
            name = self.config.data.tokenizer or self.config.model.hf_path
            text = f"{name}, {self._tokenizer.vocab_size:,} tokens"
        yield Finding("tokenizer", text)

    def data(self) -> Iterator[Finding]:
        """Reads, renders and tokenizes the first group of each data file."""
        if self._model is None or not self._has_tokenizer:
            return
        for table, files in (("data", self.config.data.files), ("validation", self.config.validation.files)):
            if files is not None:
                settings = replace(self.config.data, files=files, weights=None)
                reader = build.build_reader(settings, self._tokenizer, self._model)
                problems = list(chain(*(attempt(table, _first_group, reader, file) for file in reader.files)))
                yield from problems
                readable = len(reader.files) - len(problems)
                size = size_text(reader.num_bytes())
                if readable:
                    text = f"first group readable in {readable} of {len(reader.files)} files; {size}"
                    yield Finding(table, text)

    def checkpoints(self) -> Iterator[Finding]:
        """Compares the size of checkpoints with the free space of the disk."""
        config, folder = self.config.checkpoint, Path(self.config.folder)
        for parent in dict.fromkeys(map(existing, (folder, folder / config.folder))):
            if not (parent.is_dir() and os.access(parent, os.W_OK)):
                yield problem("folder", f"{parent} is not a writable folder", "set folder to another path")
        if not config.interval or self._model is None:
            return
        spec = OPTIMIZERS[self.config.optimizer.name]
        shards = [p.numel() for p in self._model.parameters() if p.requires_grad]
        size = sum(WEIGHT_BYTES * shard + spec.state_bytes(shard) for shard in shards)
        free = shutil.disk_usage(existing(folder / config.folder)).free
        fit = math.floor(free / size)
        needed = config.keep + 1  # a checkpoint is complete before an older one is deleted
        if self.config.training.steps is not None:
            written = math.ceil(self.config.training.steps / config.interval)
            needed = min(needed, written) if config.keep else written
        names = [path.name.removeprefix("step-") for path in (folder / config.folder).glob("step-*")]
        needed = max(needed - sum(name.isdecimal() for name in names), 1)
        text = (
            f"{size_text(size)} each; {fit:,} more fit in {size_text(free)}; checkpoint.keep = {config.keep}"
        )
        if fit >= needed:
            yield Finding("checkpoints", text)
        else:
            fix = "free some space, set folder to a path on another disk, or set checkpoint.keep=2"
            yield problem("checkpoints", f"{text} needs {needed}", fix)


def _first_group(reader: SampleReader, file: str) -> Iterator[Finding]:
    """Reads the first group of a file. Yields nothing; what is wrong raises UserError."""
    group = next(DataFiles(replace(reader.config, files=[file], weights=None)).groups())
    reader.paths(group)
    return iter(())
