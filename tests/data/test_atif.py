"""Trajectories of Harbor (ATIF): steps become messages, or the token ids that they record are trained."""

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_document
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError

ATIF_STEPS = [
    {"step_id": 1, "source": "system", "message": "Be brief."},
    {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "look"}]},
    {"step_id": 3, "source": "agent", "message": "old", "is_copied_context": True},
    {
        "step_id": 4,
        "source": "agent",
        "message": "I look",
        "reasoning_content": "hm",
        "tool_calls": [{"tool_call_id": "c", "function_name": "ls", "arguments": {}}],
        "observation": {"results": [{"source_call_id": "c", "content": "a"}, {"content": "prompt>"}]},
    },
    {"step_id": 5, "source": "agent", "message": "done"},
]
ATIF = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "agent": {"name": "a", "version": "1"},
    "steps": ATIF_STEPS,
}


def test_a_trajectory_of_harbor(tmp_path):
    child = {"trajectory_id": "child", "agent": {}, "steps": [ATIF_STEPS[1], ATIF_STEPS[4]]}
    file = write_document(tmp_path / "trajectory.json", ATIF | {"subagent_trajectories": [child]})
    ((_, record),) = read_records(file)
    assert record["id"] == "s"
    main, sub = (trajectory["messages"] for trajectory in record["trajectories"])
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": {}}}
    assert main == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "old", "weight": 0},
        {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "user", "content": "prompt>"},
        {"role": "assistant", "content": "done"},
    ]
    assert sub == [{"role": "user", "content": "look"}, {"role": "assistant", "content": "done"}]


def test_token_ids_of_harbor_are_trained(tmp_path):
    metrics = [
        {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
        {"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5, 6], "logprobs": [-0.25, -1]},
    ]
    steps = [ATIF_STEPS[1], *({"source": "agent", "message": "x", "metrics": m} for m in metrics)]
    file = write_document(tmp_path / "f.json", ATIF | {"steps": steps, "reward": 1.0})
    reader = sample_reader(file, TreeTokenizer.byte_level())
    (group,) = reader.files.groups()
    paths = reader.paths(group)
    assert [path.tokens.tolist() for path in paths] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert [path.loss_mask.tolist() for path in paths] == [[0, 0, 1], [0, 0, 0, 0, 1, 1]]


@for_each(
    ("step", "message"),
    [
        ({"source": "tool", "message": "x"}, r"steps\[0\].source: expected system, user, agent, got 'tool'"),
        (
            {"source": "system", "message": "x", "extra": {"context_management": {"type": "compaction"}}},
            r"steps\[0\].extra.context_management: the step changes what later answers read",
        ),
        ({"source": "user", "message": "x", "extra": [1]}, r"steps\[0\].extra: expected an object"),
        (
            {"source": "agent", "message": "x", "metrics": {"logprobs": 3}},
            r"metrics.logprobs: expected a list",
        ),
    ],
)
def test_steps_of_harbor_that_are_not_known_are_refused(tmp_path, step, message):
    with pytest.raises(UserError, match=message):
        list(read_records(write_document(tmp_path / "f.json", ATIF | {"steps": [step, ATIF_STEPS[4]]})))
