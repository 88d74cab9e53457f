"""The bundled environments."""

import random
import statistics

import pytest

from titan_tree.rl.environment import RIGHT, Demonstrator, Desk, Reply
from titan_tree.rl.search import MAX_SEARCHES, PEOPLE, RESULTS, Search
from titan_tree.rl.search import RIGHT as SEARCH_RIGHT


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


def test_rewards_of_a_search() -> None:
    episode = Search().episode(random.Random(7))
    name, fields = episode.name, episode.fields
    question = f"{fields[2]} of the {fields[1]} of the {fields[0]} of {name}"
    assert episode.prompt[1] == {"role": "user", "content": question}
    searches, value = [], name
    for field in fields:
        searches.append(f"search {value}")
        reply = episode.reply(searches)
        assert reply.messages is not None
        first = reply.messages[0]["content"].splitlines()[0]
        assert first.startswith(f"{value}: ")
        assert f" {field} {episode.articles[value][field]}" in first
        value = episode.articles[value][field]
    assert value == episode.answer
    for turns, reward in {
        (*searches, value): 1.0,
        (*searches, f"<think>\nWell.\n</think>\n\n{value}."): 1.0,
        (value,): 1.0,
        (*searches, "Nobody"): 0.0,
        (*searches, f"It is {value}"): 0.0,
        (*searches, ""): 0.0,
        (*[f"search {name}"] * MAX_SEARCHES, "search Anna"): 0.0,
    }.items():
        assert episode.reply(turns) == Reply(None, reward), turns
    for query in ("search", "search nobody"):
        assert episode.reply([query]) == Reply([{"role": "tool", "content": "nothing"}])


def test_a_search_finds_the_article_and_those_that_mention_it() -> None:
    episode = Search().episode(random.Random(0))
    for name in PEOPLE:
        (message,) = episode.reply([f"search {name}"]).messages or []
        found = [line.split(":")[0] for line in message["content"].splitlines()]
        mentions = [other for other, article in episode.articles.items() if name in article.values()]
        assert found == [name, *mentions][:RESULTS]


def test_demonstrations_of_searches_are_right_as_often_as_they_say() -> None:
    search = Search()
    assert isinstance(search, Demonstrator)
    rewards: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for task in range(400):
        episode = search.episode(random.Random(task))
        for messages in search.demonstrations(random.Random(task)):
            turns = [message["content"] for message in messages if message["role"] == "assistant"]
            rewards[len(turns) - 1].append(episode.reply(turns).reward)
    for hops, values in rewards.items():
        right = SEARCH_RIGHT**hops  # a wrong turn may also lead to the right word
        assert right - 0.05 < statistics.fmean(values) < right + 0.12, hops
