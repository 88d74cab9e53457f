"""Compares losses by name with the functions of TRL and verl, on rows that share tokens, in float64."""

import os
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.components.tree_loss.loss import TreeLoss, whitened
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["VERL_PLATFORM"] = "cpu"
FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
LENGTHS = (6, 4, 5, 2, 6, 3)


class Rows:
    """Six rows of one prompt in padded columns [B, T], and the same rows as a tree."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        paths, size = [], (len(LENGTHS), max(LENGTHS))
        self.mask = torch.zeros(size, dtype=torch.float64)
        for i, length in enumerate(LENGTHS):
            tokens = np.concatenate([[7, 8], rng.integers(0, 2, length)])
            mask = np.concatenate([[0, 0], rng.choice([1, 1, 1, 0], length - 1), [1]])
            old = rng.normal(-1, 0.3, length + 2).clip(max=-0.05)
            fields = {name: (old + rng.normal(0, 0.3, length + 2)).clip(max=-0.05) for name in FIELDS}
            paths.append(TokenPath(tokens, mask, advantage=float(rng.normal()), **fields))
            self.mask[i, :length] = torch.from_numpy(mask[2:])
        self.paths = paths
        self.batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        count = len(self.batch.edge_label)
        assert count < sum(LENGTHS)  # rows share tokens
        values = rng.normal(-1, 0.4, count).clip(max=-0.05)
        self.logprobs = torch.from_numpy(values).requires_grad_()
        self.advantages = torch.tensor([float(path.advantage[1]) for path in paths], dtype=torch.float64)

    def padded(self, per_path) -> torch.Tensor:
        """Returns [B, T] from one tensor per row, which also covers the prompt's second token."""
        return torch.nn.utils.rnn.pad_sequence([values[1:].double() for values in per_path], batch_first=True)

    def column(self, name: str) -> torch.Tensor:
        return self.padded([torch.from_numpy(getattr(path, name)[1:]) for path in self.paths])

    def new(self) -> torch.Tensor:
        pairs = self.batch.pairs
        counts = torch.bincount(pairs.path).tolist()
        return self.padded(self.logprobs[pairs.edge].split(counts))

    def assert_equals(self, want: torch.Tensor, loss: TreeLoss) -> None:
        (want_gradient,) = torch.autograd.grad(want, self.logprobs)
        got, _ = loss(self.logprobs, self.batch, loss.normalizer(self.paths))
        (gradient,) = torch.autograd.grad(got, self.logprobs)
        assert want_gradient.norm() > 1e-2
        assert got.item() == pytest.approx(want.item(), rel=1e-6, abs=1e-7)
        assert (gradient - want_gradient).norm() < 1e-6 * want_gradient.norm()


