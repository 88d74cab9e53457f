"""Float8 linears: which linears are converted, what they compute, and how runs save and resume them."""

import copy
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.float8 import RECIPES, by_definition
from tests.support.oracle import (
    assert_same,
    hf_model,
    hybrid_model,
    in_one_pass,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.processes import process_group, run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.distributed import ao
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine import activations
from titan_tree.errors import UserError
from titan_tree.models.decoder import build_model
from titan_tree.models.layers import Linear
from titan_tree.models.pretrained import load_pretrained
from titan_tree.tree.paths import TokenPath


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_products_use_rounded_operands(recipe, num_tokens):
    torch.manual_seed(num_tokens)
    layers = torch.nn.ModuleList([Linear(48, 32)])
    weight = layers[0].weight
    ao.float8_linears(torch.nn.ModuleDict({"layers": layers}), recipe, "cpu")
    # Rows of very different sizes: one scale for all rows rounds differently from one scale per row.
    sizes = torch.logspace(-3, 1, num_tokens)[:, None]
    x, dy = (torch.randn(num_tokens, width) * sizes for width in (48, 32))
    y = layers[0](x.requires_grad_())
    got = y, *torch.autograd.grad(y, [x, weight], dy)
    for mine, want in zip(got, by_definition(recipe, x.detach(), weight.detach(), dy), strict=True):
        assert relative_error(mine, want) < 1e-6
        assert mine.dtype == torch.float32
    assert weight is layers[0].weight


def test_only_large_projections_are_converted(caplog):
    sizes = {"linear_num_value_heads": 16, "linear_value_head_dim": 8, "num_experts": 16}
    with torch.device("meta"):
        model = build_model("qwen3_5_moe", "debug", tie_word_embeddings=False, **sizes)
    names, before = list(model.state_dict()), dict(model.named_modules())
    with caplog.at_level("INFO", "titan_tree"):
        ao.float8_linears(model, "rowwise", "cpu")
    converted = {name for name, module in model.named_modules() if module is not before[name]}
    delta_net, attention = ("in_proj_qkv", "in_proj_z", "out_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
    expected = {f"layers.{i}.linear_attn.{name}" for i in range(3) for name in delta_net}
    expected |= {f"layers.3.self_attn.{name}" for name in attention}
    shared = ("gate_proj", "up_proj", "down_proj")
    expected |= {f"layers.{i}.mlp.shared_expert.{name}" for i in range(4) for name in shared}
    assert converted == expected
    assert "float8 (rowwise, emulated): 25 of 31 linears of the layers" in caplog.text
    assert list(model.state_dict()) == names
    odd = build_model("qwen3", "debug", intermediate_size=100)  # not a multiple of 16
    ao.float8_linears(odd, "rowwise", "cpu")
    kept = {name for name, module in odd.named_modules() if isinstance(module, Linear)}
    assert kept == {f"layers.{i}.mlp.{name}" for i in range(2) for name in shared}


def test_unsupported_gpus_models_and_environments_are_refused(monkeypatch):
    model = build_model("qwen3", "debug", num_hidden_layers=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match=r"training.float8: expected .* 8.9 or later.*, got 8\.0"):
        ao.float8_linears(model, "rowwise", "cuda")
    odd = build_model("qwen3", "debug", num_hidden_layers=1, hidden_size=72)
    with pytest.raises(UserError, match=r"training.float8: .* none of the 7 in this model's layers"):
        ao.float8_linears(odd, "rowwise", "cpu")

    def missing(name):
        raise ModuleNotFoundError(name="torchao")

    monkeypatch.setattr(ao, "import_module", missing)
    install = re.escape(f"{sys.executable} -m pip install -e '.[torchao]'")
    with pytest.raises(UserError, match=f"training.float8: needs torchao.*: {install}"):
        ao.float8_linears(model, "rowwise", "cpu")


def pair(make, recipe, dtype):
    """Returns a model in ``dtype``, the same model with float8 linears, and the model in fp32."""
    hf = make(True)
    plain = tree_model(hf).to(dtype)
    float8 = copy.deepcopy(plain)
    ao.float8_linears(float8, recipe, "cpu")
    return plain, float8, tree_model(hf)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [hf_model, hybrid_model])
def test_errors_are_a_small_multiple_of_bf16(recipe, make):
    """Float8 has 4 or 5 bits less than bf16. Measured errors against fp32 are 5 to 11 times those of bf16."""
    plain, float8, exact = pair(make, recipe, torch.bfloat16)
    groups = random_groups(2)
    want = in_one_pass(exact, groups)
    errors = []
    for model in (plain, float8):
        got = in_one_pass(model, groups)
        flat = [torch.cat([g.flatten().float() for g in one[2].values()]) for one in (got, want)]
        errors.append((relative_error(torch.cat(got[0]), torch.cat(want[0])), relative_error(*flat)))
    for bf16, ours in zip(*errors, strict=True):
        assert 3 * bf16 < ours < 14 * bf16, errors


def test_rowwise_scales_do_not_depend_on_other_trees():
    """With one scale per row, log-probs do not depend on other trees. With one for all rows, they do."""
    groups = random_groups(3)  # several trees
    for recipe, same in (("rowwise", True), ("rowwise_with_gw_hp", True), ("tensorwise", False)):
        _, model, _ = pair(hf_model, recipe, torch.float32)
        together = model(tree_batch(groups)).logprobs
        alone = torch.cat([model(tree_batch([paths])).logprobs for paths in groups])
        assert (relative_error(together, alone) < 1e-6) == same, recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "part"), zip(RECIPES, ["", "mlp.down_proj", "mlp.down_proj"], strict=True)
)
def test_blocks_compile_once_for_all_trees(recipe, part):
    """With one recipe, whole blocks compile; with the others, one linear of each block."""
    _, model, _ = pair(hf_model, recipe, torch.float32)
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in compiled.layers:
        block.get_submodule(part).compile(backend=counted, fullgraph=True, dynamic=True)
    for groups in (random_groups(0), random_groups(3), [[TokenPath(list(range(16)))]]):
        assert_same(in_one_pass(compiled, groups), in_one_pass(model, groups), tolerance=1e-6)
    assert counted.frame_count == 1


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "activation_checkpoint": "selective"}])
def test_a_run_resumes_and_exports_plain_weights(tmp_path: Path, options) -> None:
    given = {f"training__{key}": value for key, value in options.items()}
    config = tiny_config(
        tmp_path, training__float8="tensorwise", checkpoint__interval=2, checkpoint__export_hf=True, **given
    )
    whole = train(config)
    rows = read_metrics(config)
    assert float(rows[-1]["nll"]) < float(rows[0]["nll"])
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert all(type(value) is torch.Tensor and value.dtype == torch.float32 for value in weights.values())
    exported = load_pretrained(Path(config.folder) / "hf", dtype=torch.bfloat16).state_dict()
    for name, value in weights.items():
        assert torch.equal(value.to(exported[name].dtype).bfloat16(), exported[name]), name
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-4")
    resumed = train(config)
    assert resumed.steps_trained == 2
    assert read_metrics(config) == rows
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.slow
def test_partitions_may_be_offloaded_and_recomputed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(activations, "MIN_BLOCK_BYTES", 64)  # the tensors of the model are tiny
    curves = []
    for policy in ("keep", "offload", "recompute"):
        options = {"data__max_tokens": 12, "partition__activations": policy, "training__steps": 2}
        config = tiny_config(tmp_path / policy, training__float8="rowwise", **options)
        train(config)
        curves.append([float(row["loss"]) for row in read_metrics(config)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[2] == pytest.approx(curves[0], rel=1e-6)


def compare_with_one_rank(rank: int, ports: list[int]) -> None:
    groups = [[TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 5]), TokenPath([1, 6, 7])]]
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,))
        for recipe in RECIPES:
            sharded = build_model("qwen3", "debug", num_hidden_layers=1)
            sharded.init_weights(seed=0)
            alone = copy.deepcopy(sharded).bfloat16()
            ao.float8_linears(alone, recipe, "cpu")
            parallelize(sharded, mesh, float8=recipe)
            _, loss, want = in_one_pass(alone, groups)
            for _ in range(2):  # the second forward pass gathers the weights again
                _, got_loss, got = in_one_pass(sharded, groups)
                assert got_loss == loss
                for name, gradient in got.items():
                    assert torch.equal(gradient.full_tensor(), 2 * want[name].float()), (recipe, name)


@pytest.mark.slow
def test_two_ranks_sum_the_gradients_that_each_computes():
    """FSDP2 gathers the weights in bf16 and passes them to the same products: equal bit for bit."""
    run_ranks(compare_with_one_rank, 2)
