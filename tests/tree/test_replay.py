"""Routing replay: records of trees against a loop; training with them against transformers, path by path."""

import base64
import copy
import dataclasses
import io
import json
import random

import numpy as np
import pytest
import torch

from tests.support.datasets import sample_reader, tree_dataset
from tests.support.oracle import (
    assert_same,
    hf_model,
    hybrid_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import RandomCuts, in_partitions
from tests.support.tiny_run import read_metrics, tiny_config, train
from tests.tree.test_token_tree import random_paths
from titan_tree import cli
from titan_tree.components.moe import MoE
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.data.packing import merged_trees
from titan_tree.engine.scoring import tree_logprobs
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.registry import build_model
from titan_tree.tree.paths import ExpertSizes, ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

MODES = ("first", "majority", "split")
LAYERS, TOP_K, EXPERTS = 2, 2, 6


def recorded(tokens, draw, kinds=EXPERTS, **fields):
    """A path with random records: some rows missing, some paths without any; of few ``kinds`` many agree."""
    rows = [
        [draw.sample(range(kinds), TOP_K) if draw.random() < 0.8 else [-1] * TOP_K for _ in range(LAYERS)]
        for _ in range(draw.randint(1, len(tokens)))
    ]
    return TokenPath(tokens, routed_experts=rows if draw.random() < 0.9 else None, **fields)


def with_records(groups, seed, kinds=EXPERTS):
    draw = random.Random(seed)
    return [
        [recorded(p.tokens, draw, kinds, loss_mask=p.loss_mask, weight=p.weight) for p in paths]
        for paths in groups
    ]


def rows_of(path):
    """[T][L] the recorded experts as lists, or None."""
    if path.routed_experts is None:
        return [[None] * LAYERS for _ in path.tokens]
    return [[None if row[0] < 0 else row for row in token] for token in path.routed_experts.tolist()]


def by_hand(paths, mode):
    """(experts of each path's tokens [T, L, k], rows with a record, rows on which paths disagree)."""
    votes = {}  # (tokens up to here, layer) -> records of all paths, in their order
    for path in paths:
        for t, token in enumerate(rows_of(path)):
            for layer, row in enumerate(token):
                cell = votes.setdefault((tuple(path.tokens[: t + 1]), layer), [])
                cell += [] if row is None else [row]

    def winner(cell):
        sets = [frozenset(row) for row in cell]
        most = max(map(sets.count, sets))
        return (
            cell[0]
            if mode == "first"
            else next(r for r, s in zip(cell, sets, strict=True) if sets.count(s) == most)
        )

    def used(path):
        if mode == "split":
            return [[row or [-1] * TOP_K for row in token] for token in rows_of(path)]
        cells = [[votes[tuple(path.tokens[: t + 1]), i] for i in range(LAYERS)] for t in range(len(path))]
        return [[winner(cell) if cell else [-1] * TOP_K for cell in token] for token in cells]

    filled = [cell for cell in votes.values() if cell]
    disagreeing = sum(len(set(map(frozenset, cell))) > 1 for cell in filled)
    return [np.array(used(path)) for path in paths], len(filled), disagreeing


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_records_of_a_tree(seed, mode):
    """Few kinds of records, so that paths agree, disagree and tie; other orders in a row mean nothing."""
    draw = random.Random(seed)
    paths = [recorded(tokens, draw, kinds=3) for tokens in random_paths(seed)]
    experts, num_rows, disagreeing = by_hand(paths, mode)
    tree = TokenTree.from_paths(paths, mode)
    if tree.records is None:
        assert num_rows == 0
        return
    for i, want in enumerate(experts):
        got = tree.records.experts[tree.indices_of(i)]
        order = np.sort if mode == "split" else np.asarray  # of equal sets any order will do
        assert np.array_equal(order(got), order(want))
        assert np.array_equal(tree.tokens[tree.indices_of(i)], paths[i].tokens)
    assert (tree.records.num_rows, tree.records.num_disagreeing) == (num_rows, disagreeing)
    merged = TokenTree.from_paths(paths)
    assert merged.records is None
    if mode != "split":
        assert np.array_equal(tree.tokens, merged.tokens)
        assert np.array_equal(tree.path_index, merged.path_index)
    else:  # distinct are the tokens that differ in what was recorded up to them
        cells = [
            tuple(
                (token, *(frozenset(r or ()) for r in row))
                for token, row in zip(p.tokens, rows_of(p), strict=True)
            )
            for p in paths
        ]
        assert len(tree) == len({cell[: n + 1] for cell in cells for n in range(len(cell))})


@pytest.mark.parametrize("mode", MODES)
def test_trees_of_a_batch_fit_and_have_their_records(mode):
    draw = random.Random(0)
    paths = [recorded(tokens, draw, kinds=3, id=str(i)) for i, tokens in enumerate(random_paths(5))]
    for limit in (12, 20, 1000):
        trees = merged_trees(paths, limit, mode)
        assert sorted(path.id for tree in trees for path in tree.paths) == sorted(path.id for path in paths)
        for tree in trees:
            assert len(tree) <= limit
            places = [int(path.id) for path in tree.paths]
            assert places == sorted(places)  # "first" is the file's
            for i, want in enumerate(by_hand(tree.paths, mode)[0]):
                got = tree.records.experts[tree.indices_of(i)]
                assert np.array_equal(np.sort(got), np.sort(want))


def test_a_forest_has_the_records_of_its_trees():
    draw = random.Random(1)
    with_some, without = recorded([1, 2, 3], draw), TokenPath([1, 2, 4])
    trees = [TokenTree.from_paths([path], "first") for path in (without, with_some)]
    records = TokenTree.forest(trees).records
    assert (records.experts[:3] == -1).all()
    assert np.array_equal(records.experts[3:], with_some.routed_experts)
    assert records.num_rows == trees[1].records.num_rows
    other = TokenTree.from_paths([TokenPath([1], routed_experts=[[[0, 1]] * 3])], "first")
    with pytest.raises(UserError, match=r"experts of one model, got .* \(2, 2\) and \(3, 2\)"):
        TokenTree.forest([trees[1], other])
    with pytest.raises(UserError, match="path b: routed_experts: expected 2 layers and 2 experts of a token"):
        TokenTree.from_paths([with_some, TokenPath([1], routed_experts=[[[0, 1]] * 3], id="b")], "split")


# Training with them.

MODELS = {
    "Qwen3-MoE": lambda seed: hf_model(True, kind="Qwen3Moe", seed=seed),
    "not renormalised": lambda seed: hf_model(True, kind="Qwen3Moe", seed=seed, norm_topk_prob=False),
    "Qwen3.5-MoE": lambda seed: hybrid_model(True, "Qwen3_5Moe", num_layers=LAYERS, seed=seed),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_replay_equals_every_path_alone_with_these_experts(model, seed, mode):
    """Random records, of which hardly any is what the router likes; with "split" each path has its own."""
    hf = MODELS[model](seed)
    groups = with_records(random_groups(seed), seed)
    experts = [rows for paths in groups for rows in by_hand(paths, mode)[0]]
    want = per_path(hf, [path for paths in groups for path in paths], experts=experts)
    got = in_one_pass(tree_model(hf), groups, replay=mode)
    assert_same(got, want, 2e-5 if model == "Qwen3.5-MoE" else 1e-5)
    name = "layers.0.mlp.experts.down_proj"
    assert relative_error(in_one_pass(tree_model(hf), groups)[2][name], want[2][name]) > 0.1


@pytest.mark.parametrize("max_tokens", [None, 6, 15])  # at 15 tokens run several times
def test_what_was_recorded_replays_to_the_same_bits(max_tokens):
    """And, where the router has changed since, to what transformers computes with these experts."""
    hf = hf_model(True, kind="Qwen3Moe")
    model = tree_model(hf)
    groups = random_groups(2)
    lists = [path.tokens for path in groups[0]]
    with torch.no_grad():
        plain = tree_logprobs(model, lists, max_tokens)
        logprobs, experts = tree_logprobs(model, lists, max_tokens, return_routed_experts=True)
    assert all(map(torch.equal, logprobs, plain))
    assert [tuple(x.shape) for x in experts] == [(len(tokens), LAYERS, TOP_K) for tokens in lists]
    groups = [
        [dataclasses.replace(p, routed_experts=x.numpy()) for p, x in zip(groups[0], experts, strict=True)]
    ]
    assert TokenTree.from_paths(groups[0], "first").records.num_disagreeing == 0
    own = in_one_pass(model, groups)
    for mode in MODES:
        got = in_one_pass(model, groups, replay=mode)
        assert all(map(torch.equal, got[0], own[0]))
        assert got[1] == own[1]
        assert all(torch.equal(got[2][name], gradient) for name, gradient in own[2].items())

    with torch.no_grad():
        for router in (m for m in hf.modules() if type(m).__name__.endswith("TopKRouter")):
            router.weight += 0.05 * torch.randn_like(router.weight)
    changed = tree_model(hf)
    got = in_one_pass(changed, groups, replay="first")
    assert_same(got, per_path(hf, groups[0], experts=experts))
    assert abs(in_one_pass(changed, groups)[1] - got[1]) > 1e-4 * abs(got[1])  # it would choose otherwise


def test_recording_needs_experts():
    model = build_model("qwen3", "debug")
    with pytest.raises(UserError, match="return_routed_experts: expected a model with experts"):
        tree_logprobs(model, [[1, 2]], return_routed_experts=True)
    assert tree_logprobs(build_model("qwen3_moe", "debug"), [], return_routed_experts=True) == ([], [])


@pytest.mark.parametrize("mode", MODES)
def test_partitions_equal_one_pass(mode):
    """In float64; tokens take their records along, wherever the tree is cut."""
    model = tree_model(hf_model(True, kind="Qwen3Moe")).double()
    for seed in range(3):
        groups = with_records(random_groups(seed), seed)
        _, want_loss, want = in_one_pass(model, groups, replay=mode)
        forest = TokenTree.forest([TokenTree.from_paths(paths, mode) for paths in groups])
        loss, got = in_partitions(model, RandomCuts(0.4, seed).plan(forest))
        assert loss == pytest.approx(want_loss, rel=1e-12)
        for name, gradient in want.items():
            assert relative_error(got[name], gradient) < 1e-9, name


def test_routing_counts_the_experts_that_were_used():
    model = build_model("qwen3_moe", "debug")
    paths = [TokenPath([1, 2, 3], routed_experts=[[[0, 1]] * 2] * 2), TokenPath([1, 2, 4])]
    routing = model(tree_batch([paths], replay="first")).routing
    liked = model(tree_batch([paths])).routed_experts
    for layer in range(2):
        others = torch.bincount(liked[layer][2:].flatten().long(), minlength=8)
        want = others + torch.tensor([2, 2] + [0] * 6)
        assert routing.tokens[layer].tolist() == want.tolist()
        assert routing.chosen[layer].tolist() == (others + torch.tensor([4, 4] + [0] * 6)).tolist()


def test_one_more_graph():
    made = MoE(8, 16, 5, 2, True)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    compiled = copy.deepcopy(made)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=counted, fullgraph=True, dynamic=True)
    for num_tokens in (5, 40, 2, 17):
        x, num_paths = torch.randn(num_tokens, 8), torch.rand(num_tokens)
        rows = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)]).to(torch.int16)
        rows[0] = -1
        for forced_experts in (None, rows):
            torch.testing.assert_close(
                compiled(x, num_paths, forced_experts), made(x, num_paths, forced_experts)
            )
    assert counted.frame_count == 2


