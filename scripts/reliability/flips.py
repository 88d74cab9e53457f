"""Flips a bit of an adapter or of a token store, and reads it.

The file must be refused in one line that names it, unless the flip changes nothing that is computed, such as
the name of the base model. ``damage`` does the same with checkpoints.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from training import ROOT, check

TRIALS = 200
ADAPTER, STORE = "adapter", "token store"
KINDS = (ADAPTER, STORE)


def prepare(work: Path) -> None:
    """Writes an adapter of a tiny model, and a store of the demo's first tasks."""
    sys.path.insert(0, str(ROOT))  # the module may run without an installed package
    import torch

    from titan_tree import build_model, save_adapter
    from titan_tree.components.lora import LoRA
    from titan_tree.models.lora.adapters import add_lora

    torch.manual_seed(0)
    model = build_model("qwen3", "debug")
    add_lora(model, LoRA(rank=4, alpha=8))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    save_adapter(model, work / ADAPTER)
    write_demo_store(work / STORE)


def write_demo_store(file: Path) -> None:
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.data.sample_reader import SampleReader
    from titan_tree.data.settings import DataConfig
    from titan_tree.data.token_store import write_store

    reader = SampleReader(DataConfig(files=["demo"]), TreeTokenizer.byte_level())
    groups = [
        (group.id, reader.paths(group)) for group, _ in zip(reader.files.groups(), range(4), strict=False)
    ]
    header = {"sources": [], "tokenizer": None, "tokenizer_name": "", "sample": {}}
    write_store(file, groups, header | {"advantage": "given", "advantage_options": {}})


def read_adapter(folder: Path) -> object:
    import torch

    from titan_tree import build_model
    from titan_tree.models.lora.peft import read_adapter

    with torch.device("meta"):
        model = build_model("qwen3", "debug")
    lora, weights = read_adapter(model, folder)
    return lora, {name: weight.numpy().tobytes() for name, weight in weights.items()}


def read_store(file: Path) -> object:
    from titan_tree.data.sample_reader import SampleReader
    from titan_tree.data.settings import DataConfig
    from titan_tree.data.tree_bytes import tree_to_bytes

    reader = SampleReader(DataConfig(files=[str(file)]))
    return [(group.id, tree_to_bytes(reader.tree(group))) for group in reader.files.groups()]


READERS: dict[str, Callable[[Path], object]] = {ADAPTER: read_adapter, STORE: read_store}


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Flips one bit of a copy. Returns which one, and what reading it said."""
    from titan_tree.errors import UserError

    read, copy = READERS[kind], folder / kind
    (shutil.copytree if kind == ADAPTER else shutil.copy)(work / kind, copy)
    file = draw.choice([path for path in sorted(copy.rglob("*")) or [copy] if path.is_file()])
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    where = f"bit {bit} of {file.name}"
    try:
        found = read(copy)
    except UserError as error:
        line = str(error)
        check(
            str(copy) in line and line.isprintable(),
            f"{where}: not one line with the file: {line!r}",
        )
        return f"{where}; refused: {line.replace(str(folder), '')}"
    check(found == read(work / kind), f"{where}: read as something else in silence")
    return f"{where}; read as before"