def trl_loss(rows: Rows, loss_type: str, **settings: object) -> torch.Tensor:
    """Returns the loss of TRL's GRPOTrainer for the rows."""
    from trl import GRPOTrainer

    args = {
        "use_bias_correction_kl": False,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    trainer = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": 1,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
    }
    new, mask = rows.new(), rows.mask
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": rows.advantages,
        "old_per_token_logps": rows.column("old_logprobs"),
        "ref_per_token_logps": rows.column("ref_logprobs"),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": settings.pop("weights", None),
    }
    fake = SimpleNamespace(
        **trainer | {name: value for name, value in settings.items() if name not in args},
        loss_type=loss_type,
        args=SimpleNamespace(**args | {name: value for name, value in settings.items() if name in args}),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    return GRPOTrainer._compute_loss(fake, None, inputs)


SEQUENCE = {"importance_sampling_level": "sequence"}
TRL = {  # case -> (settings of TRL, arguments of TreeLoss)
    "grpo": ({}, ("grpo", "path_token_mean")),
    "grpo, delta": ({"delta": 1.4}, ("grpo", "path_token_mean", {"dual_clip": 1.4})),
    "grpo, beta": ({"beta": 0.1}, ("grpo", "path_token_mean", {"kl": KLPenalty(0.1)})),
    "grpo, corrected beta": (
        {"beta": 0.1, "use_bias_correction_kl": True},
        ("grpo", "path_token_mean", {"kl": KLPenalty(0.1, importance=True)}),
    ),
    "dapo": ({"epsilon_high": 0.28}, ("dapo", "token_mean")),
    "dr_grpo": ({}, ("dr_grpo", "path_mean")),
    "cispo": ({"epsilon_high": 1.1}, ("cispo", "token_mean", {"max_ratio": 1.1})),
    "sapo": ({}, ("sapo", "path_token_mean")),
    "vespo": ({}, ("vespo", "token_mean")),
    "luspo": (SEQUENCE, ("luspo", "path_mean", {"clip_low": 0.2, "clip_high": 0.2})),
    "grpo, sequence": (SEQUENCE, ("gspo", "path_token_mean", {"clip_low": 0.2, "clip_high": 0.2})),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRL)
def test_losses_of_trl(case):
    settings, (name, reduction, *options) = TRL[case]
    rows = Rows()
    if name == "vespo":
        weights = (rows.column("old_logprobs") - rows.column("rollout_logprobs")) * rows.mask
        settings = {"use_vllm": True, "weights": weights.exp()}
    want = trl_loss(rows, case.partition(",")[0], **settings)
    rows.assert_equals(want, TreeLoss(name, reduction, **(options[0] if options else {})))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_sampling_of_trl(level, mode):
    """TRL's token_truncate, token_mask, sequence_truncate and sequence_mask, as its trainer computes them."""
    rows, cap = Rows(), 1.1
    log_weight = (rows.column("old_logprobs") - rows.column("rollout_logprobs")) * rows.mask
    if level == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True)
    weight = log_weight.exp()
    weight = weight.clamp(max=cap) if mode == "truncate" else weight.masked_fill(weight > cap, 0.0)
    want = trl_loss(rows, "dapo", use_vllm=True, weights=weight, epsilon_high=0.28, beta=0.1)
    correction = RolloutCorrection(level, mode, high=cap)
    rows.assert_equals(want, TreeLoss("dapo", "token_mean", kl=KLPenalty(0.1), correction=correction))


VERL = {  # case -> (clip_ratio_low, clip_ratio_high, aggregation, name in titan_tree, reduction, options)
    "vanilla": (0.2, 0.28, "token-mean", "ppo", "token_mean", {"dual_clip": 3.0}),
    "gspo": (0.1, 0.2, "seq-mean-token-mean", "gspo_token", "path_token_mean", {}),
    "sapo": (0.2, 0.2, "seq-mean-token-mean", "sapo", "path_token_mean", {}),
    "geo_mean": (0.2, 0.1, "seq-mean-token-mean", "gmpo", "path_token_mean", {}),
    "cispo": (0.2, 0.1, "token-mean", "cispo", "token_mean", {}),
    "dppo_tv": (0.05, 0.1, "token-mean", "dppo_tv", "token_mean", {"max_ratio": 3.0}),
    "dppo_kl": (0.02, 0.01, "token-mean", "dppo_kl", "token_mean", {"max_ratio": 3.0}),
    "gpg": (0.2, 0.2, "seq-mean-token-sum", "reinforce", "path_mean", {}),
}


@pytest.mark.parametrize("case", VERL)
def test_losses_of_verl(case):
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    import tests.support.verl_cpu  # noqa: F401  # a platform for CPUs

    low, high, mode, name, reduction, options = VERL[case]
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=3.0,
        tau_pos=1.0,
        tau_neg=1.05,
    )
    rows = Rows()
    advantages = rows.advantages[:, None].expand_as(rows.mask)
    old = rows.column("old_logprobs")
    want, _ = get_policy_loss_fn(case)(old, rows.new(), advantages, rows.mask, mode, config, None)
    if name not in ("sapo", "reinforce"):
        options = options | {"clip_low": low, "clip_high": high}
    rows.assert_equals(want, TreeLoss(name, reduction, **options))


