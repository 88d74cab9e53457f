"""Random paths that share prefixes."""

import random


def random_token_lists(seed: int) -> list[list[int]]:
    """Returns token lists over few ids: they share prefixes, and some are equal or prefixes of others."""
    r = random.Random(seed)
    vocab = r.choice([1, 2, 3, 1000])
    paths = [[r.randrange(vocab) for _ in range(r.randint(1, 12))] for _ in range(r.randint(1, 12))]
    for _ in range(r.randint(0, 8)):
        other = r.choice(paths)
        cut = r.randint(1, len(other))
        paths.append(other[:cut] + [r.randrange(vocab) for _ in range(r.randint(0, 4))])
    r.shuffle(paths)
    return paths
