"""Tests `python -m benchmarks learning`: its tasks, verifiers and rewards, and a step of each contender."""

import random
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from benchmarks.__main__ import main
from benchmarks.gym_tasks import TASKS, GymEpisode, GymTasks
from titan_tree.cli.bench import record
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import Reply


@pytest.mark.parametrize("name", TASKS)
def test_right_answers_get_1_and_wrong_ones_0(name: str) -> None:
    for tasks in (GymTasks(name), GymTasks(name, is_held_out=True)):
        for seed in range(20):
            episode = tasks.episode(random.Random(seed))
            answer, word = episode.entry["answer"], episode.entry["metadata"].get("word", "no")
            assert episode.reply([answer]).reward == 1
            wrong = ["", f"{answer}1", f"{answer} {answer}", "?", "?1 +"]
            wrong += [word] * (word.lower() != answer.lower())
            assert [episode.reply([turn]).reward for turn in wrong] == [0] * len(wrong)
            assert all(episode.reply([turn]).messages is None for turn in (answer, *wrong))


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_are_right_and_begin_with_the_examples(name: str) -> None:
    tasks = GymTasks(name)
    episode = tasks.episode(random.Random(0))
    demonstration = episode.demonstration()
    assert episode.prompt == [*tasks.examples, demonstration[0]]
    turns = [message["content"] for message in demonstration if message["role"] == "assistant"]
    replies = [episode.reply(turns[: i + 1]) for i in range(len(turns))]
    assert [message for reply in replies[:-1] for message in reply.messages or ()] == demonstration[2::2]
    assert (replies[-1].messages, replies[-1].reward) == (None, 1)
    assert len(turns) == (
        1 + len(episode.entry["metadata"]["expression"].split()) // 2 if "calc" in name else 1
    )
    assert tasks.demonstrations(random.Random(0))[0] == [*tasks.examples, *demonstration]


def test_the_calculator_answers_a_few_calls() -> None:
    episode = GymTasks("gym_calculator").episode(random.Random(0))
    call = episode.reply(["? -3 - 14"])
    assert call.messages == [{"role": "user", "content": "-17"}]
    assert episode.reply(["?1 + 1"] * 4).messages
    assert episode.reply(["?1 + 1"] * 5) == episode.reply(["no"])


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_question_is_trained_or_shown(name: str) -> None:
    def questions(is_held_out: bool) -> set[str]:
        tasks = GymTasks(name, is_held_out)
        return {tasks.episode(random.Random(seed)).prompt[-1]["content"] for seed in range(300)}

    trained, held_out = questions(False), questions(True)
    assert not (trained | {message["content"] for message in GymTasks(name).examples}) & held_out
    assert len(held_out) > 80
    if name == "gym_letters":
        answers = [GymTasks(name).episode(random.Random(seed)).entry["answer"] for seed in range(90)]
        assert min(answers.count(answer) for answer in "123") > 15


def test_the_command_trains_a_step_on_trees_as_on_rows(tmp_path, monkeypatch, capsys) -> None:
    csv, sample = tmp_path / "rows.csv", CachedSampler.sample

    def shorter(*arguments: Any) -> Any:
        turns, stops = sample(*arguments), arguments[3]
        for (tokens, logprobs, *_), seed in zip(turns, arguments[4], strict=True):
            tokens[seed % 4 :], logprobs[seed % 4 :] = stops[:1], [-5.0]
        return turns

    # A model with random weights neither ends its turns nor solves a task.
    monkeypatch.setattr(CachedSampler, "sample", shorter)
    monkeypatch.setattr(GymEpisode, "reply", lambda self, turns: Reply(None, float(len(turns[0]))))
    options = ["--tasks", "gym_letters", "--csv", str(csv), "--folder", str(tmp_path), "rl.rollouts=4"]
    assert main(["learning", "--quick", *options]) == 0, capsys.readouterr().err
    rows = record.read_csv(csv)
    assert [(row["contender"], row["step"]) for row in rows] == [
        ("model", ""),
        ("warm start", "1"),
        *(("trees", "0"), ("trees", "1"), ("rows", "0"), ("rows", "1")),
    ]
    assert all(row["held-out"] for row in rows)
    trees, leaf_rows = rows[3], rows[5]
    assert trees["leaf tokens"] == leaf_rows["leaf tokens"] == leaf_rows["tokens"]
    assert 0 < float(trees["tokens"]) < 0.5 * float(trees["leaf tokens"])
    assert float(trees["grad norm"]) > 1e-3
    for name in ("loss", "grad norm", "reward"):
        assert float(trees[name]) == pytest.approx(float(leaf_rows[name]), rel=1e-4, abs=1e-6)
    assert csv.with_suffix(".png").stat().st_size > 5000
