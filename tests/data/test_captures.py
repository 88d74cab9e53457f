"""Captured calls, traces, branches and trials: their paths, groups and rewards, and what is refused."""

import copy
import json

import pytest

from tests.data.test_traces import CALLS, NO, changed, listed, read, write
from tests.support.cases import for_each
from tests.support.traces import BRANCHES, ENVELOPE, EPISODES, GYM, GYM_CALLS, TRIAL, branch, entry
from titan_tree.data.readers import Source, recognized_formats
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree

EXPERTS = [[[0, 1]], [[1, 2]], [[2, 3]], [[-1, -1]]]  # of the first call


def contents(paths):
    return [(p.tokens.tolist(), p.loss_mask.tolist(), listed(p.rollout_logprobs)) for p in paths]


def test_captured_calls_of_nemo_gym_are_paths_of_their_rollout(tmp_path):
    """Each sampled token is trained once: in later calls it is context. Names of rollouts name the task."""
    second = [call | {"rollout_id": "3-2-a1", "reward": 0.25} for call in GYM_CALLS]
    named = entry("x", [1], [2], [-0.5], rollout="g7_g0")
    rows = [*(call | {"reward": 0.75} for call in GYM_CALLS), named, *second]
    groups = dict(read(write(tmp_path / "f.tokens.jsonl", *rows)))
    assert {name: len(paths) for name, paths in groups.items()} == {"3": 6, "g7_g0": 1}
    paths = groups["3"]
    assert contents(paths) == CALLS * 2
    assert paths[0].routed_experts.tolist() == EXPERTS
    assert paths[1].routed_experts is None
    assert [path.rollout_tokens for path in paths] == [4] * 6
    stats = TokenTree.from_paths(paths[:3]).stats
    assert (stats.n_flat, stats.n_leaf, stats.n_tree) == (13, 9, 8)
    ((_, paths),) = read(write(tmp_path / "f.tokens.jsonl", *rows[:3], *rows[4:]), advantage="loo")
    assert [path.advantage[-1] for path in paths] == [0.5] * 3 + [-0.5] * 3


def test_a_prompt_that_is_a_delta_goes_on_behind_its_parent(tmp_path):
    delta = GYM_CALLS[1] | {"prompt_token_ids": [5], "prompt_is_delta": True}
    longer = entry("d", [9], [10], [-2.0], parent_call_id="b", prompt_is_delta=True, cum_len=8)
    ((_, paths),) = read(write(tmp_path / "f.tokens.jsonl", GYM_CALLS[0], delta, GYM_CALLS[2], longer))
    assert contents(paths[:3]) == CALLS
    assert paths[3].tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 10]
    assert paths[3].loss_mask.tolist() == [0] * 7 + [1]


@pytest.mark.parametrize("indent", [None, 2])
def test_traces_of_the_gateway_of_agentcore_are_paths_of_their_episodes(tmp_path, indent, caplog):
    file = tmp_path / "rollouts-0000.json"
    file.write_text(json.dumps(EPISODES, indent=indent) + "\n")
    ((name, paths),) = read(str(file), advantage="loo")
    assert name == f"{file}:[0]"
    assert contents(paths[:3]) == [
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [NO, NO, -0.5, -0.25, 0, -0.125]),
        ([1, 2, 3, 4, 9, 10], [0, 0, 0, 0, 0, 1], [NO, NO, 0, 0, 0, -0.75]),
        ([1, 7, 8], [0, 0, 1], [NO, NO, -1.0]),
    ]
    assert [path.advantage[-1] for path in paths] == [0.5] * 3 + [-0.5] * 3
    assert [path.rollout_tokens for path in paths] == [5] * 6
    stats = TokenTree.from_paths(paths).stats
    assert (stats.n_flat, stats.n_leaf, stats.n_tree) == (30, 15, 10)
    assert caplog.messages == [f"{file}: left out rollouts that failed, which have no reliable reward"]


def test_branches_of_skyrl_capture_are_paths_of_their_trajectory(tmp_path):
    other = branch(0, [1, 2, 11], [0, 0, 1], [0.0, 0.0, -3.0], trajectory="tr_2", reward=0.25)
    ((first, paths), (second, _)) = read(write(tmp_path / "f.jsonl", *BRANCHES, other))
    assert (first, second) == ("tr_1", "tr_2")
    assert contents(paths) == [
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0, 0, -0.5, -0.25, 0, -0.125]),
        ([1, 2, 3, 4, 9, 10], [0, 0, 0, 0, 0, 1], [0, 0, -0.5, -0.25, 0, -0.75]),
    ]
    assert [path.rollout_tokens for path in paths] == [4] * 2
    assert paths[0].routed_experts.tolist() == [[[0, 1]]] * 6
    assert paths[1].routed_experts is None
    rows = [row | {"group_id": "g"} for row in (*BRANCHES, other)]
    ((name, paths),) = read(write(tmp_path / "g.jsonl", *rows), advantage="loo")
    assert name == "g"
    assert [path.advantage[-1] for path in paths] == [0.5, 0.5, -0.5]


