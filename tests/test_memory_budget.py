"""Tests scripts/memory_budget.py against real optimizer steps and a measurement on a GPU."""

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

# Sizes with rows that two ranks cannot shard evenly, and with shards whose states stay in fp32.
CASES = [("qwen3_moe", {"num_experts": 7}), ("qwen3_5", {"intermediate_size": 390})]


def local(tensor):
    """Returns this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensor):
    """Returns the bytes of this rank's shard, which may be in 8 bits."""
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
    """Returns the budget of a debug model."""
    with torch.device("meta"):
        model = build_model(name, "debug", **sizes)
    sharding = memory_budget.Sharding(ranks, expert_parallel)
    return memory_budget.budget(model, sharding, optimizer, gradients)


@pytest.mark.slow
@pytest.mark.distributed
def test_weights_gradients_and_states_match_the_tensors_of_a_rank():
    run_ranks(compare_with_budget, 2)


def test_gathered_and_waiting_bytes_match_a_calculation_by_hand():
    """The model is a Qwen3-MoE with three layers of 8 experts each, on 4 ranks."""
    experts = 8 * 3 * 96 * 128  # in one layer
    attention = 128 * (4 + 2 + 2 + 4) * 32 + 2 * 32
    rest = attention + 2 * 128 + 8 * 128  # attention, two norms, the router
    root = 512 * 128 + 128
    for share in (1, 2, 4):
        layer = rest + experts // share
        fsdp = rest if share == 4 else layer  # FSDP2 leaves out experts that only one rank holds
        once = 3 * (layer - fsdp)
        for gradients, gathered, kept in (
            ("every", once + root + 2 * fsdp, (root + 3 * (rest + experts)) / 4),
            ("last", once + root + 2 * fsdp, root + 3 * layer),
            ("partitions", root + 3 * layer, root + 3 * layer),
        ):
            got = budget_of("qwen3_moe", {"num_hidden_layers": 3}, 4, "adamw", gradients, share)
            assert got["gathered"] == 2 * gathered
            assert got["gradients"] == 4 * kept
            assert got["reduced"] == 10 * max(fsdp, root)
    assert budget_of("qwen3_moe", {}, 1, "adamw")["gathered"] == 2 * (root + 2 * (rest + experts))


@pytest.mark.slow
def test_activations_of_a_layer_match_a_measurement_on_a_gpu():
    """Qwen3-0.6B needed 32.5 GiB for 16,384 tokens and 56.6 for 32,768 on an H200 (docs/performance.md).

    Per token, the vocabulary and the fp32 gradient of the hidden states take 2 V + 4 d bytes of that.
    """
    slope = (56.6 - 32.5) * 2**30 / 16_384
    measured = (slope - 2 * 151_936 - 4 * 1024) / 28
    assert memory_budget.layer_bytes("qwen3", "0.6B", "none") == pytest.approx(measured, rel=0.015)
    inputs_and_experts = 2 * 128 + 2 * 2  # what full checkpointing keeps
    assert memory_budget.layer_bytes("qwen3_moe", "debug", "full") == inputs_and_experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flavor", "31B"], "unknown flavor of qwen3_moe '31B'"),
        (["--expert-parallel", "1", "3"], "expected divisors of the number of ranks, 4, got 3"),
        (["--model", "qwen3", "--flavor", "0.6B", "--expert-parallel", "4"], "number of experts, 1, got 4"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_budget.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        memory_budget.main()
    assert message in capsys.readouterr().err
