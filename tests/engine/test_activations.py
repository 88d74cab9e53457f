"""Storing, offloading or recomputing activations changes no gradient and respects the budgets."""

import gc
import weakref
from functools import cache

import pytest
import torch

from tests.support.cases import slow_except
from tests.support.oracle import hf_model, random_groups, tree_model
from tests.support.partitions import RandomCuts, forest_of
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine import activations
from titan_tree.engine.activations import Activations
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError

CPU = torch.device("cpu")
INF = float("inf")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Lowers the thresholds, because tiny models have tiny tensors."""
    monkeypatch.setattr(activations, "MIN_BLOCK_BYTES", 64)
    monkeypatch.setattr(activations, "MAX_IN_FLIGHT", 2**12)


class Watched(Activations):
    """Records the maximum number of bytes on the device and on the host, and the largest block."""

    max_on_device = max_on_host = largest = 0

    def _pack(self, tensor):
        saved = super()._pack(tensor)
        if not isinstance(saved, torch.Tensor):
            self.largest = max(self.largest, saved.block.size)
        self.max_on_device = max(self.max_on_device, self.on_device)
        self.max_on_host = max(self.max_on_host, self.on_host)
        return saved


class Failing(TreeLoss):
    """A loss that raises KeyError on the sixth partition."""

    def __init__(self, scored):
        super().__init__()
        self.scored = scored

    def __call__(self, logprobs, *args):
        self.scored.append(weakref.ref(logprobs))
        if len(self.scored) == 6:
            raise KeyError
        return super().__call__(logprobs, *args)


def gradients_of(model, kept, seed=3, loss="sft"):
    step = TreeStep(model, TreeLoss(loss), "cpu", RandomCuts(0.1, seed), kept)
    model.zero_grad()
    groups = random_groups(seed, max_length=30, num_nodes=12)
    result = step.run(step.prepare([[forest_of(groups)]]))
    gc.collect()
    assert kept.on_device == kept.on_host == kept.offloading == kept.fetching == 0
    assert not kept._offloading
    return result, {name: p.grad.clone() for name, p in model.named_parameters()}


POLICIES = {
    "offload": {"policy": "offload"},
    "recompute": {"policy": "recompute"},
    "nearly all on the host": {"device_bytes": 2**13, "host_bytes": INF},
    "excess on the host": {"device_bytes": 2**16, "host_bytes": INF},
    "host is full": {"device_bytes": 2**13, "host_bytes": 2**13},
    "no memory at all": {"device_bytes": 0, "host_bytes": 0},
}


EXECUTION = slow_except(
    [(name, "none", False) for name in ("offload", "recompute", "host is full")],
    [(name, checkpoint, False) for name in POLICIES for checkpoint in ("none", "full")],
)
EXECUTION += [
    pytest.param(name, "none", True, marks=pytest.mark.exhaustive) for name in ("offload", "host is full")
]


@cache
def with_all_activations_kept(checkpoint, compile):
    """Returns a model, the result of a step that keeps all activations, and its gradients."""
    torch._dynamo.reset()
    model = tree_model(hf_model(tied=True, max_position_embeddings=4096))
    parallelize(model, OneRank(), dtype=torch.float32, activation_checkpoint=checkpoint, compile=compile)
    return model, *gradients_of(model, Activations(CPU))


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("name", "checkpoint", "compile"), EXECUTION)
def test_every_policy_gives_the_same_gradients(name, checkpoint, compile):
    model, want_result, want = with_all_activations_kept(checkpoint, compile)
    kept = Watched(CPU, **POLICIES[name])
    result, got = gradients_of(model, kept)
    assert result.counts.forwards > 10
    recomputed = int(result.extra_forward_tokens)
    assert (recomputed > 0) == (name in ("recompute", "host is full", "no memory at all"))
    # Bit for bit, unless recomputation adds the losses in another order.
    tolerance = {"rtol": 1e-5 if recomputed else 0, "atol": 1e-6 if recomputed else 0}
    torch.testing.assert_close(result.loss, want_result.loss, **tolerance)
    for parameter, gradient in want.items():
        torch.testing.assert_close(got[parameter], gradient, **tolerance, msg=parameter)
    assert (kept.max_on_host > 0) == (name not in ("recompute", "no memory at all"))


@pytest.mark.slow
def test_device_budget_is_respected():
    model = tree_model(hf_model(tied=True))
    free = Watched(CPU, device_bytes=1e18, host_bytes=INF)
    gradients_of(model, free)
    assert free.max_on_host == 0
    assert free.max_on_device > 2**17
    for limit in (2**14, 2**16, 2**17):
        kept = Watched(CPU, device_bytes=limit, host_bytes=INF)
        gradients_of(model, kept)
        # The newest block and the one being offloaded may exceed the budget for a moment.
        assert kept.max_on_device <= limit + 2 * free.largest
        assert kept.max_on_host > 0


def test_oldest_blocks_are_offloaded_first_and_fetched_again():
    kept = Activations(CPU, device_bytes=3 * 2**12, host_bytes=INF)
    x = torch.linspace(-1, 1, 2**10, requires_grad=True)  # 4 KiB
    with kept.saving(is_suspended=True):
        outs = [(i * x).exp() for i in range(6)]
    blocks = [ref() for ref in kept._blocks.values()]
    assert len(blocks) == 3 == len(kept._kept) + len(kept._offloading)
    assert (kept.on_device, kept.on_host) == (3 * 2**12, (3 + len(kept._offloading)) * 2**12)
    still_there = [any(block.address == out.data_ptr() for block in blocks) for out in outs]
    assert still_there == [False] * 3 + [True] * 3
    for i, out in reversed(list(enumerate(outs))):
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, i * out.detach()), i


def test_a_storage_is_offloaded_once():
    """Several operators save the storage in different shapes."""
    kept = Activations(CPU, "offload")
    x = torch.nn.Parameter(torch.randn(32, 64))
    with kept.saving(is_suspended=True):
        y = x.sin()
        out = (y * y).sum() + (y.T @ y).sum() + y[3:].square().sum()
    assert kept.on_device == kept.on_host == y.nbytes
    (gradient,) = torch.autograd.grad(out, x)
    y = x.detach().sin().requires_grad_()
    ((y * y).sum() + (y.T @ y).sum() + y[3:].square().sum()).backward()
    assert torch.equal(gradient, y.grad * x.detach().cos())


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_stay_on_the_device(frozen):
    kept = Activations(CPU, "offload")
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=not frozen)
    x = torch.randn(1, 64, requires_grad=True)
    with kept.saving(is_suspended=True):
        out = x.exp() @ weight.T
    assert kept.on_device == 4 * 64  # exp's output, not 4 * 64 * 64 more
    out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{}, *POLICIES.values()], ids=["keep", *POLICIES])
def test_an_exception_frees_all_activations(kept):
    """Graphs without a backward pass are freed, because no operator's output keeps its own graph alive."""
    model = tree_model(hf_model(tied=True))
    kept = Activations(CPU, **kept)
    scored = []
    step = TreeStep(model, TreeLoss(), "cpu", RandomCuts(0.1, 3), kept)
    inputs = step.prepare([[forest_of(random_groups(3, max_length=30, num_nodes=12))]])
    step.loss = Failing(scored)
    with pytest.raises(KeyError):
        step.run(inputs)
    torch.ones(1, requires_grad=True).sum().backward()  # replaces the last graph in autograd's queue
    gc.collect()
    assert len(scored) == 6
    assert not any(logprobs() is not None for logprobs in scored)
    assert kept.on_device == kept.on_host == kept.offloading == kept.fetching == 0


