"""Hugging Face snapshots in and out: a local folder with config.json and safetensors files."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.expert_names import single_experts, split_experts
from titan_tree.models.registry import MODELS

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Ours, beside what a family publishes; no safetensors file, of which inference engines read all there are.
ROUTER_BIASES = "router_biases.json"
CARRIED_FILES = (  # from a model's source to its export
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors names them
PREFIX, TEXT_PREFIX = "model.", "model.language_model."  # of a model alone, and of one with vision
NOT_LOADED = ("model.visual.", "visual.", "mtp.")  # vision, and the head that predicts several tokens


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attention: str = "auto",
) -> Decoder:
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
    load_router_biases(model, folder)
    return model


def load_router_biases(model: Decoder, folder: str | Path) -> None:
    """Adds to ``model`` what ``save_pretrained`` wrote of them beside its weights; nothing where it did not.

    Call it when the weights are where they stay: biases go there, and are fp32 whatever the weights' dtype.
    """
    path = Path(folder) / ROUTER_BIASES
    if not path.is_file():
        return
    stored = _read_json(path)
    model.add_router_biases()
    biases = model.router_biases
    _same_names(path, set(biases), set(stored))
    for name, bias in biases.items():
        values = stored[name]
        numbers = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
        if not numbers or len(values) != len(bias):
            raise UserError(f"{path}: {name}: expected a list of {len(bias)} numbers, got {values!r:.40}")
        bias.copy_(torch.tensor(values))


def model_from_config(folder: str | Path, attention: str = "auto") -> Decoder:
    """The model that a snapshot's config.json describes, without its weights, on the default device."""
    path = Path(folder) / CONFIG
    config = _read_json(path)
    known = {name: model for model in MODELS.values() for name in model.hf_architectures}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{path}: model_type: expected one of {', '.join(known)}, got {model_type}")
    model_class = known[model_type]
    expected = [model_class.hf_architectures[model_type]]
    if (architectures := config.get("architectures") or expected) != expected:
        raise UserError(f"{path}: architectures: expected {expected}, got {architectures}")
    return model_class(model_class.Config.from_hf(config, str(path)), attention)


