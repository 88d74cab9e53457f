"""Training with experts sharded over ranks equals training on one process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.cases import slow_except
from tests.support.processes import as_rank, process_group, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.moe.layer import Experts
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.activations import Activations
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import ModelConfig
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

RECOMPUTE = {"partition__activations": "recompute", "training__activation_checkpoint": "full"}
WHOLE_PATHS: dict[str, Any] = {"loss__name": "square_of_mean"}

# How many ranks share the experts of a layer, and the options. test_meshes.py has ranks that share less, and
# tests/run/checkpoint/test_reshard.py moves experts between numbers of ranks.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank has data": (2, {"data__global_batch_groups": 1, "router_bias__rate": 1e-2, **EXPERTS}),
    "four": (4, {"data__max_tokens": 70, "parallel__reduce_gradients": "every", **EXPERTS}),
    # Some micro-batches are cut, others are not, and one rank has none. All ranks score first if one must.
    "four, whole paths": (4, {"data__max_tokens": 40, **RECOMPUTE, **EXPERTS, **WHOLE_PATHS}),
}


def square_of_mean(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns the square of a path's mean log-prob, at each of its tokens."""
    sums = torch.zeros_like(pairs.loss_tokens).index_add(0, pairs.path, logprobs * pairs.loss_mask)
    return (sums / pairs.loss_tokens.clamp_min(1e-30)).square()[pairs.path]


def config(folder: Path, name: str, expert_parallel: int = 1) -> Config:
    register_loss("square_of_mean", whole_paths=True)(square_of_mean)
    return tiny_config(
        folder / name.replace(" ", "_"),
        training__steps=2,
        checkpoint__interval=2,
        checkpoint__export_hf=True,
        optimizer__eps=1e-3,
        parallel__expert_parallel=expert_parallel,
        **{"model__name": "qwen3_moe"} | CASES[name][1],
    )


def config_8bit(folder: Path, steps: int, expert_parallel: int = 1) -> Config:
    return tiny_config(
        folder / "8bit",
        model__name="qwen3_moe",
        training__steps=steps,
        checkpoint__interval=1,
        parallel__expert_parallel=expert_parallel,
        optimizer__name="adamw8bit",
    )


# Names of frozen parameters by their prefix. If the whole first layer is frozen, only the gradient of a
# gateway passes through it.
FROZEN: dict[str, tuple[str, ...]] = {
    "experts": ("layers.0.mlp.experts", "layers.1.mlp.experts"),
    "first layer": ("embed_tokens", "layers.0"),
}


def partly_frozen_model(name: str) -> Decoder:
    model = build_model("qwen3_moe", "debug", tie_word_embeddings=False)
    model.init_weights(seed=0)
    for label, parameter in model.named_parameters():
        parameter.requires_grad_(not label.startswith(FROZEN[name]))
    return model


