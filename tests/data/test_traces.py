"""Traces of verifiers and NeMo Gym: the paths of their branches and calls, and the trees that they form."""

import copy
import json

import pytest
import torch

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.traces import GYM, LIGHTNING, TRACE, call, episode, node
from titan_tree import TreeBatch, TreeLoss
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree

NO = None
BRANCHES = [  # tokens, loss mask, rollout log-probs, advantages: written by hand
    (
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 0, 0, 0, 1, 1, 0, 0, 1],
        [NO, NO, NO, NO, -0.5, -0.25, NO, NO, -0.125],
        [0, 0, 0, 0, 1, 2, 0, 0, 3],
    ),
    (
        [1, 2, 3, 4, 5, 6, 10, 12],  # turn 2 is trained in the first branch
        [0, 0, 0, 0, 0, 0, 0, 1],
        [NO, NO, NO, NO, -0.5, -0.25, NO, -1.0],
        [0, 0, 0, 0, 1, 2, 0, 4],
    ),
    ([1, 2, 3, 13, 14], [0, 0, 0, 0, 1], [NO, NO, NO, NO, -1.5], [0, 0, 0, 0, 5]),
    ([20, 21, 22], [0, 0, 1], [NO, NO, -2.0], [0, 0, 6]),
]


CALLS = [
    ([1, 2, 3, 4], [0, 0, 1, 1], [NO, NO, -0.5, -0.25]),
    ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1], [NO, NO, NO, NO, NO, -0.125]),
    ([1, 7, 8], [0, 0, 1], [NO, NO, -1.0]),
]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(file, **options):
    reader = sample_reader(file, **options)
    return [(group.id, reader.paths(group)) for group in reader.files.groups()]


def listed(values):
    return [None if value != value else value for value in values.tolist()]


def test_the_branches_of_a_verifiers_trace_are_paths_of_one_rollout(tmp_path):
    ((name, paths),) = read(write(tmp_path / "traces.jsonl", TRACE))
    assert name == "search-1"
    contents = [
        (p.tokens.tolist(), p.loss_mask.tolist(), listed(p.rollout_logprobs), p.advantage.tolist())
        for p in paths
    ]
    assert contents == BRANCHES
    assert [path.temperature for path in paths] == [0.5] * 4
    assert [path.rollout_tokens for path in paths] == [6] * 4
    stats = TokenTree.from_paths(paths).stats
    # 9 tokens of the first branch, then 10 and 12, 13 and 14, and the sub-agent's 20, 21 and 22
    assert (stats.n_flat, stats.n_tree) == (25, 9 + 2 + 2 + 3)


def test_traces_of_a_task_form_one_group_in_any_order_and_share_their_reward(tmp_path):
    def trace(name, key, score, **fields):
        nodes = [{k: v for k, v in node.items() if k != "advantages"} for node in TRACE["nodes"]]
        task = {**TRACE["task"], "key": key}
        return TRACE | {"id": name, "task": task, "nodes": nodes, "rewards": {"r": {"score": score}}} | fields

    rows = [
        trace("t1", "a", 1.0),
        trace("t2", "b", 0.0),
        trace("t3", "a", 0.0),
        trace("t4", "b", 1.0, ok=False),
        trace("t5", "b", 1.0, agent={"trainable": False}),
    ]
    groups = dict(read(write(tmp_path / "traces.jsonl", *rows), advantage="loo"))
    assert {name: len(paths) for name, paths in groups.items()} == {"a": 8, "b": 4}
    assert [path.advantage[-1] for path in groups["a"]] == [1.0] * 4 + [-1.0] * 4
    # Both rollouts have the same tokens.
    assert TokenTree.from_paths(groups["a"]).stats.n_tree == 16


def test_the_traces_of_an_episode_join_the_group_of_their_episode(tmp_path):
    """A judge is not trained, and an episode that failed is left out. Without a group, tasks form groups."""
    judge = TRACE | {"id": "j", "agent": {"name": "judge", "trainable": False}}
    rows = [
        episode(TRACE, judge),
        episode(TRACE | {"id": "t2"}, ok=False),
        episode(TRACE | {"id": "t3"}, TRACE | {"id": "t4"}, group=None),
        episode(TRACE | {"id": "t5", "task": {"hash": "of another task"}}),
    ]
    groups = dict(read(write(tmp_path / "traces.jsonl", *rows)))
    assert {name: len(paths) for name, paths in groups.items()} == {"g1": 8, "search-1": 8}
    for paths in groups.values():
        assert [path.loss_tokens for path in paths] == [3, 1, 1, 1] * 2
        stats = TokenTree.from_paths(paths).stats
        assert (stats.n_flat, stats.n_leaf, stats.n_tree) == (50, 25, 16)


