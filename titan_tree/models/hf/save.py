"""Saves models as Hugging Face snapshots."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from titan_tree.components.lora import is_factor
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import ConfigJson
from titan_tree.models.hf.names import (
    PREFIX,
    TEXT_PREFIX,
    hf_name,
    not_loaded,
    pack,
    split_experts,
    transpose_experts,
)
from titan_tree.models.hf.snapshot_files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    PICKLES,
    ROUTER_BIASES,
    WEIGHTS,
    open_weights,
    read_json,
    weight_files,
    write_json,
)

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
# Files of a source that its export does not get: weights, what describes them, and traces of training.
NOT_COPIED = {CONFIG, ROUTER_BIASES, ADAPTER_CONFIG, "README.md", "trainer_state.json"}
NOT_COPIED_ENDINGS = (*PICKLES, ".safetensors", ".index.json", ".gguf", ".h5", ".msgpack", ".onnx")
MAX_COPIED_BYTES = 1 << 28  # tokenizers are smaller


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Saves a ``Decoder``. See ``titan_tree.models.pretrained.save_pretrained``."""
    weights: Mapping[str, Tensor] = model.state_dict() if state_dict is None else state_dict
    assert weights.keys() == {name for name in model.state_dict() if not is_factor(name)}, (
        "the weights are not this model's"
    )
    # The model's own biases may have another dtype.
    biases = model.experts.router_biases() if model.experts else {}
    dtypes = {w.dtype for n, w in weights.items() if n not in biases}
    assert len(dtypes) == 1, f"one dtype expected, got {dtypes}"
    with all_or_nothing(Path(folder)) as temporary:
        prefix = write_all_but_weights(model, temporary, dtypes.pop(), source)
        named = snapshot_tensors(model, weights, prefix) | weights_not_loaded(model, source)
        _write_weights(named, temporary, max_shard_bytes)


def write_all_but_weights(model: Decoder, folder: Path, dtype: torch.dtype, source: str | Path | None) -> str:
    """Writes all files of a snapshot but its weights, and returns the prefix of the weights' names."""
    config, prefix = {**model.config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}, PREFIX
    if source is not None:
        files = copied_files(Path(source))
        if (Path(source) / CONFIG).is_file():
            config, prefix = _merged_config(model, config, Path(source) / CONFIG)
        copy_files(Path(source), files, folder)
    if model.vision_json is not None and prefix == PREFIX:
        config["rope_parameters"] |= {"mrope_section": list(model.mrope_sections), "mrope_interleaved": True}
        names = {"dtype": config["dtype"], "tie_word_embeddings": config["tie_word_embeddings"]}
        names["architectures"] = [model.hf_architectures[model.vision_json["model_type"]]]
        config["model_type"] = f"{model.vision_json['model_type']}_text"
        config, prefix = model.vision_json | names | {"text_config": config}, TEXT_PREFIX
    write_json(folder / CONFIG, config)
    if biases := model.experts.router_biases() if model.experts else {}:
        write_json(folder / ROUTER_BIASES, {name: bias.tolist() for name, bias in biases.items()})
        logger.warning(
            "only titan_tree reads the router biases in %s; other programs will choose other experts",
            ROUTER_BIASES,
        )
    return prefix


def snapshot_tensors(
    model: Decoder, weights: Mapping[str, Tensor], prefix: str = PREFIX
) -> dict[str, Tensor]:
    """Returns the tensors of a snapshot by their names there, most of them views of ``weights``.

    Args:
        weights: weights of ``model`` without LoRA, by the model's names; not sharded. All of them, or some of
            the groups of ``names.stored_together``.
        prefix: how the names in the snapshot begin, see ``snapshot_prefix``.
    """
    assert not any(hasattr(w, "full_tensor") for w in weights.values()), "gather sharded weights first"
    biases = model.experts.router_biases() if model.experts else {}
    parts: Mapping[str, Tensor] = {name: w for name, w in weights.items() if name not in biases}
    if model.publishes_single_experts:  # except within Qwen3-VL
        parts = split_experts(parts) if prefix == PREFIX else transpose_experts(parts)
    parts = pack(parts, model) if model.publishes_packed else parts
    return {hf_name(name, prefix): weight for name, weight in parts.items()}


def snapshot_prefix(source: str | Path | None) -> str:
    """Returns how the names of a text model's weights begin in the snapshot ``source``. None: its default."""
    nested = source is not None and "text_config" in read_json(Path(source) / CONFIG)
    return TEXT_PREFIX if nested else PREFIX


