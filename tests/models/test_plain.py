"""A module of a user on trees equals the module by itself on each path, in float64."""

import pytest
import torch
from torch import Tensor, nn

from examples.own_model import OwnModel
from tests.support.cases import slow_except
from tests.support.oracle import flat, path_coefficients, random_groups, relative_error
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.plain import PlainModel
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.token_tree import TokenTree


class AllRules(OwnModel):
    """Runs Kimi Delta Attention and Mamba-2's SSD after the layers of ``OwnModel``, with its weights."""

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        x = super().hidden_states(tokens, positions, tree)
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 16)).unbind(1)
        g, beta = self.gates(x).chunk(2, dim=-1)
        x = x + tree.recurrence(q, k, v, -nn.functional.softplus(v), beta.sigmoid()).flatten(1)
        return x + tree.recurrence(q, k, v, -nn.functional.softplus(g)).flatten(1)


@pytest.fixture
def module() -> OwnModel:
    torch.manual_seed(0)
    return AllRules().double()


def logprobs_alone(module: OwnModel, tokens: list[int]) -> Tensor:
    ids = torch.as_tensor(tokens).long()
    return module(ids)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("max_tokens", [None, 5])
@pytest.mark.parametrize("seed", slow_except((0,), [0, 3]))  # a tree of any shape, and a forest
def test_a_step_equals_the_module_on_each_path(module: OwnModel, seed: int, max_tokens: int | None) -> None:
    groups = random_groups(seed, max_length=4)
    paths = flat(groups)
    want = module.head.weight.new_zeros(())
    for path, factors in zip(paths, path_coefficients(paths, "path_mean"), strict=True):
        want = want - (factors * logprobs_alone(module, path.tokens)).sum()
    want.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()

    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(PlainModel(module), TreeLoss("sft"), partitioner=partitioner)
    result = step.run(step.prepare([[TokenTree.from_paths(group) for group in groups]]))
    assert (result.counts.gateway_bytes > 0) == (max_tokens is not None)
    assert relative_error(result.loss, want.detach()) < 2e-7  # the loss is fp32
    for name, p in module.named_parameters():
        assert relative_error(p.grad, gradients[name]) < 1e-7, name  # weights of paths are fp32


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_scores_equal_the_module_on_each_path(module: OwnModel, max_tokens: int | None) -> None:
    lists = [[*range(9), 3], [*range(9), 5, 1, 2], [*range(4), 7, 7]]
    with torch.no_grad():
        scores = tree_logprobs(PlainModel(module), lists, max_tokens)
        for tokens, got in zip(lists, scores, strict=True):
            assert relative_error(got, logprobs_alone(module, tokens)) < 1e-12


def test_what_a_module_lacks_is_named(module: OwnModel) -> None:
    with pytest.raises(UserError, match=r"^PlainModel: Linear has no hidden_states; define hidden_states\("):
        PlainModel(nn.Linear(2, 2))
    with pytest.raises(UserError, match="token id 61 at token 1: expected ids below the model's vocabulary"):
        tree_logprobs(PlainModel(module), [[0, 61]])


def test_hidden_states_of_another_shape_are_refused(module: OwnModel) -> None:
    module.head = nn.Linear(8, 61)
    with pytest.raises(
        UserError, match=r"^PlainModel: AllRules: expected hidden states \[2, 8\] of .* \[2, 32\]$"
    ):
        PlainModel(module)


def test_dropout_is_refused(module: OwnModel) -> None:
    module.norms.append(nn.Dropout(0.1))
    with pytest.raises(UserError, match=r"^PlainModel: norms\.3: expected no dropout, .*, got p = 0\.1; set"):
        PlainModel(module)


def test_costs_are_those_of_matrices_and_calls(module: OwnModel) -> None:
    """Linears of 32 x 96, 32 x 96 and 32 x 4, a convolution, three recurrences; 2 heads of dim 16."""
    costs = PlainModel(module).costs()
    assert costs.flops_per_token == 6 * (2 * 32 * 96 + 32 * 4 + 96 * 4) + (18 + 18 + 12) * 2 * 16 * 16
    assert costs.flops_per_visible_pair == 12 * 32
    assert costs.flops_per_edge == 6 * 61 * 32


class Mixing(OwnModel):
    """Mixes each token with the token before it in the batch, which may be of another branch."""

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        x = super().hidden_states(tokens, positions, tree)
        return x + 0.1 * x.roll(1, 0)


class OwnPositions(OwnModel):
    """Counts positions in the batch instead of on the path."""

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        return super().hidden_states(tokens, torch.arange(len(tokens)), tree)


@pytest.mark.parametrize("kind", [Mixing, OwnPositions])
@pytest.mark.parametrize("lists", [[[1, 2, 3], [1, 2, 4, 5]], [[1, 2]]])  # also if the batch has no branch
def test_a_module_that_mixes_tokens_without_the_tree_is_refused(
    kind: type[OwnModel], lists: list[list[int]]
) -> None:
    model = PlainModel(kind())
    with pytest.raises(UserError, match=rf"^PlainModel: {kind.__name__}: expected hidden states that depend"):
        tree_logprobs(model, lists)


WEAK = {
    "earlier tokens": lambda x: 2e-3 * x.roll(1, 0),
    "later tokens": lambda x: 2e-3 * x.roll(-1, 0),
    "their mean": lambda x: 3e-3 * x.mean(0),
    "their norm": lambda x: 1e-2 * x / x.norm(dim=0),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_mixing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effect is below 1 % of the largest hidden state."""
    module, kernels = OwnModel(), OwnModel.hidden_states

    def mixing(self: OwnModel, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        x = kernels(self, tokens, positions, tree)
        return x + WEAK[name](x)

    monkeypatch.setattr(OwnModel, "hidden_states", mixing)
    with pytest.raises(UserError, match="those of one branch change with the tokens of another one by"):
        tree_logprobs(PlainModel(module), [[1, 2, 3]])


class FarMixing(OwnModel):
    """Mixes each token with the 40th before it in the batch, by weights that are 0 at first."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(gate))

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        x = super().hidden_states(tokens, positions, tree)
        return x + self.gate * nn.functional.pad(x, (0, 0, 40, 0))[: len(x)]


@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_later_checks_find_what_weights_of_0_and_short_paths_hide(gate: float) -> None:
    module = FarMixing(gate)
    model, lists = PlainModel(module), [[*range(30)], [*range(15), *range(30, 45)]]
    for _ in range(1 if gate else 3):  # later passes have longer paths
        tree_logprobs(model, lists)
    module.gate.data.fill_(0.5)
    with pytest.raises(UserError, match=r"^PlainModel: FarMixing: expected hidden states that depend"):
        tree_logprobs(model, lists)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_module_that_mixes_by_the_tree_passes_the_check_in_any_dtype(dtype: torch.dtype) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        tree_logprobs(PlainModel(OwnModel().to(dtype)), [[1, 2]])