def test_records_of_another_model_are_refused():
    batch = tree_batch([[TokenPath([1, 2], routed_experts=[[[0, 1]] * 3])]], replay="first")
    for name, message in (
        ("qwen3", "this model has no experts"),
        ("qwen3_moe", "as the model has, got 3 and 2"),
    ):
        with pytest.raises(UserError, match=message):
            build_model(name, "debug")(batch)


# From files.


def npy(rows):
    file = io.BytesIO()
    np.save(file, np.array(rows))
    return base64.b64encode(file.getvalue()).decode()


def read(tmp_path, *records, experts=None):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    reader = sample_reader(file, limits=ModelLimits(experts=experts), replay="first")
    return [path for group in reader.groups() for path in reader.paths(group)]


def test_lists_and_arrays_are_read(tmp_path):
    rows = [[[3, 1], [0, 2]], [[-1, -1], [5, 4]]]
    for given in (rows, npy(rows)):
        (path,) = read(tmp_path, {"tokens": [1, 2, 3], "routed_experts": given})
        assert path.routed_experts.dtype == np.int16
        assert path.routed_experts.tolist() == [*rows, [[-1, -1], [-1, -1]]]
    (path,) = read(tmp_path, {"tokens": [1], "routed_experts": npy(np.array([[[255, 0]]], np.uint8))})
    assert path.routed_experts.tolist() == [[[255, 0]]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[[0, 1]], [[0, 1], [2, 3]]], "as many layers and experts of every token, got unequal lists"),
        (
            [[0, 1], [1, 0]],
            r"integers \[at most 2 tokens, layers, experts of a token\], got int64 of shape \(2, 2\)",
        ),
        ([[[0, 1]]] * 3, r"integers \[at most 2 tokens.*of shape \(3, 1, 2\)"),
        ([[[0.5, 1]]], "got float64 of shape"),
        ([[[]]], r"of shape \(1, 1, 0\)"),
        ([[[0, 1]], [[2, 2]]], r"token 1, layer 0: expected different ids .* or -1 alone, got \[2, 2\]"),
        ([[[0, 1], [-1, 2]]], r"token 0, layer 1: expected different ids .* or -1 alone, got \[-1, 2\]"),
        ([[[0, 40000]]], r"token 0, layer 0: expected different ids from 0 to 32767"),
        ("AAAA", "expected base64 of a .npy file of integers"),
        ("what?", "expected base64 of a .npy file of integers"),
        ([[[0, 1]]], "expected 2 layers with experts and 2 experts of a token, got 1 and 2; are they"),
        ([[[0, 1], [6, 1]]], r"token 0, layer 1: expected ids below the model's 6 experts, got \[6, 1\]"),
    ],
)
def test_bad_records_are_named(tmp_path, given, message):
    sizes = ExpertSizes(LAYERS, TOP_K, EXPERTS)
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{message}") as error:
        read(tmp_path, {"tokens": [1, 2], "routed_experts": given}, experts=sizes)
    assert "\n" not in str(error.value)


