"""Ranks that share out experts: a layer equals that with all experts, and training that of one process."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed.test_fsdp import EXPERTS, as_rank, assert_same_run, free_ports
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.build import build_parallel_model
from titan_tree.components.moe import Experts, MoE
from titan_tree.components.tree_loss import TreeLoss, register_loss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed.exchange import Exchange
from titan_tree.distributed.mesh import init_distributed
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.activations import Activations
from titan_tree.engine.lockstep import in_lockstep, positions
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import load_pretrained, save_pretrained
from titan_tree.models.registry import build_model
from titan_tree.tree.batch import PathPairs, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

CUT: dict[str, Any] = {"data__max_tokens": 12}  # no tree fits one forward, and each rank cuts its own
FEW: dict[str, Any] = {"data__global_batch_groups": 1}  # one rank has data
WHOLE: dict[str, Any] = {"loss__name": "square_of_mean"}
HYBRID = {"model__name": "qwen3_5_moe"}
CHECKPOINT = {"training__activation_checkpoint": "full"}
EVERY = {"parallel__reduce_gradients": "every"}

# Ranks, of which so many share out experts, up to which step; and options.
TWO, FOUR, TWO_BY_TWO = [(2, 2, 2)], [(4, 4, 2)], [(4, 2, 2)]
CASES: dict[str, tuple[list[tuple[int, int, int]], dict[str, Any]]] = {
    "one group, biases": (TWO, {**FEW, "router_bias__rate": 1e-2, **EXPERTS}),
    "partitions": (TWO, {**CUT, **EXPERTS}),
    "recompute": (TWO, {**CUT, "partition__activations": "recompute", **CHECKPOINT, **EXPERTS}),
    "whole paths": (TWO, {**CUT, "training__activation_checkpoint": "selective", **WHOLE}),
    "hybrid": (TWO, {**CUT, **HYBRID}),
    "two by two": (TWO_BY_TWO, {**CUT, **EXPERTS}),
    "four": (FOUR, {"data__max_tokens": 70, **EVERY, **EXPERTS}),
    "resumed by others": ([(4, 2, 1), (2, 2, 2)], {"lr_scheduler__min_lr_factor": 1.0}),
    # Some micro-batches are cut, others not, and one rank has none: all score first where one must.
    "four, whole paths": (FOUR, {"data__max_tokens": 40, **EXPERTS, **WHOLE}),
}


@register_loss("square_of_mean", whole_paths=True)
def square_of_mean(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Of the path's log-probs, at each of its tokens."""
    sums = torch.zeros_like(pairs.loss_tokens).index_add(0, pairs.path, logprobs * pairs.loss_mask)
    return (sums / pairs.loss_tokens.clamp_min(1e-30)).square()[pairs.path]


def config(folder: Path, name: str, expert_parallel: int = 1, steps: int = 2) -> Config:
    return tiny_config(
        folder / name.replace(" ", "_"),
        training__steps=steps,
        checkpoint__interval=2,
        checkpoint__export_hf=True,
        optimizer__eps=1e-3,
        parallel__expert_parallel=expert_parallel,
        **{"model__name": "qwen3_moe"} | CASES[name][1],
    )


# A layer: tokens of each rank, and experts that all of them choose.
NUM_EXPERTS, SIZE = 8, 6
LAYERS: dict[str, tuple[list[int], list[int]]] = {
    "different numbers": ([5, 17, 2, 40], []),
    "experts of one rank": ([9, 3, 4, 7], [0, 1]),  # nothing arrives anywhere else
    "one token": ([1, 1, 1, 1], []),
}


def layer(favourites: list[int]) -> MoE:
    generator = torch.Generator().manual_seed(0)
    made = MoE(SIZE, 10, NUM_EXPERTS, 2, norm_topk_prob=True).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        made.gate.weight[favourites, 0] += 50  # of a feature that is 1
    return made


def results(made: torch.nn.Module, rank: int, num_tokens: int) -> list[Tensor]:
    """Of a rank's tokens the output, then gradients of x, the router and the experts."""
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(num_tokens, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0] = 1
    y, *_ = made(x.requires_grad_(), torch.ones(num_tokens))
    return [y.detach(), *torch.autograd.grad(y, [x, *made.parameters()], dy)]


def run_layers(rank: int, num_ranks: int) -> dict[str, list[list[Tensor]]]:
    """Of each case the results as it is, and compiled."""
    found: dict[str, list[list[Tensor]]] = {}
    torch._dynamo.reset()
    for name, (num_tokens, favourites) in LAYERS.items():
        all_experts = layer(favourites)
        own = copy.deepcopy(all_experts)
        own.experts = Experts(NUM_EXPERTS // num_ranks, SIZE, 10)
        own.experts.dispatcher = Exchange(cast(dist.ProcessGroup, dist.group.WORLD))
        for mine, whole in zip(own.experts.parameters(), all_experts.experts.parameters(), strict=True):
            mine.data = whole.detach().chunk(num_ranks)[rank].clone()
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True, dynamic=True)
        found[name] = [results(each, rank, num_tokens[rank]) for each in (own, compiled)]
    return found


