"""Rows and files that readers refuse with one line."""

import json
import re

import pyarrow
import pyarrow.ipc
import pytest

from tests.data.fuzz_formats import fuzz
from tests.support.cases import for_each
from tests.support.formats import write_document, write_lines
from tests.support.rows import ANSWER, ASK, SAYS, chat, request
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError


def blocks(*parts):
    return {"role": "assistant", "content": list(parts)}


def tree(*nodes):
    return {"nodes": list(nodes)}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PAIR = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
NODE = {"id": 0, "tokens": [1]}
REFUSED = [
    ("openai_responses", {"input": [{"type": []}]}, r"input\[0\]: items of type \[\] are not supported"),
    ("openai_chat", chat(3), r"messages\[0\]: expected an object with role and content, got 3"),
    (
        "openai_chat",
        chat({**ASK, "content": [{"type": "image_url", "image_url": {"file_id": "x"}}]}),
        r"messages\[0\].content\[0\]: expected an image as a file beside the data or as a data: URL, got",
    ),
    (
        "openai_chat",
        chat(ASK, {**ANSWER, "audio": {"id": "1"}}),
        r"messages\[1\].audio: not read; give images as parts of messages or",
    ),
    (
        "openai_chat",
        chat(ASK, {**ANSWER, "refusal": "no"}),
        r"messages\[1\].refusal: expected either content or",
    ),
    (
        "openai_chat",
        chat(ASK, {"role": "assistant", "function_call": 3}),
        r"messages\[1\].function_call: expected",
    ),
    (
        "openai_chat",
        request(ASK) | {"response": {"choices": [{"message": ANSWER}]}, "messages": [ASK]},
        "messages: expected it once, got it in the row and in its parts; remove one",
    ),
    (
        "openai_chat",
        {
            "request": chat(ASK, temperature=1),
            "response": {"choices": [{"message": ANSWER}]},
            "temperature": 2,
        },
        "temperature: expected it once",
    ),
    (
        "anthropic",
        {"request": chat(ASK), "response": {"content": []}, "tools": [], "messages": [ASK]},
        "messages: expected it once",
    ),
    (
        "openai_responses",
        {"request": {"input": "?"}, "response": {"output": [SAYS]}, "output": []},
        "output: expected it once",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": "!"}], "messages": [ASK]},
        "messages: expected it",
    ),
    ("openai_chat", chat(ASK, ANSWER, system="s"), "system: a field of Anthropic's API"),
    (
        "openai_chat",
        chat(ASK, ANSWER, tools=[], functions=[]),
        "functions: expected either tools or functions",
    ),
    (
        "openai_chat",
        chat(ASK, ANSWER, images=["x"]),
        r'images: expected a part {"type": "image"} of a message for each of 1, got 0',
    ),
    ("openai_chat", {"messages": "[1"}, r"messages \(JSON text\): broken JSON at character 3"),
    (
        "openai_chat",
        {"messages": '[{"role": 1, "role": 2}]'},
        r"messages \(JSON text\): role: expected every key",
    ),
    ("openai_chat", {"messages": "[[NaN]]"}, r"messages \(JSON text\): \[0\]\[0\]: expected a finite number"),
    (
        "openai_chat",
        {"messages": r'["\ud800"]'},
        r"messages \(JSON text\): \[0\]: .* got a lone surrogate in",
    ),
    (
        "openai_chat",
        {"request": chat(ASK), "response": None},
        "response: expected an object with choices beside the request, got null; rename or add it, or remove",
    ),
    (
        "openai_chat",
        {"request": chat(ASK), "response": []},
        r"response: expected an object .* got \[\]; join the chunks of a stream into one message",
    ),
    (
        "openai_chat",
        {"request": chat(ASK), "reply": "2"},
        "response: .* got only the fields request, reply; rename",
    ),
    (
        "openai_chat",
        {"request": chat(ASK), "response": {"error": {}}},
        "response.choices: expected a non-empty list, got None; remove a failed call",
    ),
    (
        "openai_responses",
        {"input": [{"type": "web_search_call"}]},
        r"input\[0\]: items of type 'web_search_call'",
    ),
    (
        "openai_responses",
        {"input": [{"role": "x", "content": "?"}]},
        r"input\[0\].role: expected system, dev",
    ),
    (
        "openai_responses",
        {"input": [ASK], "previous_response_id": "r"},
        "previous_response_id: expected the items",
    ),
    (
        "openai_responses",
        {"request": {"input": "?"}, "response": {"output": [SAYS], "previous_response_id": "r"}},
        "previous_response_id: expected the items",
    ),
    (
        "openai_responses",
        {"request": {"input": "?", "conversation": "c"}, "response": {"output": [SAYS]}},
        "conversation: expected the items of the earlier responses in input; add them",
    ),
    (
        "openai_responses",
        {"input": "?", "output": [SAYS], "error": {"code": "server_error"}},
        "error: expected an answer without an error",
    ),
    (
        "openai_chat",
        request(ASK) | {"response": {"choices": [{"message": ANSWER, "error": {"code": 502}}]}},
        r"response.choices\[0\].error: expected an answer without an error; remove the row",
    ),
    (
        "openai_chat",
        request(ASK) | {"response": {"choices": [{"message": ANSWER}], "status": "incomplete"}},
        r"response.status: expected as in response.choices\[0\], which is finished; remove one",
    ),
    ("openai_responses", {"input": [ASK], "tools": [{"type": "mcp"}]}, r"tools\[0\]: a tool of type 'mcp'"),
    (
        "openai_responses",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        r"input\[0\].content\[0\]: got a part of type 'input_file'; expected text, or an image that a user, ",
    ),
    (
        "anthropic",
        chat(blocks({"type": "image"}), system="s"),
        r"messages\[0\].content\[0\]: got a part of type 'image'; expected text, or an image that a user,",
    ),
    (
        "anthropic",
        chat({"role": "tool"}, system="s"),
        r"messages\[0\].role: expected user or assistant, got 'tool'",
    ),
    (
        "anthropic",
        chat(blocks({"type": "thinking"})),
        r"messages\[0\].content\[0\].thinking: expected a string",
    ),
    ("anthropic", chat(ASK, tools=[{"type": "bash_20250124"}]), r"tools\[0\]: a tool that runs at Anthropic"),
    (
        "sharegpt",
        {"conversations": [{"from": "alien", "value": "x"}]},
        r"conversations\[0\].from: expected one of",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt"}]},
        r"conversations\[0\].value: expected a string, got None",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": "", "loss": 0}]},
        r"conversations\[0\].loss: expected",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "x"}]},
        r"conversations\[0\].value \(JSON text of a call\): broken JSON at character 1",
    ),
    ("sharegpt", {"conversations": [], "chosen": {}}, "chosen: this format has no preference pairs; "),
    ("alpaca", {"instruction": "a", "output": 3}, "output: expected a string, got 3"),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["q"]]},
        r"history\[0\]: expected a question and",
    ),
    (
        "token_rows",
        PAIR | {"response_mask": [1] * 5},
        r"response_mask: expected 3 entries \(the response\), got 5",
    ),
    ("token_rows", PAIR | {"loss_mask": [1] * 4}, r"loss_mask: expected 3 .*or 5 \(the row\), got 4"),
    ("token_rows", PAIR | {"completion_mask": ["1", 1, 1]}, "completion_mask: expected numbers, got '1'"),
    ("token_rows", PAIR | {"input_ids": [1, 2]}, "input_ids: expected prompt_ids followed by completion_ids"),
    ("token_rows", PAIR | {"responses": [1]}, "responses: expected only one of completion_ids and responses"),
    ("token_rows", PAIR | {"temperatures": [1, 2, 2]}, "temperatures: expected one temperature"),
    ("token_rows", PAIR | {"temperatures": [{}, 2, 2]}, "temperatures: expected numbers, got {}"),
    ("token_rows", PAIR | {"attention_mask": ["0", 1, 1, 1, 1]}, "attention_mask: expected 0 or 1"),
    (
        "token_rows",
        PAIR | {"attention_mask": [1, 1, 1, 0, 1]},
        "attention_mask: expected zeros only for padding",
    ),
    (
        "token_rows",
        PAIR | {"attention_mask": [1, 1, 1, 1, 0], "completion_mask": [1, 1, 1]},
        "loss_mask: expected 0 for padding, got a trained token with 0 in attention_mask or prompt_mask",
    ),
    (
        "token_rows",
        PAIR | {"loss_mask": [-1] * 3, "completion_mask": [-1] * 3},
        "loss_mask: expected numbers of at least 0, got -1",
    ),
    (
        "token_rows",
        PAIR | {"prompt_mask": ["0", "1"]},
        "prompt_mask: expected 0 or 1 for every token, got '0'",
    ),
    ("token_rows", PAIR | {"prompt_mask": [1, 0]}, "prompt_mask: expected 2 entries: 0 for padding"),
    ("token_rows", {"prompt_ids": [1, 2]}, "prompt_ids: expected ids of a prompt and a response"),
    ("token_rows", {"token_ids": [1, 2]}, "loss_mask: missing, and nothing tells the prompt"),
    ("token_rows", {"token_ids": [1, "x"], "mask": [1, 1]}, "token_ids: expected integers, got 'x'"),
    (
        "token_rows",
        {"input_ids": [1, 2], "labels": [-100, 3]},
        r"labels\[1\]: expected -100 or the token 2, got 3",
    ),
    (
        "token_rows",
        {"tokens": [1, 2], "response_length": 3, "mask": [1]},
        "response_length: expected at most 2",
    ),
    (
        "token_rows",
        {"prompt_ids": [1, 2], "completion_ids": [3, 4], "response_length": 1},
        "response_length: expected 2, as completion_ids has, got 1; remove it",
    ),
    ("tree", tree(), r"nodes: expected a non-empty list, got \[\]"),
    ("tree", tree({"id": 1}), r"nodes\[0\]: expected one of messages, text, tokens, got none"),
    ("tree", tree(NODE, NODE), r"nodes\[1\].id: expected different ids, got 0 twice"),
    ("tree", tree({**NODE, "parent": 7}), r"nodes\[0\].parent: no node has the id 7"),
    ("tree", tree({**NODE, "parent": 0}), r"nodes\[0\].parent: the node is its own ancestor"),
    ("tree", tree({**NODE, "loss_mask": [1, 1]}), r"nodes\[0\].loss_mask: expected 1 entries"),
    ("tree", tree({**NODE, "rewards": 1}), r"nodes\[0\].rewards: unknown field; expected one of advantage"),
    (
        "tree",
        tree({**NODE, "reward": 1}, {"parent": 0, "text": "x"}),
        r"nodes\[0\].reward: no sample ends here",
    ),
    ("tree", tree(NODE, {"parent": 0, "text": "x"}), r"nodes\[1\]: expected either tokens or messages"),
    ("tree", tree({**NODE, "sample": False}), "nodes: expected a leaf or a node with sample = true"),
]


