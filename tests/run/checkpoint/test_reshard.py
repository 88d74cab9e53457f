"""Checkpoints move between 4, 2 and 1 ranks and back: weights, router biases and optimizer states stay."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.processes import process_group, run_ranks
from titan_tree.distributed.optimizers import build_optimizers
from titan_tree.distributed.settings import OptimizerConfig, ParallelConfig
from titan_tree.models.settings import ModelConfig
from titan_tree.run.checkpoint import Checkpoints, Progress
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import CheckpointConfig, TrainingConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("reshard")]

# Neither 2 nor 4 divides the vocabulary, and 4 does not divide the MLPs. With 4 ranks, two have no row of
# DeltaNet's decays.
UNEVEN: dict[str, Any] = {"vocab_size": 61, "tie_word_embeddings": False}
HYBRID = {"intermediate_size": 90, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
TWO_LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2}
# Rows of 256 numbers, and at least 4,096 numbers in each shard of a matrix: all matrices have 8-bit states.
WIDE = {"vocab_size": 64, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "hybrid": ("qwen3_5", {**UNEVEN, **HYBRID, **TWO_LAYERS}, "adamw"),
    "experts": ("qwen3_moe", UNEVEN, "adamw"),
    "8-bit states": ("qwen3", {**WIDE, "num_hidden_layers": 1}, "adamw8bit"),
}
# Ranks and parallel.expert_parallel. With (4, 2), experts are sharded in two dims, with (4, 4) in one.
STAGES = [(4, 2), (2, 1), (1, 1), (4, 4)]


class Run:
    """One rank's model, optimizer and checkpoints."""

    def __init__(self, case: str, stage: int, folder: Path) -> None:
        name, sizes, optimizer = CASES[case]
        ranks, expert_parallel = STAGES[stage]
        model = ModelConfig(name=name, flavor="debug", overrides=sizes)
        self.model = build_parallel_model(
            model,
            TrainingConfig(seed=stage),  # so that no value is right by chance
            ParallelConfig(expert_parallel=expert_parallel if name == "qwen3_moe" else 1),
            init_device_mesh("cpu", (ranks,)),
        )
        if self.model.experts:
            self.model.experts.add_router_biases()
        self.optimizers = build_optimizers(OptimizerConfig(name=optimizer), self.model)
        self.progress = Progress()
        self.checkpoints = Checkpoints(
            CheckpointConfig(interval=1, keep=0, async_save=bool(stage % 2)),
            folder / case,
            model=self.model,
            optimizers=self.optimizers,
            progress=self.progress,
            architecture={},
            run_config=Config(model=model),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns all weights, router biases and optimizer states by name."""
        states = self.optimizers.state_dict()
        named = {name: value for name, value in states.items() if name.startswith("state.")}
        return {**self.model.state_dict(), **named}


def values(name: str, shape: torch.Size) -> Tensor:
    """Returns the values that the tensor ``name`` has in all stages, drawn by torch's own generator."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith(".step"):
        return torch.randint(1, 1000, shape, generator=generator).float()
    return torch.rand(shape, generator=generator)  # second moments are not negative


def set_values(name: str, tensor: Tensor) -> None:
    whole = values(name, tensor.shape)
    if isinstance(tensor, DTensor):
        box = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(box.to_local())
    else:
        tensor.copy_(whole)


def gathered(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor, dequantized."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_quantized(tensor):
        local = local.dequantize()
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        size = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(local, mesh, placements, run_check=False, **size).full_tensor()
    return local.clone()


def run_stage(rank: int, ports: list[int], stage: int, folder: Path) -> None:
    """Resumes each case, records its tensors and how far it is, and saves the next checkpoint."""
    with process_group(rank, STAGES[stage][0], ports[0]), torch.no_grad():
        for case in CASES:
            run = Run(case, stage, folder)
            run.checkpoints.resume()
            if stage == 0:
                for name, tensor in run.tensors().items():
                    set_values(name, tensor)
                run.progress.data = {"epoch": 3, "group": 7}
            tensors = {name: gathered(tensor) for name, tensor in run.tensors().items()}
            quantized = sum(map(is_quantized, run.tensors().values()))
            if rank == 0:
                found = tensors, quantized, (run.progress.step, run.progress.data)
                torch.save(found, folder / f"{case}_{stage}.pt")
            run.progress.step = stage + 1
            assert run.checkpoints.save(due=True)
            run.checkpoints.close()


def is_quantized(tensor: Tensor) -> bool:
    return hasattr(tensor.to_local() if isinstance(tensor, DTensor) else tensor, "codes")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    for stage, (ranks, _) in enumerate(STAGES):
        run_ranks(run_stage, ranks, stage, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_ranks_resumes_the_same_state(stages: Path, case: str) -> None:
    for stage in range(len(STAGES)):
        tensors, quantized, progress = torch.load(stages / f"{case}_{stage}.pt")
        assert progress == (stage, {"epoch": 3, "group": 7})
        num_states = sum(name.startswith("state.") for name in tensors)
        num_biases = sum("correction_bias" in name for name in tensors)
        assert num_states == 3 * (len(tensors) - num_states - num_biases) > 30
        assert bool(num_biases) == (case == "experts")
        assert quantized == (16 if case == "8-bit states" else 0)
        for name, tensor in tensors.items():
            expected = values(name, tensor.shape)
            if case == "8-bit states" and "exp_avg" in name:
                # The first stage rounds the states; later ones do not.
                torch.testing.assert_close(tensor, expected, rtol=0.05, atol=0.05)
                expected = torch.load(stages / f"{case}_0.pt")[0][name]
            assert torch.equal(tensor, expected), (STAGES[stage], name)
