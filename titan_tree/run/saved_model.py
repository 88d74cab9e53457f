"""Loads the model of a finished or interrupted run, or of a snapshot, into one process without a mesh."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.distributed.mesh import OneRank
from titan_tree.errors import UserError
from titan_tree.models.hf.snapshot_files import ADAPTER_CONFIG, CONFIG
from titan_tree.models.pretrained import Vision, has_tower, load_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.build import build_tokenizer
from titan_tree.run.checkpoint.checkpoints import load_model
from titan_tree.run.checkpoint.storage import CHECKPOINT
from titan_tree.run.config import Config, load_stored
from titan_tree.run.model_setup import build_parallel_model


@dataclass(frozen=True)
class SavedModel:
    """Where the weights of a model lie.

    Attributes:
        snapshot: a Hugging Face snapshot, such as an export; None for a checkpoint.
        checkpoint: a checkpoint of titan_tree; None for a snapshot.
        config: the configuration of the checkpoint's run.
    """

    snapshot: Path | None = None
    checkpoint: Path | None = None
    config: Config | None = None

    @classmethod
    def at(cls, path: str, plugins: bool = False) -> SavedModel:
        """Finds the model of a snapshot, of a checkpoint, or of a run's newest checkpoint.

        A run without checkpoints may have an export in hf/.

        Args:
            plugins: import the code that the configuration of the run names.

        Raises:
            UserError: the folder is none of these; or its configuration names code, and ``plugins`` is false.
        """
        folder = Path(path).expanduser()
        if (folder / CONFIG).is_file():
            return cls(snapshot=folder)
        run = folder.parent.parent if CHECKPOINT.fullmatch(folder.name) else folder
        if not folder.is_dir() or not (run / "config.toml").is_file():
            found = "a folder without them" if folder.is_dir() else "no such folder"
            if folder.is_file():
                found = "a file; give the folder"
            elif (folder / ADAPTER_CONFIG).is_file():
                found = "an adapter; give the run that wrote it"
            raise UserError(
                f"{path}: expected the folder of a run (config.toml), a checkpoint inside of one "
                f"(checkpoints/step-N) or a snapshot ({CONFIG}), got {found}"
            )
        config = load_stored(run / "config.toml", plugins)
        if run != folder:
            return cls(checkpoint=folder, config=config)
        steps = [
            int(match[1])
            for entry in (run / config.checkpoint.folder).glob("step-*")
            if (match := re.fullmatch(CHECKPOINT, entry.name))
        ]
        if steps:
            return cls(checkpoint=run / config.checkpoint.folder / f"step-{max(steps)}", config=config)
        if (run / "hf" / CONFIG).is_file():
            return cls(snapshot=run / "hf")
        raise UserError(f"{path}: this run has no checkpoint and no export yet; train it first")

    def tokenizer(self, name: str | None = None, template: str | None = None) -> TreeTokenizer:
        """Returns the tokenizer ``name``, or else that of the run or of the snapshot.

        Raises:
            UserError: there is none.
        """
        if name is None and self.config is not None:
            data = dataclasses.replace(self.config.data, template=template or self.config.data.template)
            if (tokenizer := build_tokenizer(data, self.config.model.hf_path)) is not None:
                return tokenizer
        if name is None and self.snapshot is not None and (self.snapshot / "tokenizer.json").is_file():
            name = str(self.snapshot)
        if name is None:
            raise UserError("--tokenizer: the model has none of its own; give a folder, a file, or byte")
        return TreeTokenizer.load(name, template)

    def start_model(self, device: torch.device) -> TreeModel:
        """Returns the model with the weights that its run started from. Only for a checkpoint."""
        assert self.config is not None
        training = dataclasses.replace(self.config.training, compile=False)
        parallel = dataclasses.replace(
            self.config.parallel, replicate=1, sequence_parallel=1, expert_parallel=1
        )
        return build_parallel_model(
            self.config.model, training, parallel, OneRank(device.type), self.config.lora
        )

    def model(self, device: torch.device, start: TreeModel | None = None) -> TreeModel:
        """Returns the model with its saved weights; those of a snapshot in bf16, with a tower if it has one.

        Args:
            start: what ``start_model`` has returned; it gets the weights.
        """
        if self.snapshot is not None:
            vision: Vision = "frozen" if has_tower(self.snapshot) else "off"
            return load_pretrained(self.snapshot, device=device, vision=vision)
        assert self.checkpoint is not None
        model = start or self.start_model(device)
        load_model(self.checkpoint, model)
        return model