# What is frozen, by how parameters' names begin. Where all of the first layer is, only a gateway's gradient
# passes through it.
FROZEN: dict[str, tuple[str, ...]] = {
    "experts": ("layers.0.mlp.experts", "layers.1.mlp.experts"),
    "below": ("embed_tokens", "layers.0"),
}


def partly_frozen(name: str) -> Decoder:
    model = build_model("qwen3_moe", "debug", tie_word_embeddings=False)
    model.init_weights(torch.Generator().manual_seed(0))
    for label, parameter in model.named_parameters():
        parameter.requires_grad_(not label.startswith(FROZEN[name]))
    return model


def gradients_of_a_cut_tree(model: Decoder, rank: int) -> dict[str, Tensor]:
    """Of what is not frozen; rank 0 has the tree."""
    tree = TokenTree.from_paths([TokenPath([*range(10), *range(n, 3 * n)]) for n in (4, 5, 6)])
    step = TreeStep(model, TreeLoss(), partitioner=TreePartitioner("auto", 12))
    step.run(step.prepare([[tree]] if rank == 0 else []))
    every = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in every.items()}


def run_frozen(rank: int) -> dict[str, dict[str, Tensor]]:
    mesh, options = init_device_mesh("cpu", (2,)), {"dtype": torch.float32, "expert_parallel": 2}
    models = {name: parallelize(partly_frozen(name), mesh, **options) for name in FROZEN}  # type: ignore[arg-type]
    return {name: gradients_of_a_cut_tree(model, rank) for name, model in models.items()}


def run_cases(rank: int, num_ranks: int, names: list[str], folder: Path, ports: list[int]) -> None:
    for name, port in zip(CASES, ports, strict=True):
        for num, expert_parallel, steps in CASES[name][0]:
            if num == num_ranks and name in names:
                with as_rank(rank, num_ranks, port):
                    train(config(folder, name, expert_parallel, steps))


def load_snapshot(folder: Path) -> None:
    """Into shards; rank 0 writes what they are together."""
    mesh, _ = init_distributed()
    options = ModelConfig(hf_path=str(folder / "snapshot")), TrainingConfig()
    model = build_parallel_model(*options, ParallelConfig(expert_parallel=2), mesh)
    weights = {name: cast(DTensor, w).full_tensor() for name, w in model.state_dict().items()}
    if mesh.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


def eight_bit(folder: Path, steps: int, expert_parallel: int = 1) -> Config:
    return tiny_config(
        folder / "eight_bit",
        model__name="qwen3_moe",
        training__steps=steps,
        checkpoint__interval=1,
        parallel__expert_parallel=expert_parallel,
        optimizer__name="adamw8bit",
    )