def test_turns_of_harbor_are_paths_of_their_trial(tmp_path, caplog):
    other = TRIAL | {"id": "t2", "trial_name": "hello__b", "verifier_result": {"rewards": {"score": 0.25}}}
    failed = TRIAL | {"id": "t3", "trial_name": "hello__c", "reward_valid": False}
    steps = copy.deepcopy(TRIAL) | {"id": "t4", "task_checksum": "beef", "agent_result": None}
    steps["step_results"] = [
        {"step_name": str(n), "agent_result": {"rollout_details": [detail]}}
        for n, detail in enumerate(TRIAL["agent_result"]["rollout_details"])
    ]
    file = write(tmp_path / "trials.jsonl", TRIAL, steps, failed, other)
    groups = dict(read(file))
    assert {name: len(paths) for name, paths in groups.items()} == {"c0ffee": 6, "beef": 3}
    for paths in groups.values():
        assert contents(paths[:3]) == CALLS
        assert [path.temperature for path in paths[:3]] == [0.5] * 3
        assert [path.rollout_tokens for path in paths[:3]] == [4] * 3
        assert paths[0].routed_experts.tolist() == EXPERTS
        assert paths[1].routed_experts is None
    assert caplog.messages == [f"{file}: left out rollouts that failed, which have no reliable reward"]
    ((_, paths),) = read(write(tmp_path / "t.jsonl", TRIAL, other), advantage="loo")
    assert [path.advantage[-1] for path in paths] == [0.5] * 3 + [-0.5] * 3
    document = tmp_path / "result.json"
    document.write_text(json.dumps(TRIAL, indent=4))
    assert [contents(paths) for _, paths in read(str(document))] == [CALLS]


def test_the_beginning_of_a_long_capture_suffices_to_recognize_it(tmp_path):
    ids, zeros = list(range(100_000)), [0.0] * 100_000
    trial = changed(TRIAL, "config", "agent", "kwargs", to={"text": "x" * 300_000})
    rows = {
        "nemo_gym_capture": entry("a", ids, ids, zeros),
        "agentcore": changed(EPISODES, 0, 0, "records", 0, "token_ids", to=ids),
        "skyrl_capture": branch(0, ids, zeros, zeros),
        "harbor": trial,
    }
    for name, row in rows.items():
        file = tmp_path / name
        file.write_text(json.dumps(row) + "\n")
        assert list(recognized_formats(Source(str(file)))) == [name]


def test_experts_of_a_nemo_gym_rollout_are_read(tmp_path):
    row = changed(GYM, "response", "output", 0, "routed_experts", to=ENVELOPE)
    ((_, paths),) = read(write(tmp_path / "rollouts.jsonl", row))
    assert paths[0].routed_experts.tolist() == EXPERTS


DETAIL = ("agent_result", "rollout_details", 0)
FORM = "expected nrlre1:DTYPE:TxLxK:BASE64, got"
NUMBER = "for all tokens of the call, whose last one engines do not read"


@for_each(
    ("row", "message"),
    [
        (
            entry("b", [1], [2], [-0.5], prompt_is_delta=True, parent_call_id="z"),
            "parent_call_id: expected an earlier call, behind which this prompt goes on",
        ),
        (GYM_CALLS[0] | {"cum_len": 5}, "cum_len: expected 4, the tokens of the call, got 5"),
        (
            GYM_CALLS[0] | {"generation_log_probs": [-0.5]},
            "generation_log_probs: expected 2 entries, got 1",
        ),
        (GYM_CALLS[0] | {"rollout_id": 3}, "rollout_id: expected a name, got 3"),
        (
            GYM_CALLS[0] | {"prompt_images": [1]},
            "prompt_images: unknown field of a task. To ignore: data.ignore_fields='[\"prompt_images\"]'",
        ),
        (GYM_CALLS[0] | {"routed_experts": "nrlre1:int16:4x1x2:AAAA"}, f"routed_experts: {FORM} {{}}"),
        (GYM_CALLS[0] | {"routed_experts": "nrlre1:float16:1x1x1:AAA="}, f"routed_experts: {FORM} {{}}"),
        (
            GYM_CALLS[0] | {"routed_experts": [[[0, 1]]] * 2},
            f"routed_experts: expected 3 or 4 entries, {NUMBER}, got 2",
        ),
        (
            BRANCHES[0] | {"rollout_logprobs": [-0.5]},
            "rollout_logprobs: expected 6 entries (the response) or 6 (the row), got 1",
        ),
        (
            changed(TRIAL, *DETAIL, "completion_token_ids", to=[[3, 4]]),
            "rollout_details[0].completion_token_ids: expected 2 turns, got 1",
        ),
        (
            changed(TRIAL, *DETAIL, "logprobs", 1, to=[-0.5, -0.5]),
            "rollout_details[0]: turn 1: logprobs: expected 1 entries, got 2",
        ),
        (
            changed(TRIAL, *DETAIL, "extra", "routed_experts", to=[[[[0, 1]]]]),
            "rollout_details[0].routed_experts: expected 2 turns, got 1",
        ),
        (
            changed(TRIAL, "verifier_result", "rewards", to={"a": 1, "b": 0}),
            "verifier_result.rewards: expected one, or one called reward, got a, b; add reward to the row",
        ),
        (
            TRIAL | {"agent_result": None},
            "rollout_details: no token ids; run the agent with collect_rollout_details = true",
        ),
    ],
)
def test_malformed_captures_are_refused(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(UserError) as error:
        read(file)
    text = str(error.value)
    assert text.startswith(f"{file}:1: {message.removesuffix('{}')}")
    assert message.endswith("{}") or text == f"{file}:1: {message}"


def test_a_malformed_trace_of_the_gateway_is_refused(tmp_path):
    file = tmp_path / "rollouts.json"
    file.write_text(json.dumps(changed([EPISODES[0]], 0, 1, "records", 2, "logprobs", to=[])))
    with pytest.raises(UserError) as error:
        read(str(file))
    assert str(error.value) == (
        f"{file}:[0]: episodes[1].records[2]: logprobs: expected 1 entries (the response) or 3 (the row), "
        "got 0"
    )
