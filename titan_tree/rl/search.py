"""Search: questions that need several searches, in the way of Search-R1 (arXiv:2503.09516).

user       home of the boss of Anna
assistant  search Anna
tool       Anna: boss Felix, friend Olga, aunt Karin, home Oslo, job baker, pet goat.
           Felix: boss David, friend Anna, aunt Olga, home Lima, job pilot, pet dog.
assistant  search Felix
tool       ...
assistant  Lima

Each task has articles of its own, so nothing else can tell the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from titan_tree.rl.environment import Message, Reply

PEOPLE = (
    *("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry"),
    *("Irene", "Jonas", "Karin", "Louis", "Maria", "Nils", "Olga", "Peter"),
)
PERSONS = ("boss", "friend", "aunt")  # fields of an article that name another person
FACTS = {
    "home": ("Athens", "Berlin", "Cairo", "Dublin", "Essen", "Geneva", "Hanoi", "Kyoto", "Lima", "Oslo"),
    "job": ("actor", "baker", "cook", "dancer", "farmer", "guide", "lawyer", "nurse", "pilot", "tailor"),
    "pet": ("ant", "bee", "cat", "dog", "emu", "fox", "goat", "horse", "mouse", "pig"),
}
MAX_HOPS = 3  # articles that a question needs
MAX_SEARCHES = 5
RESULTS = 3  # articles that a search finds, at most
RIGHT = 0.7  # probability that a demonstration reads the field that the question asks for, not another one
SYSTEM = "Reply with one word, or with: search NAME"


class SearchEpisode:
    """One question with its articles. The reward is 1 for the right word, else 0.

    The question is a chain of fields: ``fields[0]`` of ``name`` names a person, and so on. The last field is
    a fact.
    """

    def __init__(self, draw: random.Random) -> None:
        self.articles = {
            name: {field: draw.choice([other for other in PEOPLE if other != name]) for field in PERSONS}
            | {field: draw.choice(values) for field, values in FACTS.items()}
            for name in PEOPLE
        }
        persons = draw.choices(PERSONS, k=draw.randrange(MAX_HOPS))
        self.name = draw.choice(PEOPLE)
        self.fields = (*persons, draw.choice(list(FACTS)))
        self.prompt: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{' of the '.join(reversed(self.fields))} of {self.name}"},
        ]

    @property
    def answer(self) -> str:
        value = self.name
        for field in self.fields:
            value = self.articles[value][field]
        return value

    def reply(self, turns: Sequence[str]) -> Reply:
        words = _words(turns[-1])
        if words[:1] == ["search"] and len(turns) <= MAX_SEARCHES:
            return Reply([self._found(words[1:])])
        return Reply(None, float(words == [self.answer]))

    def demonstration(self, draw: random.Random) -> list[Message]:
        """Returns a conversation that may read wrong fields."""
        messages, name = list(self.prompt), self.name
        for field in self.fields:
            messages += [{"role": "assistant", "content": f"search {name}"}, self._found([name])]
            others = [other for other in (PERSONS if field in PERSONS else FACTS) if other != field]
            name = self.articles[name][field if draw.random() < RIGHT else draw.choice(others)]
        return [*messages, {"role": "assistant", "content": name}]

    def _found(self, query: Sequence[str]) -> Message:
        """Returns the article about the first word of ``query``, and then articles that mention it."""
        word = query[0] if query else ""
        about = [word] if word in self.articles else []
        mentions = [name for name, article in self.articles.items() if word in article.values()]
        lines = [
            f"{name}: {', '.join(map(' '.join, self.articles[name].items()))}."
            for name in [*about, *mentions][:RESULTS]
        ]
        return {"role": "tool", "content": "\n".join(lines) or "nothing"}


class Search:
    """The environment of search tasks. Its demonstrations are often wrong: RL has something to learn."""

    def episode(self, draw: random.Random) -> SearchEpisode:
        return SearchEpisode(draw)

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns four conversations on one task."""
        episode = SearchEpisode(draw)
        return [episode.demonstration(draw) for _ in range(4)]


def _words(turn: str) -> list[str]:
    """Returns the words of a turn without the thoughts and the full stop."""
    return re.sub(r"(?s)<think>.*?</think>", "", turn).strip().removesuffix(".").split()
