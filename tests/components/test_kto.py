"""Compares KTO with its formula on transformers' log-probs of every answer alone, and with TRL."""

import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.datasets import sample_reader
from tests.support.oracle import hf_model, hybrid_model, path_logprobs, relative_error, tree_model
from tests.support.partitions import RandomCuts
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.scoring.scored_records import path_record
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

OPTIONS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}


def answers(prompt, *sides, seed=0, gap=-0.3):
    """Returns one path per side, whose answers to the same prompt begin with the same token."""
    rng = np.random.default_rng(seed)
    paths = []
    for side, length in zip(sides, (5, 3, 4, 2), strict=False):
        tokens = [*prompt, 1, *rng.integers(0, 61, length)]
        paths.append(TokenPath(tokens, [0] * len(prompt) + [1] * (length + 1), preference=side))
    return paths


def groups():
    """Returns three trees: with a pair, with singles, and without a mismatched path."""
    return [
        answers([5, 6, 7], "chosen", "rejected", "mismatched", seed=1),
        answers([5, 8], "desirable", "undesirable", "desirable", "mismatched", seed=2),
        answers([9, 3, 2, 4], "undesirable", seed=3),
    ]


def with_reference(groups, hf, shift):
    """Sets reference log-probs that are those of ``hf`` minus ``shift`` and noise."""
    rng = np.random.default_rng(4)
    for path in (path for paths in groups for path in paths):
        with torch.no_grad():
            own = path_logprobs(hf, path.tokens).double().numpy()
        values = own - shift + rng.normal(0, 0.3, len(own))
        path.ref_logprobs = np.concatenate([[np.nan], values]).astype(np.float32)
    return groups


def kto(groups, logprobs_of, beta, desirable_weight, undesirable_weight):
    """Returns the loss of KTO, and its reference point."""
    scores = defaultdict(list)
    for path in (path for paths in groups for path in paths):
        gap = logprobs_of(path) - torch.from_numpy(path.ref_logprobs[1:]).double()
        scores[path.preference].append(gap[torch.from_numpy(path.loss_mask[1:]) > 0].sum())
    z = torch.stack(scores["mismatched"]).mean().detach().clamp(min=0)
    good, bad = scores["chosen"] + scores["desirable"], scores["rejected"] + scores["undesirable"]
    losses = [desirable_weight * (1 - torch.sigmoid(beta * (s - z))) for s in good]
    losses += [undesirable_weight * (1 - torch.sigmoid(beta * (z - s))) for s in bad]
    return torch.stack(losses).mean(), z


@pytest.mark.parametrize(
    ("kind", "shift"),
    [("dense", 0.2), ("dense", -0.4), ("experts", -0.4), ("hybrid", 0.2)],
    ids=["dense, above zero", "dense, clamped", "experts, clamped", "hybrid, above zero"],
)
def test_a_step_equals_transformers_on_every_answer(kind, shift):
    """The reference point is that of the whole step, however it is divided."""
    hf = {
        "dense": lambda: hf_model(tied=True, dtype=torch.float64),
        "experts": lambda: hf_model(tied=False, kind="Qwen3Moe"),
        "hybrid": lambda: hybrid_model(tied=True, dtype=torch.float64),
    }[kind]()
    made = with_reference(groups(), hf, shift)
    want, z = kto(made, lambda path: path_logprobs(hf, path.tokens).double(), **OPTIONS)
    assert (z > 0.1) == (shift > 0)
    want.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}
    model, loss = tree_model(hf), TreeLoss("kto", "path_token_mean", **OPTIONS)
    trees = [TokenTree.from_paths(paths) for paths in made]
    for partitioner in (None, RandomCuts(0.3, 0)):
        for micro_batches in ([trees], [trees[:1], trees[1:2], trees[2:]]):
            model.zero_grad(set_to_none=True)
            step = TreeStep(model, loss, "cpu", partitioner)
            result = step.run(step.prepare(micro_batches))
            assert result.loss.item() == pytest.approx(want.item(), rel=1e-5)
            assert result.loss_metrics["reference_point"].item() == pytest.approx(z.item(), abs=1e-5)
            for name, p in model.named_parameters():
                assert relative_error(p.grad, gradients[name]) < 1e-5, name


