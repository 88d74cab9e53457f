"""A layer whose experts are sharded over GPUs computes what the whole layer does.

To debug without GPUs, run the same code on gloo with TITAN_TREE_ON_CPU=1.
"""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.gpu import ON_CPU, ON_RANKS, on_gpus
from tests.support.processes import as_rank
from titan_tree.components.moe.layer import MoE
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.distributed.mesh import init_distributed

pytestmark = ON_RANKS


def layer_results(layer: MoE, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Returns the output, then gradients of x, the router and the experts, all on the CPU."""
    y, *_ = layer(x, torch.ones(len(x), device=x.device))
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, [x, *layer.parameters()], dy))]


def run_layer(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    """Saves what a sharded layer and the whole layer compute for this rank's tokens, in fp32 and bf16."""
    found = {}
    with as_rank(rank, num_ranks, ports[0]) if num_ranks > 1 else nullcontext():
        _, device = init_distributed()
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            whole = MoE(64, 32, 16, 3, norm_topk_prob=True)
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.normal_(0, 0.2, generator=generator)
            whole = whole.bfloat16().to(device, dtype)
            sharded = copy.deepcopy(whole)
            sharded.experts.dispatcher = ShardedExperts(cast(dist.ProcessGroup, dist.group.WORLD))
            for name, weight in whole.experts.named_parameters():
                mine = torch.nn.Parameter(weight.detach().chunk(num_ranks)[rank].clone())
                setattr(sharded.experts, name, mine)
            generator.manual_seed(rank)
            x, dy = (torch.randn(501 + rank, 64, generator=generator).bfloat16() for _ in range(2))
            x, dy = x.to(device, dtype).requires_grad_(), dy.to(device, dtype)
            first = layer_results(sharded, x, dy)
            if not ON_CPU and dtype == torch.bfloat16:  # fp32 has no grouped product and waits
                y, *_ = sharded(x, torch.ones(len(x), device=device))
                torch.cuda.set_sync_debug_mode("error")
                y, *_ = sharded(x, torch.ones(len(x), device=device))
                torch.autograd.grad(y, [x, *sharded.parameters()], dy)
                torch.cuda.set_sync_debug_mode("default")
            found[dtype] = first, layer_results(sharded, x, dy), layer_results(whole, x, dy)
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_sharded_layer_equals_the_whole_layer(num_ranks: int, tmp_path: Path) -> None:
    """Up to rounding, and every run gives the same bits. Only numbers of rows make the host wait."""
    if num_ranks == 1:
        run_layer(0, [], 1, tmp_path)
    else:
        on_gpus(run_layer, num_ranks, num_ranks, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        every = [found[dtype] for found in ranks]
        for rank, (first, second, whole) in enumerate(every):
            assert all(map(torch.equal, first, second))
            totals = [sum(w[i].double() for _, _, w in every).chunk(num_ranks)[rank] for i in (3, 4)]
            for got, want in zip(first, [*(t.double() for t in whole[:3]), *totals], strict=True):
                assert (got - want).norm() <= tolerance * want.norm()
