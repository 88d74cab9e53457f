"""Tests that torchtitan's model, which benchmarks time beside titan_tree's, does the same work."""

from argparse import Namespace

import pytest
import torch

from benchmarks import steps, torchtitan_model
from benchmarks.__main__ import main
from benchmarks.trees import random_tree
from titan_tree.models.pretrained import build_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32")
def test_equal_weights_and_tokens_have_the_same_loss_and_gradient_norm():
    arguments = Namespace(tokens=64, routing="random", compile=False, activation_checkpoint="full")
    ours = build_model("qwen3", "debug", num_hidden_layers=1)
    ours.init_weights(seed=1)
    trees = [random_tree("chain", 64, ours.config.vocab_size, seed) for seed in (0, 1)]
    with steps.process_group() as (_, device):
        step = steps.training_step(ours, device)
        loss = step.run(step.prepare([[tree] for tree in trees])).loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()]).item()
        model, update = torchtitan_model.training_step(ours.config, arguments, device)
        hf = {f"model.{name}": p.detach() for name, p in ours.named_parameters()}
        weights = torchtitan_model.qwen3.Qwen3StateDictAdapter(model.config, None).from_hf(hf)
        heads = ours.config.num_key_value_heads, -1, ours.config.head_dim, ours.config.hidden_size
        for name, parameter in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            if "wqkv" in name:
                parts = [weights[name.replace("wqkv", part)].view(heads) for part in ("wq", "wk", "wv")]
                weights[name] = torch.cat(parts, 1).flatten(0, 2)
            parameter.to_local().data.copy_(weights[name])
        got = update(torchtitan_model.prepare(trees, device))
    assert got == pytest.approx((loss, norm), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--tree: expected chain with --way torchtitan, got bushy"),
        (
            "--tree chain --model llama",
            "--model: expected qwen3 or qwen3_moe with --way torchtitan, got llama",
        ),
        (
            "--tree chain --tokens 60",
            "--tokens: expected a multiple of 8 with --way torchtitan, got 60",
        ),
    ],
)
def test_what_its_model_cannot_be_timed_on_is_refused(arguments, message, capsys):
    assert main(["ranks", "--quick", "--way", "torchtitan", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"python -m benchmarks: error: {message}\n"
