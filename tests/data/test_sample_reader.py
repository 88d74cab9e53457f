"""SampleReader turns records into samples, and its errors name the place and the field."""

import json

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_lines
from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.tool_calls import EARLY_RESULT, NO_OBJECT
from titan_tree.data.sample_reader import NO_LIMITS, SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.data.token_store import write_store
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.run.build import build_reader
from titan_tree.tree.paths import ExpertSizes, ModelLimits, TokenPath

LIMITS = ModelLimits(max_positions=10, vocab_size=256)


class FakeTokenizer:
    """One sample per assistant turn: the bytes of all contents up to it, the last one trained on."""

    template_fields = frozenset()

    def samples(self, messages, tools=None, loud=False):
        text, paths = (tools or [""])[0], []
        for message in messages:
            before, text = text, text + message["content"]
            if message["role"] == "assistant":
                tokens = list((text.upper() if loud else text).encode())
                paths.append(TokenPath(tokens, loss_mask=[0] * len(before) + [1] * (len(text) - len(before))))
        return paths


def chat(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(files, tokenizer=None, limits=NO_LIMITS, **settings):
    """Returns [(group id, paths)] of some files."""
    reader = sample_reader(files, tokenizer or FakeTokenizer(), limits, **settings)
    return [(group.id, reader.paths(group)) for group in reader.files.groups()]


def text(path):
    return bytes(path.tokens.tolist()).decode()


def test_a_task_becomes_a_group_of_its_trajectories(tmp_path):
    file = write(
        tmp_path / "tasks.jsonl",
        {
            "id": "t0",
            "tools": ["T:"],
            "weight": 2,
            "source": "a field of the user, ignored",
            "trajectories": [
                {"id": "a", "reward": None, "weight": None, "messages": chat("hi", "yo", "so", "ok")},
                {"weight": 0.5, "advantage": -1, "tools": ["U:"], "messages": chat("hi", "no")},
            ],
        },
        {"id": 1, "trajectories": [{"tokens": [7, 8]}]},
        {"id": 1, "trajectories": [{"tokens": [7, 9]}]},
        {"trajectories": [{"tokens": [7]}], "group_id": "g"},
        {"trajectories": [{"tokens": [8]}], "group_id": "g", "id": 5},
    )
    (first, paths), (second, others), (third, more), (fourth, joined) = read(file)
    # Only group_id joins records; id does not.
    assert (third, [p.tokens.tolist() for p in more]) == ("1", [[7, 9]])
    assert (fourth, [p.tokens.tolist() for p in joined]) == ("g", [[7], [8]])
    assert (first, second) == ("t0", "1")
    assert [text(p) for p in paths] == ["T:hiyo", "T:hiyosook", "U:hino"]
    assert [p.id for p in paths] == ["t0/a/1", "t0/a/2", "t0/1/1"]
    assert [p.weight for p in paths] == [2, 2, 0.5]
    assert paths[0].advantage is None
    assert paths[2].advantage.tolist() == [-1] * 6
    assert paths[1].loss_mask.tolist() == [0] * 8 + [1] * 2
    assert others[0].tokens.tolist() == [7, 8]


def test_records_with_one_group_id_form_a_group(tmp_path):
    file = write(
        tmp_path / "flat.jsonl",
        {"group_id": "g", "messages": chat("a", "b")},
        {"group_id": "g", "messages": chat("a", "c"), "tools": ["T"], "weight": 3},
        {"messages": chat("x", "y")},
        {"messages": chat("x", "z"), "group_id": None},
        {"group_id": 4, "messages": chat("x", "z"), "id": "s"},
    )
    groups = read(file)
    assert [(name, [text(p) for p in paths]) for name, paths in groups] == [
        ("g", ["ab", "Tac"]),
        (f"{file}:3", ["xy"]),
        (f"{file}:4", ["xz"]),
        ("4", ["xz"]),
    ]
    assert [p.weight for p in groups[0][1]] == [1, 3]
    assert groups[-1][1][0].id == "4/s/1"


def test_token_ids_become_paths(tmp_path):
    row = {"loss_mask": [0, 1, 0.5], "weight": 2, "old_logprobs": [0, -1, -2], "ref_logprobs": [0, -3, -4]}
    file = write(
        tmp_path / "tokens.jsonl",
        {"tokens": [5, 6, 7], "advantage": [0, 1, 2], "group_id": "g", "id": 9, **row},
        "",
        {"input_ids": [5, 6], "advantage": 0.5, "group_id": "g"},
        {"tokens": [5]},
        {"tokens": [5, 1], "id": "own"},
        {"tokens": [5, 2], "id": "own"},
    )
    (_, (a, b)), (alone, (c,)), *own = read(file)
    assert [(name, path.id, len(path)) for name, (path,) in own] == [("own", "own", 2)] * 2
    assert a.tokens.tolist() == [5, 6, 7]
    assert (a.id, a.weight) == ("g/9", 2)
    assert a.loss_mask.tolist() == [0, 1, 0.5]
    assert a.advantage.tolist() == [0, 1, 2]
    assert a.old_logprobs.tolist() == [0, -1, -2]
    assert a.ref_logprobs.tolist() == [0, -3, -4]
    assert b.advantage.tolist() == [0.5, 0.5]
    assert b.loss_mask.tolist() == [1, 1]
    assert b.old_logprobs is None
    assert alone == c.id == f"{file}:4"


def rewarded(*rewards, **fields):
    return [{"reward": reward, "messages": chat("q", str(i)), **fields} for i, reward in enumerate(rewards)]


def test_group_advantages_compare_samples_within_a_group(tmp_path):
    """Rewards 1, 0 and 0.5 have mean 0.5 and standard deviation 0.5 (with n - 1 = 2)."""
    task, longer = rewarded(1, 0, 0.5), chat("q", "a", "b", "c")
    task[0]["messages"] = longer  # two paths of one trajectory, which counts once
    file = write(
        tmp_path / "f",
        {"id": "task", "trajectories": task},
        *rewarded(2, 0, 1, group_id="lines"),
        *({"group_id": "rows", "tokens": [5, 6], "reward": reward} for reward in (1, 0, 0.5)),
        {"id": "equal", "trajectories": rewarded(0.1, 0.1, 0.1)},
        *rewarded(3),
    )
    found = {
        name: [path.advantage.tolist() for path in paths] for name, paths in read(file, advantage="group")
    }
    up, down = 0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6)
    assert found["task"] == [pytest.approx([a] * n) for a, n in ((up, 2), (up, 4), (down, 2), (0, 2))]
    assert found["lines"] == [pytest.approx([a] * 2) for a in (1 / (1 + 1e-6), -1 / (1 + 1e-6), 0)]
    assert found["rows"] == [pytest.approx([a] * 2) for a in (up, down, 0)]
    assert found["equal"] == [[0, 0]] * 3
    assert found[f"{file}:9"] == [[0, 0]]
    assert all(path.advantage is None for _, paths in read(file) for path in paths)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({}, "reward: expected a finite number, which data.advantage = 'group' needs .* got None; add"),
        ({"reward": None}, "reward: .* got None"),
        ({"reward": "good"}, "reward: .* got 'good'"),
        ({"reward": True}, "reward: .* got True"),
        ({"reward": 10**310}, "reward: .* got 1000"),
        ({"reward": 1, "advantage": 0.0}, "advantage: expected none, .* remove the field, or set"),
    ],
)
def test_group_advantages_need_rewards_and_no_advantages(tmp_path, sample, message):
    task = write(tmp_path / "task", {"trajectories": [*rewarded(1), {"tokens": [1], **sample}]})
    rows = write(tmp_path / "rows", *({"group_id": 1, "tokens": [1], **s} for s in ({"reward": 1}, sample)))
    for file, where in ((task, r":1: trajectories\[1\]: "), (rows, ":2: ")):
        with pytest.raises(UserError, match=f"^{file}{where}{message}"):
            read(file, advantage="group")
    with pytest.raises(UserError, match="advantage: expected none"):
        read(write(tmp_path / "all", {"advantage": 1, "trajectories": rewarded(1)}), advantage="group")


