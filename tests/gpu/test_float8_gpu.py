"""Float8 linears on a GPU work for any number of tokens, compiled, with bounded noise."""

import copy
from pathlib import Path

import pytest
import torch

from tests.support.float8 import RECIPES, by_definition
from tests.support.gpu import DENSE, FOREST, HYBRID
from tests.support.oracle import (
    hf_model,
    hybrid_model,
    in_one_pass,
    random_groups,
    relative_error,
    tree_model,
)
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.distributed import ao
from titan_tree.models.layers import Linear

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[torchao]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU of compute capability 8.9",
    ),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_use_rounded_operands(recipe, compiled):
    """Products are compared for several numbers of tokens, including 1. The bound is the rounding of bf16."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([Linear(256, 384)]).cuda().bfloat16()
    weight = layers[0].weight
    ao.float8_linears(torch.nn.ModuleDict({"layers": layers}), recipe, "cuda")
    linear = layers[0]
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    if compiled:
        linear.compile(backend=counted, fullgraph=True, dynamic=True)
    for num_tokens in (700, 33, 7, 16, 1):
        sizes = torch.logspace(-3, 1, num_tokens, device="cuda")[:, None]
        x, dy = ((torch.randn(num_tokens, n, device="cuda") * sizes).bfloat16() for n in (256, 384))
        y = linear(x.requires_grad_())
        got = y, *torch.autograd.grad(y, [x, weight], dy)
        wants = by_definition(recipe, x.detach(), weight.detach(), dy)
        for what, mine, want in zip(("y", "dx", "dweight"), got, wants, strict=True):
            assert relative_error(mine, want) < 1e-2, (num_tokens, what)
    assert counted.frame_count <= 2 * compiled  # one token has a graph of its own


@pytest.mark.parametrize(
    ("recipe", "make", "sizes"),
    [
        *((recipe, hf_model, DENSE) for recipe in RECIPES),
        ("tensorwise", hybrid_model, {**HYBRID, "num_layers": 2}),
    ],
)
def test_noise_is_a_small_multiple_of_bf16(recipe, make, sizes):
    """Errors of log-probs, and of all gradients as one vector, are 2 to 14 times those of bf16."""
    hf = make(True, device="cuda", max_position_embeddings=4096, **sizes)
    exact = tree_model(hf, "triton")
    plain = copy.deepcopy(exact).bfloat16()
    float8 = copy.deepcopy(plain)
    ao.float8_linears(float8, recipe, "cuda")
    torch._dynamo.reset()
    for block in float8.layers:
        block.compile(fullgraph=True, dynamic=True)
    errors = []
    for model in (plain, float8):
        squares = torch.zeros(2)
        for seed in range(4):
            groups = random_groups(seed, **FOREST)
            got, want = in_one_pass(model, groups), in_one_pass(exact, groups)
            vectors = [[torch.cat(list(one[0])), flat(one[2])] for one in (got, want)]
            squares += torch.tensor([relative_error(a, b) for a, b in zip(*vectors, strict=True)]) ** 2
        errors.append((squares / 4).sqrt())
    logprobs, gradients = (errors[1] / errors[0]).tolist()
    of_gradients = [f"{error[1]:.2%}" for error in errors]
    print(f"{recipe}: {logprobs:.1f} and {gradients:.1f} times bf16's; gradients {of_gradients}")
    assert 2 < logprobs < 14
    assert 2 < gradients < 14


def flat(gradients):
    return torch.cat([gradient.flatten().float() for gradient in gradients.values()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_run_learns_as_well_as_in_bf16(recipe: str, tmp_path: Path) -> None:
    """Both have fp32 weights and offloaded partitions. The one in float8 is compiled, with checkpointing."""
    rows = []
    for float8 in ("none", recipe):
        is_compiled = float8 != "none"
        config = tiny_config(
            tmp_path / float8,
            training__float8=float8,
            training__dtype="bfloat16",
            training__compile=is_compiled,
            training__activation_checkpoint="selective" if is_compiled else "none",
            training__steps=20,
            data__max_tokens=24,
            partition__activations="offload",
            model__overrides__hidden_size=128,
            model__overrides__head_dim=64,
        )
        train(config)
        rows.append(read_metrics(config))
    for theirs, ours in zip(*rows, strict=True):
        assert float(ours["nll"]) == pytest.approx(float(theirs["nll"]), rel=0.02), ours["step"]
    assert float(rows[1][-1]["nll"]) < float(rows[1][0]["nll"]) - 0.3
