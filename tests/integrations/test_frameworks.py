"""Rows of AReaL, prime-rl, SkyRL and slime: on trees, and in plain PyTorch with each row alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.framework_rows import (
    ADVANTAGES,
    MASKS,
    OLD,
    PROMPTS,
    RESPONSES,
    SAMPLED,
    TEMPERATURE,
    check_scores,
    check_step,
    clipped,
    per_sample,
)
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.errors import UserError
from titan_tree.integrations.frameworks import AReaL, PrimeRL, SkyRL, Slime
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


def areal_batch(computed: bool) -> dict[str, Any]:
    """Returns a batch of rollouts with recomputed log-probs, before or after ``compute_advantages``."""
    batch = {
        "input_ids": padded([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)], torch.long),
        "attention_mask": padded([[1] * (len(p) + len(r)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]),
        "loss_mask": padded(per_sample(MASKS, 0.0)),
        "logprobs": padded(per_sample(SAMPLED, 0.0)),
        "versions": padded(per_sample([torch.full_like(m, 3) for m in MASKS], -1), torch.long),
        "prox_logp": torch.roll(padded(per_sample(OLD, 0.0)), -1, dims=-1),
        "rewards": torch.ones(5),
    }
    if computed:
        for name in ("loss_mask", "logprobs"):
            batch[name] = torch.roll(batch[name], -1, dims=-1)
        batch["advantages"] = batch["loss_mask"] * torch.tensor(ADVANTAGES)[:, None]
    return batch


def decoupled(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    assert pairs.old_logprobs is not None
    assert pairs.rollout_logprobs is not None
    weight = (pairs.old_logprobs - pairs.rollout_logprobs).exp()
    return clipped(logprobs, pairs.old_logprobs, pairs.advantage) * weight


def test_areal_has_the_same_losses() -> None:
    def formula(logprobs: list[Tensor], is_decoupled: bool) -> Tensor:
        """ppo_actor_loss_fn, with loss_weight_fn = the number of trained tokens."""
        total = torch.zeros(())
        for x, old, sampled, a, m in zip(logprobs, OLD, SAMPLED, ADVANTAGES, MASKS, strict=True):
            weight = (old - sampled).exp() if is_decoupled else 1.0
            total = total + (clipped(x, old, a) * weight * m).sum()
        return total / sum(m.count_nonzero() for m in MASKS)

    paths = AReaL.to_paths(areal_batch(computed=True), TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "token_mean"), lambda x: formula(x, False))
    register_loss("decoupled")(decoupled)
    check_step(paths, TreeLoss("decoupled", "token_mean"), lambda x: formula(x, True))


def test_arrays_of_areal_are_aligned_before_and_after_it_moves_them() -> None:
    before, after = (AReaL.to_paths(areal_batch(computed)) for computed in (False, True))
    for got, want, mask in zip(before, after, MASKS, strict=True):
        assert got.loss_tokens == mask.sum()
        for name in ("tokens", "loss_mask", "old_logprobs", "policy_version"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        np.testing.assert_array_equal(got.rollout_logprobs[1:], want.rollout_logprobs[1:])
        assert before[0].advantage is None


def test_areal_gets_values_moved_to_the_left() -> None:
    batch = areal_batch(computed=False)

    def moved(values: list[Tensor]) -> Tensor:
        rows = torch.roll(padded(per_sample(values, float("nan"))), -1, dims=-1)
        rows[:, -1] = 0.0
        return rows

    check_scores(AReaL.to_paths(batch, TEMPERATURE), lambda values: AReaL.to_rows(batch, values), moved)


def training_samples(**changes: Any) -> list[SimpleNamespace]:
    columns = {
        "mask": [[bool(x) for x in row] for row in per_sample(MASKS, 0.0)],
        "logprobs": per_sample(SAMPLED, 0.0),
        "advantages": per_sample(
            [a * torch.ones(len(r)) for a, r in zip(ADVANTAGES, RESPONSES, strict=True)], 0.0
        ),
        "temperatures": per_sample([TEMPERATURE * torch.ones(len(r)) for r in RESPONSES], 1.0),
        "rl_weights": [None] * 5,
    }
    rows = [
        {"token_ids": p + r, "env_name": "e", "mm_refs": None, **{n: c[i] for n, c in columns.items()}}
        for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    return [SimpleNamespace(**{**row, **changes}) for row in rows]


PADDING = 3  # tokens at the end of a micro-batch


def micro_batch(rows: Sequence[SimpleNamespace]) -> dict[str, Any]:
    def joined(name: str) -> list[Any]:
        return [x for row in rows for x in getattr(row, name)] + [name == "token_ids"] * PADDING

    return {
        "input_ids": list(map(int, joined("token_ids"))),
        "loss_mask": joined("mask"),
        "advantages": joined("advantages"),
        "inference_logprobs": joined("logprobs"),
        "position_ids": [i for row in rows for i in range(len(row.token_ids))] + list(range(PADDING)),
        "sequence_lengths": [len(row.token_ids) for row in rows],
        "temperatures": joined("temperatures"),
        "env_names": ["e"] * len(joined("token_ids")),
        "trace_ids": ["t"] * len(rows),
        "branch_indices": list(range(len(rows))),
    }


def dppo(logprobs: Tensor, sampled: Tensor, advantage: Any, high: float, low: float, tau: float) -> Tensor:
    """prime-rl's default loss of each token: DPPO's mask on probabilities, and a squared log-ratio."""
    difference = logprobs.detach().exp() - sampled.exp()
    is_masked = torch.where(torch.as_tensor(advantage) > 0, difference > high, difference < -low)
    log_ratio = logprobs - sampled
    return tau * log_ratio**2 - ~is_masked * advantage * log_ratio.exp()


def tree_dppo(logprobs: Tensor, pairs: PathPairs, high: float = 0.02, low: float = 0.02) -> Tensor:
    assert pairs.rollout_logprobs is not None
    return dppo(logprobs, pairs.rollout_logprobs, pairs.advantage, high, low, 0.1)


@pytest.mark.parametrize("kind", ["samples", "micro-batches", "a row of weight 0"])
def test_prime_rl_has_the_same_loss(kind: str) -> None:
    weights = (1, 0, 1, 1, 1) if kind == "a row of weight 0" else (1, 1, 1, 1, 1)

    def formula(logprobs: list[Tensor]) -> Tensor:
        """The sum over trained tokens, divided by their number."""
        rows = zip(logprobs, SAMPLED, ADVANTAGES, MASKS, weights, strict=True)
        total = sum((w * dppo(x, s, a, 0.02, 0.02, 0.1) * m).sum() for x, s, a, m, w in rows)
        return total / sum(m.sum() * (w > 0) for m, w in zip(MASKS, weights, strict=True))

    rows: list[Any] = training_samples()
    if kind == "a row of weight 0":
        rows[1].rl_weights = [0.0] * len(rows[1].token_ids)
    elif kind == "micro-batches":
        rows = [micro_batch(rows[:3]), micro_batch(rows[3:])]
    register_loss("dppo")(tree_dppo)
    check_step(PrimeRL.to_paths(rows), TreeLoss("dppo", "token_mean"), formula)


def test_weights_of_prime_rl_multiply_the_advantage() -> None:
    rows = training_samples()
    rows[0].rl_weights = [0.5] * len(rows[0].token_ids)

    def formula(logprobs: list[Tensor]) -> Tensor:
        columns = zip(logprobs, SAMPLED, ADVANTAGES, MASKS, (0.5, 1, 1, 1, 1), strict=True)
        total = sum((w * clipped(x, s, a) * m).sum() for x, s, a, m, w in columns)
        return total / sum(m.sum() for m in MASKS)

    check_step(PrimeRL.to_paths(rows), TreeLoss("ppo", "token_mean"), formula)


def test_prime_rl_gets_a_value_for_every_token() -> None:
    def every_token(values: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(row) for row in per_sample(values, float("nan"))]

    rows = training_samples(temperatures=None)
    for row in rows:
        row.temperatures = [TEMPERATURE] * len(row.token_ids)
    check_scores(PrimeRL.to_paths(rows), lambda values: PrimeRL.to_rows(rows, values), every_token)
    packed = [micro_batch(rows[:3]), micro_batch(rows[3:])]
    check_scores(
        PrimeRL.to_paths(packed),
        lambda values: PrimeRL.to_rows(packed, values),
        lambda values: [
            torch.cat([*part, torch.full((PADDING,), torch.nan)])
            for part in (every_token(values)[:3], every_token(values)[3:])
        ],
    )


def test_prime_rl_records_experts() -> None:
    rows = training_samples()
    for row in rows:
        experts = np.arange(len(row.token_ids) * 6, dtype=np.uint8).reshape(-1, 2, 3)
        row.routed_experts = SimpleNamespace(data=experts.tobytes(), shape=list(experts.shape), dtype="uint8")
    for path, row in zip(PrimeRL.to_paths(rows), rows, strict=True):
        assert path.routed_experts.flatten().tolist() == list(range(6 * len(row.token_ids)))
    padded = np.zeros((len(rows[0].token_ids), 2, 3), np.int32)
    padded[:2] = [[3, 1, 2], [0, 5, 4]]
    rows[0].routed_experts = {"data": padded.tobytes(), "shape": list(padded.shape), "dtype": "int32"}
    path = PrimeRL.to_paths(rows[:1])[0]
    assert path.routed_experts[:2].tolist() == padded[:2].tolist()
    assert (path.routed_experts[2:] == -1).all()


def test_the_frameworks_record_sampling_masks() -> None:
    """Every response keeps two ids at its even tokens, and the whole vocabulary, or nothing, elsewhere."""
    kept = [[[t, 1] if i % 2 == 0 else [] for i, t in enumerate(r)] for r in RESPONSES]
    rows, slime = training_samples(), train_data()
    slime |= {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": []}
    for row, prompt, ids in zip(rows, PROMPTS, kept, strict=True):
        counts = np.array([0] * len(prompt) + list(map(len, ids)), np.int32)
        flat = np.array([i for kept_ids in ids for i in kept_ids], np.int32)
        row.sampling_mask = SimpleNamespace(ids=flat.tobytes(), counts=counts.tobytes(), logprobs=None)
        slime["rollout_top_p_token_ids"].append(torch.from_numpy(flat))
        slime["rollout_top_p_token_offsets"].append(torch.tensor([0, *counts[len(prompt) :].cumsum()]))
    support = [np.array([x or [-1, -1] for x in ids], np.int32) for ids in kept]
    for paths in (
        PrimeRL.to_paths(rows),
        SkyRL.to_paths(generator_output() | {"rollout_sample_support": support}),
        Slime.to_paths(slime),
    ):
        for path, prompt, ids, mask in zip(paths, PROMPTS, kept, MASKS, strict=True):
            found = [x.tolist() for x in path.sampling_mask.by_token()]
            assert found == [[]] * len(prompt) + [x if m else [] for x, m in zip(ids, mask, strict=True)]
    rows[0].sampling_mask.counts = b""
    expected = (
        f"row 0: sampling_mask: expected the count of ids of {len(rows[0].token_ids)} tokens, and all ids"
    )
    with pytest.raises(UserError, match=expected):
        PrimeRL.to_paths(rows)


def test_samples_that_prime_rl_does_not_train_have_no_advantage() -> None:
    rows = training_samples()
    rows[0].advantages, rows[0].mask = None, [False] * len(rows[0].mask)
    rows[1].advantages = [a if m else None for a, m in zip(rows[1].advantages, rows[1].mask, strict=True)]
    paths = PrimeRL.to_paths(rows)
    assert not paths[0].advantage.any()
    assert not paths[0].loss_tokens
    kept = np.array(rows[1].mask)
    given = [a for a in rows[1].advantages if a is not None]
    np.testing.assert_array_equal(paths[1].advantage[kept], np.float32(given))
    assert not paths[1].advantage[~kept].any()
    rows[2].advantages = None
    assert PrimeRL.to_paths(rows)[2].advantage is None  # a trained sample: the loss refuses it


def generator_output() -> dict[str, Any]:
    return {
        "prompt_token_ids": PROMPTS,
        "response_ids": RESPONSES,
        "rewards": [1.0] * 5,
        "loss_masks": [m.int().tolist() for m in MASKS],
        "stop_reasons": ["stop"] * 5,
        "rollout_metrics": {"x": 1},
        "rollout_logprobs": [s.tolist() for s in SAMPLED],
        "trajectory_ids": None,
        "rollout_expert_indices": None,
        "is_last_step": None,
        "is_hinted": [None] * 5,
        "advantages": ADVANTAGES,
        "action_log_probs": OLD,
    }


def test_skyrl_has_the_same_losses() -> None:
    def formula(logprobs: list[Tensor], by_row: bool) -> Tensor:
        """The sum of losses with the advantages of ``apply_loss_reduction_to_advantages_minibatch``."""
        total, number = torch.zeros(()), sum(m.sum() for m in MASKS)
        for x, old, a, m in zip(logprobs, OLD, ADVANTAGES, MASKS, strict=True):
            total = total + (clipped(x, old, a / (5 * m.sum() if by_row else number)) * m).sum()
        return total

    paths = SkyRL.to_paths(generator_output(), TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "token_mean"), lambda x: formula(x, False))
    check_step(paths, TreeLoss("ppo", "path_token_mean"), lambda x: formula(x, True))


def test_steps_of_a_skyrl_trajectory_are_one_rollout() -> None:
    """Three steps of one trajectory, the third after a compaction, and one step of another trajectory."""
    output = {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5], [1, 7], [1, 2]],
        "response_ids": [[3, 4], [6], [8], [3, 9]],
        "loss_masks": [[1, 1], [1], [1], [1, 1]],
        "trajectory_ids": [SimpleNamespace(instance_id="a", repetition_id=i) for i in (0, 0, 0, 1)],
        "is_last_step": [False, False, True, True],
    }
    paths = SkyRL.to_paths(output)
    assert [path.rollout_tokens for path in paths] == [4, 4, 4, 2]
    stats = TokenTree.from_paths(paths).stats
    assert (stats.n_flat, stats.n_tree) == (17, 6 + 2 + 1)  # 1 to 6, then 7 and 8, then 9
    assert {path.rollout_tokens for path in SkyRL.to_paths(output | {"trajectory_ids": None})} == {1, 2}


def test_merging_the_steps_of_skyrl_changes_neither_the_tree_nor_what_is_trained() -> None:
    """Four steps, and the two rows that ``merge_stepwise_output`` of SkyRL makes of them.

    The first response ends with a token of the environment. The prompt of step 3 tokenizes the history anew.
    """
    name = SimpleNamespace(instance_id="a", repetition_id=0)
    steps = {
        "prompt_token_ids": [[1], [1, 2, 3, 4], [1, 23, 5], [1, 23, 5, 6, 7]],
        "response_ids": [[2, 3], [5], [6], [8, 9]],
        "loss_masks": [[1, 0], [1], [1], [1, 1]],
        "rewards": [0.0, 0.0, 0.0, 1.0],
        "stop_reasons": ["stop"] * 4,
        "rollout_logprobs": [[-1.0, 0.0], [-2.0], [-3.0], [-4.0, -5.0]],
        "trajectory_ids": [name] * 4,
        "is_last_step": [False, False, False, True],
        "env_metrics": [{"turns": 4}] * 4,
    }
    merged = {
        "prompt_token_ids": [[1], [1, 23, 5]],
        "response_ids": [[2, 3, 4, 5], [6, 7, 8, 9]],
        "loss_masks": [[1, 0, 0, 1], [1, 0, 1, 1]],
        "rollout_logprobs": [[-1.0, 0.0, 0.0, -2.0], [-3.0, 0.0, -4.0, -5.0]],
        "trajectory_ids": [name] * 2,
        "is_last_step": [False, True],
    }
    trees = [TokenTree.from_paths(SkyRL.to_paths(output)) for output in (steps, merged)]
    assert [(len(tree.paths), tree.stats.n_flat, tree.stats.n_tree) for tree in trees] == [
        (4, 3 + 5 + 4 + 7, 11),  # 1 to 5, then 23 and 5 to 9
        (2, 5 + 7, 11),
    ]
    trained = [sorted(_trained(path) for path in tree.paths) for tree in trees]
    assert [sum(part, ()) for part in trained] == [
        ((2, -1.0), (5, -2.0), (6, -3.0), (8, -4.0), (9, -5.0))
    ] * 2
    assert [path.rollout_tokens for tree in trees for path in tree.paths] == [5] * 6


def _trained(path: TokenPath) -> tuple[tuple[int, float], ...]:
    """Returns the trained tokens of a path with their log-probs."""
    assert path.rollout_logprobs is not None
    return tuple(
        (path.tokens[i].item(), path.rollout_logprobs[i].item()) for i in path.loss_mask.nonzero()[0]
    )


def test_skyrl_gets_values_of_responses() -> None:
    output = generator_output()
    check_scores(SkyRL.to_paths(output, TEMPERATURE), lambda values: SkyRL.to_rows(output, values), list)


@dataclass
class Status:
    value: str = "completed"


@dataclass
class Sample:
    """The fields of slime's Sample that a rollout fills in."""

    index: int
    rollout_id: int | None
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    group_index: int = 0
    prompt: str = "p"
    response: str = "r"
    reward: float = 1.0
    status: Status = field(default_factory=Status)
    weight_versions: list[str] = field(default_factory=lambda: ["3"])
    metadata: dict = field(default_factory=dict)
    remove_sample: bool = False
    multimodal_inputs: dict | None = None
    teacher_log_probs: list[float] | None = None