def test_token_mean_of_a_trace_is_the_mean_over_each_sampled_token_once(tmp_path):
    """As prime-rl trains the branches: the loss of its samples, with its masks, on each branch alone."""
    ((_, paths),) = read(write(tmp_path / "traces.jsonl", TRACE))
    tree = TokenTree.from_paths(paths)
    batch = TreeBatch.from_trees([tree])
    logprobs = torch.linspace(-2, -1, len(batch.edge_label))
    loss_function = TreeLoss("reinforce", "token_mean")
    loss, _ = loss_function(logprobs, batch, loss_function.normalizer(paths))
    by_label = dict(zip(batch.edge_label.tolist(), logprobs.tolist(), strict=True))
    credits = {5: 1, 6: 2, 9: 3, 12: 4, 14: 5, 22: 6}
    expected = -sum(credit * by_label[token] for token, credit in credits.items()) / 6
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_calls_of_a_nemo_gym_rollout_are_paths_of_one_rollout(tmp_path):
    other = copy.deepcopy(GYM) | {"_ng_rollout_index": 0}
    elsewhere = copy.deepcopy(GYM) | {"_ng_task_index": 1}
    groups = dict(read(write(tmp_path / "rollouts.jsonl", GYM, elsewhere, other)))
    assert {name: len(paths) for name, paths in groups.items()} == {"0": 6, "1": 3}
    paths = groups["1"]
    contents = [(p.tokens.tolist(), p.loss_mask.tolist(), listed(p.rollout_logprobs)) for p in paths]
    assert contents == CALLS
    assert [path.temperature for path in paths] == [0.5] * 3
    assert [path.rollout_tokens for path in paths] == [4] * 3
    stats = TokenTree.from_paths(paths).stats
    assert (stats.n_flat, stats.n_leaf, stats.n_tree) == (13, 9, 8)


def test_the_triplets_of_an_agent_lightning_rollout_are_paths_of_one_rollout(tmp_path):
    other = copy.deepcopy(LIGHTNING) | {"rollout_id": "rollout-2", "final_reward": None}
    other["triplets"][1]["reward"] = 0.25
    elsewhere = changed(LIGHTNING, "task", "input", to={"question": "!"})
    ((_, both), (_, one)) = read(write(tmp_path / "r.jsonl", LIGHTNING, elsewhere, other), advantage="loo")
    assert (len(both), len(one)) == (6, 3)
    contents = [(p.tokens.tolist(), p.loss_mask.tolist(), listed(p.rollout_logprobs)) for p in both[:3]]
    assert contents == CALLS
    assert [path.advantage[-1] for path in both] == [0.5] * 3 + [-0.5] * 3
    stats = TokenTree.from_paths(both).stats
    assert (stats.n_flat, stats.n_leaf, stats.n_tree) == (26, 9, 8)


def changed(row, *keys, to):
    """Returns a copy of a row in which the member that the keys lead to has another value."""
    row = copy.deepcopy(row)
    member = row
    for key in keys[:-1]:
        member = member[key]
    member[keys[-1]] = to
    return row


def test_gym_reads_sampling_masks_and_leaves_out_rollouts_without_a_reliable_reward(tmp_path):
    first = changed(GYM, "response", "output", 0, "sampling_mask", to=[[3, 9], None])
    masked = GYM | {"_ng_rollout_index": 2, "mask_sample": True}
    ((_, paths),) = read(write(tmp_path / "rollouts.jsonl", first | {"mask_sample": False}, masked))
    assert len(paths) == 3
    assert [ids.tolist() for ids in paths[0].sampling_mask.by_token()] == [[], [], [3, 9], []]


