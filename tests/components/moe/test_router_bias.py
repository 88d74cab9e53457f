"""RouterBias: its choices and updates, in trees and flat, after a resume, and in snapshots."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.support.moe import moe_by_token, small_moe
from tests.support.tiny_run import SMALL, read_metrics, tiny_config, train
from titan_tree.components.moe.routing import RouterBias, Routing
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import ModelConfig
from titan_tree.run.trainer import Trainer
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

BIASED = {"model__name": "qwen3_moe", "router_bias__rate": 3e-4}


def biases(trainer):
    return {name: bias.clone() for name, bias in trainer.model.experts.router_biases().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_bias_changes_choices_but_not_weights():
    """Large biases force experts 1 and 3, whose weights still come from the probabilities alone."""
    made = small_moe(top_k=2, shared=False)
    x = torch.randn(23, 8, dtype=torch.float64)
    plain = moe_by_token(made, x)
    made.e_score_correction_bias = torch.tensor([0.0, 9, 0, 9, 0])
    got, routing, experts = made(x, torch.ones(23))
    assert routing.tokens.tolist() == [0, 23, 0, 23, 0]
    assert (experts.sort().values == torch.tensor([1, 3])).all()
    probability = (x @ made.gate.weight.t()).softmax(-1)
    torch.testing.assert_close(routing.probability, probability.sum(0))
    pair = probability[:, [1, 3]] / probability[:, [1, 3]].sum(1, keepdim=True)
    want = torch.zeros_like(x)
    for i, e in enumerate((1, 3)):
        gate, up = (x @ made.experts.gate_up_proj[e].t()).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        want += pair[:, [i]] * (hidden @ made.experts.down_proj[e].t())
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    made.e_score_correction_bias = torch.zeros(5)
    torch.testing.assert_close(made(x, torch.ones(23))[0], plain, rtol=1e-12, atol=1e-12)


def test_a_bias_moves_against_the_load():
    routing = Routing(
        tokens=torch.tensor([[1.0, 1, 4], [2, 2, 2]]),
        chosen=torch.tensor([[9.0, 1, 5], [6, 6, 0]]),
        probability=torch.zeros(2, 3),
        squared_lse=torch.zeros(2),
    )
    for counts, steps in (("paths", [[-1, 1, 0], [-1, -1, 1]]), ("tokens", [[1, 1, -1], [0, 0, 0]])):
        moved = [torch.full((3,), 0.5), torch.zeros(3)]
        RouterBias(0.25, counts).update(moved, routing)
        want = torch.tensor([[0.5] * 3, [0.0] * 3]) + 0.25 * torch.tensor(steps)
        assert torch.equal(torch.stack(moved), want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0,), "router_bias.rate: expected a finite number >= 0, got -1.0"),
        ((float("inf"),), "router_bias.rate: expected a finite number >= 0, got inf"),
        ((1.0, "rows"), "router_bias.counts: expected one of paths, tokens, got 'rows'"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        RouterBias(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["paths", "tokens"])
def test_biases_balance_a_router(counts):
    """A fresh router gives some expert more than half again the mean load. Only the biases change."""
    torch.manual_seed(0)
    model = build_model("qwen3_moe", "debug")
    model.experts.add_router_biases()
    prompt = torch.randint(512, (60,))
    paths = [TokenPath(torch.cat([prompt, torch.randint(512, (90,))]).numpy()) for _ in range(4)]
    step, bias, loads = TreeStep(model, TreeLoss()), RouterBias(1e-3, counts), []
    prepared = step.prepare([[TokenTree.from_paths(paths)]])
    for _ in range(40):
        result = step.run(prepared)
        chosen = result.routing.chosen if counts == "paths" else result.routing.tokens
        loads.append((chosen.amax(1) / chosen.mean(1)).mean().item())
        if counts == "tokens":
            assert result.router_metrics["expert_load"].item() == loads[-1]
        bias.update(model.experts.router_biases().values(), result.routing)
    assert loads[0] > 1.5
    assert max(loads[-5:]) < 1.15


@pytest.mark.slow
def test_trees_and_flat_paths_move_biases_alike_unless_distinct_tokens_count(tmp_path):
    """Biases are equal bit for bit, with several micro-batches, partitions, and recomputed forward passes."""
    kinds = {
        "tree": {},
        "flat": {"data__layout": "flat"},
        "partitions": {"data__max_tokens": 12, "partition__activations": "recompute"},
        "full": {"training__activation_checkpoint": "full"},
        "tokens": {"router_bias__counts": "tokens"},
    }
    options = BIASED | SMALL["qwen3_moe"] | {"data__max_tokens": 70, "training__steps": 3}
    ended = {
        name: biases(train(tiny_config(tmp_path / name, **options | own))) for name, own in kinds.items()
    }
    assert all(bias.dtype == torch.float32 and bias.any() for bias in ended["tree"].values())
    assert len(ended["tree"]) == 2
    for name in ("flat", "partitions", "full"):
        assert same(ended[name], ended["tree"]), name
    assert not same(ended["tokens"], ended["tree"])


def test_a_skipped_step_moves_no_bias(tmp_path):
    config = tiny_config(tmp_path, **BIASED, optimizer__lr=1e30)
    trainer = Trainer(config)
    inputs = trainer.inputs()
    trainer.train_step(inputs)
    before = biases(trainer)
    assert all(bias.any() for bias in before.values())
    trainer.train_step(inputs)  # the loss is not finite any more
    assert trainer.optimizer_step.bad_steps == 1
    assert same(biases(trainer), before)
    inputs.close()
    dist.destroy_process_group()


def test_a_resumed_run_has_the_biases_of_an_uninterrupted_one(tmp_path):
    config = tiny_config(tmp_path, **BIASED, checkpoint__interval=2)
    want = biases(train(config))
    expected = read_metrics(config)
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-4")
    resumed = train(config)
    assert resumed.optimizer_step.good_steps == 2
    assert read_metrics(config) == expected
    assert same(biases(resumed), want)
    # A rate of 0 keeps the biases as they are. Without a rate, the model differs from the checkpoint's.
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-4")
    halfway = biases(train(tiny_config(tmp_path, **BIASED, checkpoint__interval=2, training__steps=2)))
    frozen = train(tiny_config(tmp_path, **BIASED | {"router_bias__rate": 0.0}, checkpoint__interval=2))
    assert same(biases(frozen), halfway)
    with pytest.raises(UserError, match=r"of another model or optimizer: router_bias = True \(now None\)"):
        train(tiny_config(tmp_path, model__name="qwen3_moe", checkpoint__interval=2))


def test_without_a_rate_there_are_no_biases(tmp_path):
    trainer = train(tiny_config(tmp_path / "a", model__name="qwen3_moe", checkpoint__interval=2))
    assert not any("bias" in name for name in trainer.model.state_dict())
    assert "router_bias" not in trainer.checkpoints.architecture
    with pytest.raises(UserError, match=r"router_bias.rate: expected a model with experts"):
        train(tiny_config(tmp_path / "b", router_bias__rate=0.0))


def with_biases(dtype=torch.float32):
    model = build_model("qwen3_moe", "debug", num_hidden_layers=2, decoder_sparse_step=2).to(dtype)
    model.experts.add_router_biases()
    for bias in model.experts.router_biases().values():
        bias.copy_(torch.linspace(-0.1, 1 / 3, 8))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_snapshots_store_biases_beside_the_weights(tmp_path, caplog, dtype):
    """Biases are in fp32 for any dtype of the weights. transformers loads the snapshot without them."""
    model = with_biases(dtype)
    save_pretrained(model, tmp_path / "out")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "only titan_tree reads the router biases in router_biases.json; other programs" in record.message
    again = load_pretrained(tmp_path / "out", dtype=dtype)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    assert {bias.dtype for bias in again.experts.router_biases().values()} == {torch.float32}
    assert list(again.experts.router_biases()) == ["layers.1.mlp.e_score_correction_bias"]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(hf.model.layers[1].mlp.gate.weight, model.layers[1].mlp.gate.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda stored: stored.clear(),
            "router_biases.json: missing tensors: layers.1.mlp.e_score_correction_bias",
        ),
        (lambda stored: stored.update(x=[1]), "router_biases.json: unexpected tensors: x"),
        (
            lambda stored: stored.update({next(iter(stored)): [0.0] * 7}),
            "expected a list of 8 finite numbers",
        ),
        (
            lambda stored: stored.update({next(iter(stored)): ["a"] * 8}),
            "expected a list of 8 finite numbers",
        ),
    ],
)
def test_damaged_bias_files_are_refused(tmp_path, change, message):
    save_pretrained(with_biases(), tmp_path / "out")
    path = tmp_path / "out" / "router_biases.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=message):
        load_pretrained(tmp_path / "out")


@pytest.mark.parametrize("rate", ["null", "0.01"])
def test_a_run_loads_the_biases_of_a_snapshot_and_exports_its_own(tmp_path, rate):
    first = train(tiny_config(tmp_path / "a", **BIASED, checkpoint__export_hf=True))
    config = tiny_config(
        tmp_path / "b",
        optimizer__lr=0.0,
        training__steps=1,
        router_bias__rate=rate,
        checkpoint__export_hf=True,
    )
    config.model = ModelConfig(name="qwen3_moe", hf_path=f"{first.config.folder}/hf")
    second = train(config)
    assert same(biases(second), biases(first)) == (rate == "null")
    exported = load_pretrained(Path(config.folder) / "hf", dtype=torch.bfloat16)
    assert same(exported.experts.router_biases(), biases(second))
