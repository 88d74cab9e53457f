"""Snapshots whose weights two ranks write together equal those that one process writes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.test_hf_hybrid import with_vision
from tests.support.oracle import hf_model, hybrid_model
from tests.support.processes import process_group, run_ranks
from titan_tree.components.lora import LoRA, is_factor
from titan_tree.distributed.parallelize import weight_shards
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.errors import UserError
from titan_tree.models.hf import save
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.weights import WeightShards, draw_weights, whole_weights
from titan_tree.run.checkpoint import export
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("shares")]

SOURCES: dict[str, Callable[[], Any]] = {
    "dense": lambda: hf_model(tied=False),
    "tied": lambda: hf_model(tied=True),
    "packed": lambda: hybrid_model(tied=False, kind="Qwen3Next"),  # with single experts
    "experts": lambda: hf_model(tied=True, kind="Qwen3Moe"),
    "vision": lambda: with_vision()[0],
    "LoRA": lambda: hybrid_model(tied=True, kind="Qwen3Next"),
}
PARALLEL = {"experts": ParallelConfig(expert_parallel=2), "packed": ParallelConfig(expert_parallel=2)}
RANK = {"LoRA": 2}
FILE_BYTES = 30_000


def draw_factors(shards: WeightShards) -> None:
    for name, shard in shards.items():
        if is_factor(name):
            draw_weights(shard, name, 3, lambda _, draws: draws.normal(0.1))


def write_shares(rank: int, ports: list[int], folder: Path) -> None:
    """Writes the models of all cases, and the bytes of each file and rank."""
    sizes: list[int] = []

    def counted(tensors: dict[str, Tensor], path: Path) -> dict[str, tuple[str, int]]:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        return write(tensors, path)

    write = save.write_tensors
    with process_group(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_tensors", counted)
        patch.setattr(save, "MAX_SHARD_BYTES", FILE_BYTES)
        for name in SOURCES:
            sizes.clear()
            source, lora = str(folder / name / "in"), LoRAConfig(rank=RANK.get(name, 0))
            parallel = PARALLEL.get(name, ParallelConfig())
            mesh = init_device_mesh("cpu", (2,))
            model = build_parallel_model(ModelConfig(hf_path=source), TrainingConfig(), parallel, mesh, lora)
            draw_factors(weight_shards(model))
            export.save_shares(model, folder / name / "two", torch.bfloat16, source)
            torch.save(sizes, folder / name / f"sizes_{rank}.pt")
            if name == "dense":
                fail(model, folder / "failed" / "out", rank)


def fail(model: Any, out: Path, rank: int) -> None:
    """Rank 1 fails, and both ranks raise the same line. Nothing is left."""

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        raise OSError(28, "No space left on device")

    for target, name, instead, message in (
        (
            save,
            "write_tensors",
            full,
            "writing failed, nothing was kept: [Errno 28] No space left on device",
        ),
        (Path, "is_dir", lambda path: False, "rank 1 does not see it; choose one that all ranks see"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(target, name, instead)
            with pytest.raises(UserError) as raised:
                export.save_shares(model, out, torch.bfloat16, None)
        assert str(raised.value) == f"{out}: {message}"
    if rank == 0:
        assert os.listdir(out.parent) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with what two ranks and one process write for each case."""
    folder = tmp_path_factory.mktemp("shares")
    for name, make in SOURCES.items():
        make().save_pretrained(folder / name / "in")
    run_ranks(write_shares, 2, folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", SOURCES)
def test_ranks_write_what_one_process_writes(folder: Path, name: str) -> None:
    source, one, two = (folder / name / kind for kind in ("in", "one", "two"))
    model = load_pretrained(source, torch.bfloat16)
    if rank := RANK.get(name):
        add_lora(model, LoRA(rank=rank, targets=()))
        draw_factors(whole_weights(model))
    save_pretrained(model, one, source=source)
    want, got = tensors(one), tensors(two)
    assert got.keys() == want.keys()
    for label, tensor in want.items():
        assert got[label].dtype == tensor.dtype, label
        assert torch.equal(got[label], tensor), label
    others = [
        {f.name: f.read_bytes() for f in path.iterdir() if ".safetensors" not in f.name}
        for path in (one, two)
    ]
    assert others[0] == others[1]
    theirs = [transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (one, two)]
    for (label, expected), parameter in zip(
        theirs[0].named_parameters(), theirs[1].parameters(), strict=True
    ):
        assert torch.equal(expected, parameter), label


@pytest.mark.parametrize(
    ("name", "files_per_rank"), [("dense", 1), ("packed", 3), ("experts", 2), ("LoRA", 3)]
)
def test_files_are_small_and_ranks_write_equally_much(folder: Path, name: str, files_per_rank: int) -> None:
    """A rank holds one file at a time, of about 30 kB or of half the model if that is less."""
    sizes = [torch.load(folder / name / f"sizes_{rank}.pt") for rank in range(2)]
    assert [len(files) for files in sizes] == [files_per_rank, files_per_rank]
    first, second = map(sum, sizes)
    assert abs(first - second) < 0.1 * first
    assert max(map(max, sizes)) < FILE_BYTES
    index = json.loads((folder / name / "two" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == first + second
    count = 2 * files_per_rank
    names = {f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
    assert set(index["weight_map"].values()) == names
    for file in names:
        labels = load_file(folder / name / "two" / file).keys()
        assert labels == {label for label, where in index["weight_map"].items() if where == file}