UNKNOWN = "unknown field, which might change the loss; remove it"
ENTRIES = "expected 2 entries, one per sampled token, got 1"
SHORT = changed(TRACE, "nodes", 2, "mask", to=[True])
KEYS = "task: expected key or hash, which names the group; add a group_id to the row"
SECOND = ("response", "output", 2)


@for_each(
    ("row", "message"),
    [
        (changed(TRACE, "nodes", 2, "kept", to=1), f"nodes[2].kept: {UNKNOWN}"),
        (changed(TRACE, "nodes", 2, "logprobs", to=[-1.0]), f"nodes[2].logprobs: {ENTRIES}"),
        (SHORT, "nodes[2].mask: expected 3 entries, got 1"),
        (
            episode(TRACE, seed=3),
            "traces[0]: seed: unknown field of a task. To ignore: data.ignore_fields='[\"seed\"]'",
        ),
        (episode(TRACE, SHORT), "traces[1]: nodes[2].mask: expected 3 entries, got 1"),
        (changed(TRACE, "nodes", 2, "parent", to=2), "nodes[2].parent: expected an earlier node, got 2"),
        (
            changed(TRACE, "nodes", 1, "message", to={"content": [{"type": "image_url"}]}),
            "nodes[1].message.content[0]: expected an image as a file beside the data or as a data: URL, got "
            "{'type': 'image_url'}; an id of a file does not hold it",
        ),
        (
            changed(TRACE, "nodes", 2, "loss_weights", to={"ce": [1.0, 1.0, 1.0]}),
            "nodes[2].loss_weights: losses chosen per token are not supported; remove it",
        ),
        (
            changed(TRACE, "calls", 1, "sampling", to={"temperature": 1.0}),
            "calls: expected one temperature for the trained nodes of a branch, got 2",
        ),
        (changed(TRACE, "task", to={"data": {}}), KEYS),
        (
            changed(TRACE, "nodes", to=[node(None, []) | {"mask": []}]),
            "nodes: no token ids; record the rollouts with a client that returns them",
        ),
        (
            changed(TRACE, "rewards", "correct", "score", to="high"),
            "rewards.correct.score: expected a number, got 'high'",
        ),
        (
            changed(GYM, *SECOND, "generation_log_probs", to=[]),
            "response.output[2].generation_log_probs: expected 1 entries, got 0",
        ),
        (
            changed(GYM, *SECOND, "prompt_token_ids", to=None),
            "response.output[2].prompt_token_ids: expected a list, got None",
        ),
        (
            changed(GYM, *SECOND, "routed_experts", to="nrlre1:"),
            "response.output[2].routed_experts: expected nrlre1:DTYPE:TxLxK:BASE64, got 'nrlre1:'; record "
            "the call again",
        ),
        (
            changed(GYM, "_ng_task_index", to=None),
            "_ng_task_index: missing; it names the group and the rollout",
        ),
        (
            changed(LIGHTNING, "task", to=None),
            "task: expected input, which names the group; add a group_id to the row",
        ),
        (
            changed(LIGHTNING, "triplets", 1, "response", "logprobs", to=[]),
            "triplets[1].response.logprobs: expected 1 entries, got 0",
        ),
        (
            changed(LIGHTNING, "triplets", 2, "prompt", "token_ids", to=[]),
            "triplets[2].prompt.token_ids: no token ids; record the rollouts with a client that returns them",
        ),
        (
            changed(LIGHTNING, "triplets", 0, "prompt", "image_urls", to=["https://a"]),
            "triplets[0].prompt.image_urls: not read; give images as parts of messages or beside token ids "
            "(docs/images.md), or remove the row",
        ),
        (
            changed(GYM, "response", "output", to=[call([], [], [])]),  # as if without token ids
            "response.output: no token ids; record the rollouts with a client that returns them",
        ),
    ],
)
def test_malformed_traces_are_refused(tmp_path, row, message):
    file = write(tmp_path / "traces.jsonl", row)
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value) == f"{file}:1: {message}"


def test_fields_that_an_environment_adds_must_be_ignored_by_name(tmp_path):
    file = write(tmp_path / "rollouts.jsonl", GYM | {"expected_answer": "4"})
    with pytest.raises(UserError, match="expected_answer: unknown field of a task"):
        read(file)
    assert len(read(file, ignore_fields=["expected_answer"])) == 1