def test_extra_forward_tokens_count_the_score_pass():
    model = tree_model(hf_model(tied=True))
    step = TreeStep(model, TreeLoss("gspo", clip_low=0.5, clip_high=0.5), "cpu", RandomCuts(0.1, 3))
    groups = random_groups(3)
    for path in [path for paths in groups for path in paths]:
        path.advantage = torch.ones(len(path)).numpy()
        path.old_logprobs = -torch.ones(len(path)).numpy()
    result = step.run(step.prepare([[forest_of(groups)]]))
    assert int(result.extra_forward_tokens) == result.counts.executed_tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_training_does_not_depend_on_the_policy(tmp_path, policy):
    """The policies are set through the configuration."""
    kept = train(tiny_config(tmp_path / "keep", data__max_tokens=12))
    other = train(tiny_config(tmp_path / policy, data__max_tokens=12, partition__activations=policy))
    for mine, theirs in zip(read_metrics(other.config), read_metrics(kept.config), strict=True):
        for column in ("loss", "grad_norm"):
            assert float(mine[column]) == pytest.approx(float(theirs[column]), rel=1e-5)
        assert float(theirs["extra_forward_tokens"]) == 0
        assert (float(mine["extra_forward_tokens"]) > 0) == (policy == "recompute")
        assert float(mine["gateway_gib"]) > 0


def test_unknown_policies_and_conflicting_options_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected one of auto, keep, offload, recompute, got 'drop'"):
        Activations(CPU, "drop")
    with pytest.raises(
        UserError,
        match=r"device_gb: expected partition.activations = .auto. when a budget is set, got .keep.",
    ):
        tiny_config(tmp_path, partition__activations="keep", partition__device_gb=3.0)
    with pytest.raises(UserError, match=r"partition.host_gb: expected at least 0, got -1"):
        tiny_config(tmp_path, partition__host_gb=-1.0)


def test_device_names_with_and_without_index_are_equal():
    """On a rank, "cuda" equals "cuda:0"; here "cpu" equals "cpu:0"."""
    kept = Watched(torch.device("cpu:0"), "offload")
    gradients_of(tree_model(hf_model(tied=True)), kept)
    assert kept.max_on_host > 0
