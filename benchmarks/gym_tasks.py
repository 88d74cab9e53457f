"""Tasks of the package reasoning-gym as environments of ``titan-tree rl``, with examples in the prompt.

    gym_letters      letter_counting: how often is a letter in two or three words?
    gym_backward     spell_backward: words of three letters
    gym_calculator   chain_sum: sums of two or three numbers, with a calculator for one operation at a time:

    user       State the final answer to the following arithmetic problem: 4 - 1 - 7 =
    assistant  ?4 - 1
    user       3
    assistant  ?3 - 7
    user       -4
    assistant  -4

The reward is 1 if the package's verifier gives the last turn its full score, else 0: the verifier gives
0.36 to words that were not reversed. In gym_letters, the answers 1, 2 and 3 are equally frequent; in the
package, 1 is right for 71 % of the questions.

All prompts of an environment begin with the same examples. A quarter of all questions is held out: training
never sees them. Configurations use the environments with plugins = ["benchmarks.gym_tasks"].
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from titan_tree.errors import UserError
from titan_tree.rl.environment import ENVIRONMENTS, Message, Reply

CALL = re.compile(r"\?\s*(-?\d+)\s*([+-])\s*(-?\d+)")
MAX_CALLS = 4
EXAMPLES = 4
DEMONSTRATIONS = 8  # in one tree, whose conversations share the examples
HELD_OUT = 4  # one of so many questions is held out
INDICES = 10**9  # of each data set of the package
TASKS: dict[str, tuple[str, dict[str, int]]] = {  # environment -> data set of the package, and its options
    "gym_letters": ("letter_counting", {"min_words": 2, "max_words": 3}),
    "gym_backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 3}),
    "gym_calculator": ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
}
ANSWERS = {"gym_letters": ("1", "2", "3")}  # equally frequent answers


class GymEpisode:
    """One task of reasoning-gym.

    Args:
        examples: messages before the question.
        entry: the task, as the package returns it.
        verify: the package's verifier, which returns a score from 0 to 1 for an answer.
    """

    def __init__(
        self, examples: Sequence[Message], entry: Mapping[str, Any], verify: Callable[..., float]
    ) -> None:
        self.entry, self.verify = entry, verify
        self.prompt: list[Message] = [*examples, {"role": "user", "content": entry["question"]}]

    def reply(self, turns: Sequence[str]) -> Reply:
        turn = turns[-1].strip()
        call = CALL.fullmatch(turn) if self.entry["metadata"]["source_dataset"] == "chain_sum" else None
        if call and len(turns) <= MAX_CALLS:
            return Reply([{"role": "user", "content": calculate(call)}])
        return Reply(None, float(self.verify(turn, self.entry) == 1))

    def demonstration(self) -> list[Message]:
        """Returns a right conversation without its prompts: the question, calls, results and the answer."""
        turns = [self.entry["question"]]
        if expression := self.entry["metadata"].get("expression"):
            result, *rest = expression.split()
            for operator, number in zip(rest[::2], rest[1::2], strict=True):
                turns.append(f"?{result} {operator} {number}")
                call = CALL.fullmatch(turns[-1])
                assert call
                turns.append(result := calculate(call))
        roles = ("user", "assistant")
        return [
            {"role": roles[i % 2], "content": text} for i, text in enumerate([*turns, self.entry["answer"]])
        ]


def calculate(call: re.Match[str]) -> str:
    """Returns the result of a call of the calculator."""
    a, operator, b = call.groups()
    return str(int(a) + int(b) * (1 if operator == "+" else -1))


class GymTasks:
    """The tasks of one environment of ``TASKS``.

    Args:
        name: the environment.
        is_held_out: whether its tasks are those that training never sees.

    Raises:
        UserError: reasoning-gym is not installed.
    """

    def __init__(self, name: str, is_held_out: bool = False) -> None:
        try:
            from reasoning_gym.factory import create_dataset
        except ImportError as error:
            raise UserError(
                f"rl.environment = {name!r}: {error}; run pip install reasoning-gym==0.1.25"
            ) from None
        dataset, options = TASKS[name]
        self.is_held_out, self.answers = is_held_out, ANSWERS.get(name)
        self.dataset = create_dataset(dataset, seed=0, size=INDICES, **options)
        self.examples: list[Message] = []
        shown = [self._entry(random.Random(i), self.answers, is_held_out=False) for i in range(EXAMPLES)]
        for entry in shown:
            self.examples += GymEpisode((), entry, self.dataset.score_answer).demonstration()
        self.shown = {entry["question"] for entry in shown}

    def episode(self, draw: random.Random) -> GymEpisode:
        """Returns a task whose question is not one of the examples."""
        entry = self._entry(draw, self.answers, self.is_held_out, self.shown)
        return GymEpisode(self.examples, entry, self.dataset.score_answer)

    def demonstrations(self, draw: random.Random) -> list[list[Message]]:
        """Returns right conversations on several tasks."""
        return [[*self.examples, *self.episode(draw).demonstration()] for _ in range(DEMONSTRATIONS)]

    def _entry(
        self,
        draw: random.Random,
        answers: Sequence[str] | None,
        is_held_out: bool,
        shown: Collection[str] = (),
    ) -> dict[str, Any]:
        answer = draw.choice(answers) if answers else None
        while True:
            entry: dict[str, Any] = self.dataset[draw.randrange(INDICES)]
            question = entry["question"]
            is_wanted = answer in (None, entry["answer"]) and question not in shown
            if is_wanted and (zlib.crc32(question.encode()) % HELD_OUT == 0) == is_held_out:
                return entry


def register() -> None:
    """Registers the environments of ``TASKS``."""
    for name in TASKS:
        ENVIRONMENTS.register(name, partial(GymTasks, name), replace=True)
