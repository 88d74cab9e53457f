"""Compares losses of preference pairs with their formulas, with TRL, and over partitions; and their data."""

import json
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.cases import for_each, slow_except
from tests.support.oracle import hf_model, hybrid_model, relative_error, tree_model
from tests.support.partitions import RandomCuts
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.run.balance.splitting import may_split
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# Name -> (options, loss of a pair from the token log-probs and reference log-probs of both answers)
LOSSES = {
    "dpo": ({}, lambda c, d, fc, fd: -logistic(0.1 * ((c - fc).sum() - (d - fd).sum()))),
    "dpo, smoothed": (
        {"beta": 0.5, "label_smoothing": 0.1},
        lambda c, d, fc, fd: (
            -0.9 * logistic(0.5 * ((c - fc).sum() - (d - fd).sum()))
            - 0.1 * logistic(-0.5 * ((c - fc).sum() - (d - fd).sum()))
        ),
    ),
    "ipo": ({}, lambda c, d, fc, fd: ((c - fc).mean() - (d - fd).mean() - 5) ** 2),
    "apo_zero": (
        {"beta": 0.3},
        lambda c, d, fc, fd: 1 - sigmoid(0.3 * (c - fc).sum()) + sigmoid(0.3 * (d - fd).sum()),
    ),
    "simpo": ({}, lambda c, d, fc, fd: -logistic(2 * (c.mean() - d.mean()) - 1)),
    "orpo": ({}, lambda c, d, fc, fd: -c.mean() - 0.1 * logistic(odds(c.mean()) - odds(d.mean()))),
    "cpo": ({}, lambda c, d, fc, fd: -logistic(0.1 * (c.sum() - d.sum())) - c.mean()),
}


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def logistic(x):
    return sigmoid(x).log()


def odds(mean):
    return mean - (1 - mean.exp()).log()


def pair_of_paths(rng, pair, weight=1.0, vocab_size=61):
    """Returns a chosen and a rejected path that share a prompt and the first token of the answer."""
    prompt = rng.integers(0, vocab_size, 4).tolist()
    paths = []
    for preference, length in (("chosen", 5), ("rejected", 3)):
        tokens = [*prompt, 1, *rng.integers(0, vocab_size, length)]
        mask = [0] * 4 + [1] * (length + 1)
        reference = rng.normal(-2, 0.5, len(tokens)).clip(max=-0.1)
        paths.append(
            TokenPath(tokens, mask, weight, ref_logprobs=reference, preference=preference, pair=pair)
        )
    return paths


def groups_of_pairs(seed=0):
    """Returns three trees: of one pair, of two pairs, and of a pair with weight 2."""
    rng = np.random.default_rng(seed)
    first = pair_of_paths(rng, "a")
    second = [*pair_of_paths(rng, "b")[::-1], *pair_of_paths(rng, "c")]
    third = pair_of_paths(rng, "d", weight=2.0)
    return [first, second, third]


def expected_loss(groups, logprobs_of, formula):
    total, weights = 0.0, 0.0
    for pair in "abcd":
        answers = {}
        for path in (path for group in groups for path in group if path.pair == pair):
            counted = torch.from_numpy(path.loss_mask[1:]) > 0
            reference = torch.from_numpy(path.ref_logprobs[1:]).double()
            answers[path.preference] = logprobs_of(path)[counted], reference[counted], path.weight
        (c, fc, weight), (d, fd, _) = answers["chosen"], answers["rejected"]
        total, weights = total + weight * formula(c, d, fc, fd), weights + weight
    return total / weights


EVERYDAY = [("dense", case) for case in LOSSES]
OTHER_MODELS = [(kind, case) for kind in ("experts", "hybrid") for case in ("dpo", "orpo")]


