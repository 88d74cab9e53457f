"""Experts shared out among ranks: a layer against the same layer with all experts, on every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.test_fsdp import free_ports
from titan_tree.components.moe import Experts, MoE
from titan_tree.distributed.exchange import Exchange

NUM_EXPERTS, SIZE = 8, 6
# Tokens of each rank, and experts that get everything: [] is nobody's choice but the router's.
CASES = {
    "different numbers": ([5, 17, 2, 40], []),
    "one token": ([1, 1, 1, 1], []),
    "experts of one rank": ([9, 3, 4, 7], [0, 1]),  # nothing arrives anywhere else
}


def layer(favourites):
    torch.manual_seed(0)
    made = MoE(SIZE, 10, NUM_EXPERTS, 2, renormalise=True).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
        made.gate.weight[favourites, 0] += 50  # of a feature that is 1
    return made


def shared_out(made, rank, num_ranks):
    """The same, with the experts of one rank of the world."""
    own = copy.deepcopy(made)
    own.experts = Experts(NUM_EXPERTS // num_ranks, SIZE, 10).double()
    own.experts.dispatcher = Exchange(dist.group.WORLD)
    for mine, all_of_them in zip(own.experts.parameters(), made.experts.parameters(), strict=True):
        mine.data = all_of_them.detach().chunk(num_ranks)[rank].clone()
    return own


def inputs(rank, num_tokens):
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(num_tokens, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0] = 1
    return x.requires_grad_(), dy


def results(made, x, dy):
    """Output, then gradients of x, the router and the experts."""
    y, _ = made(x, torch.ones(len(x)))
    return [y.detach(), *torch.autograd.grad(y, [x, *made.parameters()], dy)]


def check(rank, num_ranks, num_tokens, favourites, compiled):
    made = layer(favourites)
    want = [results(made, *inputs(r, num_tokens[r])) for r in range(num_ranks)]
    own = shared_out(made, rank, num_ranks)
    if compiled:
        torch._dynamo.reset()
        own.compile(fullgraph=True, dynamic=True)
    got = results(own, *inputs(rank, num_tokens[rank]))
    for mine, other in zip(got[:3], want[rank][:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
    for i in (3, 4):  # of an expert's weights: of all ranks' tokens
        total = sum(each[i] for each in want).chunk(num_ranks)[rank]
        torch.testing.assert_close(got[i], total, rtol=1e-11, atol=1e-12)


def worker(rank, num_ranks, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    for num_tokens, favourites in CASES.values():
        for compiled in (False, True):
            check(rank, num_ranks, num_tokens, favourites, compiled)
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_equals_that_with_all_experts(num_ranks):
    mp.spawn(worker, (num_ranks, *free_ports(1)), nprocs=num_ranks)