def gradients_of_a_cut_tree(model: Decoder, rank: int) -> dict[str, Tensor]:
    """Returns the gradients of the parameters that are not frozen. Only rank 0 has a tree."""
    tree = TokenTree.from_paths([TokenPath([*range(10), *range(n, 3 * n)]) for n in (4, 5, 6)])
    step = TreeStep(model, TreeLoss(), partitioner=TreePartitioner("auto", 12))
    step.run(step.prepare([[tree]] if rank == 0 else []))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def run_frozen(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in FROZEN:
        model = parallelize(partly_frozen_model(name), mesh, dtype=torch.float32, expert_parallel=2)
        found[name] = gradients_of_a_cut_tree(model, rank)
    torch.save(found, folder / f"frozen_{rank}.pt")


def run_in_bf16(rank: int, folder: Path) -> None:
    """Saves the fp32 gradients of experts for four micro-batches together, and for each of them alone."""
    model = build_model("qwen3_moe", "debug")
    model.init_weights(0)
    parallelize(model, init_device_mesh("cpu", (2,)), dtype=torch.bfloat16, expert_parallel=2)
    weights = {name: p for name, p in model.named_parameters() if ".experts." in name}
    batches = [
        [TokenTree.from_paths([TokenPath([*range(9), *range(i, 3 * i)]) for i in (n, n + 2)])]
        for n in (3, 4, 5, 6)
    ]
    step = TreeStep(model, TreeLoss())
    found = []
    for chosen in (batches, *([batch] for batch in batches)):
        inputs = step.prepare(chosen)
        step.run(replace(inputs, counts=replace(inputs.counts, normalizer=6.0)))
        grads = {name: cast(DTensor, weight.grad).to_local().clone() for name, weight in weights.items()}
        found.append(grads)
        model.zero_grad()
    assert all(model.get_parameter(name) is weight for name, weight in weights.items())
    torch.save(found, folder / f"bf16_{rank}.pt")


def load_snapshot(rank: int, ports: list[int], folder: Path) -> None:
    """Loads a snapshot into shards; rank 0 saves the gathered weights."""
    with process_group(rank, 4, ports[0]):
        mesh = init_device_mesh("cpu", (4,))
        options = ModelConfig(hf_path=str(folder / "snapshot")), TrainingConfig()
        model = build_parallel_model(*options, ParallelConfig(expert_parallel=2), mesh)
        weights = {name: cast(DTensor, w).full_tensor() for name, w in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


def train_case(rank: int, ports: list[int], folder: Path, name: str) -> None:
    num_ranks, _ = CASES[name]
    with as_rank(rank, num_ranks, ports[0]):
        train(config(folder, name, num_ranks))


def train_8bit_twice(rank: int, ports: list[int], folder: Path) -> None:
    for steps, port in zip((1, 2), ports, strict=True):
        with as_rank(rank, 4, port):
            train(config_8bit(folder, steps, expert_parallel=2))


def gradients_on_two_ranks(rank: int, ports: list[int], folder: Path) -> None:
    with process_group(rank, 2, ports[0]):
        run_frozen(rank, folder)
        run_in_bf16(rank, folder)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the gradients that two ranks compute."""
    folder = tmp_path_factory.mktemp("gradients")
    run_ranks(gradients_on_two_ranks, 2, folder)
    return folder


@pytest.mark.parametrize("name", slow_except(("one rank has data",), CASES))
def test_sharded_experts_train_as_one_process(tmp_path: Path, name: str) -> None:
    """Compares losses, gradient norms, the weights of the checkpoint and those of the export."""
    many = config(tmp_path / "many", name)  # writes the data before several ranks read it
    run_ranks(train_case, CASES[name][0], tmp_path / "many", name)
    one = train(config(tmp_path / "one", name))
    assert_same_run(many, one)
    exports = [load_pretrained(f"{c.folder}/hf", torch.float32) for c in (many, one.config)]
    for ours, theirs in zip(*(model.state_dict().values() for model in exports), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_parameters_may_be_frozen(gradients: Path, name: str) -> None:
    want = gradients_of_a_cut_tree(partly_frozen_model(name), 0)
    assert not any(label.startswith(FROZEN[name]) for label in want)
    for rank in range(2):
        got = torch.load(gradients / f"frozen_{rank}.pt")[name]
        assert got.keys() == want.keys()
        for label, gradient in want.items():
            torch.testing.assert_close(got[label], gradient, rtol=1e-4, atol=5e-6, msg=label)


@pytest.mark.slow
def test_gradients_of_experts_on_one_rank_are_accumulated_in_fp32(gradients: Path) -> None:
    """Each micro-batch's gradient is rounded to bf16; their sum is not rounded."""
    for rank in range(2):
        together, *alone = torch.load(gradients / f"bf16_{rank}.pt")
        assert len(together) == 2 * 2  # layers and weights
        for name, total in together.items():
            parts = [part[name] for part in alone]
            assert total.dtype == torch.float32
            assert all(part.any() and torch.equal(part, part.bfloat16().float()) for part in parts)
            torch.testing.assert_close(total, sum(parts), rtol=1e-6, atol=1e-9)
            assert not torch.equal(total, total.bfloat16().float())


@pytest.mark.parametrize(("num_ranks", "has_fsdp"), [(2, False), (4, True)])
def test_fsdp_leaves_out_experts_that_one_rank_holds(num_ranks: int, has_fsdp: bool) -> None:
    """Two ranks hold all experts together. With four ranks, two hold the same experts."""
    with fake_group(num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))
        with torch.device("meta"):
            model = build_model("qwen3_moe", "debug")
        parallelize(model, mesh, expert_parallel=2)
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        assert [isinstance(experts, FSDPModule) for experts in layers] == [has_fsdp] * 2
        with cast_weights(model):
            dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for name, dtype in dtypes.items():
        is_cast = ".experts." in name and not has_fsdp
        assert dtype == (torch.bfloat16 if is_cast else torch.float32), name


@contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    """Joins a group whose other ranks do not exist and whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_8_bit_states_keep_the_number_of_ranks_that_share_an_expert(tmp_path: Path) -> None:
    """Four ranks, two per expert, resume their run. One rank cannot."""
    config_8bit(tmp_path, 1)  # writes the data before several ranks read it
    run_ranks(train_8bit_twice, 4, tmp_path, num_groups=2)
    assert len(read_metrics(config_8bit(tmp_path, 2))) == 2
    with pytest.raises(UserError, match=r"ranks_that_share_an_expert = 2 \(now None\)"):
        train(config_8bit(tmp_path, 3))


@pytest.mark.slow
def test_a_snapshot_is_loaded_into_shards(tmp_path: Path) -> None:
    save_pretrained(build_model("qwen3_moe", "debug"), tmp_path / "snapshot")
    run_ranks(load_snapshot, 4, tmp_path)
    got = torch.load(tmp_path / "weights.pt")
    want = load_pretrained(tmp_path / "snapshot", torch.float32).state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], weight) for name, weight in want.items())


@pytest.mark.parametrize(
    ("name", "num_ranks", "expert_parallel", "message"),
    [
        ("qwen3", 4, 2, "expected 1, because the model has no experts"),
        ("qwen3_moe", 4, 3, "expected a divisor of the number of ranks (--nproc or torchrun), 4, got 3"),
        ("qwen3_moe", 16, 16, "expected a divisor of the number of experts, 8, got 16"),
        ("qwen3_moe", 14, 2, "7 ranks shard each expert, so 7 must divide the 192 rows"),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(
    name: str, num_ranks: int, expert_parallel: int, message: str
) -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(size=lambda: num_ranks, device_type="cpu"))
    with pytest.raises(UserError, match=re.escape(message)):
        parallelize(build_model(name, "debug"), mesh, expert_parallel=expert_parallel)


@pytest.mark.parametrize("budget", [("offload", None), ("auto", 1e9)])
def test_offloading_is_refused_with_sharded_experts(budget: tuple[Any, float | None]) -> None:
    model = build_model("qwen3_moe", "debug")
    assert model.experts is not None
    model.experts.group = cast(dist.ProcessGroup, object())
    for policy in ("auto", "keep", "recompute"):
        TreeStep(model, TreeLoss(), activations=Activations(torch.device("cpu"), policy))
    with pytest.raises(UserError, match="expected 'keep' or 'recompute' with"):
        TreeStep(model, TreeLoss(), activations=Activations(torch.device("cpu"), *budget))
