"""The task of rl_loop.py, distill.py and tinker_loop.py: say how many letters a word has."""

import re

WORDS = ["sun", "pear", "stone", "garden", "history", "mountain", "adventure", "blackberry"]


def ask(word: str) -> list[dict[str, str]]:
    """Returns the messages of a task."""
    return [{"role": "user", "content": f"How many letters does '{word}' have? Answer with a number."}]


def reward(answer: str, word: str) -> float:
    """Returns 1 / (1 + error) for the first number of an answer, and 0 without a number."""
    number = re.search(r"\d+", answer)
    return 0.0 if number is None else 1 / (1 + abs(int(number[0]) - len(word)))


def advantages(rewards: list[float]) -> list[float]:
    """Returns (R - mean) / std of the answers to one prompt, as in GRPO (arXiv:2402.03300)."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in rewards]
