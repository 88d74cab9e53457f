"""Writes the weights of a run as a Hugging Face snapshot."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_tree.checkpoint.lock import set_aside
from titan_tree.distributed.collectives import rank, world_size
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.tree_model import TreeModel

logger = logging.getLogger(__name__)


def export_hf(model: TreeModel, folder: Path, run: str, dtype: torch.dtype, source: str | None) -> None:
    """Writes the weights as a Hugging Face snapshot. Collective.

    An earlier snapshot in ``folder`` is renamed, for example from hf to hf.earlier.

    Args:
        model: may be sharded.
        run: id of the run, see FolderLock.
        dtype: dtype of the written weights. Constants keep theirs.
        source: folder of the snapshot that the weights started from, or None. Its tokenizer and other
            files are copied.
    """
    weights: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if rank() == 0:
            weights[name] = full.to("cpu", dtype if name in parameters else None)
    if rank() == 0:
        unfinished = folder.with_name(f"{folder.name}.{run}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)  # an earlier start was interrupted
        save_pretrained(model, unfinished, weights, source=source)
        if earlier := set_aside(folder, "earlier"):
            logger.info("earlier snapshot: moved to %s", earlier)
        unfinished.rename(folder)
        logger.info("Hugging Face snapshot: %s", folder)
    if world_size() > 1:
        dist.barrier()