ROLLOUTS = [5, 5, 6, 7, 7]


def samples() -> list[Sample]:
    rows = zip(ROLLOUTS, PROMPTS, RESPONSES, MASKS, SAMPLED, strict=True)
    return [
        Sample(i, rollout, prompt + response, len(response), mask.int().tolist(), sampled.tolist())
        for i, (rollout, prompt, response, mask, sampled) in enumerate(rows)
    ]


def train_data() -> dict[str, Any]:
    """Returns slime's columns, as its trainer has them after it computed advantages."""
    sums = {r: sum(m.sum() for m, other in zip(MASKS, ROLLOUTS, strict=True) if other == r) for r in ROLLOUTS}
    return {
        "tokens": [torch.tensor(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)],
        "response_lengths": [len(r) for r in RESPONSES],
        "rewards": ADVANTAGES,
        "raw_reward": [1.0] * 5,
        "truncated": [0] * 5,
        "sample_indices": list(range(5)),
        "rollout_ids": ROLLOUTS,
        "loss_masks": [m.int() for m in MASKS],
        "rollout_mask_sums": [sums[r] for r in ROLLOUTS],
        "rollout_log_probs": SAMPLED,
        "log_probs": OLD,
        "advantages": [a * torch.ones(len(r)) for a, r in zip(ADVANTAGES, RESPONSES, strict=True)],
        "returns": [torch.zeros(len(r)) for r in RESPONSES],
    }


