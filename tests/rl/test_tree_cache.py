"""Rows store and read the keys that they share once, and sample as if each had its own."""

import random

import numpy as np
import pytest
import torch

from tests.rl.test_sampling import tiny_model
from titan_tree import tree_logprobs
from titan_tree.components.tree_attention import triton_kernels
from titan_tree.components.tree_attention.block_lists import decoding_lists
from titan_tree.rl import cached_sampler
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.tree_cache import Forest, TreeCache


def groups_of_rows() -> tuple[list[list[int]], list[int]]:
    """Returns contexts, of which up to 37 are equal, and limits. All rows of one context end early."""
    draw = random.Random(1)
    contexts, limits = [], []
    for length, number in ((50, 37), (1, 17), (9, 16), (21, 2), (80, 1)):
        contexts += [[draw.randrange(256) for _ in range(length)]] * number
        limits += [2 if length == 9 else draw.randrange(1, 30) for _ in range(number)]
    order = draw.sample(range(len(contexts)), len(contexts))
    return [contexts[i] for i in order], [limits[i] for i in order]


def test_rows_with_equal_contexts_have_the_trainers_logprobs() -> None:
    model = tiny_model()
    contexts, limits = groups_of_rows()
    turns = CachedSampler(model).sample(contexts, limits, [101], range(len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    for context, turn, limit, score in zip(contexts, turns, limits, scores, strict=True):
        assert len(turn.tokens) == limit or turn.tokens[-1] == 101
        torch.testing.assert_close(torch.tensor(turn.logprobs), score[len(context) - 1 :], atol=1e-4, rtol=0)


def shared_prefixes(number: int) -> list[list[int]]:
    """Returns contexts of which each occurs ``number`` times, and which begin alike."""
    draw = random.Random(0)
    prompt, question, answer = ([i, *draw.choices(range(256), k=n)] for i, n in enumerate((19, 8, 30)))
    contexts = [
        prompt,
        prompt[:1],
        answer * 2,
        prompt + question,
        prompt + answer,
        prompt + answer + question,
    ]
    return draw.sample(contexts * number, len(contexts) * number)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_rows_see_their_contexts_and_their_own_turns(size: int) -> None:
    contexts = shared_prefixes(3)
    forest = Forest.of(contexts, size)
    assert sorted(forest.row.tolist()) == list(range(len(contexts)))
    tokens = np.full(len(forest.end), -1)
    tokens[forest.column] = forest.contexts.tokens
    turns = {int(start) + i for start in forest.start for i in range(size)}
    assert len(turns) == size * len(contexts) == len(forest.end) - len(forest.contexts)
    assert (tokens[sorted(turns)] == -1).all()
    columns = np.arange(len(forest.end))
    for row, start in zip(forest.row, forest.start, strict=True):
        for i in range(size):
            seen = columns[(columns <= start + i) & (start + i < forest.end)]
            assert tokens[seen[: -i - 1]].tolist() == contexts[row]
            assert seen[-i - 1 :].tolist() == [start + j for j in range(i + 1)]


@pytest.mark.parametrize("limit", [1000, 40, 13])
def test_tokens_that_contexts_share_are_read_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads at most ``limit`` tokens. Keys, values and logits are those of each context alone."""
    monkeypatch.setattr(cached_sampler, "CPU_READ", limit)
    sampler, contexts, sizes = CachedSampler(tiny_model()), shared_prefixes(18), []
    run = sampler._run

    def counted(x: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.append(len(x))
        return run(x, *others)

    monkeypatch.setattr(sampler, "_run", counted)
    with torch.no_grad():
        cache, context_of_row, logits = sampler._read(contexts, 3)
        prefixes = {tuple(context[: i + 1]) for context in contexts for i in range(len(context))}
        assert sizes == [min(limit, len(prefixes) - i) for i in range(0, len(prefixes), limit)]
        assert cache.seen is not None
        for row, seen, got in zip(context_of_row, cache.seen, logits, strict=True):
            alone, _, expected = sampler._read([contexts[row]], 0)
            n = len(contexts[row])
            assert cache.position[context_of_row.index(row)] == n
            torch.testing.assert_close(
                cache.keys_values[:, :, seen[:n]], alone.keys_values, atol=1e-5, rtol=0
            )
            torch.testing.assert_close(got, expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("contexts", "size", "offsets"),
    [
        (shared_prefixes(3), 11, range(11)),
        (shared_prefixes(3), 11, range(5, 8)),
        (
            [[78] * 150] * 16 + [[77]],
            260,
            range(0, 260, 129),
        ),  # blocks that a whole tile sees; a row in a tile
    ],
)
def test_the_kernel_of_decoding_equals_the_definition(
    contexts: list[list[int]], size: int, offsets: range
) -> None:
    """One object of block lists serves all offsets. No row reads a column past its own."""
    torch.manual_seed(0)
    forest = Forest.of(contexts, size)
    end, start = torch.from_numpy(forest.end), torch.from_numpy(forest.start).int()
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((len(start), 2), (len(end), 1), (len(end), 1)))
    lists = decoding_lists(end, start + offsets[0], start + offsets[-1])
    for offset in (offsets[0], offsets[-1]):
        column, key = start + offset, torch.arange(len(end))
        visible = (key <= column[:, None]) & (column[:, None] < end)
        scores = torch.einsum("nhd,md->hnm", q, k[:, 0]).masked_fill(~visible, -torch.inf)
        expected = torch.einsum("hnm,md->nhd", (scores / 4).softmax(-1), v[:, 0])
        out = triton_kernels.decode(q, k, v, end, column, lists)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "dim", "is_decoded"),
    [(torch.bfloat16, 64, True), (torch.float64, 64, False), (torch.bfloat16, 20, False)],
)
def test_other_devices_gather_keys_if_the_kernel_refuses(
    dtype: torch.dtype, dim: int, is_decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "INTERPRET", True)
    forest = Forest.of([[1, 2], [1]], 3)
    keys_values = torch.zeros(1, 2, len(forest.end), 1, dim, dtype=dtype, device="meta")
    cache = TreeCache.of(forest, 3, keys_values)
    assert (cache.seen is None) == (cache.block_lists(2) is not None) == is_decoded
    if cache.seen is not None:
        one = torch.zeros(2, 1, dim, dtype=dtype, device="meta")
        out = cache.attention(one, *keys_values[0], cache.position, cache.start.int(), None)
        assert out.device.type == "meta"


def test_logprobs_in_bf16_are_as_exact_as_the_trainers() -> None:
    model = tiny_model().to(torch.bfloat16)
    contexts, limits = groups_of_rows()
    turns = CachedSampler(model).sample(contexts, limits, [258], range(len(contexts)))
    paths = [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)]
    with torch.no_grad():
        scores, exact = tree_logprobs(model, paths), tree_logprobs(model.to(torch.float32), paths)
    got = torch.cat([torch.tensor(turn.logprobs) for turn in turns])
    trainer, expected = (
        torch.cat([row[-len(turn.tokens) :].float() for row, turn in zip(rows, turns, strict=True)])
        for rows in (scores, exact)
    )
    error, budget = (got - expected).square().mean().sqrt(), (trainer - expected).square().mean().sqrt()
    assert error <= 1.2 * budget, (error, budget)
    assert (got - trainer).square().mean().sqrt() <= 2 * budget


def test_turns_without_room_are_empty() -> None:
    sampler = CachedSampler(tiny_model())
    for limits in ([0], [0, 0], [0, 2]):
        turns = sampler.sample([[1, 2]] * len(limits), limits, [258], range(len(limits)))
        assert [len(turn.tokens) for turn in turns] == limits


def test_contexts_may_have_one_token() -> None:
    model = tiny_model()
    contexts = [[i % 3] for i in range(20)]
    turns = CachedSampler(model).sample(contexts, [6] * 20, [258], range(len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    got = torch.cat([torch.tensor(turn.logprobs) for turn in turns])
    torch.testing.assert_close(got, torch.cat(scores), atol=1e-4, rtol=0)
