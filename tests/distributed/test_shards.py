"""Weights that ranks draw or read into their shards equal those of one process, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.oracle import hf_model, hybrid_model
from tests.support.processes import process_group, run_ranks
from titan_tree.distributed.parallelize import weight_shards
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.errors import UserError
from titan_tree.models.hf import load, model_from_config
from titan_tree.models.hf.snapshot_files import open_weights
from titan_tree.models.pretrained import build_model
from titan_tree.models.settings import ModelConfig
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("shards")]

# No number of ranks but 1 divides the vocabulary, and 4 does not divide the MLPs. Ranks 2 and 3 of 4
# have none of the two decays.
UNEVEN: dict[str, Any] = {"vocab_size": 61, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**UNEVEN, "intermediate_size": 90},
    "qwen3_5": {**UNEVEN, "intermediate_size": 90, "linear_num_value_heads": 2, "linear_num_key_heads": 2},
    "qwen3_moe": UNEVEN,
    "qwen3_5_moe": UNEVEN,
}
# Ranks and parallel.expert_parallel. With (4, 2), experts are sharded in two dims.
MESHES = {
    "qwen3": [(4, 1)],
    "qwen3_5": [(2, 1), (4, 1)],
    "qwen3_moe": [(2, 2), (4, 1), (4, 2), (4, 4)],
    "qwen3_5_moe": [(4, 2)],
}
CASES = [(name, *mesh) for name, meshes in MESHES.items() for mesh in meshes]
SEED = 5


def draw_into_shards(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    """Draws the models of all cases with ``num_ranks`` ranks; rank 0 saves the gathered weights."""
    with process_group(rank, num_ranks, ports[0]):
        for name, ranks, expert_parallel in CASES:
            if ranks == num_ranks:
                options = ModelConfig(name=name, flavor="debug", overrides=MODELS[name])
                parallel = ParallelConfig(expert_parallel=expert_parallel)
                mesh = init_device_mesh("cpu", (num_ranks,))
                model = build_parallel_model(options, TrainingConfig(seed=SEED), parallel, mesh)
                state = cast(dict[str, DTensor], model.state_dict())
                held = sum(shard.values.numel() for shard in weight_shards(model).values())
                assert held < 0.7 * sum(weight.numel() for weight in state.values())
                weights = {name: weight.full_tensor() for name, weight in state.items()}
                if rank == 0:
                    torch.save(weights, folder / f"{name}_{ranks}_{expert_parallel}.pt")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    for num_ranks in (2, 4):
        run_ranks(draw_into_shards, num_ranks, num_ranks, folder)
    return folder


@pytest.mark.parametrize(("name", "ranks", "expert_parallel"), CASES)
def test_random_weights_are_the_same_for_any_mesh(
    drawn: Path, name: str, ranks: int, expert_parallel: int
) -> None:
    whole = build_model(name, "debug", **MODELS[name])
    whole.init_weights(SEED)
    got = torch.load(drawn / f"{name}_{ranks}_{expert_parallel}.pt")
    want = whole.state_dict()
    assert got.keys() == want.keys()
    for label, weight in want.items():
        assert torch.equal(got[label], weight), label


SNAPSHOTS: dict[str, list[tuple[int, int]]] = {
    "dense": [(1, 1), (2, 1), (4, 1)],
    "packed": [(1, 1), (2, 1), (4, 1)],
    "fused experts": [(1, 1), (2, 1), (2, 2), (4, 2)],
    "single experts": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
}

# All ranks raise the error, although only the first or only the last one reads the wrong rows.
WRONG = {
    "nan": r"layers.1.mlp.up_proj.weight: expected finite weights",
    "copy": r"lm_head.weight differs from model.embed_tokens.weight",
}


def write_snapshot(name: str, folder: Path) -> None:
    if name == "dense":
        hf_model(tied=False).save_pretrained(folder, max_shard_size="30KB")
    elif name == "packed":
        hybrid_model(tied=False, kind="Qwen3Next").save_pretrained(folder, max_shard_size="30KB")
    elif name == "single experts":  # spreads the experts of a layer over several files
        hf_model(tied=True, kind="Qwen3Moe").save_pretrained(folder, max_shard_size="20KB")
    else:
        model = hf_model(tied=True, kind="Qwen3Moe")
        model.config.architectures = ["Qwen3MoeForCausalLM"]
        model.config.save_pretrained(folder)
        weights = {n: w.clone() for n, w in model.state_dict().items() if not n.startswith("lm_head")}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class CountedFile:
    """A safetensors file that counts the bytes of what is read, and only allows reading rows."""

    num_bytes = 0

    def __init__(self, file: Any) -> None:
        self.keys, self.get_slice = file.keys, lambda name: CountedSlice(file.get_slice(name))


class CountedSlice:
    def __init__(self, tensor: Any) -> None:
        self.tensor, self.get_shape, self.get_dtype = tensor, tensor.get_shape, tensor.get_dtype

    def __getitem__(self, rows: Any) -> torch.Tensor:
        values: torch.Tensor = self.tensor[rows]
        CountedFile.num_bytes += values.nbytes
        return values


@contextmanager
def counted(file: Path) -> Iterator[CountedFile]:
    with open_weights(file) as opened:
        yield CountedFile(opened)


def load_into_shards(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    """Loads all snapshots with ``num_ranks`` ranks; saves the gathered weights and the bytes read."""
    with process_group(rank, num_ranks, ports[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_weights", counted)
        mesh = init_device_mesh("cpu", (num_ranks,))
        for name, meshes in SNAPSHOTS.items():
            for ranks, expert_parallel in meshes:
                if ranks == num_ranks:
                    CountedFile.num_bytes = 0
                    options = ModelConfig(hf_path=str(folder / name)), TrainingConfig()
                    parallel = ParallelConfig(expert_parallel=expert_parallel)
                    model = build_parallel_model(*options, parallel, mesh)
                    state = model.state_dict()
                    weights = {n: w.full_tensor() if num_ranks > 1 else w for n, w in state.items()}
                    own = sum(4 * shard.values.numel() for shard in weight_shards(model).values())
                    saved = weights, CountedFile.num_bytes, own
                    torch.save(saved, folder / f"{name}_{ranks}_{expert_parallel}_{rank}.pt")
        for name, message in WRONG.items():
            wrong = ModelConfig(hf_path=str(folder / name))
            with pytest.raises(UserError, match=message):
                build_parallel_model(wrong, TrainingConfig(), ParallelConfig(), mesh)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the snapshots, and with what ranks have loaded of them."""
    folder = tmp_path_factory.mktemp("loaded")
    for name in (*SNAPSHOTS, *WRONG):
        (folder / name).mkdir()
    for name in SNAPSHOTS:
        write_snapshot(name, folder / name)
    for name in WRONG:
        hf_model(tied=True).save_pretrained(folder / name)
        weights = load_file(folder / name / "model.safetensors")
        if name == "nan":
            weights["model.layers.1.mlp.up_proj.weight"][0, 3] = torch.nan
        else:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
            weights["lm_head.weight"][-1, 3] += 1
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    for num_ranks in (1, 2, 4):
        run_ranks(load_into_shards, num_ranks, num_ranks, folder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all weights of a snapshot by the model's names, made of whole tensors."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    tensors = {name.removeprefix("model."): tensor for file in files for name, tensor in file.items()}
    model = model_from_config(folder)
    for name in list(tensors):
        for ending, parts in model.packed.items():
            if name.endswith(ending):
                values = model.unpack(name, tensors.pop(name))
                tensors |= zip((name.removesuffix(ending) + part for part in parts), values, strict=True)
    for name, weight in model.state_dict().items():
        if name not in tensors:
            layer, _, kind = name.rpartition(".")
            singles = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            experts = [
                torch.cat([tensors.pop(f"{layer}.{expert}.{single}.weight") for single in singles])
                for expert in range(len(weight))
            ]
            tensors[name] = torch.stack(experts)
    return tensors


@pytest.mark.parametrize(
    ("name", "ranks", "expert_parallel"),
    [(name, *mesh) for name, meshes in SNAPSHOTS.items() for mesh in meshes],
)
def test_each_rank_reads_only_its_rows_of_a_snapshot(
    loaded: Path, name: str, ranks: int, expert_parallel: int
) -> None:
    want = weights_of(loaded / name)
    for rank in range(ranks):
        got, num_bytes, own = torch.load(loaded / f"{name}_{ranks}_{expert_parallel}_{rank}.pt")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[label], weight) for label, weight in want.items())
        assert num_bytes == own