def test_sample_settings_reach_the_tokenizer(tmp_path):
    file = write(tmp_path / "f", {"messages": chat("a", "b")})
    assert text(read(file, sample={"loud": True})[0][1][0]) == "AB"


GOOD = {"tokens": [1, 2], "group_id": "good"}
MALFORMED = {
    "no object": ([1, 2], "expected one JSON object per line, got list"),
    "no sample": (
        {"txt": "hi"},
        "expected one of the fields trajectories, messages, tokens, input_ids, text; got txt",
    ),
    "batch file": (
        {"custom_id": "a", "body": {"messages": []}},
        r'got custom_id, body; join requests and results by custom_id: \{"request": body, "response": ',
    ),
    "call as text": (
        {"request": '{"messages": []}', "response": "{}"},
        r"got request, response; request holds text: parse it and the response with json.loads",
    ),
    "answer alone": ({"choices": []}, "got choices; log each answer with its request"),
    "turns of ShareGPT": (
        {"messages": [{"from": "gpt", "value": "a", "role": "assistant", "content": "a"}]},
        r"messages\[\*\].from: not read; write role and content, or name the list conversations",
    ),
    "a score": ({"messages": chat("a", "b"), "score": 1}, "score: not read; a reward is called reward."),
    "two kinds": ({"tokens": [1], "messages": []}, "got messages and tokens"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\].role"),
    "no trajectories": ({"id": 1, "trajectories": []}, "trajectories: expected a non-empty list"),
    "odd trajectory": ({"id": 1, "trajectories": [3]}, r"trajectories\[0\]: expected a JSON object, got int"),
    "role in trajectory": (
        {"id": 1, "trajectories": [{"tokens": [1]}, {"messages": [{"content": "x"}]}]},
        r"trajectories\[1\]: messages\[0\].role",
    ),
    "empty tokens": ({"tokens": []}, "tokens: expected a non-empty list"),
    "floats": ({"tokens": [1.5]}, r"tokens\[0\]: expected an integer, got 1.5"),
    "nested": ({"tokens": [1, [2]]}, r":2: tokens\[1\]: expected an integer, got \[2\]"),
    "nested in input_ids": ({"input_ids": [[1], [2]]}, r"input_ids\[0\]: expected an integer, got \[1\]"),
    "negative id": ({"tokens": [1, -2]}, "tokens: expected ids from 0 to .*got -2"),
    "id too large": (
        {"tokens": [1, 300, 2], "id": "x"},
        "token id 300 at token 1: expected ids below .* 256",
    ),
    "advantage per token of a chat": (
        {"messages": chat("a", "b"), "advantage": [1]},
        "advantage: expected one number",
    ),
    "mask of a chat": (
        {"messages": chat("a", "b"), "loss_mask": [1, 0]},
        "loss_mask: not allowed together with messages",
    ),
    "log-probs of a chat": (
        {"trajectories": [{"messages": chat("a", "b"), "old_logprobs": [0, -1]}]},
        r"trajectories\[0\]: old_logprobs: not allowed together with messages",
    ),
    "mask of a task": (
        {"trajectories": [{"tokens": [1, 2]}], "loss_mask": [0, 1]},
        "loss_mask: not allowed together with trajectories",
    ),
    "sample beside trajectories": (
        {"trajectories": [{"tokens": [1, 2]}], "tokens": [3, 4]},
        "tokens: not allowed together with trajectories",
    ),
    "thousands of digits": ('{"tokens": [' + "9" * 5000 + "]}", "broken JSON"),
    "too long": (
        {"tokens": [1] * 11, "id": "long"},
        "long: it has 11 tokens, but the model has 10 positions",
    ),
}