def copied_files(source: Path) -> list[Path]:
    """Returns the files of a snapshot that an export copies, by their names in it: those of its tokenizer,
    chat templates, processors and their code, and all other small files.

    Raises:
        UserError: ``source`` is not a snapshot.
    """
    if not any((source / name).is_file() for name in (CONFIG, "tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{source}: expected a snapshot with {CONFIG} or tokenizer files, found neither")
    files = [*source.iterdir(), *source.glob("additional_chat_templates/*.jinja")]
    return [
        file.relative_to(source)
        for file in files
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in NOT_COPIED
        and not file.name.endswith(NOT_COPIED_ENDINGS)
        and file.stat().st_size <= MAX_COPIED_BYTES
    ]


def copy_files(source: Path, files: Iterable[Path], folder: Path) -> None:
    """Copies the result of ``copied_files`` from ``source`` to ``folder``."""
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, folder / file)


def _merged_config(model: Decoder, sizes_to_save: ConfigJson, path: Path) -> tuple[ConfigJson, str]:
    """Returns the source's config.json with ``sizes_to_save``, and the prefix of the weights' names.

    If the source is a model with vision, the text model's config becomes its ``text_config``.
    """
    source = read_json(path)
    if source.get("model_type") not in model.hf_architectures:
        raise UserError(
            f"{path}: model_type: expected one of {', '.join(model.hf_architectures)}, the types of the "
            f"model to save, got {source.get('model_type')}"
        )
    text = source.get("text_config")
    before = source if text is None else text
    rope = {name: x for name, x in (before.get("rope_scaling") or {}).items() if name.startswith("mrope_")}
    rope |= (before.get("rope_parameters") or {}) | sizes_to_save["rope_parameters"]
    sizes_to_save = sizes_to_save | {"rope_parameters": rope}
    # The weights are written for the code of transformers, not for the source's own (auto_map).
    dropped = {"auto_map", "quantization_config", "torch_dtype"}
    dropped |= {"partial_rotary_factor", "full_attention_interval"}
    sizes = {*vars(model.config), *dropped, "rope_parameters", "rope_scaling", "layer_types"}
    identity = {"dtype", "architectures", "model_type"}
    config = sizes_to_save | {name: value for name, value in before.items() if name not in sizes | identity}
    if text is None:
        return config, PREFIX
    config["model_type"] = f"{source['model_type']}_text"
    vision_config = {name: value for name, value in source.items() if name not in dropped}
    return vision_config | {"text_config": config, "dtype": sizes_to_save["dtype"]}, TEXT_PREFIX


def weights_not_loaded(model: Decoder, source: str | Path | None) -> dict[str, Tensor]:
    """Returns the weights that ``model`` does not load, by their names; {} if the snapshot has no weights."""
    if source is None or not any((Path(source) / name).is_file() for name in (WEIGHTS, INDEX)):
        return {}
    others: dict[str, Tensor] = {}
    for file in weight_files(Path(source)):
        with open_weights(file) as shard:
            names = [name for name in shard.keys() if name.startswith(not_loaded(model))]  # noqa: SIM118
            others |= {name: shard.get_tensor(name) for name in names}
    return others


def _write_weights(weights: dict[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    written: dict[str, tuple[str, int]] = {}
    for file, shard in zip(file_names(len(shards)), shards, strict=True):
        written |= write_tensors(shard, folder / file)
    write_index(folder, written)


def file_names(count: int) -> list[str]:
    """Returns the names of the ``count`` weight files of a snapshot."""
    numbers = range(1, count + 1)
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in numbers] if count > 1 else [WEIGHTS]


def write_index(folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
    """Writes which file has which tensor, unless one file has all. ``written``: see ``write_tensors``."""
    weight_map = {name: file for name, (file, _) in written.items()}
    if len(set(weight_map.values())) > 1:
        total = sum(size for _, size in written.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, tuple[str, int]]:
    """Writes a safetensors file, and returns its name and the number of bytes for each tensor."""
    path.touch()
    mode = path.stat().st_mode  # as the umask says; safetensors would allow only the owner to read
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod(mode)
    return {name: (path.name, tensor.nbytes) for name, tensor in tensors.items()}


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside ``folder``: renamed to ``folder`` on success, removed on failure.

    Raises:
        UserError: ``folder`` is taken, or writing failed.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; name a new folder or remove it")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        with write_errors(folder):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Raises UserError if writing a part of a snapshot fails. ``all_or_nothing`` then removes the rest."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: writing failed, nothing was kept: {error}") from error
