"""TreeStep.warm_up compiles every graph that later steps need, and changes nothing else."""

import copy
import io
import pickle
import random

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.oracle import hf_model, tree_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.loader import from_bytes, to_bytes
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.step_io import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.engine.warm_up import warm_up_inputs
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("qwen3", 1500),
        pytest.param("qwen3", 150, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", 1500, marks=pytest.mark.exhaustive),
    ],
)
def test_no_step_compiles_after_the_warm_up(name: str, num_tokens: int) -> None:
    torch._dynamo.reset()
    eager = build_model(name, "debug", num_hidden_layers=1)
    model = copy.deepcopy(eager)
    parallelize(model, OneRank(), dtype=torch.float32, activation_checkpoint="selective", compile=True)
    step = TreeStep(model, TreeLoss("gspo"), "cpu", TreePartitioner("redundancy_free", 34))
    step.warm_up(num_tokens, evaluates=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    forwards = []
    for seed in range(6):
        inputs = step.prepare([[random_tree(random.Random(seed))]])
        step.run(inputs)
        step.evaluate([inputs])
        forwards.append(inputs.counts.forwards)
    assert min(forwards) == 1
    assert max(forwards) > 3
    assert counters["stats"]["unique_graphs"] == graphs


def test_ranks_that_reduce_every_gradient_warm_up_without_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a run may set a partitioner: it fails only if a tree must be cut."""
    model = tree_model(hf_model(tied=True))
    monkeypatch.setattr("titan_tree.engine.tree_step.FSDPModule", type(model))
    step = TreeStep(model, TreeLoss("sft"), "cpu", TreePartitioner("auto", 34), reduce_gradients="every")
    step.warm_up(150, evaluates=True)
    large = TokenTree.from_paths([TokenPath(range(60))])
    with pytest.raises(UserError, match=r"parallel\.reduce_gradients: expected 'last'"):
        step.run(step.prepare([[large]]))


def test_the_warm_up_has_all_fields_that_a_loss_may_read() -> None:
    loss = TreeLoss("grpo", reduction="distinct_token_mean")  # reads what siblings share, too
    step = TreeStep(tree_model(hf_model(tied=True)), loss, "cpu", TreePartitioner("auto", 34))
    for inputs in warm_up_inputs(step.preparer(), 150, 99, is_partitioned=True):
        batches = inputs.micro_batches[0]
        for batch in batches:
            missing = [name for name, value in vars(batch.pairs).items() if value is None]
            # No loss of pairs or of rollouts runs on such a partition, and this one reads no targets.
            assert missing == [*(["partner", "rollout"] if len(batches) > 1 else []), "targets"]
    step = TreeStep(step.model, TreeLoss("distill_topk"))
    (inputs,) = warm_up_inputs(step.preparer(), 150, 99, is_partitioned=False)
    assert len(inputs.micro_batches[0][0].pairs.targets.pair)


def test_inputs_from_a_worker_fit_the_graphs_of_the_warm_up() -> None:
    """A graph depends on the strides of its inputs, even of those that are empty."""
    step = TreeStep(tree_model(hf_model(tied=True)), TreeLoss("gspo"), "cpu", TreePartitioner("auto", 34))
    for inputs in warm_up_inputs(step.preparer(), 150, 99, is_partitioned=True):
        assert strides(inputs) == strides(from_bytes(to_bytes(inputs)))


def strides(inputs: StepInput) -> list[tuple[int, ...]]:
    """Returns the strides of all tensors."""
    found: list[tuple[int, ...]] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if not isinstance(value, Tensor):
                return None
            found.append(value.stride())
            return len(found)

    Pickler(io.BytesIO()).dump(inputs)
    return found


def random_tree(draw: random.Random) -> TokenTree:
    """Returns a tree of one root whose nodes have at least four tokens.

    A partition of a single token has graphs of its own, and so has a forest of roots that need no context.
    """
    prefixes = [[1, 2, 3, 4]]
    for _ in range(draw.randrange(1, 8)):
        prefixes.append(draw.choice(prefixes) + [draw.randrange(60) for _ in range(draw.randrange(4, 20))])
    return TokenTree.from_paths(
        [TokenPath(tokens, advantage=1.0, old_logprobs=[-1.0] * len(tokens)) for tokens in prefixes[1:]]
    )