def test_whitening_of_verl():
    pytest.importorskip("verl")
    from verl.utils.torch_functional import masked_whiten

    rows = Rows()
    want = masked_whiten(rows.column("advantage"), rows.mask)
    pairs = whitened(rows.batch.pairs)
    got = rows.padded(pairs.advantage.split(torch.bincount(pairs.path).tolist()))
    torch.testing.assert_close(got * rows.mask, want * rows.mask, rtol=1e-5, atol=1e-6)


VERL_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}


@pytest.mark.parametrize(
    "option",
    [
        f"{level}_{estimator}"
        for level in VERL_LEVELS
        for estimator in ("k1", "k2", "k3")
        if (level, estimator) != ("seq_max", "k1")
    ],
)
def test_rejection_of_verl(option):
    pytest.importorskip("verl")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    level, _, estimator = option.rpartition("_")
    for seed in range(4):
        rows = Rows(seed)
        gap = rows.column("old_logprobs") - rows.column("rollout_logprobs")
        if estimator == "k1":  # bounds of p_rollout / p_old
            lowest, highest = (0.9, 1.1) if level == "seq_mean" else (0.7, 1.25)
            low, high, threshold, name = 1 / highest, 1 / lowest, f"{lowest}_{highest}", "ratio"
        else:
            high = {"token": 0.1, "seq_sum": 0.3, "seq_mean": 0.06, "seq_max": 0.3}[level]
            low, threshold, name = 0.0, high, estimator
        kept, metrics = compute_rollout_rejection_mask(gap, rows.mask, option, threshold)
        correction = RolloutCorrection(VERL_LEVELS[level], "reject", low, high, name)
        loss = TreeLoss("ppo", "token_mean", correction=correction)
        weight, _ = correction.weights(rows.batch.pairs)
        got = rows.padded(weight.split(torch.bincount(rows.batch.pairs.path).tolist())) * rows.mask
        torch.testing.assert_close(got, kept)
        _, sums = loss(rows.logprobs, rows.batch, loss.normalizer(rows.paths))
        means = loss.finish_metrics(sums)
        for mine, theirs in (
            ("masked_fraction", "rollout_rs_masked_fraction"),
            ("masked_path_fraction", "rollout_rs_seq_masked_fraction"),
        ):
            assert means[mine].item() == pytest.approx(metrics[theirs], abs=1e-6)
        assert 0 < metrics["rollout_rs_masked_fraction"] <= 1


@pytest.mark.slow  # it imports TRL's trainer
@pytest.mark.parametrize("tail", [1.0, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_distillation_from_likeliest_tokens_is_that_of_trl(beta, tail):
    from trl.experimental.async_distillation.async_distillation_trainer import (
        _add_tail_bucket,
        _jsd_divergence,
    )

    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 30, generator=draw, dtype=torch.float64) * 2  # of the student and the teacher
    student, teacher = logits.log_softmax(2)
    values, ids = teacher.topk(5)
    topk = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    path = TokenPath(range(10), teacher_topk=[None, *topk])
    batch = TreeBatch.from_trees([TokenTree.from_paths([path])], targets=True)
    edge, id = batch.edge_targets
    of_targets = student[edge, id].requires_grad_()
    loss = TreeLoss("distill_topk", "path_mean", beta=beta, tail=tail)
    got, _ = loss(torch.zeros(9), batch.with_target_logprobs(of_targets), 1.0)
    own = of_targets.view(9, 5)  # sorted by id, as theirs must be
    theirs = teacher[edge, id].float().double().view(9, 5)
    support = torch.ones(9, 5, dtype=torch.bool)
    if tail:
        (own, wide), (theirs, _) = (_add_tail_bucket(x, support) for x in (own, theirs))
        support = wide
    else:
        own, theirs = own.log_softmax(1), theirs.log_softmax(1)
    want = _jsd_divergence(own, theirs, beta, support).sum()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x, of_targets)[0] for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
