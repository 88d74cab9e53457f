"""Experts sharded over GPUs train as on one GPU in fp32, and compiled as in eager mode in bf16.

To debug without GPUs, run the same code on gloo with TITAN_TREE_EP_ON_CPU=1.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.moe.layer import MoE
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.distributed.mesh import init_distributed
from titan_tree.run.config import Config

ON_CPU = os.environ.get("TITAN_TREE_EP_ON_CPU") == "1"
pytestmark = pytest.mark.slow if ON_CPU else [pytest.mark.gpu]
CUT: dict[str, Any] = {"data__max_tokens": 12, **EXPERTS}
CASES: dict[str, dict[str, Any]] = {
    "micro-batches": {"data__max_tokens": 70, **EXPERTS},
    "partitions": CUT,
    "recompute": {**CUT, "partition__activations": "recompute", "training__activation_checkpoint": "full"},
    "hybrid": {**CUT, "model__name": "qwen3_5_moe"},
}
WORLDS = [(2, 2), (4, 2), (4, 4)]  # ranks, and how many of them share the experts of a layer


def config(folder: Path, name: str, expert_parallel: int = 1, **options: Any) -> Config:
    return tiny_config(
        folder / name.replace(" ", "_"),
        checkpoint__interval=4,
        optimizer__eps=1e-3,
        parallel__expert_parallel=expert_parallel,
        **{"model__name": "qwen3_moe"} | options,
    )


def run(rank: int, ports: list[int], num_ranks: int, made: Config) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with as_rank(rank, num_ranks, ports[0]):
        train(made)


def launch(num_ranks: int, *args: Any, function: Callable[..., None] = run) -> None:
    if not ON_CPU and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    run_ranks(function, num_ranks, num_ranks, *args, start="spawn")


def layer_results(layer: MoE, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Returns the output, then gradients of x, the router and the experts, all on the CPU."""
    y, *_ = layer(x, torch.ones(len(x), device=x.device))
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, [x, *layer.parameters()], dy))]


def run_layer(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    """Saves what a sharded layer and the whole layer compute for this rank's tokens, in fp32 and bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    with as_rank(rank, num_ranks, ports[0]):
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
    launch(num_ranks, tmp_path, function=run_layer)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        every = [found[dtype] for found in ranks]
        for rank, (first, second, whole) in enumerate(every):
            assert all(map(torch.equal, first, second))
            totals = [sum(w[i].double() for _, _, w in every).chunk(num_ranks)[rank] for i in (3, 4)]
            for got, want in zip(first, [*(t.double() for t in whole[:3]), *totals], strict=True):
                assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_one_gpu(name: str, num_ranks: int, expert_parallel: int, tmp_path: Path) -> None:
    """Losses, gradient norms, and weights after four steps are equal within 1e-5."""
    many = config(tmp_path / "many", name, expert_parallel, **CASES[name])
    launch(num_ranks, many)
    assert_same_run(many, train(config(tmp_path / "one", name, **CASES[name])))


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), WORLDS)
@pytest.mark.timeout(900)  # compilation takes minutes
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_bf16_compiled_equals_eager(
    checkpoint: str, num_ranks: int, expert_parallel: int, tmp_path: Path
) -> None:
    """Losses and gradient norms of four steps on partitioned trees agree within the rounding of bf16."""
    options = {"training__dtype": "bfloat16", "training__activation_checkpoint": checkpoint, **CUT}
    options["data__max_tokens"] = 40
    rows = []
    for compile in (False, True):
        name = f"compile {compile}"
        made = config(tmp_path, name, expert_parallel, training__compile=compile, **options)
        launch(num_ranks, made)
        rows.append(read_metrics(made))
    for eager, compiled in zip(*rows, strict=True):
        for column in ("loss", "grad_norm"):
            assert float(compiled[column]) == pytest.approx(float(eager[column]), rel=2e-2), column
