"""Ranks with different trees train as one process does."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.config import Config
from titan_tree.engine import activations
from titan_tree.trainer import Trainer

# Three groups a step: rank 0 has two, rank 1 one; one group a step leaves rank 1 with none. Trees of a
# rank do not fit one micro-batch, so the ranks' numbers of micro-batches differ; in the last cases a tree
# does not fit either, and their numbers of partitions differ.
EXPERTS = {"model__name": "qwen3_moe", "router_loss__balance": 0.1, "router_loss__z": 0.01}
CASES: dict[str, dict[str, object]] = {
    "last": {"data__max_tokens": 70},
    "every": {"data__max_tokens": 70, "parallel__reduce_gradients": "every"},
    "merged": {"data__max_tokens": 90, "data__merge": "batch"},
    "one_group": {"data__global_batch_groups": 1},
    "partitions": {"data__max_tokens": 12},
    "offload": {"data__max_tokens": 12, "partition__activations": "offload"},
    "recompute": {"data__max_tokens": 12, "partition__activations": "recompute"},
    "partitions of one rank": {"data__max_tokens": 12, "data__global_batch_groups": 1},
    "hybrid": {"data__max_tokens": 12, "model__name": "qwen3_5"},
    # As wide that some shards have 8-bit states, and blocks of these are the same on one rank.
    "8-bit states": {
        "data__max_tokens": 70,
        "model__overrides__intermediate_size": 256,
        "optimizer__name": "adamw8bit",
    },
    "experts": {"data__max_tokens": 70, **EXPERTS},
    "experts, one group": {"data__global_batch_groups": 1, **EXPERTS},
    "experts, partitions": {"data__max_tokens": 12, **EXPERTS},
    "experts with biases": {"data__max_tokens": 70, "router_bias__rate": 1e-2, **EXPERTS},
    "experts, partitions of one rank": {"data__max_tokens": 12, "data__global_batch_groups": 1, **EXPERTS},
}


def configs(folder: Path, name: str) -> Config:
    # A large eps keeps AdamW from turning the rounding of a gradient near 0 into a step of size lr.
    return tiny_config(folder / name, checkpoint__interval=2, optimizer__eps=1e-3, **CASES[name])


@contextmanager
def as_rank(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    """Within, this process is one of torchrun's."""
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for name, value in names.items():
            patch.setenv(name, str(value))
        yield


def worker(rank: int, folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # AdamW8bit would compile
    activations.SMALLEST = 64  # the model's tensors are tiny
    for name, port in zip(CASES, ports, strict=True):
        with as_rank(rank, 2, port):
            train(configs(folder, name))


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections, which might take one before its turn comes."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, trained by two processes."""
    folder = tmp_path_factory.mktemp("two")
    for name in CASES:
        configs(folder, name)  # writes the data before two processes want it
    mp.spawn(worker, (folder, free_ports(len(CASES))), nprocs=2)
    return folder


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(two_ranks: Path, tmp_path: Path, name: str) -> None:
    # A gradient's rounding may move a state to the next of its 8-bit codes: part of a step of 1e-3.
    atol = 1e-4 if name == "8-bit states" else 1e-6
    assert_same_run(configs(two_ranks, name), train(configs(tmp_path, name)), atol)


def assert_same_run(many: Config, one: Trainer, atol: float = 1e-6) -> None:
    """What several ranks wrote is what one process did; atol: of weights."""
    for ours, theirs in zip(read_metrics(many), read_metrics(one.config), strict=True):
        for column in theirs.keys() - {
            "forwards",
            "chain_peak_tokens",
            "gateway_gib",
            "extra_forward_tokens",
            "dummy_forwards",
        }:  # these may differ
            value = theirs[column]
            assert float(ours[column]) == pytest.approx(float(value), rel=1e-5), (ours["step"], column)

    # The checkpoint of the ranks, loaded by one: nothing is left to train, so these are its weights.
    many.parallel.expert_parallel = 1
    many.checkpoint.export_hf = False
    resumed = train(many)
    assert resumed.progress.step == many.training.steps
    assert not resumed.history
    for (parameter, ours), theirs in zip(
        resumed.model.state_dict().items(), one.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, msg=parameter)