@for_each(("line", "message"), MALFORMED.values())
def test_a_malformed_record_is_an_error_with_file_line_and_field(tmp_path, line, message):
    file = write(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(UserError, match=message) as error:
        read(file, TreeTokenizer.byte_level(), LIMITS)
    assert str(error.value).startswith(f"{file}:2: ")
    assert "\n" not in str(error.value)


def test_limits_are_inclusive(tmp_path):
    file = write(tmp_path / "f", {"tokens": [255] * 10})
    assert len(read(file, limits=LIMITS)) == 1


def test_recorded_experts_are_checked_only_if_they_are_replayed(tmp_path):
    file = write(tmp_path / "f", {"tokens": [1, 2], "routed_experts": [[[0, 1]]]})
    limits = ModelLimits(experts=ExpertSizes(num_layers=2, top_k=2, num_experts=6))
    assert len(read(file, limits=limits)) == 1
    with pytest.raises(UserError, match=r"f:1: .*routed_experts"):
        read(file, limits=limits, replay="first")


def test_messages_need_a_tokenizer(tmp_path):
    file = write(tmp_path / "f", {"messages": chat("a", "b")})
    reader = sample_reader(file)
    (group,) = reader.files.groups()
    with pytest.raises(UserError, match="f:1: messages: conversations need a tokenizer"):
        reader.paths(group)


def test_records_of_a_group_must_be_adjacent_in_one_file(tmp_path):
    a, b = ({"trajectories": [{"tokens": [1]}], "group_id": name, "id": 0} for name in "ab")
    file = write(tmp_path / "f", a, b, a)
    with pytest.raises(
        UserError, match=rf"^{file}:3: group 'a' appeared before, at {file}:1; expected the records"
    ):
        read(file)
    one, two = write(tmp_path / "1", a), write(tmp_path / "2", a)
    with pytest.raises(UserError, match="appeared before"):
        read([one, two])


def test_log_probs_that_are_all_zero_are_named_once(tmp_path, caplog):
    row = {"tokens": list(range(9)), "old_logprobs": [0.0] * 9}
    short = {"tokens": [1, 2, 3], "old_logprobs": [0.0] * 3}
    reader = sample_reader(write_lines(tmp_path / "f", [short, row | {"id": "r"}, row]))
    for group in reader.files.groups():
        reader.paths(group)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "f:2: old_logprobs: all of them are 0, as if the model could say nothing else; check that they were "
        "recorded, or remove the field"
    )