@pytest.mark.parametrize(("kind", "case"), slow_except(EVERYDAY, EVERYDAY + OTHER_MODELS))
def test_a_step_equals_transformers_on_every_answer(kind, case):
    options, formula = LOSSES[case]
    hf = {
        "dense": lambda: hf_model(tied=True, dtype=torch.float64),
        "experts": lambda: hf_model(tied=False, kind="Qwen3Moe"),
        "hybrid": lambda: hybrid_model(tied=True, dtype=torch.float64),
    }[kind]()
    groups = groups_of_pairs()

    def logprobs_of(path):
        ids = torch.as_tensor(path.tokens).long()
        logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]

    want = expected_loss(groups, logprobs_of, formula)
    want.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}
    model, loss = tree_model(hf), TreeLoss(case.partition(",")[0], "path_token_mean", **options)
    trees = [TokenTree.from_paths(paths) for paths in groups]
    for partitioner in (None, RandomCuts(0.3, 0)):
        model.zero_grad(set_to_none=True)
        step = TreeStep(model, loss, "cpu", partitioner)
        result = step.run(step.prepare([trees[:2], trees[2:]]))
        assert result.loss.item() == pytest.approx(want.item(), rel=1e-5)
        for name, p in model.named_parameters():
            assert relative_error(p.grad, gradients[name]) < 1e-5, name
        assert 0 <= result.loss_metrics["accuracy"].item() <= 1