def read_weights(folder: str | Path, model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of ``model``, by its own names, as stored, one at a time on CPU.

    ``model`` only says what is expected, so it may lie on the meta device or be sharded. Names, shapes
    and dtypes of all files are checked before the first tensor comes.
    """
    folder = Path(folder)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    files = _weight_files(folder)
    shapes = _stored_shapes(folder, files)
    # A tied model's file may hold the embedding a second time, as the published Qwen3-0.6B does.
    embedding, copy = "embed_tokens.weight", "lm_head.weight"
    has_copy = copy in shapes and copy not in expected
    if has_copy:
        shapes.pop(copy)
    # Of experts that are not stored fused, the tensors that are expected instead.
    fused = {
        name: (shape, singles)
        for name, shape in expected.items()
        if name not in shapes and (singles := single_experts(name, shape))
    }
    for name, (_, singles) in fused.items():
        del expected[name]
        expected |= singles
    packed = _packed(model, set(shapes))
    found = [part for name in shapes for part in packed.get(name, (name,))]
    _same_names(folder, set(map(_hf_name, expected)), set(map(_hf_name, found)))
    if len(found) > len(expected):
        double = next(name for name in found if found.count(name) > 1)
        raise UserError(f"{folder}: {_hf_name(double)}: two tensors hold it; remove one")
    for name, shape in shapes.items():
        parts = [expected[part] for part in packed.get(name, (name,))]
        want = sum(part[0] for part in parts), *parts[0][1:]
        if shape != want:
            raise UserError(f"{folder}: {_hf_name(name)}: expected shape {want} by config.json, got {shape}")
    if has_copy and not torch.equal(_read_one(files, embedding), _read_one(files, copy)):
        raise UserError(
            f"{folder}: {copy} differs from {_hf_name(embedding)}, but config.json says "
            "tie_word_embeddings: true; set it to false"
        )
    fused_of = {single: name for name, (_, singles) in fused.items() for single in singles}
    parts_of: dict[str, dict[str, Tensor]] = {name: {} for name in fused}  # until all are there
    for file in files:
        with _open(file) as shard:
            for stored in shard.keys():  # noqa: SIM118
                if (name := _own_name(stored)) not in shapes:
                    continue
                tensor = shard.get_tensor(stored)
                if name in packed:
                    yield from zip(packed[name], model.unpack(name, tensor), strict=True)
                elif name in fused_of:
                    whole = fused_of[name]
                    (shape, singles), own = fused[whole], parts_of[whole]
                    own[name] = tensor
                    if len(own) == len(singles):
                        del parts_of[whole]
                        yield whole, torch.cat([own[single] for single in singles]).view(shape)
                else:
                    yield name, tensor


def _stored_shapes(folder: Path, files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Of all tensors but those that are not loaded, by the model's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    skipped = []
    for file in files:
        with _open(file) as shard:
            for stored in shard.keys():  # noqa: SIM118
                if stored.startswith(NOT_LOADED):
                    skipped.append(stored)
                    continue
                tensor, name = shard.get_slice(stored), _own_name(stored)
                if name in shapes:
                    raise UserError(f"{file}: {stored}: there is a second tensor for {name}; remove one")
                shapes[name] = tuple(tensor.get_shape())
                if (dtype := tensor.get_dtype()) not in DTYPES:
                    raise UserError(
                        f"{file}: {stored}: expected unquantised weights ({', '.join(DTYPES)}), got {dtype}"
                    )
    if skipped:
        kinds = sorted({name.removeprefix("model.").partition(".")[0] for name in skipped})
        logger.info(
            "%s: not loaded: %d tensors of %s; an export that names this snapshot as its source has them",
            folder,
            len(skipped),
            " and ".join(kinds),
        )
    return shapes


def _packed(model: Decoder, names: set[str]) -> dict[str, list[str]]:
    """Of stored tensors that hold several of the model's, the names of these."""
    return {
        name: [name.removesuffix(suffix) + part for part in parts]
        for name in names
        for suffix, parts in model.packed.items()
        if name.endswith(suffix)
    }


def _own_name(stored: str) -> str:
    """The model's name of a stored tensor."""
    return stored.removeprefix(TEXT_PREFIX).removeprefix(PREFIX)


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``model`` as a snapshot that transformers loads back bit for bit.

    But for biases of the router (``RouterBias``), which families with experts have no place for: they go to a
    file that ``load_pretrained`` reads and others do not, with a warning.

    All or nothing: files go to a folder beside ``folder`` that takes its name when all are written.

    Args:
        folder: must not exist yet, or be empty.
        state_dict: the weights, by the model's names, where the model's own are sharded.
        source: the snapshot that the model comes from: taken over are its tokenizer and processor files,
            the weights that were not loaded (vision, prediction of several tokens), and of config.json what
            the model does not know, as special token ids.
        max_shard_bytes: tensors go to several files, none larger unless one tensor is.
    Raises:
        UserError: the folder is taken, ``source`` is no snapshot, or writing failed (a full disk).
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; name a new folder or remove it")
    weights: Mapping[str, Tensor] = model.state_dict() if state_dict is None else state_dict
    assert weights.keys() == model.state_dict().keys(), "state_dict is not this model's"
    biases = model.router_biases  # not of ``weights``, whose dtype may be a narrow one
    weights = {name: weight for name, weight in weights.items() if name not in biases}
    assert not any(hasattr(w, "full_tensor") for w in weights.values()), "gather sharded weights first"
    dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in weights.values()})
    assert len(dtypes) == 1, f"one dtype expected, got {dtypes}"
    config, prefix = {**model.config.to_hf(), "dtype": dtypes[0]}, PREFIX
    others: dict[str, Tensor] = {}
    files: list[Path] = []
    if source is not None:
        files = [file for name in CARRIED_FILES if (file := Path(source) / name).is_file()]
        if (Path(source) / CONFIG).is_file():
            config, prefix = _carried_config(model, config, Path(source) / CONFIG)
            others = _not_loaded(Path(source))
        elif not files:
            raise UserError(f"{source}: expected a snapshot with {CONFIG} or tokenizer files, found neither")

    with _appearing_whole(folder) as temporary:
        parts = split_experts(weights) if model.publishes_single_experts else weights
        named = {_hf_name(name, prefix): w for name, w in parts.items()}
        _write_weights(named | others, temporary, max_shard_bytes)
        _write_json(temporary / CONFIG, config)
        if biases:
            _write_json(temporary / ROUTER_BIASES, {name: bias.tolist() for name, bias in biases.items()})
            logger.warning(
                "%s: biases of the router are in %s, which titan_tree alone reads: other programs choose "
                "other experts",
                folder,
                ROUTER_BIASES,
            )
        for file in files:
            shutil.copyfile(file, temporary / file.name)


def _carried_config(model: Decoder, own: dict[str, Any], path: Path) -> tuple[dict[str, Any], str]:
    """The source's config.json with the model's ``own`` sizes, and the prefix of the weights' names.

    A text model goes back to where it was in one with vision.
    """
    carried = _read_json(path)
    if carried.get("model_type") not in model.hf_architectures:
        raise UserError(
            f"{path}: model_type: expected one of {', '.join(model.hf_architectures)}, as the model is, got "
            f"{carried.get('model_type')}"
        )
    text = carried.get("text_config")
    before = carried if text is None else text
    own = own | {"rope_parameters": (before.get("rope_parameters") or {}) | own["rope_parameters"]}
    gone = {"quantization_config", "torch_dtype", "partial_rotary_factor", "full_attention_interval"}
    sizes = {*vars(model.config), *gone, "rope_parameters", "rope_scaling", "layer_types"}
    named = {"dtype", "architectures", "model_type"}
    config = own | {name: value for name, value in before.items() if name not in sizes | named}
    if text is None:
        return config, PREFIX
    whole = {name: value for name, value in carried.items() if name not in gone}
    return whole | {"text_config": config, "dtype": own["dtype"]}, TEXT_PREFIX


def _not_loaded(folder: Path) -> dict[str, Tensor]:
    """Those weights of a snapshot; none where it has no weights."""
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return {}
    others: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with _open(file) as shard:
            others |= {n: shard.get_tensor(n) for n in shard.keys() if n.startswith(NOT_LOADED)}  # noqa: SIM118
    return others


def _hf_name(name: str, prefix: str = PREFIX) -> str:
    return name if name.startswith("lm_head.") else prefix + name


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
            for stored in shard.keys():  # noqa: SIM118
                if _own_name(stored) == name:
                    return shard.get_tensor(stored)
    raise AssertionError(f"{name} was listed before")


def _same_names(where: Path, expected: set[str], found: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{where}: {kind} tensors: {some}{more}; do weights and config.json belong together?"
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