@for_each(("format", "row", "message"), REFUSED)
def test_a_malformed_row_is_an_error_with_file_line_and_field(tmp_path, format, row, message):
    file = write_lines(tmp_path / "f.jsonl", [row])
    with pytest.raises(UserError, match=rf"f\.jsonl:1: {message}") as error:
        list(read_records(file, format))
    assert "\n" not in str(error.value)


def simulated(fields, **others):
    """Returns a file of tau2-bench whose message has these fields."""
    return {"simulations": [{"task_id": "a", "messages": [ANSWER | fields], **others}]}


RUN = {"trajectory": []}
DOCUMENTS = [
    ("tau_bench", [{"task_id": 1, "traj": 3}], r":\[0\]: traj: expected a list of messages, got 3"),
    ("tau_bench", [{"traj": []}], r":\[0\]: task_id: expected a string or an integer, got None"),
    ("tau_bench", {}, ": document: expected a list of results"),
    (
        "tau2_bench",
        {"simulations": [{"task_id": "a", "messages": [3]}]},
        r":simulations\[0\]: messages\[0\]: exp",
    ),
    (
        "tau_bench",
        [{"task_id": 1, "id": "a", "trial": 0, "traj": [ASK, ANSWER]}],
        r":\[0\]: id: expected it once",
    ),
    (
        "tau2_bench",
        simulated({"raw_data": {"choices": [{"finish_reason": "length"}]}, "finish_reason": "stop"}),
        r":simulations\[0\]: messages\[0\].raw_data.choices\[0\].finish_reason: expected 'stop', as in the",
    ),
    (
        "tau2_bench",
        simulated({"raw_data": {"message": {"reasoning_content": "a"}}, "reasoning_content": "b"}),
        r":simulations\[0\]: reasoning_content: expected it once",
    ),
    (
        "tau2_bench",
        simulated({"raw_data": {"choices": []}}),
        r":simulations\[0\]: .*expected one choice, got 0",
    ),
    ("tau2_bench", simulated({"is_audio": True}), r":simulations\[0\]: messages\[0\]: .* of type 'audio'"),
    (
        "tau2_bench",
        simulated({}, reward=1, reward_info={"reward": 0}),
        r":simulations\[0\]: reward: expected it",
    ),
    ("tau2_bench", {"info": 3, "simulations": []}, ": info: expected an object, got 3"),
    ("tau2_bench", {}, ": simulations: expected a list, got None"),
    ("swe_agent", RUN, ": history: expected a list of messages, got None"),
    (
        "swe_agent",
        RUN | {"history": [{**ANSWER, "is_demo": True}]},
        r": history\[0\].is_demo: a demonstration",
    ),
    ("sharegpt", [{"conversations": []}, 3], r":\[1\]: expected a JSON object, got int"),
]


