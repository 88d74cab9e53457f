"""Rows of frameworks as forests, against the unmodified model of transformers on every row alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.hf_families import VOCAB, hf_family
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.integrations.rows import RowLoss, Rows
from titan_tree.integrations.tree_view import RowForest, TreeView, row_scores
from titan_tree.models.transformers import TransformersModel

torch.manual_seed(0)
TRUNK = torch.randint(3, VOCAB, (9,))
# Lengths 15, 13, 9, 12; the third is a prefix of others.
BRANCHES = [torch.randint(3, VOCAB, (n,)) for n in (6, 4, 0)]
ROWS = [*(torch.cat([TRUNK, branch]) for branch in BRANCHES), torch.randint(3, VOCAB, (12,))]
LEFT = [2, 0, 5, 1]  # padding before each row
WIDTH = 17


def padded(values: list[Tensor]) -> Tensor:
    """Returns [4, WIDTH], with each row after its padding."""
    sides = [(left, WIDTH - left - len(value)) for left, value in zip(LEFT, values, strict=True)]
    return torch.stack([pad(value, side) for value, side in zip(values, sides, strict=True)])


REAL = padded([torch.ones_like(row) for row in ROWS])
SCORED = padded(
    [(torch.arange(len(row)) % 3 > 0) & (torch.arange(len(row)) > r) for r, row in enumerate(ROWS)]
)


def scores(model: torch.nn.Module, temperatures: list[float]) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies [4, WIDTH] of each row alone; an entry speaks of the token after it."""
    columns: list[list[Tensor]] = [[], []]
    for row, temperature in zip(ROWS, temperatures, strict=True):
        log_p = (model(input_ids=row[None]).logits[0].float() / temperature).log_softmax(-1)[:-1]
        columns[0].append(torch.cat([log_p.gather(1, row[1:, None])[:, 0], torch.zeros(1)]))
        columns[1].append(torch.cat([-(log_p.exp() * log_p).sum(1), torch.zeros(1)]))
    is_scored = torch.roll(SCORED * REAL, -1, 1).bool()
    return tuple(torch.where(is_scored, padded(column), 0.0) for column in columns)  # type: ignore[return-value]


def row_loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss that compares tokens of a row, and rows with each other."""
    assert entropy is not None
    ratio = (logprobs.sum(-1) / 7).exp()
    return -(ratio / ratio.sum().detach()).log().mean() * ratio.max() - 0.1 * entropy.mean()


@pytest.mark.parametrize("max_tokens", [None, 8])
@pytest.mark.parametrize("temperatures", [[0.7] * 4, [1.0, 0.7, 1.0, 0.7]])
def test_row_loss_equals_the_loss_of_every_row_alone(
    max_tokens: int | None, temperatures: list[float]
) -> None:
    hf = hf_family("qwen3")
    want = row_loss(*scores(hf, temperatures))
    want.backward()
    gradients = [p.grad.clone() for p in hf.parameters() if p.grad is not None]
    hf.zero_grad()
    parameters = list(hf.parameters())

    rows = Rows.padded(padded(ROWS), REAL, SCORED, torch.tensor(temperatures))
    loss = RowLoss(rows, row_loss, entropy=True)
    step = TreeStep(
        TransformersModel(hf),
        loss,
        partitioner=None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens),
    )
    prepared = step.prepare([[rows.tree]])
    assert prepared.counts.distinct_tokens == 31  # rows of all temperatures share the trunk
    assert (prepared.counts.forwards > 1) == (max_tokens is not None)
    result = step.run(prepared)
    torch.testing.assert_close(result.loss, want.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.value, want.detach(), rtol=1e-5, atol=0)
    for p, gradient in zip(parameters, gradients, strict=True):
        assert p.grad is not None
        assert (p.grad - gradient).norm() <= 1e-5 * gradient.norm()


def test_several_outputs_of_a_rollout_share_their_prefixes() -> None:
    """As verl's agent loops return them, one (prompt, response) per call of the model, all of one rollout."""
    task, answer, tool, next_answer = [*range(6)], [10, 11, 12], [20, 21], [13, 14, 15]
    summary, after_summary = [30, 31], [16, 17, 18, 19]  # a compaction keeps the task
    delegated, reply, more, last_reply = [40, 41, 42, 43], [50, 51], [60], [52, 53]  # a sub-agent
    calls = [
        (task, answer),
        (task + answer + tool, next_answer),
        (task + summary, after_summary),
        (delegated, reply),
        (delegated + reply + more, last_reply),
    ]
    ids = torch.tensor([token for prompt, response in calls for token in prompt + response])
    scored = torch.tensor([i >= len(p) for p, response in calls for i in range(len(p + response))])
    offsets = torch.tensor([0, *(len(prompt + response) for prompt, response in calls)]).cumsum(0)
    rows = Rows.jagged(ids, offsets, scored)
    assert (len(ids), len(rows.tree), len(rows.batch().edge_label)) == (50, 29, 14)


def test_jagged_and_padded_rows_return_the_same_values_per_token() -> None:
    hf = hf_family("qwen3")
    want, _ = scores(hf, [1.0] * 4)
    model = TransformersModel(hf)
    offsets = torch.tensor([0, *map(len, ROWS)]).cumsum(0)
    scored = SCORED[REAL.bool()]
    for rows, expected in (
        (Rows.padded(padded(ROWS), REAL, SCORED), want),
        (Rows.jagged(torch.cat(ROWS), offsets.int(), scored), want[REAL.bool()]),
    ):
        batch = rows.batch()
        got = rows.by_token(model(batch).logprobs, batch)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert got.requires_grad


@pytest.mark.parametrize("max_tokens", [None, 8])
def test_rows_without_a_scored_token_keep_the_graph(max_tokens: int | None) -> None:
    """Distributed wrappers need a backward pass that reaches every parameter on every rank."""
    view = TreeView(hf_family("qwen3"))
    rows = Rows.padded(padded(ROWS), REAL, torch.zeros_like(SCORED))
    values = row_scores(view, RowForest.make(rows, view, max_tokens), entropy=True)
    (values["logprobs"].sum() + values["entropy"].sum()).backward()
    assert not values["logprobs"].any()
    assert all(p.grad is not None and not p.grad.any() for p in view.parameters())


def test_an_entropy_that_the_loss_does_not_use_has_no_gradient() -> None:
    rows = Rows.padded(padded(ROWS), REAL)
    gradients = []
    for entropy in (False, True):
        model = TransformersModel(hf_family("qwen3"))
        loss = RowLoss(rows, lambda logprobs, _: logprobs.square().sum(), entropy)
        step = TreeStep(model, loss, partitioner=TreePartitioner("redundancy_free", 8))
        step.run(step.prepare([[rows.tree]]))
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_find_cause_names_the_row() -> None:
    rows = Rows.padded(padded(ROWS), REAL)
    step = TreeStep(
        TransformersModel(hf_family("qwen3")),
        RowLoss(rows, lambda logprobs, _: logprobs[3].sum() * torch.inf),
    )
    assert step.find_cause(step.prepare([[rows.tree]])).endswith("not finite: 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"real": padded([row != row[4] for row in ROWS])}, "row 0: .* got padding between"),
        ({"real": REAL * torch.tensor([1, 0, 1, 1])[:, None]}, "path 1: tokens: expected a non-empty list"),
        ({"temperature": 0.0}, "path 0: temperature: expected a number > 0"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rows.padded(**{"tokens": padded(ROWS), "real": REAL, **change})  # type: ignore[arg-type]