def test_conversations_have_none(tmp_path):
    with pytest.raises(UserError, match="messages: conversations need"):
        read(tmp_path, {"messages": [], "routed_experts": [[[0]]]})


@pytest.fixture
def data(tmp_path):
    """A group of three paths, records of the first two; on token 1 they disagree in one of two layers."""
    rows = [
        {"tokens": [1, 2, 3], "routed_experts": [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]},
        {"tokens": [1, 2, 4], "routed_experts": npy([[[1, 0], [2, 3]], [[1, 0], [2, 4]]])},
        {"tokens": [1, 2, 5]},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"group_id": 0, **row}) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("layout", ["tree", "flat"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_reports_the_disagreement(tmp_path, data, mode, layout):
    options = {"model__name": "qwen3_moe", "data__files": data, "training__steps": 1, "data__layout": layout}
    options["data__global_batch_groups"] = 1
    config = tiny_config(tmp_path / "run", data__replay=mode, **options)
    train(config)
    (row,) = read_metrics(config)
    if layout == "tree":
        assert (row["replayed_rows"], row["replay_disagreement"]) == ("4", "0.25")
        # With "split" the first two share token 0, the third nothing.
        assert row["executed_tokens"] == {"split": "8"}.get(mode, "5")
    else:  # a path alone agrees with itself
        assert (row["replayed_rows"], row["replay_disagreement"]) == ("8", "0.0")


def test_a_split_step_is_that_of_the_paths_alone(data):
    """Tree and flat, by TreeStep: the same loss and gradients."""
    model, results = build_model("qwen3_moe", "debug"), []
    for layout in ("tree", "flat"):
        step = TreeStep(model, TreeLoss(), "cpu")
        model.zero_grad()
        limits = ModelLimits(experts=model.experts.sizes)
        dataset = tree_dataset(data, limits=limits, replay="split", layout=layout)
        result = step.run(step.prepare(next(iter(dataset))))
        results.append([result.loss, *(p.grad.clone() for p in model.parameters())])
    for tree, flat in zip(*results, strict=True):
        assert relative_error(tree, flat) < 1e-5


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("off", "path 0/1 has routed_experts, which data.replay = 'off' leaves unused"),
        ("first", "path 0/3 has no routed_experts to replay; the model's router chooses its experts"),
    ],
)
def test_what_is_not_replayed_is_said_once(data, caplog, mode, message):
    steps = iter(tree_dataset(data, replay=mode))
    for _ in range(3):
        next(steps)
    assert [record.message for record in caplog.records] == [message]


def test_a_model_without_experts_replays_none(tmp_path, data):
    with pytest.raises(
        UserError, match=r"data.replay: expected 'off' for a model without experts, got 'first'"
    ):
        train(tiny_config(tmp_path / "run", data__files=data, data__replay="first"))
    with pytest.raises(
        UserError, match=r"data.replay: expected one of off, first, majority, split; got 'last'"
    ):
        tree_dataset(data, replay="last")
    with pytest.raises(UserError, match="replay: expected one of off, first, majority, split; got 'last'"):
        TokenTree.from_paths([TokenPath([1])], "last")


def test_inspect_tells_the_disagreement(data, capsys):
    assert cli.main(["inspect", str(data)]) == 0
    assert (
        "recorded for 4 rows (one token in one layer); paths disagree on 25.00% of them"
        in capsys.readouterr().out
    )