def both_answers():
    """Returns log-probs of the edges of four pairs, and the sums, reference sums and lengths of answers."""
    groups = groups_of_pairs()[:2]
    paths = [path for group in groups for path in group]
    batch = TreeBatch.from_trees([TokenTree.from_paths(group) for group in groups])
    values = np.random.default_rng(1).normal(-1, 0.5, len(batch.edge_label)).clip(max=-0.05)
    logprobs = torch.from_numpy(values).requires_grad_()
    pairs = batch.pairs
    columns = logprobs[pairs.edge].split(torch.bincount(pairs.path).tolist())
    answers = {}
    for path, column in zip(paths, columns, strict=True):
        mask = torch.from_numpy(path.loss_mask[1:]).double()
        reference = torch.from_numpy(path.ref_logprobs[1:]).double()
        answers[path.pair, path.preference] = column * mask, (reference * mask).sum(), mask
    order = [(pair, side) for side in ("chosen", "rejected") for pair in "abc"]
    pad = torch.nn.utils.rnn.pad_sequence
    new = pad([answers[key][0] for key in order], batch_first=True)
    mask = pad([answers[key][2] for key in order], batch_first=True)
    reference = torch.stack([answers[key][1] for key in order])
    return paths, batch, logprobs, new, mask, reference


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trl_name"), [("dpo", "sigmoid"), ("ipo", "ipo"), ("apo_zero", "apo_zero")])
def test_losses_of_trls_dpo_trainer(name, trl_name):
    from trl import DPOTrainer

    paths, batch, logprobs, new, mask, reference = both_answers()
    zeros = torch.zeros_like(new)
    outputs = SimpleNamespace(log_probs=new, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    same = SimpleNamespace(
        device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
    )
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=same,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[trl_name],
        loss_weights=[1.0],
        beta=0.25,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    with_prompt = F.pad(mask, (1, 0)).long()
    inputs = {
        "input_ids": with_prompt,
        "attention_mask": with_prompt,
        "completion_mask": with_prompt,
        "ref_chosen_logps": reference[:3],
        "ref_rejected_logps": reference[3:],
    }
    want = DPOTrainer._compute_loss(fake, lambda **_: outputs, inputs, False)
    assert_equals(want, TreeLoss(name, "path_token_mean", beta=0.25), paths, batch, logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simpo", "cpo", "orpo"])
def test_losses_of_trls_other_trainers(name, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    paths, batch, logprobs, new, mask, _ = both_answers()
    sums, means = new.sum(1), new.sum(1) / mask.sum(1)
    fake = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo" if name == "simpo" else "sigmoid",
        simpo_gamma=1.0,
        beta=2.0,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    if name == "orpo":
        losses, *_ = ORPOTrainer.odds_ratio_loss(fake, means[:3], means[3:])
        want = (-means[:3] - losses).mean()
    else:
        scores = means if name == "simpo" else sums
        losses, *_ = CPOTrainer.cpo_loss(fake, scores[:3], scores[3:])
        want = losses.mean() + (0 if name == "simpo" else -means[:3].mean())
    loss = TreeLoss(name, "path_token_mean", beta=2.0)
    assert_equals(want, loss, paths, batch, logprobs, 1e-5)  # TRL computes ORPO in fp32


def assert_equals(want, loss, paths, batch, logprobs, tolerance=1e-6):
    got, _ = loss(logprobs, batch, loss.normalizer(paths))
    (want_gradient,) = torch.autograd.grad(want, logprobs, retain_graph=True)
    (gradient,) = torch.autograd.grad(got, logprobs)
    assert got.item() == pytest.approx(want.item(), rel=tolerance)
    assert (gradient - want_gradient).norm() < tolerance * want_gradient.norm()


def test_the_edges_that_both_answers_share_cancel_in_dpo_but_not_in_ipo():
    paths = [
        TokenPath(
            [1, 2, *rest], [0, 1, *(1 for _ in rest)], ref_logprobs=[-1] * (2 + len(rest)), preference=side
        )
        for rest, side in (([3, 4], "chosen"), ([5], "rejected"))
    ]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    shared = (batch.edge_label == 2).nonzero().item()
    for name, is_zero in (("dpo", True), ("ipo", False)):
        logprobs = torch.tensor([-0.5, -1.0, -2.0, -1.5], dtype=torch.float64, requires_grad=True)
        loss, _ = TreeLoss(name, "path_token_mean")(logprobs, batch, 2.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert (abs(gradient[shared].item()) < 1e-12) == is_zero


@for_each("case", LOSSES)
@for_each("x", [-1e4, -200.0, -1e-9, 0.0])
def test_extreme_logprobs_are_never_nan(case, x):
    options, _ = LOSSES[case]
    for flipped in (False, True):
        sides = ("rejected", "chosen") if flipped else ("chosen", "rejected")
        paths = [TokenPath([1, i], ref_logprobs=[0, -1], preference=side) for i, side in enumerate(sides)]
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        logprobs = torch.tensor([x, -1.0], requires_grad=True)
        loss, _ = TreeLoss(case.partition(",")[0], "path_token_mean", **options)(logprobs, batch, 2.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert torch.stack([loss, *gradient]).isfinite().all()


def test_equal_answers_have_the_loss_of_a_margin_of_zero():
    paths = [TokenPath([1, 2], ref_logprobs=[0, -1], preference=side) for side in ("chosen", "rejected")]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    loss, metrics = TreeLoss("dpo", "path_token_mean")(torch.tensor([-2.0]), batch, 2.0)
    assert loss.item() == pytest.approx(math.log(2))
    assert (metrics["margin"].item(), metrics["accuracy"].item()) == (0, 0)


def test_repeated_pairs_match_in_order():
    """A group that an epoch contains twice may be in one micro-batch twice."""
    groups = groups_of_pairs()
    batch = TreeBatch.from_trees([TokenTree.from_paths(groups[0]) for _ in range(2)])
    assert batch.pairs.partner.tolist() == [1, 0, 3, 2]
    assert batch.pairs.is_chosen.tolist() == [True, False, True, False]


def test_pairs_survive_a_token_store_and_are_never_split():
    tree = TokenTree.from_paths(groups_of_pairs()[0])
    again = tree_from_bytes(tree_to_bytes(tree))
    assert [(path.preference, path.pair) for path in again.paths] == [("chosen", "a"), ("rejected", "a")]
    assert not may_split(tree)
    for path in tree.paths:
        path.preference = None
    assert may_split(tree)


def read(tmp_path, *rows, **options):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = SampleReader(DataConfig(files=[str(file)], **options), TreeTokenizer.load("byte"))
    return [reader.paths(group) for group in reader.files.groups()]


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "1 + 1?"), *[("assistant", x) for x in "23"])
)


def test_pairs_in_the_format_of_trl(tmp_path):
    explicit = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    implicit = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    own = {
        "trajectories": [
            {"messages": [USER, GOOD], "preference": "chosen"},
            {"messages": [USER, BAD], "preference": "rejected"},
        ]
    }
    (first,), (second,), (third,) = (read(tmp_path, row) for row in (explicit, implicit, own))
    for paths in (first, second, third):
        assert [path.preference for path in paths] == ["chosen", "rejected"]
        assert paths[0].pair == paths[1].pair
        for path, want in zip(paths, first, strict=True):
            assert path.tokens.tolist() == want.tokens.tolist()
            assert path.loss_mask.tolist() == want.loss_mask.tolist()
    assert first[0].tokens.tolist() != first[1].tokens.tolist()


def test_a_conversation_before_the_pair_is_context(tmp_path):
    history = [USER, GOOD, USER]
    ((chosen, rejected),) = read(tmp_path, {"prompt": history, "chosen": [GOOD], "rejected": [BAD]})
    for path in (chosen, rejected):
        assert 0 < path.loss_tokens < 20
    ((longer, _),) = read(tmp_path, {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [BAD]})
    assert longer.loss_tokens == 2 * chosen.loss_tokens


def test_several_pairs_of_a_group_have_names(tmp_path):
    rows = [
        {"group_id": "g", "tokens": [1, 2, i], "preference": side, "pair": pair}
        for i, (side, pair) in enumerate(
            [("chosen", "x"), ("rejected", "y"), ("rejected", "x"), ("chosen", "y")]
        )
    ]
    (paths,) = read(tmp_path, *rows)
    assert [path.pair for path in paths] == ["g/x", "g/y", "g/x", "g/y"]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    assert batch.pairs.partner.tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"tokens": [1, 2], "preference": "best"},
            "preference: expected one of chosen, rejected, desirable, .*, got 'best'",
        ),
        ({"tokens": [1, 2], "preference": ["chosen"]}, "preference: expected one of chosen, .*, got"),
        ({"tokens": [1, 2], "loss_mask": [1, 0], "preference": "chosen"}, "at least one token that the loss"),
        ({"tokens": [1, 2], "pair": "a"}, "pair: expected a preference beside it"),
        (
            {"messages": [USER, GOOD, USER, BAD], "preference": "chosen"},
            "a trajectory of one sample, got 2 turns; set turns to",
        ),
        ({"chosen": [USER, GOOD]}, "rejected: expected a list of messages"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": "3"}, "rejected: expected a list of messages"),
        (
            {"prompt": [USER, GOOD, USER], "chosen": [GOOD, USER, GOOD], "rejected": [BAD]},
            "chosen: expected one message, because the prompt has turns of the assistant, got 3",
        ),
    ],
)
def test_wrong_pairs_are_one_line_with_the_place(tmp_path, row, error):
    with pytest.raises(UserError, match=rf"pairs\.jsonl:1: .*{error}"):
        read(tmp_path, row)


def test_a_path_without_its_partner_is_an_error():
    chosen = TokenPath([1, 2], preference="chosen", pair="p", id="lonely", ref_logprobs=[0, -1])
    batch = TreeBatch.from_trees([TokenTree.from_paths([chosen])])
    with pytest.raises(
        UserError, match=r"no partner; .* as many chosen as rejected paths of each pair .* 'tree'"
    ):
        TreeLoss("dpo", "path_token_mean")(torch.zeros(1), batch, 1.0)
    with pytest.raises(UserError, match=r"^path \?: preference: missing, but other paths"):
        TreeBatch.from_trees([TokenTree.from_paths([chosen, TokenPath([1, 3], ref_logprobs=[0, -1])])])
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2], ref_logprobs=[0, -1])])])
    with pytest.raises(
        UserError, match=r"^loss: the paths have no is_chosen; .* set the field preference to"
    ):
        TreeLoss("dpo", "path_token_mean")(torch.zeros(1), batch, 1.0)
    with pytest.raises(UserError, match=r"^loss\.reduction: expected 'path_token_mean'"):
        TreeLoss("dpo", "path_mean")
    assert TreeLoss("dpo").reduction == "path_token_mean"
