"""Ranks that share tokens, experts and weights in any combination train as one process."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed.test_expert_parallel import square_of_mean
from tests.support.cases import slow_except
from tests.support.processes import as_rank, process_group, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import SMALL, tiny_config, train
from titan_tree.components.moe.routing import RouterLoss
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.sequence_parallel import check_heads
from titan_tree.engine.activations import Activations
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model
from titan_tree.models.tree_model import Execution
from titan_tree.run.config import Config
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

CUT: dict[str, Any] = {"data__max_tokens": 24}  # of a partition; only one tree has fewer
SEQUENCE, EXPERT, REPLICATE = (
    f"parallel__{key}" for key in ("sequence_parallel", "expert_parallel", "replicate")
)
MICRO_BATCHES = {"data__max_tokens": 70}  # several in each step, without partitions
# Ranks, how they share the work, and the other options.
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "sequence 2, recomputed": (2, {SEQUENCE: 2}, {**CUT, "partition__activations": "recompute"}),
    "sequence 2, experts 2, hybrid": (2, {SEQUENCE: 2, EXPERT: 2}, {**CUT, **SMALL["qwen3_5_moe"]}),
    "sequence 2, whole paths": (2, {SEQUENCE: 2}, {"loss__name": "square_of_mean", **MICRO_BATCHES}),
    "replicate 2": (2, {REPLICATE: 2}, {**CUT}),
    "replicate 2 of 4": (4, {REPLICATE: 2}, {"parallel__reduce_gradients": "every", **MICRO_BATCHES}),
    "all": (
        4,
        {REPLICATE: 2, SEQUENCE: 2, EXPERT: 2},
        {**CUT, **EXPERTS, "training__activation_checkpoint": "selective"},
    ),
}


def config(folder: Path, name: str, **parallel: int) -> Config:
    register_loss("square_of_mean", whole_paths=True)(square_of_mean)
    options: dict[str, Any] = {"optimizer__eps": 1e-3, "training__steps": 2, "checkpoint__interval": 2}
    return tiny_config(folder / name.replace(" ", "_"), **options | CASES[name][2] | parallel)


def trees(number: int) -> list[TokenTree]:
    """Returns trees with nodes of one token, and paths that end within the tree."""
    result = []
    for seed in range(number):
        draw = torch.Generator().manual_seed(seed)

        def tokens(low: int, high: int, draw: torch.Generator = draw) -> list[int]:
            length = int(torch.randint(low, high, (), generator=draw))
            return torch.randint(64, (length,), generator=draw).tolist()

        trunk = tokens(20, 30)
        stems = [trunk[: 7 * i + 5] + tokens(1, 9) for i in range(4)]
        lists = [stem + tokens(1, 20) for stem in stems for _ in range(2)] + [trunk]
        fields = {"advantage": 1.0, "weight": 0.5}
        result.append(
            TokenTree.from_paths(
                [
                    TokenPath(path, **fields, old_logprobs=-4 * torch.rand(len(path), generator=draw).numpy())
                    for path in lists
                ]
            )
        )
    return result


# Families in float64: the model, the loss, and how four ranks share the work.
EXACT: dict[str, tuple[str, str, dict[str, int]]] = {
    "experts": ("qwen3_moe", "gspo", {"sequence_parallel": 2, "expert_parallel": 4}),
    "hybrid with experts": ("qwen3_5_moe", "grpo", {"sequence_parallel": 4, "expert_parallel": 2}),
}


HYBRID: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
MAX_TOKENS = (None, 48)  # of a partition: five to seven in a tree


def exact_model(name: str) -> Decoder:
    model = build_model(EXACT[name][0], "debug", vocab_size=64, **(HYBRID if "hybrid" in name else {}))
    model.init_weights(0)
    return model.double()


def exact_result(
    model: Decoder, name: str, own: list[TokenTree], max_tokens: int | None
) -> dict[str, Tensor]:
    """Returns the loss, all gradients, and the log-probs and experts of the paths of the first tree."""
    loss = EXACT[name][1]
    router = RouterLoss(0.1, 0.01, "micro_batch") if model.experts else None
    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(model, TreeLoss(loss), partitioner=partitioner, router_loss=router)
    made = step.prepare([[tree] for tree in own])
    result = {"loss": step.run(made).loss}
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        gradient = parameter.grad
        result[label] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        parameter.grad = None
    lists = [path.tokens.tolist() for path in trees(1)[0].paths]
    with torch.no_grad():
        if model.experts:
            logprobs, experts = tree_logprobs(model, lists, max_tokens, return_routed_experts=True)
            result["experts"] = torch.cat(experts)
        else:
            logprobs = tree_logprobs(model, lists, max_tokens)
        result["logprobs"] = torch.cat(logprobs)
    return result


EVERYDAY = ("sequence 2, whole paths", "replicate 2")


def train_case(rank: int, ports: list[int], folder: Path, name: str) -> None:
    num_ranks, parallel, _ = CASES[name]
    with as_rank(rank, num_ranks, ports[0]):
        train(config(folder, name, **parallel))


@pytest.mark.parametrize("name", slow_except(EVERYDAY, CASES))
def test_ranks_train_as_one_process(tmp_path: Path, name: str) -> None:
    """Compares losses and gradient norms, and the weights of the checkpoint, which one rank loads."""
    many = config(tmp_path / "many", name)  # writes the data before several ranks read it
    run_ranks(train_case, CASES[name][0], tmp_path / "many", name)
    assert_same_run(many, train(config(tmp_path / "one", name)))


def save_exact_results(rank: int, ports: list[int], path: Path, name: str) -> None:
    results, parallel = {}, EXACT[name][2]
    with process_group(rank, 4, ports[0]):
        mesh = init_device_mesh("cpu", (4,))
        for max_tokens in MAX_TOKENS:
            model = parallelize(exact_model(name), mesh, dtype=torch.float64, **parallel)
            first = 2 * (rank // parallel["sequence_parallel"])  # a second group of ranks has the last tree
            own = trees(3)[first : first + (3 if parallel["sequence_parallel"] == 4 else 2)]
            results[max_tokens] = exact_result(model, name, own, max_tokens)
    if rank == 3:
        torch.save(results, path)


@pytest.fixture(scope="module")
def exact_results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int | None, dict[str, Tensor]]]:
    """Returns a case of EXACT, and the results of four processes by largest number of tokens."""
    path = tmp_path_factory.mktemp("exact") / "results.pt"
    run_ranks(save_exact_results, 4, path, request.param)
    return request.param, torch.load(path)


@pytest.mark.slow
@pytest.mark.xdist_group("exact")
@pytest.mark.parametrize("max_tokens", MAX_TOKENS)
@pytest.mark.parametrize("exact_results", EXACT, indirect=True, scope="module")
def test_gradients_are_exact(
    exact_results: tuple[str, dict[int | None, dict[str, Tensor]]], max_tokens: int | None
) -> None:
    """Compares with one process in float64: the loss, gradients, log-probs and experts."""
    name, results = exact_results
    got = results[max_tokens]
    want = exact_result(exact_model(name), name, trees(3), max_tokens)
    assert got.keys() == want.keys()
    for label, value in want.items():
        scale = value.abs().max().clamp_min(1e-30)
        error = float((got[label] - value).abs().max() / scale)
        assert error < (1e-9 if value.dtype == torch.float64 else 1e-6), (label, error)


@pytest.mark.parametrize(
    ("name", "num_ranks", "parallel", "message"),
    [
        ("qwen3", 6, {"replicate": 4}, "a divisor of the number of ranks (--nproc or torchrun), 6, got 4"),
        ("qwen3", 8, {"replicate": 2, "sequence_parallel": 8}, "ranks of a replica, 4, got 8"),
        ("qwen3", 6, {"sequence_parallel": 3}, "expected a divisor of num_attention_heads, 4, got 3"),
        ("qwen3", 8, {"sequence_parallel": 8}, "expected a divisor of num_attention_heads, 4, got 8"),
        ("qwen3_5", 6, {"sequence_parallel": 3}, "expected a divisor of linear_num_value_heads, 4, got 3"),
        ("qwen3_moe", 12, {"sequence_parallel": 4, "expert_parallel": 6}, "multiple of parallel.seq"),
        ("qwen3", 4, {"expert_parallel": 2}, "expected 1, because the model has no experts"),
    ],
)  # fmt: skip
def test_impossible_divisions_are_refused(
    name: str, num_ranks: int, parallel: dict[str, int], message: str
) -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(size=lambda: num_ranks, device_type="cpu"))
    with pytest.raises(UserError, match=re.escape(message)):
        parallelize(build_model(name, "debug"), mesh, **parallel)


def test_a_mixer_without_heads_to_share_is_refused() -> None:
    model = build_model("qwen3", "debug")
    model.layers[0].self_attn.num_heads = {}  # type: ignore[union-attr,assignment]
    check_heads(model, 1)
    with pytest.raises(UserError, match=r"sequence_parallel: expected 1 for a Qwen3 model, .* got 2$"):
        check_heads(model, 2)


def test_offloading_is_refused_where_ranks_share_tokens() -> None:
    model = build_model("qwen3", "debug")
    group = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    model.execution = Execution(sequence_group=group)
    with pytest.raises(UserError, match="expected 'keep' or 'recompute' with"):
        TreeStep(model, TreeLoss(), activations=Activations(torch.device("cpu"), "offload"))