@for_each(("format", "document", "message"), DOCUMENTS)
def test_a_malformed_document_is_an_error_with_its_place(tmp_path, format, document, message):
    with pytest.raises(UserError, match=rf"f\.json{message}"):
        list(read_records(write_document(tmp_path / "f.json", document), format))


def test_a_struct_with_a_field_twice_is_an_error(tmp_path):
    import pyarrow
    import pyarrow.parquet

    struct = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(pyarrow.table({"s": struct}), tmp_path / "f")
    with pytest.raises(UserError, match=r"f:row 0: cannot be converted: .*duplicate.*; rename one$"):
        list(read_records(str(tmp_path / "f"), "jsonl"))


def test_broken_documents_and_tables_are_errors(tmp_path):
    file = tmp_path / "f"
    file.write_text('[{"instruction": "a",\n "output": }]')
    with pytest.raises(UserError, match=r"f: broken JSON at line 2, character 12: Expecting value"):
        list(read_records(str(file), "alpaca"))
    file.write_text('[{"instruction": "a",\n "output": NaN}]')
    with pytest.raises(UserError, match=r"f: \[0\].output: expected a finite number, got NaN"):
        list(read_records(str(file), "alpaca"))
    file.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(UserError, match=r"f: damaged file after row 0 \("):
        list(read_records(str(file)))
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"several splits \(train\); set data.files to one of them"):
        list(read_records(str(folder)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.arrow", "expected names of files in this folder, each once, got '../outside.arrow'"),
        ("/outside.arrow", "expected names of files in this folder, each once, got '/outside.arrow'"),
        (5, 'expected {"_data_files": [{"filename": str}]}; save the data set again'),
        (None, 'expected {"_data_files": [{"filename": str}]}; save the data set again'),
    ],
)
def test_a_data_set_names_only_files_in_its_folder(tmp_path, name, message):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError) as error:
        list(read_records(str(tmp_path)))
    assert str(error.value) == f"{tmp_path}/state.json: {message}"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"_data_files": [{"filename": "a"}, {"filename": "a"}]}', "in this folder, each once, got 'a'"),
        ('{"_data_files": [{"filename": "a\\u0000"}]}', "expected names of files in this folder, each once"),
        ('{"_data_files": [{"filename": "a"}], "_data_files": []}', "_data_files: expected every key once"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "b"}]}', "an index selects the rows"),
        ("[" * 200_000, "nested"),
    ],
)
def test_a_contradictory_state_of_a_data_set_is_refused(tmp_path, state, message):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path))}/state\.json.*{message}"):
        list(read_records(str(tmp_path)))


def test_an_arrow_file_without_its_end_is_refused(tmp_path):
    rows = pyarrow.table(
        {"messages": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]]}
    )
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", rows.schema) as stream:
        stream.write_table(rows)
        stream.write_table(rows)
    content = (tmp_path / "a.arrow").read_bytes()
    assert len(list(read_records(str(tmp_path)))) == 2
    (tmp_path / "a.arrow").write_bytes(content + b"more")
    assert len(list(read_records(str(tmp_path)))) == 2
    (tmp_path / "a.arrow").write_bytes(content[:-8])
    with pytest.raises(UserError, match=r"a\.arrow: damaged file: its end is missing; copy it again"):
        list(read_records(str(tmp_path)))


@pytest.mark.slow
def test_mutated_rows_are_read_or_refused_in_one_line(tmp_path):
    outcomes = fuzz(400, 0, tmp_path)
    assert set(outcomes) == {"read", "refused"}, outcomes
    assert min(outcomes.values()) > 50, outcomes
