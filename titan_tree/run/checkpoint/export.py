"""Writes the weights of a run as a Hugging Face snapshot, and LoRA as an adapter of PEFT."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_tree.components.lora import is_factor
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.hf_files import write_byte_tokenizer, write_ends
from titan_tree.distributed.collectives import rank, world_size
from titan_tree.errors import UserError
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.checkpoint.lock import set_aside
from titan_tree.run.config import Config

logger = logging.getLogger(__name__)


def export_results(
    model: TreeModel, config: Config, run: str, tokenizer: TreeTokenizer | None = None
) -> None:
    """Writes what a finished run leaves in its folder beside checkpoints. Collective.

    These are LoRA as an adapter, in adapter/, and the weights in hf/ if ``checkpoint.export_hf`` is true.

    Args:
        model: may be sharded.
        run: id of the run, see FolderLock.
        tokenizer: that of the data, which the export gets if the start weights came without one.
    """
    folder, source = Path(config.folder), config.model.hf_path
    if model.lora is not None:
        export_adapter(model, folder / "adapter", run, source)
    if config.checkpoint.export_hf:
        dtype = getattr(torch, config.training.dtype)
        export_hf(model, folder / "hf", run, dtype, source, tokenizer, config.data.sample)


def export_hf(
    model: TreeModel,
    folder: Path,
    run: str,
    dtype: torch.dtype,
    source: str | None,
    tokenizer: TreeTokenizer | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes the weights as a Hugging Face snapshot. Collective.

    An earlier snapshot in ``folder`` is renamed, for example from hf to hf.earlier.

    Args:
        model: may be sharded.
        run: id of the run, see FolderLock.
        dtype: dtype of the written weights. Constants keep theirs.
        source: folder of the snapshot that the weights started from, or None. Its tokenizer and other
            files are copied.
        tokenizer: see ``export_results``. Generation ends where answers of its chat template end.
        variables: variables of the template, as in [data.sample].
    """
    weights = gathered_weights(model, dtype)
    if rank() == 0:
        with _replaced(folder, run, "Hugging Face snapshot") as unfinished:
            save_pretrained(model, unfinished, weights, source=source)
            is_missing = not (unfinished / "tokenizer.json").exists()
            if tokenizer is not None:
                if is_missing and not write_byte_tokenizer(tokenizer, variables, unfinished):
                    logger.warning("%s: has no tokenizer; copy the files of data.tokenizer into it", folder)
                write_ends(tokenizer, variables, unfinished)
    if world_size() > 1:
        dist.barrier()


def export_adapter(model: TreeModel, folder: Path, run: str, source: str | None) -> None:
    """Writes LoRA as an adapter of PEFT, in fp32. Collective. Arguments and names: see ``export_hf``."""
    factors = gathered_factors(model)
    if rank() == 0:
        with _replaced(folder, run, "PEFT adapter") as unfinished:
            save_adapter(model, unfinished, factors, source)
    if world_size() > 1:
        dist.barrier()


def gathered_weights(model: TreeModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns all weights of a model on the CPU of rank 0, and {} on other ranks. Collective.

    Constants keep their dtype. So do factors of LoRA, which are added to weights in fp32.
    """
    state = model.state_dict(keep_vars=True)
    cast = {n for n, value in state.items() if isinstance(value, nn.Parameter) and not is_factor(n)}
    return {n: full.to(dtype if n in cast else None) for n, full in _gather(state).items()}


def gathered_factors(model: TreeModel) -> dict[str, Tensor]:
    """Returns the factors of LoRA on the CPU of rank 0, and {} on other ranks. Collective."""
    return _gather({name: value for name, value in model.state_dict().items() if is_factor(name)})


def _gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU of rank 0, and {} on other ranks. Collective."""
    gathered: dict[str, Tensor] = {}
    for name, value in tensors.items():
        value = value.detach()
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if rank() == 0:
            gathered[name] = full.to("cpu")
    return gathered


@contextmanager
def _replaced(folder: Path, run: str, kind: str) -> Iterator[Path]:
    """Yields the path of a folder to write, which is then renamed to ``folder``. An earlier one is kept."""
    unfinished = folder.with_name(f"{folder.name}.{run}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # an earlier start was interrupted
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        if earlier := set_aside(folder, "earlier"):
            logger.warning("%s: its earlier content was moved to %s", folder, earlier)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot be written: {error}; free some space, or choose another folder"
        ) from None
    logger.info("%s: %s", kind, folder)
