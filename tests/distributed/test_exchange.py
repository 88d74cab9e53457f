"""Experts that are sharded over ranks equal a loop over the tokens and experts of one process."""

import copy
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.processes import process_group, run_ranks
from titan_tree.components.moe.experts import ExpertWeight
from titan_tree.components.moe.layer import Experts, MoE
from titan_tree.distributed.experts.exchange import Arrived, arrival, gather_tokens, make_copies
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.distributed.titan import FullAC, TreeSelectiveAC

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("exchange")]

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 16, 6, 10


class Case(NamedTuple):
    """Numbers of tokens by rank, experts of a token, and the experts that they choose from."""

    num_tokens: tuple[int, ...] = (5, 17, 2, 40)
    top_k: int = 2
    choices: tuple[int, ...] = tuple(range(NUM_EXPERTS))


CASES = {
    "top 2": Case(),
    "top 1": Case(top_k=1),
    "top 8": Case(top_k=8),
    "one expert": Case(top_k=1, choices=(6,)),  # most ranks compute nothing
    "experts of the last rank": Case(top_k=3, choices=(12, 13, 14, 15)),
    "one token": Case((1, 1, 1, 1)),
    "ranks without tokens": Case((0, 3, 0, 1)),
}
POLICIES = {"no": None, "selective": TreeSelectiveAC, "full": FullAC}
LAYERS = ["router", "replayed", "compiled", "recomputed"]


class Inputs(NamedTuple):
    """What one rank passes to its experts, and the gradient of what it gets."""

    x: Tensor
    weight: Tensor
    expert: Tensor
    dy: Tensor