def test_log_probs_that_are_means_of_answers_are_named_once(tmp_path, caplog):
    """Log-probs near 0 have few digits, so neighbors may be equal. A path of two answers has two means."""
    row, near = {"tokens": list(range(9))}, [0.0, 0.0, 0.0, 0.0, -1.2e-7, -1.2e-7, -1.2e-7, -0.7, -0.7]
    means = [None, -0.5, -0.5, -0.5, -0.5, -0.25, -0.25, -0.25, -0.25]
    rows = [row | {"rollout_logprobs": near}, row | {"rollout_logprobs": means, "id": "m"}]
    reader = sample_reader(write_lines(tmp_path / "f", rows))
    for group in reader.files.groups():
        reader.paths(group)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "f:2: rollout_logprobs: neighbors are equal, as if each were the mean of its answer; record one for "
        "each token, or remove the field"
    )


def test_rewards_that_are_no_numbers_are_named_once_per_file(tmp_path, caplog):
    rows = [{"reward": reward, "messages": chat("x", "y")} for reward in (1, 0.5, None, "0.5", True)]
    file = write(tmp_path / "f", *rows[:3], {"trajectories": rows[3:4]}, rows[4])
    read([file])
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}:4: trajectories[0]: reward: expected a number; data.advantage refuses any other"
    ]


def test_rollouts_alone_in_their_groups_are_named_once_per_file(tmp_path, caplog):
    rows = [{"tokens": [i, 2], "reward": 1, "group_id": str(group)} for i, group in enumerate((0, 1, 1, 2))]
    reader = sample_reader(write_lines(tmp_path / "f", rows), advantage="group")
    for group in reader.files.groups():
        reader.paths(group)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "f:1: one rollout is alone in its group, so data.advantage = 'group' sets its advantages to 0; give "
        "rollouts of the same task one group_id"
    )