def test_slime_averages_over_rollouts() -> None:
    data = train_data()

    def formula(logprobs: list[Tensor]) -> Tensor:
        """sum_of_sample_mean over rollout_mask_sums, divided by the number of rollouts."""
        rows = zip(logprobs, OLD, ADVANTAGES, MASKS, data["rollout_mask_sums"], strict=True)
        return sum((clipped(x, old, a) * m).sum() / total for x, old, a, m, total in rows) / 3  # type: ignore[return-value]

    paths = Slime.to_paths(data, TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "rollout_token_mean"), formula)
    by_sample = [
        {**row, "log_probs": old, "rewards": a}
        for row, old, a in zip(map(vars, samples()), OLD, ADVANTAGES, strict=True)
    ]
    for got, want in zip(Slime.to_paths(by_sample, TEMPERATURE), paths, strict=True):
        assert got.rollout_tokens == want.rollout_tokens
        for name in ("tokens", "loss_mask", "old_logprobs", "rollout_logprobs"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        assert got.policy_version.tolist() == [3] * len(got)

    def per_token(logprobs: list[Tensor]) -> Tensor:
        rows = zip(logprobs, OLD, ADVANTAGES, MASKS, strict=True)
        total = sum((clipped(x, old, a) * m).sum() for x, old, a, m in rows)
        return total / sum(m.sum() for m in MASKS)

    check_step(paths, TreeLoss("ppo", "token_mean"), per_token)


def test_slime_gets_values_of_responses() -> None:
    for rows in (samples(), train_data()):
        check_scores(Slime.to_paths(rows, TEMPERATURE), lambda v, rows=rows: Slime.to_rows(rows, v), list)


def test_a_part_of_a_rollout_keeps_its_weight() -> None:
    """The samples of one rank, of a rollout that has others elsewhere."""
    part = {name: values[1:4] for name, values in train_data().items()}
    assert [path.rollout_tokens for path in Slime.to_paths(part)] == [10.0, 3.0, 10.0]


def test_slime_reads_saved_rollouts(tmp_path: Path) -> None:
    rows = [vars(sample) | {"status": "completed"} for sample in samples()]
    torch.save({"rollout_id": 4, "samples": rows}, tmp_path / "4.pt")
    loaded = Slime.read_samples(tmp_path / "4.pt")
    assert [path.tokens.tolist() for path in Slime.to_paths(loaded)] == [
        path.tokens.tolist() for path in Slime.to_paths(samples())
    ]
    (tmp_path / "4.pt").write_bytes(b"no pickle")
    with pytest.raises(UserError, match=r"4\.pt: expected rollout data that slime saved"):
        Slime.read_samples(tmp_path / "4.pt")


def test_slime_counts_rollouts_without_trained_tokens() -> None:
    rows = samples()
    rows[2].remove_sample = True
    with pytest.raises(UserError, match="rollout 6: no token is trained, but slime counts the rollout"):
        Slime.to_paths(rows)
    assert [path.loss_tokens for path in Slime.to_paths(rows, skip_untrained=True)] == [5, 5, 0, 5, 5]


def test_marks_decide_what_is_trained() -> None:
    """A filtered response is not trained; the ids of one that was cut off are trained as they are."""
    marks = ["stop", "context_length", "agent_timeout", "content_filter", None]
    paths = SkyRL.to_paths(generator_output() | {"stop_reasons": marks})
    assert [path.loss_tokens for path in paths] == [5, 5, 3, 0, 5]
    rows = samples()
    for row, status in zip(rows, ("pending", "completed", "truncated", "aborted", "failed"), strict=True):
        row.status = Status(status)
    assert [path.loss_tokens for path in Slime.to_paths(rows)] == [5, 5, 3, 5, 5]
    with pytest.raises(UserError, match=r"^row 0: stop_reasons: expected a known mark, got 'new'"):
        SkyRL.to_paths(generator_output() | {"stop_reasons": ["new", *marks[1:]]})


def test_half_precision_tensors_are_read() -> None:
    batch = areal_batch(computed=False)
    logprobs = batch["logprobs"].bfloat16()
    paths = AReaL.to_paths(batch | {"logprobs": logprobs})
    length = len(paths[0])
    assert paths[0].rollout_logprobs.tolist() == logprobs[0, :length].tolist()
    old = [each.bfloat16() for each in OLD]
    paths = SkyRL.to_paths(generator_output() | {"action_log_probs": old})
    assert paths[2].old_logprobs[len(PROMPTS[2]) :].tolist() == old[2].tolist()


def test_samples_of_one_rollout_may_be_named_by_a_tensor() -> None:
    """Tensors are never equal as keys, so each sample would be a rollout of its own."""
    data = train_data() | {"rollout_ids": torch.tensor(ROLLOUTS), "rollout_mask_sums": None}
    assert [path.rollout_tokens for path in Slime.to_paths(data)] == [10, 10, 3, 10, 10]


NOT_NUMBERS = {"data": b"abc", "shape": [1, 1, 1], "dtype": "int8"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [0, float("nan"), 1]}, "row 0: mask: expected only 0 and 1, got nan"),
        ({"mask": [0, -1, 1]}, "row 0: mask: expected only 0 and 1, got -1"),
        ({"mask": 1}, "row 0: mask: expected a list, got 1"),
        ({"mask": "011"}, "row 0: mask: expected a list, got '011'"),
        (
            {"mask": list("011")},
            "row 0: mask: expected numbers, got array(['0', '1', '1'], dtype='<U1')",
        ),
        ({"mask": [[0], [0, 1], [1]]}, "row 0: mask: expected numbers, got a nested list"),
        ({"mask": [[0], [1], [1]]}, "row 0: mask: expected one number per entry, got shape [3, 1]"),
        ({"token_ids": [5.7, 6, 8]}, "row 0: token_ids: expected integers, got [5.7, 6, 8]"),
        (
            {"rl_weights": [0, 0, float("nan")]},
            "row 0: rl_weights: expected finite numbers >= 0, got something else",
        ),
        (
            {"position_ids": [0, 1.5, 2]},
            "row 0: position_ids: expected 0, 1, 2, ... for each sample, got something else",
        ),
        (
            {"routed_experts": NOT_NUMBERS},
            "row 0: routed_experts: expected integers [T, L, k], got cannot reshape array of size 3 into "
            "shape (1,1,1)",
        ),
    ],
)
def test_prime_rl_refuses_what_is_no_number(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        PrimeRL.to_paths([{"token_ids": [5, 6, 8], "mask": [0, 0, 1]} | changes])
    assert str(caught.value) == message


def sample(**changes: Any) -> list[dict[str, Any]]:
    return [{"tokens": [5, 6, 8], "response_length": 1} | changes]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrimeRL.to_paths([5]), "row 0: expected a dict or an object with fields, got 5"),
        (
            lambda: AReaL.to_paths(areal_batch(False) | {"input_ids": areal_batch(False)["input_ids"] + 0.7}),
            "batch: input_ids: expected integers, got tensor",
        ),
        (
            lambda: AReaL.to_paths(areal_batch(False) | {"logprobs": [[0.0], [0.0, 1.0]]}),
            "batch: logprobs: expected numbers, got a nested list",
        ),
        (
            lambda: AReaL.to_paths(areal_batch(False) | {"attention_mask": padded([[float("nan")]])}),
            "batch: attention_mask: expected only 0 and 1, got nan",
        ),
        (
            lambda: SkyRL.to_paths(generator_output() | {"response_ids": ["ab"] * 5}),
            "row 0: response_ids: expected a list, got 'ab'",
        ),
        (
            lambda: SkyRL.to_paths(generator_output() | {"advantages": ["x"] * 5}),
            "row 0: advantages: expected numbers, got ",
        ),
        (
            lambda: Slime.to_paths(sample(response_length="x")),
            "sample 0: response_length: expected an integer of at most 3 tokens, got 'x'",
        ),
        (
            lambda: Slime.to_paths(sample(response_length=1.9)),
            "sample 0: response_length: expected an integer of at most 3 tokens, got 1.9",
        ),
        (
            lambda: Slime.to_paths(sample(rollout_id=[1])),
            "sample 0: rollout_id: expected an integer or text, got [1]",
        ),
        *[
            (
                lambda total=total: Slime.to_paths(train_data() | {"rollout_mask_sums": [total] * 5}),
                "sample 0: rollout_mask_sums: expected at least the sample's own 5 trained tokens, got "
                f"{total!r}",
            )
            for total in ("x", float("nan"), 4)
        ],
    ],
)
def test_rows_of_other_types_are_refused_in_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AReaL.to_paths(areal_batch(True) | {"attention_mask": padded([[0, 1]] * 5)}),
            "batch: attention_mask: expected",
        ),
        (
            lambda: AReaL.to_paths(
                {"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]], "loss_mask": [[0, 1, 1]]}
            ),
            "batch: loss_mask: expected 0 on padding, where attention_mask is 0",
        ),
        (
            lambda: AReaL.to_paths(areal_batch(True) | {"pixel_values": 1}),
            "batch: pixel_values: expected text only",
        ),
        (
            lambda: PrimeRL.to_paths(training_samples(ce_weights=[1.0])),
            "row 0: ce_weights: only the component",
        ),
        (
            lambda: PrimeRL.to_paths(training_samples(payload=[("experts", 0)])),
            "row 0: payload: expected routed_experts and sampling_mask in the row; decode the payload",
        ),
        (
            lambda: PrimeRL.to_paths([micro_batch(training_samples()) | {"position_ids": [0, 2] * 20}]),
            "row 0: position_ids: expected",
        ),
        (
            lambda: PrimeRL.to_paths([micro_batch(training_samples()) | {"token_ids": [1]}]),
            "expected one name of this field, got",
        ),
        (
            lambda: SkyRL.to_paths(
                generator_output() | {"loss_masks": [*generator_output()["loss_masks"][:-1], None]}
            ),
            "row 4: loss_masks: missing; give it for every row",
        ),
        (
            lambda: PrimeRL.to_paths(training_samples(trace_id="t", branch_index=0, sampling_mask=b"x")),
            "row 0: sampling_mask: expected a dict or an object with fields, got b'x'",
        ),
        (
            lambda: SkyRL.to_paths(generator_output() | {"rollout_sample_support": [[1]] * 5}),
            r"row 0: rollout_sample_support: expected shape \[7, top_k\], got \[1\]",
        ),
        (
            lambda: SkyRL.to_paths(generator_output() | {"is_hinted": [True] * 5}),
            "output: is_hinted: samples with",
        ),
        (
            lambda: SkyRL.to_paths({**generator_output(), "rollout_logprobs": [[0.0]] * 5}),
            "row 0: rollout_logprobs: expected 7 entries, got 1",
        ),
        (lambda: Slime.to_paths([vars(samples()[0]) | {"new": 1}]), "sample 0: new: unknown field"),
        (
            lambda: Slime.to_paths([vars(samples()[0]) | {"rollout_top_p_token_ids": [1]}]),
            "sample 0: rollout_top_p_token_offsets: missing",
        ),
        (
            lambda: Slime.to_paths([vars(samples()[0]) | {"loss_mask": [1]}]),
            "sample 0: loss_mask: expected 7 entries, got 1",
        ),
        (
            lambda: Slime.to_paths(train_data() | {"log_probs": OLD[:2]}),
            "train_data: log_probs: expected 5 entries, got 2",
        ),
    ],
)
def test_what_would_change_the_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