def worker(process: int, folder: Path, ports: list[list[int]]) -> None:
    """One of four ranks; then one of two, twice, each time for half of what two ranks do."""
    torch.set_num_threads(1)
    pair, rank = divmod(process, 2)
    with as_rank(process, 4, ports[0][-2]):
        load_snapshot(folder)
    with torch.compiler.set_stance("force_eager"):  # AdamW8bit would compile
        for steps in (1, 2):
            with as_rank(process, 4, ports[steps - 1][-3]):
                train(eight_bit(folder, steps, 2))
    for place, num_ranks, names, own_ports in (
        (process, 4, list(CASES), ports[0]),
        (rank, 2, list(CASES)[pair::2], ports[1]),
    ):
        if num_ranks == 4 or pair == 0:
            address = f"tcp://127.0.0.1:{own_ports[-1]}"
            dist.init_process_group("gloo", init_method=address, rank=place, world_size=num_ranks)
            torch.save(run_layers(place, num_ranks), folder / f"layers_{num_ranks}_{place}.pt")
            if num_ranks == 2:
                torch.save(run_frozen(place), folder / f"frozen_{place}.pt")
            dist.destroy_process_group()
        run_cases(place, num_ranks, names, folder, own_ports[:-3])


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it, by four processes."""
    folder = tmp_path_factory.mktemp("shared")
    for name in CASES:
        config(folder, name)  # writes the data before the ranks want it
    eight_bit(folder, 1)
    save_pretrained(build_model("qwen3_moe", "debug"), folder / "snapshot")
    ports = free_ports(2 * len(CASES) + 6)
    mp.spawn(worker, (folder, [ports[::2], ports[1::2]]), nprocs=4)
    return folder


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_equals_that_with_all_experts(shared_out: Path, num_ranks: int, name: str) -> None:
    """In float64, values and all gradients."""
    num_tokens, favourites = LAYERS[name]
    want = [results(layer(favourites), rank, num_tokens[rank]) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        for got in torch.load(shared_out / f"layers_{num_ranks}_{rank}.pt")[name]:
            for mine, other in zip(got[:3], want[rank][:3], strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
            for i in (3, 4):  # of an expert: of all ranks' tokens
                total = sum(each[i] for each in want).chunk(num_ranks)[rank]  # type: ignore[union-attr]
                torch.testing.assert_close(got[i], total, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(shared_out: Path, tmp_path: Path, name: str) -> None:
    """Losses, gradient norms, weights of the checkpoint and of the export."""
    one, many = train(config(tmp_path, name)), config(shared_out, name)
    assert_same_run(many, one)
    exports = [load_pretrained(f"{c.folder}/hf", torch.float32) for c in (many, one.config)]
    for ours, theirs in zip(*(model.state_dict().values() for model in exports), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FROZEN)
def test_parameters_may_be_frozen(shared_out: Path, name: str) -> None:
    want = gradients_of_a_cut_tree(partly_frozen(name), 0)
    assert not any(label.startswith(FROZEN[name]) for label in want)
    for rank in range(2):
        got = torch.load(shared_out / f"frozen_{rank}.pt")[name]
        assert got.keys() == want.keys()
        for label, gradient in want.items():
            torch.testing.assert_close(got[label], gradient, rtol=1e-4, atol=1e-6, msg=label)


def test_8_bit_states_of_an_experts_rows_stay_with_as_many_ranks(shared_out: Path) -> None:
    """Four ranks, two to an expert, went on; one does not."""
    assert len(read_metrics(eight_bit(shared_out, 2))) == 2
    with pytest.raises(UserError, match=r"ranks_that_share_an_expert = 2 \(now None\)"):
        train(eight_bit(shared_out, 3))


def test_a_snapshot_goes_to_shards(shared_out: Path) -> None:
    got = torch.load(shared_out / "weights.pt")
    want = load_pretrained(shared_out / "snapshot", torch.float32).state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], weight) for name, weight in want.items())


def test_larger_subtrees_come_first() -> None:
    """A root, its small child, its large child with two children of its own, and a second root."""
    batches = [SimpleNamespace(parent=parent) for parent in (-1, 0, 0, 2, 2, -1)]
    found = positions(cast(list[TreeBatch], batches))
    assert found == [(0,), (0, 1), (0, 0), (0, 0, 0), (0, 0, 1), (1,)]


def test_a_schedule_is_the_union_of_all_ranks_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [[[-1, 0, 0], [-1]], [[-1, 0, 1]], []]  # parents, of each rank and micro-batch
    own = [
        [[cast(TreeBatch, SimpleNamespace(parent=p)) for p in parents] for parents in rank] for rank in trees
    ]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = [[positions(batches) for batches in rank] for rank in own]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(
        "titan_tree.engine.lockstep.dataclasses.replace", lambda batch, parent: (batch, parent)
    )
    monkeypatch.setattr("titan_tree.engine.lockstep.dummy_batch", lambda: "dummy")
    group = cast(dist.ProcessGroup, SimpleNamespace(size=lambda: 3))
    for batches in own:
        schedule = in_lockstep(batches, 3, group)
        assert [[parent for _, parent in tree] for tree in schedule] == [[-1, 0, 1, 0], [-1], [-1]]
        ran = [batch for tree in schedule for batch, _ in tree if batch != "dummy"]
        assert sorted(map(id, ran)) == sorted(id(batch) for tree in batches for batch in tree)


@pytest.mark.parametrize(
    ("name", "num_ranks", "expert_parallel", "message"),
    [
        ("qwen3", 4, 2, "expected 1, because the model has no experts"),
        ("qwen3_moe", 4, 3, "got 3, expected a divisor of the number of ranks (torchrun), 4"),
        ("qwen3_moe", 16, 16, "got 16, expected a divisor of the number of experts, 8"),
        (
            "qwen3_moe",
            14,
            2,
            "expected a larger number: 7 ranks share an expert, and they must divide its 192 rows",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    name: str, num_ranks: int, expert_parallel: int, message: str
) -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(size=lambda: num_ranks, device_type="cpu"))
    with pytest.raises(UserError, match=re.escape(message)):
        parallelize(build_model(name, "debug"), mesh, expert_parallel=expert_parallel)


@pytest.mark.parametrize("budget", [("offload", None), ("auto", 1e9)])
def test_activations_may_not_move(budget: tuple[Any, float | None]) -> None:
    model = build_model("qwen3_moe", "debug")
    assert model.experts is not None
    model.experts.group = cast(dist.ProcessGroup, object())
    for policy in ("auto", "keep", "recompute"):
        TreeStep(model, TreeLoss(), activations=Activations(torch.device("cpu"), policy))
    with pytest.raises(UserError, match="expected 'keep' or 'recompute' with"):
        TreeStep(model, TreeLoss(), activations=Activations(torch.device("cpu"), *budget))
