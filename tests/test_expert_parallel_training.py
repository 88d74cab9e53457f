"""Ranks that share out experts train as one process does, whatever their trees, partitions and losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tests.test_fsdp import EXPERTS, as_rank, assert_same_run, free_ports
from tests.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss import register_loss
from titan_tree.config import Config
from titan_tree.data.batch import PathPairs
from titan_tree.errors import UserError
from titan_tree.models.hf import load_pretrained

CUT: dict[str, Any] = {"data__max_tokens": 12}  # no tree fits one forward, and each rank cuts its own
FEW: dict[str, Any] = {"data__global_batch_groups": 1}  # one rank has data
WHOLE: dict[str, Any] = {"loss__name": "square_of_mean"}
HYBRID = {"model__name": "qwen3_5_moe"}
CHECKPOINT = {"training__activation_checkpoint": "full"}
EVERY = {"parallel__reduce_gradients": "every"}

# Ranks, of which so many share out experts, and options.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one group": (2, 2, {**FEW, **EXPERTS}),
    "partitions": (2, 2, {**CUT, **EXPERTS}),
    "recompute": (2, 2, {**CUT, "partition__activations": "recompute", **CHECKPOINT, **EXPERTS}),
    # Some micro-batches are cut, others not: all ranks score first where one must.
    "whole paths": (2, 2, {"data__max_tokens": 40, "training__activation_checkpoint": "selective", **WHOLE}),
    "hybrid": (2, 2, {**CUT, **HYBRID}),
    "two by two": (4, 2, {**CUT, **EXPERTS}),
    "four": (4, 4, {"data__max_tokens": 70, **EVERY, **EXPERTS}),
    "four, one group, whole paths": (4, 4, {**CUT, **FEW, **EXPERTS, **WHOLE}),
}


@register_loss("square_of_mean", whole_paths=True)
def square_of_mean(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Of the path's log-probs, at each of its tokens."""
    sums = torch.zeros_like(pairs.loss_tokens).index_add(0, pairs.path, logprobs * pairs.loss_mask)
    return (sums / pairs.loss_tokens.clamp_min(1e-30)).square()[pairs.path]


def config(folder: Path, name: str, expert_parallel: int = 1) -> Config:
    options = {"model__name": "qwen3_moe"} | CASES[name][2]
    return tiny_config(
        folder / name.replace(" ", "_"),
        checkpoint__interval=4,
        checkpoint__export_hf=True,
        optimizer__eps=1e-3,
        parallel__expert_parallel=expert_parallel,
        **options,
    )


def worker(rank: int, folder: Path, num_ranks: int, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for name, port in zip(CASES, ports, strict=True):
        if CASES[name][0] == num_ranks:
            with as_rank(rank, num_ranks, port):
                train(config(folder, name, CASES[name][1]))


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, trained by their ranks."""
    folder = tmp_path_factory.mktemp("shared")
    for name in CASES:
        config(folder, name)  # writes the data before the ranks want it
    for num_ranks in (2, 4):
        mp.spawn(worker, (folder, num_ranks, free_ports(len(CASES))), nprocs=num_ranks)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(shared_out: Path, tmp_path: Path, name: str) -> None:
    """Losses, gradient norms, the weights of a checkpoint and those of the export."""
    one, many = train(config(tmp_path, name)), config(shared_out, name)
    assert_same_run(many, one)
    exports = [load_pretrained(f"{c.folder}/hf", torch.float32) for c in (many, one.config)]
    for ours, theirs in zip(*(model.state_dict().values() for model in exports), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
