"""A single rank computes in bf16 with fp32 weights: cast once per step, gradients accumulated in fp32."""

from dataclasses import replace

import pytest
import torch

from tests.support.oracle import hf_model, random_groups, tree_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.distributed.adamw import KernelAdamW
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.tree_model import Execution
from titan_tree.tree.token_tree import TokenTree


class Failing(TreeLoss):
    def __call__(self, *args):
        raise RuntimeError("in the loss")


def bf16_model():
    model = tree_model(hf_model(tied=True))
    model.execution = Execution(torch.bfloat16)
    return model


def micro_batches(count):
    return [[TokenTree.from_paths(random_groups(seed)[0])] for seed in range(count)]


def gradients(model, batches):
    """Returns the gradients of one step. The divisor of the loss does not depend on its micro-batches."""
    step = TreeStep(model, TreeLoss())
    model.zero_grad()
    inputs = step.prepare(batches)
    step.run(replace(inputs, counts=replace(inputs.counts, normalizer=6.0)))
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradients_of_micro_batches_are_accumulated_in_fp32():
    """Each gradient is rounded to bf16 once; their sum is not rounded."""
    model, batches = bf16_model(), micro_batches(6)
    together = gradients(model, batches)
    apart = [gradients(model, [batch]) for batch in batches]
    rounded = 0
    for name, total in together.items():
        assert total.dtype == torch.float32
        parts = [part[name] for part in apart]
        if not name.startswith("embed"):  # tied: itself a bf16 sum of two gradients
            assert all(torch.equal(part, part.bfloat16().float()) for part in parts), name
        torch.testing.assert_close(total, sum(parts), rtol=1e-6, atol=1e-7)
        rounded += not torch.equal(total, total.bfloat16().float())
    assert rounded == len(together)


@pytest.mark.parametrize("count", [1, 2])
def test_adamw_gets_the_same_gradients_without_a_cast(count, monkeypatch):
    """Those of a single backward pass stay in bf16. Sums are fp32. Three steps train the same weights."""
    runs = []
    for casts in (False, True):
        if casts:
            monkeypatch.delattr(KernelAdamW, "add_param_group")  # weights then have gradients in fp32
        model = bf16_model()
        optimizers = build_optimizers(OptimizerConfig(lr=1e-2), model)
        tensors = []
        for _ in range(3):
            tensors += gradients(model, micro_batches(count)).values()
            dtypes = {parameter.grad.dtype for parameter in model.parameters()}
            assert dtypes == {torch.float32 if casts or count > 1 else torch.bfloat16}
            tensors.append(clip_and_step(optimizers, torch.ones(()), 1e-2))
        runs.append([*tensors, *model.parameters()])
    for without, cast in zip(*runs, strict=True):
        assert torch.equal(without.float(), cast)


def test_the_model_gets_its_own_weights_back():
    model = bf16_model()
    own = dict(model.named_parameters())
    with cast_weights(model):
        inside = dict(model.named_parameters())
        assert inside.keys() == own.keys()
        assert all(p.dtype == torch.bfloat16 and torch.equal(p, own[n].bfloat16()) for n, p in inside.items())
    assert all(p is own[name] for name, p in model.named_parameters())
    step = TreeStep(model, Failing())
    with pytest.raises(RuntimeError, match="in the loss"):
        step.run(step.prepare(micro_batches(1)))
    assert all(p is own[name] for name, p in model.named_parameters())


def test_copies_are_kept_and_follow_the_weights():
    model = bf16_model()
    with cast_weights(model):
        first = dict(model.named_parameters())
    frozen, replaced = "norm.weight", "layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    model.get_parameter(frozen).requires_grad_(False)
    model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.get_parameter(replaced).detach() + 1)
    own = dict(model.named_parameters())
    with cast_weights(model):
        for name, copy in model.named_parameters():
            assert torch.equal(copy, own[name].bfloat16())
            assert copy.requires_grad == (name != frozen)
            assert (copy is first[name]) == (name not in (frozen, replaced))


def test_copies_that_inference_mode_made_are_trained():
    model = bf16_model()
    want = gradients(bf16_model(), micro_batches(1))
    with torch.inference_mode(), cast_weights(model):
        pass
    for name, gradient in gradients(model, micro_batches(1)).items():
        assert torch.equal(gradient, want[name]), name


def test_a_step_after_one_that_ran_out_of_memory_has_its_own_gradients(monkeypatch):
    def fail(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    model, batches = bf16_model(), micro_batches(1)
    want = gradients(model, batches)
    own = model.norm.weight
    own.grad = torch.zeros_like(own)
    with cast_weights(model), monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__iadd__", fail)
        with pytest.raises(torch.OutOfMemoryError):
            model.norm.weight.sum().backward()
    own.grad = None
    for name, gradient in gradients(model, batches).items():
        assert torch.equal(gradient, want[name]), name


def test_frozen_weights_have_no_gradients():
    model = bf16_model()
    frozen = ["layers.0.mlp.up_proj.weight", "norm.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    step = TreeStep(model, TreeLoss())
    step.run(step.prepare(micro_batches(2)))
    assert [name for name, p in model.named_parameters() if p.grad is None] == frozen


def test_a_model_that_computes_in_its_own_dtype_is_unchanged():
    model = tree_model(hf_model(tied=True))
    own = list(model.parameters())
    model.execution = Execution(torch.float32)
    with cast_weights(model):
        assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
