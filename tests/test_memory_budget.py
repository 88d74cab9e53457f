"""The memory that scripts/memory_budget.py computes, against tensors that are there."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.processes import process_group, run_ranks
from titan_tree.build import build_parallel_model
from titan_tree.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed.optimizers import build_optimizers
from titan_tree.models.registry import build_model

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import memory_budget

# Rows that two ranks cannot share out evenly, and shards whose states stay in fp32.
CASES = [("qwen3_moe", {"num_experts": 7}), ("qwen3_5", {"intermediate_size": 390})]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensor):
    tensor = local(tensor)
    return tensor.codes.nbytes + tensor.scale.nbytes if hasattr(tensor, "codes") else tensor.nbytes


def compare_with_budget(rank: int, ports: list[int]) -> None:
    torch.compiler.set_stance("force_eager")
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,))
        for (name, sizes), optimizer in itertools.product(CASES, ("adamw", "adamw8bit")):
            config = ModelConfig(name, "debug", overrides=sizes)
            model = build_parallel_model(config, TrainingConfig(), ParallelConfig(), mesh)
            optimizers = build_optimizers(OptimizerConfig(name=optimizer), model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizers.step()
            states = [state for each in optimizers for state in each.state.values()]
            found = {
                "weights": sum(map(num_bytes, model.parameters())),
                "gradients": sum(num_bytes(parameter.grad) for parameter in model.parameters()),
                "states": sum(num_bytes(s[key]) for s in states for key in ("exp_avg", "exp_avg_sq")),
            }
            if rank == 0:
                expected = budget_of(name, sizes, 2, optimizer)
                assert found == {key: expected[key] for key in found}, (name, optimizer)


def budget_of(name, sizes, ranks, optimizer, gradients="every", expert_parallel=1):
    with torch.device("meta"):
        model = build_model(name, "debug", **sizes)
    sharding = memory_budget.Sharding(ranks, expert_parallel)
    return memory_budget.budget(model, sharding, optimizer, gradients)


@pytest.mark.distributed
def test_weights_gradients_and_states_are_those_of_a_rank():
    run_ranks(compare_with_budget, 2)


def test_what_is_gathered_and_what_waits():
    """By hand, of a Qwen3-MoE whose two layers have 8 experts each, over 4 ranks."""
    experts = 8 * 3 * 96 * 128  # of a layer
    attention = 128 * (4 + 2 + 2 + 4) * 32 + 2 * 32
    rest = attention + 2 * 128 + 8 * 128  # two norms and the router
    root = 512 * 128 + 128
    for share in (1, 4):
        layer = rest + experts // share
        for gradients, gathered, kept in (
            ("every", root + 2 * layer, (root + 2 * (rest + experts)) / 4),
            ("last", root + 2 * layer, root + 2 * layer),
            ("partitions", root + 2 * layer, root + 2 * layer),  # of two layers, the next is the last
        ):
            got = budget_of("qwen3_moe", {}, 4, "adamw", gradients, share)
            assert got["gathered"] == 2 * gathered
            assert got["gradients"] == 4 * kept
            assert got["reduced"] == 10 * max(layer, root)
    assert budget_of("qwen3_moe", {}, 1, "adamw")["gathered"] == 2 * (root + 2 * (rest + experts))


def test_a_layer_keeps_what_it_does_on_a_gpu():
    """Of Qwen3-0.6B on an H200 (docs/performance.md): 32.5 GiB at 16,384 tokens and 56.6 at 32,768, of which
    vocabulary and fp32 gradient of the hidden states take 2 V + 4 d bytes a token."""
    slope = (56.6 - 32.5) * 2**30 / 16_384
    measured = (slope - 2 * 151_936 - 4 * 1024) / 28
    assert memory_budget.layer_bytes("qwen3", "0.6B", "none") == pytest.approx(measured, rel=0.015)
    assert (
        memory_budget.layer_bytes("qwen3_moe", "debug", "full") == 2 * 128 + 2 * 2
    )  # its input, and which experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flavor", "31B"], "unknown flavor of qwen3_moe: 31B"),
        (["--expert-parallel", "1", "3"], "expected divisors of the number of ranks, 4, got 3"),
        (["--model", "qwen3", "--flavor", "0.6B", "--expert-parallel", "4"], "number of experts, 1, got 4"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_budget.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        memory_budget.main()
    assert message in capsys.readouterr().err