def test_doubtful_messages_are_named_once_per_file(tmp_path, caplog):
    def answer(*arguments, **fields):
        calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
        return {"role": "assistant", "content": "", "tool_calls": calls} | fields

    cut_off = {"messages": [*chat("x"), answer("{}", '{"a": ', finish_reason="length")]}
    good = {"messages": [*chat("x"), answer("{}", {}, "print(1)"), {"role": "tool", "content": "1"}]}
    no_object = {"messages": [*chat("x"), answer("{}", "{a: 1}")]}
    no_text, a_list = {"messages": [*chat("x"), answer("")]}, {"messages": [*chat("x"), answer("[1]")]}
    early = {"messages": [{"role": "tool", "content": "2"}, *chat("x", "y")]}
    task = {"trajectories": [good, early]}
    one = write(tmp_path / "one", cut_off, good, no_object, no_text, early, task)
    two = write(tmp_path / "two", a_list, task)
    read([one, two])
    assert [record.getMessage() for record in caplog.records] == [
        f"{one}:3: messages[1].tool_calls[1]: {NO_OBJECT}",
        f"{one}:5: messages[0]: {EARLY_RESULT}",
        f"{two}:1: messages[1].tool_calls[0]: {NO_OBJECT}",
        f"{two}:2: trajectories[1]: messages[0]: {EARLY_RESULT}",
    ]


@pytest.mark.parametrize("names", [("prompt", "response"), ("question", "answer")])
def test_a_question_and_its_answer_as_text_get_the_names_that_are_read(tmp_path, names):
    file = write(tmp_path / "f", dict.fromkeys(names, "x"))
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value) == (
        f"{file}:1: expected one of the fields trajectories, messages, tokens, input_ids, text; got a "
        "question and its answer: give them as messages, or, to train without a chat template, as the texts "
        "prompt and completion"
    )


def test_only_the_longest_path_and_its_prefixes_are_the_rollout_that_is_trained(tmp_path):
    samples = [{"tokens": tokens, "rollout_id": "r"} for tokens in ([1, 2], [1, 3, 4], [1, 2, 5, 6])]
    file = write(tmp_path / "f", {"trajectories": samples})
    for chosen, lengths, loss_tokens in (("all", [2, 3, 4], 1 + 2 + 3), ("longest", [2, 4], 1 + 3)):
        ((_, paths),) = read(file, paths=chosen)
        assert [len(path) for path in paths] == lengths
        assert [path.rollout_tokens for path in paths] == [loss_tokens] * len(paths)
        assert sum(path.rollout_share for path in paths) == pytest.approx(1)


def test_every_rollout_has_a_name_of_its_own(tmp_path):
    samples = [{"tokens": [1, n], "rollout_id": name} for n, name in enumerate(("a", None, "a", 1))]
    file = write(tmp_path / "f", {"id": "g", "trajectories": samples})
    ((_, paths),) = read(file)
    assert [path.rollout for path in paths] == ["g/a", "g#1", "g/a", "g/1"]


def test_only_all_paths_of_preference_data_are_read(tmp_path):
    pair = [{"tokens": [1, 2], "preference": "chosen"}, {"tokens": [1, 3, 4], "preference": "rejected"}]
    file = write(tmp_path / "pairs.jsonl", {"tokens": [1, 2]}, {"trajectories": pair})
    assert [len(paths) for _, paths in read(file)] == [1, 2]
    message = (
        f"{file}:2: preference: expected none with data.paths = 'longest', because a loss of preferences "
        "needs all paths; set data.paths = 'all'"
    )
    with pytest.raises(UserError) as error:
        read(file, paths="longest")
    assert str(error.value) == message


