"""The bundled environment."""

import random
import statistics

import pytest

from titan_tree.rl.desk import RIGHT, Desk
from titan_tree.rl.environment import Demonstrator, Reply


def test_rewards_of_the_desk() -> None:
    episode = Desk().episode(random.Random(3))
    first, second = episode.items
    other = next(item for item in episode.count if item not in episode.items)
    count, answer = episode.count, episode.answer
    assert episode.prompt == [{"role": "user", "content": f"{first} {second}"}]
    assert answer == str(count[first] + count[second])
    assert episode.reply([f"?{first}?{other}?x"]) == Reply(
        [{"role": "tool", "content": text} for text in (str(count[first]), str(count[other]), "unknown")]
    )
    calls = f"?{first}?{second}"
    wrong = str(int(answer) + 1)
    for turns, reward in {
        (calls, answer): 1.0,
        (calls, f" {answer}\n"): 1.0,
        (calls, wrong): 0.2,
        (f"?{first}", f"?{second}", answer): 1.0,
        (f"?{first}?{other}", answer): 0.9,
        (f"?{first}?{first}", wrong): 0.0,
        (f"{calls}?{other}", wrong): 0.2 * 2 / 3,
        (answer,): 0.8,
        (calls, calls, calls): 0.0,
        ("",): 0.0,
    }.items():
        assert episode.reply(turns) == Reply(None, pytest.approx(reward)), turns


def test_demonstrations_are_right_as_often_as_they_say() -> None:
    desk = Desk()
    assert isinstance(desk, Demonstrator)
    assert desk.demonstrations(random.Random(1)) == desk.demonstrations(random.Random(1))
    rewards = []
    for task in range(400):
        for messages in desk.demonstrations(random.Random(task)):
            turns = [message["content"] for message in messages if message["role"] == "assistant"]
            rewards.append(desk.episode(random.Random(task)).reply(turns).reward)
    # A random thing out of 8, and a random sum out of 9, are right as well.
    called, answered = RIGHT + (1 - RIGHT) / 8, RIGHT + (1 - RIGHT) / 9
    assert statistics.fmean(rewards) == pytest.approx(0.2 * called + 0.8 * answered, abs=0.04)
