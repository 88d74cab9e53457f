"""Writes the weights of a run as a Hugging Face snapshot, and LoRA as an adapter of PEFT."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_tree.components.lora import is_factor
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.hf_files import write_byte_tokenizer, write_ends
from titan_tree.distributed.collectives import call_and_gather, call_on_rank_0, rank, world_size
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import save
from titan_tree.models.hf.names import stored_together
from titan_tree.models.lora.adapters import merge
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
    with ExitStack() as stack:
        replaced = _replaced(folder, run, "Hugging Face snapshot")
        unfinished = call_on_rank_0(lambda: stack.enter_context(replaced))
        save_shares(model, unfinished, dtype, source)

        def finish() -> None:
            with stack:
                is_missing = not (unfinished / "tokenizer.json").exists()
                if tokenizer is not None:
                    if is_missing and not write_byte_tokenizer(tokenizer, variables, unfinished):
                        logger.warning(
                            "%s: has no tokenizer; copy the files of data.tokenizer into it", folder
                        )
                    write_ends(tokenizer, variables, unfinished)

        call_on_rank_0(finish)


def save_shares(model: TreeModel, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """Saves a model as ``save_pretrained`` does, but each rank writes a share of the weights. Collective.

    Ranks gather a few weights at a time on their devices, and write at the same time. The host's memory holds
    one file per rank: its share, or about ``save.MAX_SHARD_BYTES`` if that is less. Rank 0 alone gathers and
    writes a model of transformers, which stores weights in another form.

    Args:
        model: may be sharded.
        folder: must be empty or not exist. All ranks must see it.
        dtype: dtype of the written weights. Constants keep theirs.
        source: see ``save_pretrained``.
    Raises:
        UserError: see ``save_pretrained``. All ranks raise it.
    """
    if not isinstance(model, Decoder):
        weights = gathered_weights(model, dtype)
        call_on_rank_0(lambda: save_pretrained(model, folder, weights, source))
        return
    state = model.state_dict(keep_vars=True)
    files = _files(model, state, dtype)
    names = save.file_names(sum(map(bool, files)))
    written: dict[str, tuple[str, int]] = {}
    with save.write_errors(folder), ExitStack() as stack:

        def begin() -> tuple[Path, str]:
            temporary = stack.enter_context(save.all_or_nothing(folder))
            return temporary, save.write_all_but_weights(model, temporary, dtype, source)

        def write(number: int, weights: dict[str, Tensor]) -> dict[str, tuple[str, int]]:
            if not weights:
                return {}
            if not temporary.is_dir():
                raise UserError(f"{folder}: rank {rank()} does not see it; choose one that all ranks see")
            weights = weights if model.lora is None else merge(model, weights)
            tensors = save.snapshot_tensors(model, weights, prefix)
            tensors |= {} if number else save.weights_not_loaded(model, source)
            return save.write_tensors(tensors, temporary / names[number])

        def finish() -> None:
            save.write_index(temporary, written)
            stack.close()

        temporary, prefix = call_on_rank_0(begin)
        for first in range(0, len(files), world_size()):
            share = _gather(state, files[first : first + world_size()], dtype)
            for tensors in call_and_gather(partial(write, first + rank(), share)):
                written |= tensors
            del share  # before the next one is gathered
        call_on_rank_0(finish)


def _files(model: Decoder, state: Mapping[str, Tensor], dtype: torch.dtype) -> list[list[str]]:
    """Returns the names of the weights in each file of a snapshot. Rank r writes files r, r + ranks, ...

    The largest weights come first, each in the smallest file so far. The last files may be empty.
    """
    biases = model.experts.router_biases() if model.experts else {}  # have a file of their own
    groups = stored_together([name for name in state if name not in biases], model)
    sizes = [dtype.itemsize * sum(state[name].numel() for name in group) for group in groups]
    num_rounds = math.ceil(sum(sizes) / save.MAX_SHARD_BYTES / world_size())
    files: list[list[str]] = [[] for _ in range(num_rounds * world_size())]
    loads = [0] * len(files)
    for size, group in sorted(zip(sizes, groups, strict=True), key=lambda item: -item[0]):
        smallest = loads.index(min(loads))
        loads[smallest] += size
        files[smallest] += group
    return files


def export_adapter(model: TreeModel, folder: Path, run: str, source: str | None) -> None:
    """Writes LoRA as an adapter of PEFT, in fp32. Collective. Arguments and names: see ``export_hf``."""
    factors = gathered_factors(model)

    def write() -> None:
        with _replaced(folder, run, "PEFT adapter") as unfinished:
            save_adapter(model, unfinished, factors, source)

    call_on_rank_0(write)


def gathered_weights(model: TreeModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns all weights of a model on the CPU of rank 0, and {} on other ranks. Collective.

    Constants keep their dtype. So do factors of LoRA, which are added to weights in fp32.
    """
    state = model.state_dict(keep_vars=True)
    return _gather(state, [list(state)], dtype)


def gathered_factors(model: TreeModel) -> dict[str, Tensor]:
    """Returns the factors of LoRA on the CPU of rank 0, and {} on other ranks. Collective."""
    factors = {name: value for name, value in model.state_dict().items() if is_factor(name)}
    return _gather(factors, [list(factors)])


def _gather(
    state: Mapping[str, Tensor], names_by_rank: Sequence[Sequence[str]], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns on each rank the whole tensors of its names, on the CPU. Collective.

    A tensor of each rank is gathered on the devices. Then, all ranks copy theirs to the host together.

    Args:
        names_by_rank: the names of the first ranks. Others get {}.
        dtype: dtype of the weights, without constants and factors of LoRA. None: they keep theirs.
    """
    weights = [n for n, value in state.items() if isinstance(value, nn.Parameter) and not is_factor(n)]
    dtypes, gathered = dict.fromkeys(weights, dtype), dict[str, Tensor]()
    for names in zip_longest(*names_by_rank):
        for owner, name in enumerate(names):
            value = None if name is None else state[name].detach()
            if isinstance(value, DTensor):
                value = cast(DTensor, value.to(dtypes.get(name))).full_tensor()
            if owner == rank() and value is not None:
                gathered[name] = value
        for name in gathered.keys() & set(names):
            gathered[name] = gathered[name].to("cpu").to(dtypes.get(name))
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