def make_inputs(case: Case, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(rank)
    num_tokens = case.num_tokens[rank]
    x, dy = (torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(num_tokens, case.top_k, generator=generator, dtype=torch.float64)
    choices = torch.tensor(case.choices)
    orders = torch.rand(num_tokens, len(choices), generator=generator).argsort(1)
    return Inputs(x.requires_grad_(), weight.requires_grad_(), choices[orders[:, : case.top_k]], dy)


def make_layer(top_k: int = 3) -> MoE:
    generator = torch.Generator().manual_seed(0)
    layer = MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, top_k, True, torch.nn.Linear(HIDDEN, HIDDEN)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return layer


def token_by_token(inputs: Inputs, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for x, weights, experts in zip(inputs.x, inputs.weight, inputs.expert.tolist(), strict=True):
        row = torch.zeros_like(x)
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (gate_up[expert] @ x).chunk(2)
            row = row + weight * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else inputs.x


def shard(layer: MoE, rank: int, num_ranks: int) -> MoE:
    sharded = copy.deepcopy(layer)
    sharded.experts = Experts(NUM_EXPERTS // num_ranks, HIDDEN, INTERMEDIATE)
    sharded.experts.dispatcher = ShardedExperts(cast(dist.ProcessGroup, dist.group.WORLD))
    for mine, every in zip(sharded.experts.parameters(), layer.experts.parameters(), strict=True):
        mine.data = every.detach().chunk(num_ranks)[rank].clone()
    return sharded


def run_layer(layer: Any, rank: int, kind: str) -> list[Tensor]:
    """Returns the output for a rank's tokens, then gradients of x, the other weights and the experts."""
    x, _, expert, dy = make_inputs(Case(top_k=3), rank)
    if kind == "compiled":
        layer = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    forced = expert.to(torch.int16).where(torch.arange(len(expert))[:, None] % 2 == 0, -1)
    arguments = (x, torch.ones(len(x)), None if kind == "router" else forced)
    y, *_ = checkpoint(layer, *arguments, use_reentrant=False) if kind == "recomputed" else layer(*arguments)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def run_experts(case: Case, rank: int, num_ranks: int) -> list[Tensor]:
    """Returns the output, and gradients of x, the router weights and both weights of the experts."""
    x, weight, expert, dy = make_inputs(case, rank)
    weights = [w.detach().chunk(num_ranks)[rank].requires_grad_() for w in make_layer().experts.parameters()]
    experts = ShardedExperts(cast(dist.ProcessGroup, dist.group.WORLD))
    y = experts(x, *map(ExpertWeight, weights), expert, weight)
    return [y.detach(), *torch.autograd.grad(y, [x, weight, *weights], dy)]


def run_gather(case: Case, rank: int, num_ranks: int) -> tuple[Tensor, Arrived]:
    """Returns the copies for a rank's experts, and what the rank knows about them."""
    x, weight, expert, _ = make_inputs(case, rank)
    group = cast(dist.ProcessGroup, dist.group.WORLD).group_name
    tokens = Arrived(*gather_tokens(x.detach(), expert, weight.detach(), NUM_EXPERTS // num_ranks, group))
    return make_copies(x.detach(), tokens.rows, arrival(tokens.rows), tokens), tokens


def count_exchanges(layer: MoE, rank: int, policy: type | None) -> tuple[int, int, list[Tensor]]:
    """Returns how often a compiled layer exchanges tensors in each pass, and what ``run_layer`` returns."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    if policy is not None:
        policy(policy.Config(preserve_rng_state=False)).apply(model)
    block = torch.compile(model.layers[0], backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    x, _, _, dy = make_inputs(Case(top_k=3), rank)
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        y, *_ = block(x, torch.ones(len(x)))
        forward = exchange.call_count
        found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        return forward, exchange.call_count - forward, [y.detach(), *found]


def run_all(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    with process_group(rank, num_ranks, ports[0]):
        for name, case in CASES.items():
            found[name] = [run_experts(case, rank, num_ranks) for _ in range(2)]
            copies, tokens = run_gather(case, rank, num_ranks)
            found[f"gather {name}"] = copies, tuple(tokens)
        for kind in LAYERS:
            found[kind] = run_layer(shard(make_layer(), rank, num_ranks), rank, kind)
        for name, policy in POLICIES.items():
            torch._dynamo.reset()
            found[f"{name} checkpointing"] = count_exchanges(
                shard(make_layer(), rank, num_ranks), rank, policy
            )
        frozen = shard(make_layer(), rank, num_ranks)
        frozen.experts.requires_grad_(False)
        x, *_, dy = make_inputs(CASES["top 2"], rank)
        frozen(x, torch.ones(len(x)))[0].backward(dy)
        found["frozen"] = [x.grad, frozen.experts.gate_up_proj.grad, frozen.experts.down_proj.grad]
    torch.save(found, folder / f"{num_ranks}_{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Returns everything that ranks found, by number of ranks and by rank."""
    folder = tmp_path_factory.mktemp("exchange")
    for num_ranks in (2, 4):
        run_ranks(run_all, num_ranks, num_ranks, folder)
    return {n: [torch.load(folder / f"{n}_{rank}.pt") for rank in range(n)] for n in (2, 4)}


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_experts_equal_a_loop_over_tokens(results: Any, num_ranks: int, name: str) -> None:
    """Outputs and all gradients are equal in float64. A second run has the same bits."""
    weights = list(make_layer().experts.parameters())
    totals = [torch.zeros_like(w) for w in weights]  # an expert's gradient sums over the tokens of all ranks
    wanted = []
    for rank in range(num_ranks):
        inputs = make_inputs(CASES[name], rank)
        y = token_by_token(inputs, *weights)
        leaves = [inputs.x, inputs.weight, *weights]
        found = torch.autograd.grad(y, leaves, inputs.dy, allow_unused=True, materialize_grads=True)
        wanted.append([y.detach(), *found[:2]])
        totals = [total + grad for total, grad in zip(totals, found[2:], strict=True)]
    for rank, want in enumerate(wanted):
        first, second = results[num_ranks][rank][name]
        assert_equal(first[:3], want)
        assert_equal(first[3:], [total.chunk(num_ranks)[rank] for total in totals])
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_copies_the_tokens_of_its_experts(results: Any, num_ranks: int, name: str) -> None:
    """All tokens of other ranks arrive. Copies are sorted by expert, the rank's own tokens first."""
    inputs = [make_inputs(CASES[name], rank) for rank in range(num_ranks)]
    per_rank = NUM_EXPERTS // num_ranks
    for receiver in range(num_ranks):
        got, arrived = results[num_ranks][receiver][f"gather {name}"]
        tokens, others = Arrived(*arrived), [each for i, each in enumerate(inputs) if i != receiver]
        assert torch.equal(tokens.rows, torch.cat([each.x.detach() for each in others]))
        copies: list[list[Tensor]] = [[] for _ in range(per_rank)]
        for x, weight, expert, _ in (inputs[receiver], *others):
            for token, chosen in enumerate(expert.tolist()):
                for j, number in enumerate(chosen):
                    if number // per_rank == receiver:
                        row = torch.cat([x[token], weight[token, j].unsqueeze(0)])
                        copies[number % per_rank].append(row.detach())
        want = [row.tolist() for of_expert in copies for row in of_expert]
        assert torch.cat([got, tokens.scale], 1).tolist() == want
        assert tokens.ends.tolist() == torch.tensor(list(map(len, copies))).cumsum(0).tolist()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sharded_layer_equals_the_whole_layer(results: Any, num_ranks: int, kind: str) -> None:
    """The router chooses, or replayed experts replace its choice for every other token."""
    mode = "router" if kind == "router" else "replayed"
    want = [run_layer(make_layer(), rank, mode) for rank in range(num_ranks)]
    names = [name for name, _ in make_layer().named_parameters()]
    for rank, every in enumerate(results[num_ranks]):
        got = dict(zip(("y", "x", *names), every[kind], strict=True))
        for i, (name, mine) in enumerate(got.items()):
            other = want[rank][i]
            if name.startswith("experts."):
                other = sum(of_rank[i] for of_rank in want).chunk(num_ranks)[rank]
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=name)


def test_frozen_experts_pass_gradients_on(results: Any) -> None:
    for rank, found in enumerate(results[4]):
        dx, *of_weights = found["frozen"]
        x, *_, dy = make_inputs(CASES["top 2"], rank)
        (want,) = torch.autograd.grad(make_layer()(x, torch.ones(len(x)))[0], x, dy)
        torch.testing.assert_close(dx, want, rtol=1e-12, atol=1e-12)
        assert of_weights == [None, None]


@pytest.mark.parametrize(("policy", "repeated"), [("no", 0), ("selective", 0), ("full", 2)])
def test_checkpointing_stores_what_arrived(results: Any, policy: str, repeated: int) -> None:
    """Tokens and choices travel, and results return; then gradients travel in the opposite directions.

    Full checkpointing sends tokens and choices again, but does not compute experts and return results again.
    """
    for num_ranks in (2, 4):
        for every in results[num_ranks]:
            forward_calls, backward_calls, found = every[f"{policy} checkpointing"]
            assert (forward_calls, backward_calls) == (3, 3 + repeated)
            assert_equal(found, every["router"])
