"""Ranks that share a tower's weights, with different numbers of images, train exactly as one process does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.cases import slow_except
from tests.support.oracle import relative_error
from tests.support.processes import process_group, run_ranks
from tests.support.vision import screen_paths, vision_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.gradient_sync import reshard
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.feature_cache import forget_features
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models import vision
from titan_tree.models.settings import ModelConfig
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.tree.token_tree import TokenTree

# (what is done with the tower, when gradients are reduced, largest partition)
CASES = [
    ("train", "last", None),
    ("train", "every", None),
    ("train", "last", 7),
    ("frozen", "last", 7),
    ("frozen", "every", None),
]


def trees() -> list[list[list[TokenTree]]]:
    """Returns the micro-batches of both ranks. Rank 1 has no images in the first one, and no second one."""
    groups = screen_paths()
    text = [path for path in groups[1] if not path.images]
    screens = [path for path in groups[1] if path.images]
    return [
        [[TokenTree.from_paths(groups[0])], [TokenTree.from_paths(screens)]],
        [[TokenTree.from_paths(text)]],
    ]


def gradients_of_steps(
    folder: Path, mesh, steps, mode: str, reduce: str, size: int | None
) -> list[dict[str, Tensor]]:
    """Returns the gradients of steps with equal weights, and then the held-out loss of the first one."""
    table, training = ModelConfig(hf_path=str(folder), vision=mode), TrainingConfig(dtype="float32")
    model = build_parallel_model(table, training, ParallelConfig(), mesh)
    assert isinstance(model.visual, FSDPModule) == (mesh.size() > 1)
    partitioner = None if size is None else TreePartitioner("redundancy_free", size)
    step = TreeStep(model, TreeLoss(), partitioner=partitioner, reduce_gradients=reduce)
    results = []
    for own in steps:
        model.zero_grad(set_to_none=True)
        step.run(step.prepare(own))
        reshard(model)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()})
    loss = step.evaluate([step.prepare(steps[0])])["loss"]
    return [*results, {"loss": torch.tensor(loss)}]


def save_gradients(rank: int, ports: list[int], folder: Path, *case: str) -> None:
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        encoded = []
        with pytest.MonkeyPatch.context() as patch:
            made = vision.tower_class
            patch.setattr(vision, "tower_class", lambda published: counting(made(published), encoded))
            results = gradients_of_steps(folder, mesh, steps_of(rank), *case)
        if case[0] == "frozen":
            # In the second step, rank 0 knows all images, and rank 1 none. Empty images have one token.
            assert sum(tokens > 1 for tokens in encoded) == 4
        torch.save(results, folder / f"{rank}.pt")


def counting(tower: Any, encoded: list[int]) -> Any:
    """Returns the class ``tower`` with the sizes of images appended to ``encoded`` in tokens."""

    class Counting(tower):
        def features(self, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
            encoded.extend(image.shape[0] * image.shape[1] // self.patch**2 for image in images)
            return super().features(images)

    return Counting


def steps_of(rank: int) -> list[list[list[TokenTree]]]:
    """Returns the micro-batches of a rank in two steps. In the second one, both have those of rank 0."""
    return [trees()[rank], trees()[0]]


@pytest.mark.parametrize(("mode", "reduce", "size"), slow_except(CASES[2:4], CASES))
def test_two_ranks_equal_one(tmp_path: Path, mode: str, reduce: str, size: int | None) -> None:
    vision_model().save_pretrained(tmp_path)
    run_ranks(save_gradients, 2, tmp_path, mode, reduce, size)
    both = [
        [micro_batch for own in step for micro_batch in own]
        for step in zip(steps_of(0), steps_of(1), strict=True)
    ]
    want = gradients_of_steps(tmp_path, OneRank(), both, mode, reduce, size)
    assert any(name.startswith("visual.") for name in want[0]) == (mode == "train")
    for rank in range(2):
        for got, expected in zip(torch.load(tmp_path / f"{rank}.pt"), want, strict=True):
            assert got.keys() == expected.keys()
            for name, gradient in expected.items():
                assert relative_error(got[name], gradient) < 2e-5, name


def change_sharded_weights(rank: int, ports: list[int], folder: Path) -> None:
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        table, training = ModelConfig(hf_path=str(folder), vision="frozen"), TrainingConfig(dtype="float32")
        model = build_parallel_model(table, training, ParallelConfig(), mesh)
        step = TreeStep(model, TreeLoss())
        tower: Any = model.visual

        def loss() -> float:
            return step.evaluate([step.prepare(trees()[rank])])["loss"]

        def scale(is_local: bool) -> None:
            for weight in tower.parameters():
                (weight.to_local() if is_local else weight).mul_(1.5)

        def load() -> None:
            model.load_state_dict({n: w / 1.5 if "visual" in n else w for n, w in model.state_dict().items()})

        before = loss()
        for change in (lambda: scale(False), load, lambda: scale(True)):
            with torch.no_grad():
                change()
            found = loss()
            forget_features()
            assert found == loss() != before
            before = found


def test_other_sharded_weights_forget_the_features(tmp_path: Path) -> None:
    """Changes of DTensors, and of a rank's part of them."""
    vision_model().save_pretrained(tmp_path)
    run_ranks(change_sharded_weights, 2, tmp_path)
