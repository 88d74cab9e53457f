"""What responses of vLLM and SGLang record of an answer is trained as it is."""

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_lines
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError

ASKED = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.7}
SAID = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
CONTENT = {"content": [{"token": f"token_id:{t}", "logprob": p} for t, p in ((8, -0.5), (9, -0.25))]}
PAIRS = [[-0.5, 8, "a"], [-0.25, 9, None]]
EXPECTED = {
    "tokens": [5, 6, 8, 9],
    "loss_mask": [0, 0, 1, 1],
    "rollout_logprobs": [None, None, -0.5, -0.25],
    "temperature": 0.7,
    "finish_reason": "stop",
}


def read(tmp_path, *rows):
    return [record for _, record in read_records(write_lines(tmp_path / "f.jsonl", list(rows)))]


def generated(request=None, **info):
    """Returns a call of generate of SGLang."""
    response = {"output_ids": [8, 9], "meta_info": {"finish_reason": {"type": "stop"}} | info}
    return {"request": {"input_ids": [5, 6]} | (request or {}), "response": response}


def chat(response=None, **choice):
    return {"request": ASKED, "response": {"choices": [SAID | choice]} | (response or {})}


@for_each(
    "row",
    [
        chat({"prompt_token_ids": [5, 6]}, token_ids=[8, 9], logprobs=CONTENT),
        chat(
            {"prompt_token_ids": [5, 6], "usage": {"completion_tokens": 2}},
            token_ids=[8, 9],
            logprobs=CONTENT,
        )
        | {"request": ASKED | {"return_token_ids": True, "logprobs": True}},
        chat({"prompt_token_ids": [5, 6]}, logprobs=CONTENT),  # return_tokens_as_token_ids
        chat(prompt_token_ids=[5, 6], meta_info={"output_token_logprobs": PAIRS}),
        chat(meta_info={"output_token_logprobs": PAIRS, "prompt_token_ids": [5, 6]}),
        {"choices": [SAID | {"token_ids": [8, 9], "logprobs": CONTENT}], "prompt_token_ids": [5, 6]} | ASKED,
        {  # completions
            "request": {"prompt": "text", "temperature": 0.7},
            "response": {
                "choices": [
                    {"text": "ab", "token_ids": [8, 9], "prompt_token_ids": [5, 6], "finish_reason": "stop"}
                    | {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]}}
                ]
            },
        },
        {  # generate of SGLang
            "request": {"input_ids": [5, 6], "sampling_params": {"temperature": 0.7}},
            "response": {
                "text": "ab",
                "output_ids": [8, 9],
                "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": PAIRS},
            },
        },
        {  # the same of a text
            "request": {"text": "hi", "sampling_params": {"temperature": 0.7}},
            "response": {
                "output_ids": [8, 9],
                "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": PAIRS}
                | {"prompt_tokens": 2, "input_token_logprobs": [[None, 5, "h"], [-0.1, 6, "i"]]},
            },
        },
    ],
)
def test_recorded_ids_are_trained(tmp_path, row):
    (record,) = read(tmp_path, row | {"reward": 1.0})
    assert record == EXPECTED | {"reward": 1.0}


def test_masks_and_experts_come_along(tmp_path):
    experts = {"routed_experts": [[[2]], [[3]]]}
    row = {
        "request": {"token_ids": [5, 6], "sampling_params": {"temperature": 0.7}},
        "response": {
            "prompt_routed_experts": [[[0]], [[1]]],
            "choices": [
                {"token_ids": [8, 9], "logprobs": CONTENT, "sampling_mask": [[8], [7, 9]]}
                | {"finish_reason": "stop"}
                | experts
            ],
        },
    }
    (record,) = read(tmp_path, row)
    assert record == EXPECTED | {
        "sampling_mask": [None, None, [8], [7, 9]],
        "routed_experts": [[[0]], [[1]], [[2]], [[3]]],
    }


def test_calls_with_ids_form_groups_by_their_messages(tmp_path):
    rows = [chat({"prompt_token_ids": [5, 6]}, token_ids=[8, n], logprobs=None) for n in (9, 10)]
    later = chat({"prompt_token_ids": [5, 6, 8, 9, 5]}, token_ids=[7])
    later["request"] = {"messages": [*ASKED["messages"], SAID["message"], {"role": "user", "content": "x"}]}
    file = write_lines(tmp_path / "f.jsonl", [*rows, later])
    (group,) = sample_reader(file).files.groups()  # needs no tokenizer
    paths = sample_reader(file).paths(group)
    assert [path.tokens.tolist() for path in paths] == [[5, 6, 8, 9], [5, 6, 8, 10], [5, 6, 8, 9, 5, 7]]


