"""Hugging Face snapshots in and out: a local folder with config.json and safetensors files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from titan_tree.components.tree_attention import Backend
from titan_tree.errors import UserError
from titan_tree.models.qwen3 import Qwen3
from titan_tree.models.registry import MODELS

MAX_SHARD_BYTES = 5 * 10**9
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors names them
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attention: Backend = "auto",
) -> Qwen3:
    """The model of a local snapshot, weights cast to ``dtype``. Host memory: one tensor beyond the model.

    Raises UserError, in one line, for whatever is missing, superfluous, broken, of another shape, or not
    computed by our models.
    """
    with torch.device("meta"):
        model = model_from_config(folder, attention).to(dtype)
    model.to_empty(device=device)
    parameters = model.state_dict()
    for name, tensor in read_weights(folder, model):
        parameters[name].copy_(tensor)
    return model


def model_from_config(folder: str | Path, attention: Backend = "auto") -> Qwen3:
    """The model that a snapshot's config.json describes, without its weights, on the default device."""
    path = Path(folder) / CONFIG
    config = _read_json(path)
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise UserError(f"{path}: model_type: expected one of {', '.join(MODELS)}, got {model_type}")
    model_class = MODELS[model_type]
    architectures = config.get("architectures") or [model_class.hf_architecture]
    if architectures != [model_class.hf_architecture]:
        raise UserError(f"{path}: architectures: expected {model_class.hf_architecture}, got {architectures}")
    return model_class(model_class.Config.from_hf(config, str(path)), attention)


def read_weights(folder: str | Path, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of ``model``, by its own names, as stored, one at a time on CPU.

    ``model`` only says what is expected, so it may lie on the meta device or be sharded. Names, shapes
    and dtypes of all files are checked before the first tensor comes.
    """
    folder = Path(folder)
    expected = {_hf_name(name): tuple(p.shape) for name, p in model.state_dict().items()}
    files = _weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                stored = shard.get_slice(name)
                shapes[name] = tuple(stored.get_shape())
                if (dtype := stored.get_dtype()) not in DTYPES:
                    raise UserError(
                        f"{file}: {name}: expected unquantised weights ({', '.join(DTYPES)}), got {dtype}"
                    )

    # A tied model's file may hold the embedding a second time, as the published Qwen3-0.6B does.
    embedding, copy = _hf_name("embed_tokens.weight"), "lm_head.weight"
    has_copy = copy in shapes and copy not in expected
    if has_copy:
        shapes.pop(copy)
    _same_names(folder, set(expected), set(shapes))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(f"{folder}: {name}: expected shape {shape} by config.json, got {shapes[name]}")
    if has_copy and not torch.equal(_read_one(files, embedding), _read_one(files, copy)):
        raise UserError(
            f"{folder}: {copy} differs from {embedding}, but config.json says tie_word_embeddings: true; "
            "set it to false"
        )
    for file in files:
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if name in expected:
                    yield name.removeprefix("model."), shard.get_tensor(name)


def save_pretrained(
    model: Qwen3,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``model`` as a snapshot that transformers loads back bit for bit.

    All or nothing: files go to a folder beside ``folder`` that takes its name when all are written.

    Args:
        folder: must not exist yet, or be empty.
        state_dict: the weights, by the model's names, where the model's own are sharded.
        source: a snapshot whose tokenizer files and special token ids are taken over.
        max_shard_bytes: tensors go to several files, none larger unless one tensor is.
    Raises:
        UserError: the folder is taken, ``source`` has no tokenizer, or writing failed (a full disk).
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; name a new folder or remove it")
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    assert weights.keys() == model.state_dict().keys(), "state_dict is not this model's"
    assert not any(hasattr(w, "full_tensor") for w in weights.values()), "gather sharded weights first"
    dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in weights.values()})
    assert len(dtypes) == 1, f"one dtype expected, got {dtypes}"
    config = {**model.config.to_hf(), "dtype": dtypes[0]}
    tokenizer = []
    if source is not None:
        tokenizer = [file for name in TOKENIZER_FILES if (file := Path(source) / name).is_file()]
        if not tokenizer:
            raise UserError(f"{source}: expected a snapshot with tokenizer files, found none")
        if (Path(source) / CONFIG).is_file():
            carried = _read_json(Path(source) / CONFIG)
            config |= {name: carried[name] for name in SPECIAL_TOKENS if name in carried}

    with _appearing_whole(folder) as temporary:
        _write_weights({_hf_name(name): w for name, w in weights.items()}, temporary, max_shard_bytes)
        _write_json(temporary / CONFIG, config)
        for file in tokenizer:
            shutil.copyfile(file, temporary / file.name)


def _hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; expected a local Hugging Face snapshot")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a local Hugging Face snapshot") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a snapshot; UserError if one that the index names is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder}: expected {WEIGHTS} or {INDEX}, found neither")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX}: expected a table weight_map from tensor to file")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: named in {INDEX}, but missing; the download is incomplete")
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        shard = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
    with shard as opened:
        yield opened


def _read_one(files: list[Path], name: str) -> Tensor:
    for file in files:
        with _open(file) as shard:
            if name in shard.keys():  # noqa: SIM118
                return shard.get_tensor(name)
    raise AssertionError(f"{name} was listed before")


def _same_names(folder: Path, expected: set[str], found: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{folder}: {kind} tensors: {some}{more}; do weights and config.json belong together?"
            )


def _write_weights(weights: dict[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in weights.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file, shard in zip(names, shards, strict=True):
        contiguous = {name: tensor.detach().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})


@contextmanager
def _appearing_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place if the block ends well, and vanishes if not."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: writing failed, nothing was kept: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
