"""Recorded experts in files: reading, packing, training runs and ``titan-tree inspect``."""

import json
import random

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader, tree_dataset
from tests.support.oracle import relative_error
from tests.support.paths import random_token_lists
from tests.support.records import EXPERTS, LAYERS, MODES, TOP_K, expected_records, npy, random_recorded_path
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree import cli
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.data.packing import merged_trees
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import ExpertSizes, ModelLimits


@pytest.mark.parametrize("mode", MODES)
def test_packed_trees_fit_and_have_the_records_of_their_paths(mode):
    draw = random.Random(0)
    paths = [
        random_recorded_path(tokens, draw, kinds=3, id=str(i))
        for i, tokens in enumerate(random_token_lists(5))
    ]
    for limit in (12, 20, 1000):
        trees = merged_trees(paths, limit, mode)
        assert sorted(path.id for tree in trees for path in tree.paths) == sorted(path.id for path in paths)
        for tree in trees:
            assert len(tree) <= limit
            places = [int(path.id) for path in tree.paths]
            assert places == sorted(places)  # so "first" means first in the file
            for i, want in enumerate(expected_records(tree.paths, mode)[0]):
                got = tree.routed_experts.experts[tree.indices_of(i)]
                assert np.array_equal(np.sort(got), np.sort(want))


def read(tmp_path, *records, experts=None):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    reader = sample_reader(file, limits=ModelLimits(experts=experts), replay="first")
    return [path for group in reader.files.groups() for path in reader.paths(group)]


def test_records_are_read_from_lists_and_from_npy_files(tmp_path):
    rows = [[[3, 1], [0, 2]], [[-1, -1], [5, 4]]]
    for given in (rows, npy(rows)):
        (path,) = read(tmp_path, {"tokens": [1, 2, 3], "routed_experts": given})
        assert path.routed_experts.dtype == np.int16
        assert path.routed_experts.tolist() == [*rows, [[-1, -1], [-1, -1]]]
    (path,) = read(tmp_path, {"tokens": [1], "routed_experts": npy(np.array([[[255, 0]]], np.uint8))})
    assert path.routed_experts.tolist() == [[[255, 0]]]


@for_each(
    ("given", "message"),
    [
        (
            [[[0, 1]], [[0, 1], [2, 3]]],
            "the same number of layers and experts for every token, got lists of unequal lengths",
        ),
        (
            [[0, 1], [1, 0]],
            r"integers \[at most 2 tokens, layers, experts per token\], got int64 of shape \(2, 2\)",
        ),
        ([[[0, 1]]] * 3, r"integers \[at most 2 tokens.*of shape \(3, 1, 2\)"),
        ([[[0.5, 1]]], "got float64 of shape"),
        ([[[]]], r"of shape \(1, 1, 0\)"),
        ([[[0, 1]], [[2, 2]]], r"token 1, layer 0: expected different ids .* or only -1, got \[2, 2\]"),
        ([[[0, 1], [-1, 2]]], r"token 0, layer 1: expected different ids .* or only -1, got \[-1, 2\]"),
        ([[[0, 40000]]], r"token 0, layer 0: expected different ids from 0 to 32767"),
        ("AAAA", "expected base64 of a .npy file of integers"),
        ("what?", "expected base64 of a .npy file of integers"),
        ([[[0, 1]]], "expected 2 layers with experts and 2 experts per token, got 1 and 2; check that"),
        ([[[0, 1], [6, 1]]], r"token 0, layer 1: expected ids below the model's 6 experts, got \[6, 1\]"),
    ],
)
def test_errors_name_line_token_and_layer_of_bad_records(tmp_path, given, message):
    sizes = ExpertSizes(LAYERS, TOP_K, EXPERTS)
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{message}") as error:
        read(tmp_path, {"tokens": [1, 2], "routed_experts": given}, experts=sizes)
    assert "\n" not in str(error.value)


def test_conversations_have_none(tmp_path):
    with pytest.raises(UserError, match="messages: conversations need"):
        read(tmp_path, {"messages": [], "routed_experts": [[[0]]]})


@pytest.fixture
def data(tmp_path):
    """Writes three paths. The first two have records and disagree on token 1 in one of two layers."""
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
def test_a_run_reports_how_many_rows_disagree(tmp_path, data, mode, layout):
    options = {"model__name": "qwen3_moe", "data__files": data, "training__steps": 1, "data__layout": layout}
    options["data__global_batch_groups"] = 1
    config = tiny_config(tmp_path / "run", data__replay=mode, **options)
    train(config)
    (row,) = read_metrics(config)
    if layout == "tree":
        assert (row["replayed_rows"], row["replay_disagreement"]) == ("4", "0.25")
        # With "split" the first two share token 0, the third nothing.
        assert row["executed_tokens"] == {"split": "8"}.get(mode, "5")
    else:  # a single path agrees with itself
        assert (row["replayed_rows"], row["replay_disagreement"]) == ("8", "0.0")


def test_a_step_with_split_replay_equals_the_step_over_flat_paths(data):
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
def test_the_log_says_once_what_is_not_replayed(data, caplog, mode, message):
    steps = iter(tree_dataset(data, replay=mode))
    for _ in range(3):
        next(steps)
    assert [record.message for record in caplog.records] == [message]


def test_a_model_without_experts_refuses_replay(tmp_path, data):
    with pytest.raises(
        UserError, match=r"data.replay: expected 'off' for a model without experts, got 'first'"
    ):
        train(tiny_config(tmp_path / "run", data__files=data, data__replay="first"))
    with pytest.raises(
        UserError, match=r"data.replay: expected one of off, first, majority, split, got 'last'"
    ):
        tree_dataset(data, replay="last")


def test_inspect_prints_the_disagreement(data, capsys):
    assert cli.main(["inspect", str(data)]) == 0
    assert (
        "recorded for 4 rows (one token in one layer); paths disagree on 25.00% of them"
        in capsys.readouterr().out
    )