def test_choices_with_ids_become_trajectories(tmp_path):
    row = chat({"prompt_token_ids": [5, 6]})
    row["response"]["choices"] = [SAID | {"token_ids": [8, 9]}, SAID | {"token_ids": [8]}, SAID]
    (record,) = read(tmp_path, row | {"tools": None})
    assert [t.get("tokens") for t in record["trajectories"]] == [[5, 6, 8, 9], [5, 6, 8], None]
    assert record["trajectories"][2]["messages"][-1] == {
        "role": "assistant",
        "content": "ab",
        "finish_reason": "stop",
    }


@for_each(
    ("row", "line"),
    [
        (chat(token_ids=[8, 9]), "token ids of the answer, but not of the prompt"),
        (
            chat(token_ids=[8, 9], meta_info={"prompt_token_ids": [5, 6], "prompt_tokens": 3}),
            "not of the prompt",
        ),
        (chat(logprobs={"content": [{"token": "ab", "logprob": -0.5}]}), "log-probs of tokens without ids"),
        (chat({"prompt_token_ids": [5, 6]}, token_ids=[8, 9]), "are trained as recorded, not the text"),
    ],
)
def test_what_is_done_is_said(tmp_path, caplog, row, line):
    caplog.clear()
    read(tmp_path, row)
    (said,) = [record.message for record in caplog.records]
    assert line in said


@for_each(
    ("row", "message"),
    [
        (
            chat({"prompt_token_ids": [5]}, token_ids=[8], logprobs=CONTENT),
            r"choices\[0\]: expected 1 token ids",
        ),
        (
            chat({"prompt_token_ids": [5]}, token_ids=[8, 7], logprobs=CONTENT),
            r"expected 2 token ids and as many log-probs, got \[8, 9\], too",
        ),
        (
            {"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}]}},
            "expected token ids of the pro",
        ),
        (chat({"prompt_token_ids": [5]}, logprobs="x"), r"choices\[0\].logprobs: expected an object"),
        (
            chat({"prompt_token_ids": [5]}, token_ids="ab"),
            r"choices\[0\].token_ids: expected a list, got 'ab'",
        ),
        (chat({"prompt_token_ids": [5]}, logprobs={"content": [None]}), "logprobs.content: expected objects"),
        (generated(output_token_logprobs=[[-0.5]]), "output_token_logprobs: expected pairs of a log-prob"),
        (generated(output_token_logprobs=7), "output_token_logprobs: expected a list, got 7"),
        (generated({"sampling_params": [{}]}), r"sampling_params: expected an object, of one call per row"),
        # a part of a stream, ids that the server lost, and an answer that repeats its prompt
        (generated(completion_tokens=4), r"expected all 4 token ids of an answer that ended, got 2"),
        (generated(finish_reason=None), r"got 2; of a stream, log the ids of all chunks"),
        (
            chat({"prompt_token_ids": [5], "usage": {"completion_tokens": 3}}, token_ids=[8]),
            r"choices\[0\]: expected all 3 token ids",
        ),
        (
            chat({"prompt_token_ids": [5], "usage": {"completion_tokens": 1}}, token_ids=[8, 9]),
            r"all 1 token",
        ),
        (
            {
                "request": {"prompt": [5]},
                "response": {
                    "choices": [{"token_ids": [t]} for t in (8, 9)],
                    "usage": {"completion_tokens": 3},
                },
            },
            r"choices\[0\]: expected all 2 token ids",
        ),
        (generated() | {"response": []}, "response.choices: expected a list of answers; remove a"),
        (generated({"echo": True}), "request.echo: expected false, got true"),
        (
            {
                "request": {"prompt": [[5], [6]]},
                "response": {"choices": [{"prompt_token_ids": [t], "token_ids": [8]} for t in (5, 6)]},
            },
            "response: expected answers to one prompt, got several",
        ),
        (
            chat({"prompt_token_ids": [5, 6]}, token_ids=[8, 9], routed_experts=[[[0]], [[1]]]),
            r"choices\[0\].routed_experts: expected 3 entries",
        ),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, row)