def test_labels_of_pairs_do_not_depend_on_the_packing():
    """Answers labeled "chosen" and "rejected" need no partner, whichever answers share their micro-batch."""
    hf = hf_model(tied=True, dtype=torch.float64)
    made = [
        answers([5, 6, 7], "chosen", "mismatched", seed=1),
        answers([5, 8], "rejected", "rejected", seed=2),
        answers([5, 6, 9], "chosen", "rejected", "mismatched", seed=3),
        answers([9, 3, 2, 4], "chosen", seed=4),
        answers([4, 4], "desirable", "undesirable", seed=5),
    ]
    with_reference(made, hf, 0.3)
    want, z = kto(made, lambda path: path_logprobs(hf, path.tokens).double(), **OPTIONS)
    want.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}
    model, loss = tree_model(hf), TreeLoss("kto", "path_token_mean", **OPTIONS)
    rng = np.random.default_rng(0)
    layouts = [made, [[path] for paths in made for path in paths]]  # data.layout "tree" and "paths"
    for number in range(8):
        trees = [TokenTree.from_paths(paths) for paths in layouts[number % 2]]
        owner = rng.integers(0, 1 + number // 2, len(trees))
        order = rng.permutation(len(trees))
        packed = [[trees[i] for i in order if owner[i] == each] for each in np.unique(owner)]
        model.zero_grad(set_to_none=True)
        step = TreeStep(model, loss, "cpu", RandomCuts(0.3, number) if number > 3 else None)
        result = step.run(step.prepare(packed))
        assert result.loss.item() == pytest.approx(want.item(), rel=1e-6)
        assert result.loss_metrics["reference_point"].item() == pytest.approx(z.item(), rel=1e-6)
        for name, p in model.named_parameters():
            assert relative_error(p.grad, gradients[name]) < 1e-6, name


def loss_of_trl(trainer, paths, columns, labels):
    """Returns the loss of TRL's trainer, and its estimate of the KL divergence.

    Args:
        trainer: the class KTOTrainer.
        paths: those of the answers, and then as many mismatched ones.
        columns: log-probs of all tokens but the first, for each path.
        labels: whether each answer is desirable.
    """
    n, pad = len(labels), torch.nn.utils.rnn.pad_sequence
    masks = [torch.from_numpy(path.loss_mask).double() for path in paths]
    own = [column * mask[1:] for column, mask in zip(columns, masks, strict=True)]
    reference = [
        (torch.from_numpy(path.ref_logprobs) * mask)[1:].sum()
        for path, mask in zip(paths, masks, strict=True)
    ]
    kl_logps = torch.stack([values.sum() for values in own[n:]])
    new, mask = pad(own[:n], batch_first=True), pad(masks[:n], batch_first=True).long()
    zeros = torch.zeros_like(new)
    outputs = SimpleNamespace(log_probs=new, entropy=zeros, mean_logits=zeros)
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        _compute_kl_logps=lambda *_: kl_logps.detach(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        **OPTIONS,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": labels,
        "ref_logps": torch.stack(reference[:n]),
        "ref_KL_logps": torch.stack(reference[n:]),
    }
    loss = trainer._compute_loss(fake, lambda **_: outputs, inputs, False)
    return loss, fake._metrics["train"]["kl"][0]


@pytest.mark.slow
def test_trls_trainer():
    """TRL takes the completions of a batch, each with the prompt of the next example, as mismatched ones."""
    from trl import KTOTrainer

    rng = np.random.default_rng(0)
    examples = [
        ([5, 6, 7], [1, 2, 3, 4], True),
        ([5, 6, 8], [1, 9], False),
        ([4, 4], [2, 2, 2], True),
        ([5, 6, 7], [1, 2, 8], False),
    ]
    rotated = [examples[i - 1][1] for i in range(len(examples))]
    rows = [(prompt, answer, label) for prompt, answer, label in examples]
    kl_rows = [(prompt, answer, None) for (prompt, _, _), answer in zip(examples, rotated, strict=True)]
    paths = [
        TokenPath(
            prompt + answer,
            [0] * len(prompt) + [1] * len(answer),
            ref_logprobs=rng.normal(-2, 0.4, len(prompt + answer)),
            preference={True: "desirable", False: "undesirable", None: "mismatched"}[label],
        )
        for prompt, answer, label in rows + kl_rows
    ]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    values = rng.normal(-1.5, 0.5, len(batch.edge_label)).clip(max=-0.05)
    logprobs = torch.from_numpy(values).requires_grad_()
    columns = logprobs[batch.pairs.edge].split(torch.bincount(batch.pairs.path).tolist())

    labels = torch.tensor([label for *_, label in rows])
    want, kl = loss_of_trl(KTOTrainer, paths, columns, labels)
    loss = TreeLoss("kto", "path_token_mean", **OPTIONS)
    got, metrics = loss(logprobs, batch, loss.normalizer(paths))
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    assert kl > 0.1
    assert (metrics["reference_point"] / metrics["token_weight"]).item() == pytest.approx(kl, rel=1e-6)
    (want_gradient,) = torch.autograd.grad(want, logprobs, retain_graph=True)
    (gradient,) = torch.autograd.grad(got, logprobs)
    assert (gradient - want_gradient).norm() < 1e-6 * want_gradient.norm()


def test_a_reference_point_of_zero_on_pairs_is_apo_zero():
    pair = answers([5, 6], "chosen", "rejected")
    for path in pair:
        path.ref_logprobs = np.full(len(path), -2, np.float32)
    batch = TreeBatch.from_trees([TokenTree.from_paths(pair)])
    logprobs = torch.linspace(-3, -1, len(batch.edge_label))
    kto, apo = (
        TreeLoss(name, "path_token_mean", **options)(logprobs, batch, 2.0)[0]
        for name, options in (("kto", {"reference_point": 0.0}), ("apo_zero", {}))
    )
    assert 2 * kto.item() == pytest.approx(apo.item(), rel=1e-6)


def test_labels_of_files(tmp_path):
    """A mismatched answer has no loss, also after a token store or ``titan-tree score``."""
    sides = ("desirable", "undesirable", "mismatched")
    rows = [{"group_id": 1, "tokens": [5, 6, i], "preference": side} for i, side in enumerate(sides)]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = sample_reader(tmp_path / "f.jsonl")
    (group,) = reader.files.groups()
    paths = reader.paths(group)
    (tmp_path / "scored.jsonl").write_text(
        "".join(path_record(group, "1", path, {}, {"ref_logprobs": np.zeros(3)}) + "\n" for path in paths)
    )
    again = sample_reader(tmp_path / "scored.jsonl")
    (scored,) = again.files.groups()
    stored = tree_from_bytes(tree_to_bytes(TokenTree.from_paths(paths))).paths
    for found in (paths, again.paths(scored), stored):
        assert [path.preference for path in found] == list(sides)
        assert [path.weight for path in found] == [1, 1, 0]
    pairs = TreeBatch.from_trees([TokenTree.from_paths(paths)]).pairs
    assert pairs.is_chosen.tolist() == [True, False, False]
    assert pairs.is_mismatched.tolist() == [False, False, True]


def test_missing_paths_are_named():
    hf = hf_model(tied=True)
    model = tree_model(hf)
    made = with_reference(groups(), hf, 0.1)
    for paths in ([made[2]], [made[2], made[2]]):
        step = TreeStep(model, TreeLoss("kto", "path_token_mean"))
        with pytest.raises(UserError, match=r"expected paths with the preference 'mismatched' .* got none; "):
            step.run(step.prepare([[TokenTree.from_paths(each)] for each in paths]))
    step = TreeStep(model, TreeLoss("dpo", "path_token_mean"))
    with pytest.raises(UserError, match=r"the paths have no partner; .* to 'chosen' or 'rejected'"):
        step.run(step.prepare([[TokenTree.from_paths(made[1])]]))
    assert TokenPath([1, 2], preference="mismatched", weight=3).weight == 0
