"""Whether a run could start here: its configuration, model, tokenizer, data, components and checkpoints."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from titan_tree.cli.doctor.finding import Finding, Subject, attempt, problem
from titan_tree.cli.doctor.machine import existing, size_text
from titan_tree.cli.doctor.numerics import training_device
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config import Config
from titan_tree.config.toml import load_config
from titan_tree.data.data_files import DataFiles
from titan_tree.data.sample_reader import SampleReader
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import read_weights
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import whole_weights
from titan_tree.registry import ATTENTION_BACKENDS, GDN_BACKENDS, LOGGERS, OPTIMIZERS
from titan_tree.run import build
from titan_tree.run.model_setup import build_lora, build_model_without_weights
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

WEIGHT_BYTES = 4  # per parameter, in a checkpoint
STATE_BYTES = {"adamw": 8, "adamw8bit": 2.03}  # of the optimizer, per parameter (docs/memory.md)


def configuration(subject: Subject) -> Iterator[Finding]:
    """Checks what a run reads before its first step. Reads only the first records of data files."""
    assert subject.file is not None
    config = load_config(subject.file, subject.overrides)
    yield Finding("file", f"{subject.file} is valid")
    run = _Run(config)
    for name in ("components", "model", "backends", "tokenizer", "data", "checkpoints"):
        yield from attempt(name, getattr(run, name))


class _Run:
    """The checks of one configuration, in the order in which they need each other's results."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._model: TreeModel | None = None  # without weights
        self._tokenizer: TreeTokenizer | None = None
        self._has_tokenizer = False  # True also if the data need none

    def components(self) -> Iterator[Finding]:
        """Imports the loss, the optimizer and the loggers."""
        config = self.config
        build.build_loss(config.loss)
        OPTIMIZERS[config.optimizer.name].load()
        for name in config.metrics.loggers:
            LOGGERS[name]
        names = (config.loss.name, config.optimizer.name, *config.metrics.loggers)
        yield Finding("components", ", ".join(names))

    def model(self) -> Iterator[Finding]:
        """Builds the model without weights, and compares the snapshot's tensors with it."""
        model, folder = self.config.model, self.config.model.hf_path
        with torch.device("meta"):
            built = self._model = build_model_without_weights(model)
            lora, _ = build_lora(self.config.lora, built)
            if lora is not None:
                add_lora(built, lora)
        text = f"{built.config.family}, {built.num_parameters():,} parameters"
        if not folder:
            yield Finding("model", f"{text}, random weights")
        elif isinstance(built, Decoder):
            # This compares all names, shapes and dtypes before the first tensor.
            next(read_weights(folder, built, whole_weights(built)))
            yield Finding("model", f"{text}; {folder} has all tensors")
        else:
            yield Finding("model", f"{text}, layers of transformers; {folder} is checked when it is loaded")

    def backends(self) -> Iterator[Finding]:
        """Checks that the backends of the configuration support this model on this device."""
        if self._model is None:
            yield Finding("backends", "not checked, because they depend on the model", ok=None)
            return
        sizes: Any = getattr(self._model, "hf_config", self._model.config)
        device, _ = training_device()
        dtype = getattr(torch, self.config.training.dtype)
        names = self.config.model
        deterministic = self.config.training.deterministic
        layout = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([0, 1])])]).to(device).layout
        self._model.attention.prepare(layout)  # some backends refuse a device only here
        x = torch.empty(0, device=device, dtype=dtype)
        chosen = [
            ATTENTION_BACKENDS.resolve(names.attention, device, *inputs, deterministic)
            for inputs in self._model.attention_inputs(x)
        ]
        chosen = list(dict.fromkeys(chosen))
        if "states" in self._model.cache_streams:
            dims = sizes.linear_key_head_dim, sizes.linear_value_head_dim
            k, v = (torch.empty(1, 1, dim, device=device, dtype=dtype) for dim in dims)
            chosen.append(GDN_BACKENDS.resolve(names.gdn, device, k, k, v))
        yield Finding("backends", f"{' and '.join(chosen)}, {self.config.training.dtype} on {device.type}")

    def tokenizer(self) -> Iterator[Finding]:
        self._tokenizer = build.build_tokenizer(self.config.data, self.config.model.hf_path)
        self._has_tokenizer = True
        name = self.config.data.tokenizer or build.tokenizer_folder(self.config.model.hf_path)
        if self._tokenizer is None:
            yield Finding("tokenizer", "none; the data must be token ids")
        else:
            yield Finding("tokenizer", f"{name}, {self._tokenizer.vocab_size:,} tokens")

    def data(self) -> Iterator[Finding]:
        """Reads, renders and tokenizes the first group of each data file."""
        if self._model is None or not self._has_tokenizer:
            yield Finding("data", "not checked, because it needs the model and the tokenizer", ok=None)
            return
        reader = build.build_reader(self.config.data, self._tokenizer, self._model)
        yield from self._files("data", reader)
        if self.config.validation.files is not None:
            held_out = replace(self.config.data, files=self.config.validation.files, weights=None)
            reader = build.build_reader(held_out, self._tokenizer, self._model)
            yield from self._files("validation", reader)

    def _files(self, name: str, reader: SampleReader) -> Iterator[Finding]:
        findings = [attempt(name, self._first_group, reader, file) for file in reader.files]
        problems = list(chain(*findings))
        yield from problems
        readable = len(reader.files) - len(problems)
        if readable:
            size = size_text(reader.num_bytes())
            yield Finding(name, f"first group readable in {readable} of {len(reader.files)} files; {size}")

    def _first_group(self, reader: SampleReader, file: str) -> Iterator[Finding]:
        config = replace(reader.config, files=[file], weights=None)
        group = next(DataFiles(config).groups())
        reader.paths(group)
        return iter(())

    def checkpoints(self) -> Iterator[Finding]:
        """Compares the size of checkpoints with the free space of the disk."""
        checkpoint, folder = self.config.checkpoint, Path(self.config.folder)
        for found in dict.fromkeys(map(existing, (folder, folder / checkpoint.folder))):
            if not (found.is_dir() and os.access(found, os.W_OK)):
                yield problem("folder", f"{found} is not a writable folder", "set folder to another path")
        if not checkpoint.interval:
            yield Finding("checkpoints", "none (checkpoint.interval = 0)", ok=None)
        elif self._model is None:
            yield Finding("checkpoints", "not checked, because their size depends on the model", ok=None)
        else:
            yield self._disk(self._model.num_trained(), folder / checkpoint.folder)

    def _disk(self, num_trained: int, folder: Path) -> Finding:
        config = self.config
        state_bytes = STATE_BYTES.get(config.optimizer.name, STATE_BYTES["adamw"])
        size = num_trained * (WEIGHT_BYTES + state_bytes)
        free = shutil.disk_usage(existing(folder)).free
        fit = math.floor(free / size)
        keep, steps = config.checkpoint.keep, config.training.steps
        at_once = keep + 1  # a checkpoint is complete before an older one is deleted
        if steps is not None:
            written = math.ceil(steps / config.checkpoint.interval)
            at_once = min(at_once, written) if keep else written
        names = [path.name for path in folder.glob("step-*")]
        present = sum(name.removeprefix("step-").isdecimal() for name in names)
        needed = max(at_once - present, 1)
        text = f"{size_text(size)} each; {fit:,} more fit in {size_text(free)}; checkpoint.keep = {keep}"
        if fit >= needed:
            return Finding("checkpoints", text)
        return problem(
            "checkpoints",
            f"{text} needs {needed}",
            "free some space, set folder to a path on another disk, or set checkpoint.keep=2",
        )
