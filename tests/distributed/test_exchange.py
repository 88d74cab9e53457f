"""A layer whose experts are sharded over ranks equals the layer with all experts on one rank."""

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.processes import process_group, run_ranks
from titan_tree.components.moe import Experts, MoE
from titan_tree.distributed.exchange import Exchange

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("exchange")]

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 6, 10
# Number of tokens of each rank, and experts that all tokens choose.
CASES: dict[str, tuple[list[int], list[int]]] = {
    "different numbers of tokens": ([5, 17, 2, 40], []),
    "experts of one rank": ([9, 3, 4, 7], [0, 1]),  # the other ranks receive nothing
    "one token": ([1, 1, 1, 1], []),
}


def make_layer(favourites: list[int]) -> MoE:
    generator = torch.Generator().manual_seed(0)
    layer = MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, 2, norm_topk_prob=True).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        layer.gate.weight[favourites, 0] += 50  # the first feature of every token is 1
    return layer


def run_layer(layer: torch.nn.Module, rank: int, num_tokens: int) -> list[Tensor]:
    """Returns the output for a rank's tokens, then gradients of x, the router and the experts."""
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0] = 1
    y, *_ = layer(x.requires_grad_(), torch.ones(num_tokens))
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def run_all_cases(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    """Saves the results of the eager and of the compiled layer for each case."""
    found: dict[str, list[list[Tensor]]] = {}
    with process_group(rank, num_ranks, ports[0]):
        for name, (num_tokens, favourites) in CASES.items():
            whole = make_layer(favourites)
            sharded = copy.deepcopy(whole)
            sharded.experts = Experts(NUM_EXPERTS // num_ranks, HIDDEN, INTERMEDIATE)
            sharded.experts.dispatcher = Exchange(cast(dist.ProcessGroup, dist.group.WORLD))
            for mine, every in zip(sharded.experts.parameters(), whole.experts.parameters(), strict=True):
                mine.data = every.detach().chunk(num_ranks)[rank].clone()
            compiled = torch.compile(sharded, backend="aot_eager", fullgraph=True, dynamic=True)
            found[name] = [run_layer(layer, rank, num_tokens[rank]) for layer in (sharded, compiled)]
    torch.save(found, folder / f"{num_ranks}_{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    for num_ranks in (2, 4):
        run_ranks(run_all_cases, num_ranks, num_ranks, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sharded_layer_equals_the_whole_layer(results: Path, num_ranks: int, name: str) -> None:
    """The output and all gradients are equal in float64, eager and compiled."""
    num_tokens, favourites = CASES[name]
    want = [run_layer(make_layer(favourites), rank, num_tokens[rank]) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        for got in torch.load(results / f"{num_ranks}_{rank}.pt")[name]:
            for mine, other in zip(got[:3], want[rank][:3], strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
            for i in (3, 4):  # the gradient of an expert sums over the tokens of all ranks
                total = torch.stack([of_rank[i] for of_rank in want]).sum(0).chunk(num_ranks)[rank]
                torch.testing.assert_close(got[i], total, rtol=1e-11, atol=1e-12)