def test_a_loss_that_trains_all_answers_alike_refuses_rejected_ones(tmp_path):
    pair = [{"tokens": [1, 2], "preference": "chosen"}, {"tokens": [1, 3, 4], "preference": "rejected"}]
    file, store = write(tmp_path / "pairs.jsonl", {"id": "q", "trajectories": pair}), str(tmp_path / "store")
    reader = SampleReader(DataConfig(files=[file]))
    header = {"sample": {}, "advantage": "given", "tokenizer": None}
    write_store(store, [("q", reader.paths(group)) for group in reader.files.groups()], header)
    assert reader.rejected == 1
    model = build_model("qwen3", "debug")
    for path in (file, store):
        (group,) = SampleReader(DataConfig(files=[path])).files.groups()
        for loss in ("dpo", "kto", "simpo", "orpo", "grpo"):
            own = build_reader(DataConfig(files=[path]), None, model, LossConfig(name=loss))
            assert len(own.paths(group)) == len(own.tree(group).paths) == 2
        own = build_reader(DataConfig(files=[path]), None, model, LossConfig(name="sft"))
        for read_group in (own.paths, own.tree):
            with pytest.raises(UserError) as error:
                read_group(group)
            assert str(error.value) == (
                f"{group.records[0][0]}: path q/1: this answer is marked 'rejected', and the loss 'sft' "
                'would train it like a good one; set loss.name = "dpo", or another loss of preferences, '
                "or remove such answers from the data"
            )


def test_a_loss_of_preferences_refuses_answers_without_one(tmp_path):
    file = write(tmp_path / "f", {"id": "q", "trajectories": [{"tokens": [1, 2]}, {"tokens": [1, 3]}]})
    for loss in ("dpo", "kto", "simpo", "grpo", "sft"):
        reader = build_reader(
            DataConfig(files=[file]), None, build_model("qwen3", "debug"), LossConfig(name=loss)
        )
        (group,) = reader.files.groups()
        if loss in ("grpo", "sft"):
            assert len(reader.paths(group)) == 2
            continue
        with pytest.raises(UserError) as error:
            reader.paths(group)
        assert str(error.value) == (
            f"{file}:1: path q/0: the loss {loss!r} compares chosen and rejected answers, and this answer "
            'has no preference; give rows with chosen and rejected, or set loss.name = "sft"'
        )


def test_text_is_trained_as_it_is(tmp_path):
    """Text, prompts with completions, and the logs of TRL and verl need no chat template."""
    tokenizer, end = TreeTokenizer.byte_level(), "<|im_end|>"
    columns = {"step": 1, "advantage": 0.5, "my_reward": 1.0}
    rows = [
        {"text": f"ab{end}"},
        {"prompt": "a", "completion": f"b{end}"},
        {"prompt": "a", "completion": f"b{end}", **columns},
        {"input": "a", "output": f"b{end}", "gts": "b", "score": 0.25, "step": 3, "acc": 1},
    ]
    for number, row in enumerate(rows):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        reader = SampleReader(DataConfig(files=[str(file)]), tokenizer)
        (group,) = reader.files.groups()
        assert group.records[0][1].get("reward") == row.get("score")
        (path,) = reader.paths(group)
        assert path.tokens.tolist() == [97, 98, 258]
        assert path.loss_mask.tolist() == [number == 0, 1, 1]
        if "advantage" in row:
            assert set(path.advantage.tolist()) == {row["advantage"]}


def test_all_problems_of_a_file_are_found(tmp_path):
    file = tmp_path / "a.jsonl"
    good = json.dumps({"messages": [*chat("x"), {"role": "assistant", "content": "y"}]})
    file.write_text(f'{good}\n{{"mesages": []}}\n{{"messages"\n{good}\n{{"messages": []}}\n')
    reader = SampleReader(DataConfig(files=[str(file)]), TreeTokenizer.byte_level())
    found, num_good = reader.problems()
    assert num_good == 2
    assert sorted(str(error).removeprefix(str(file))[:12] for error in found) == [
        ":2: expected",
        ":3: broken J",
        ":5: messages",
    ]
    assert any(str(error).endswith("did you mean 'messages' by 'mesages'?") for error in found)
    file.write_text('{"messages": [3]}\n{\n')
    found, num_good = reader.problems()
    assert num_good == 0
    assert sorted(str(error).removeprefix(str(file))[:12] for error in found) == [
        ":1: messages",
        ":2: broken J",  # and not that the file is empty
    ]
    file.write_text(f"{good}\n{good}\n", encoding="utf-16")
    ((error,), _) = reader.problems()
    assert str(error).endswith("it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8")
