"""Rows with an equal context read its keys together, and sample as if each had its own."""

import random

import pytest
import torch

from tests.rl.test_sampling import tiny_model
from titan_tree import tree_logprobs
from titan_tree.rl import cached_sampler
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.context_cache import product


def groups_of_rows() -> tuple[list[list[int]], list[int]]:
    """Returns contexts, of which up to 37 are equal, and limits. All rows of one context end early."""
    draw = random.Random(1)
    contexts, limits = [], []
    for length, number in ((50, 37), (1, 17), (9, 16), (21, 2), (80, 1)):
        contexts += [[draw.randrange(256) for _ in range(length)]] * number
        limits += [2 if length == 9 else draw.randrange(1, 30) for _ in range(number)]
    order = draw.sample(range(len(contexts)), len(contexts))
    return [contexts[i] for i in order], [limits[i] for i in order]


def test_rows_of_many_bundles_have_the_trainers_logprobs() -> None:
    model = tiny_model()
    contexts, limits = groups_of_rows()
    turns = CachedSampler(model).sample(contexts, limits, 101, range(len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    for context, turn, limit, score in zip(contexts, turns, limits, scores, strict=True):
        assert len(turn.tokens) == limit or turn.tokens[-1] == 101
        torch.testing.assert_close(torch.tensor(turn.logprobs), score[len(context) - 1 :], atol=1e-4, rtol=0)


def test_up_to_16_rows_share_the_keys_of_their_context() -> None:
    model = tiny_model()
    sampler = CachedSampler(model)
    contexts, _ = groups_of_rows()
    with torch.no_grad():
        cache = sampler._read(contexts, turn=30)
    config = model.config
    sizes = config.num_key_value_heads, config.head_dim
    # 37 rows need 3 bundles, 17 need 2, and the others one each. Tokens are padded to multiples of 8.
    assert cache.context.shape == (config.num_hidden_layers, 2, 8, sizes[0], 80, sizes[1])
    assert cache.turn.shape == (config.num_hidden_layers, 2, 73, sizes[0], 32, sizes[1])
    small = cache.select(torch.tensor([i for i, context in enumerate(contexts) if len(context) in (21, 80)]))
    assert (small.context.shape[2], small.turn.shape[2], small.bundles.rows.shape) == (2, 3, (2, 2))


@pytest.mark.parametrize("limit", [1000, 40])
def test_tokens_that_contexts_share_are_read_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads a tree of at most ``limit`` tokens. Keys and values are those of each context alone."""
    monkeypatch.setattr(cached_sampler, "CPU_READ", limit)
    sampler, draw, passes = CachedSampler(tiny_model()), random.Random(0), []
    prompt, question, answer = ([i, *draw.choices(range(256), k=n)] for i, n in enumerate((19, 8, 30)))
    contexts = [prompt, prompt[:1], answer * 2]
    contexts += [prompt + question, prompt + answer, prompt + answer + question]
    contexts = draw.sample(contexts * 18, 108)  # each needs two bundles
    run = sampler._run

    def counted(tokens: torch.Tensor, *others: object) -> torch.Tensor:
        passes.append(tokens.shape)
        return run(tokens, *others)

    monkeypatch.setattr(sampler, "_run", counted)
    with torch.no_grad():
        cache = sampler._read(contexts, turn=1)
        sizes = [size for _, size in passes]
        assert {rows for rows, _ in passes} == {1}
        if limit == 1000:
            prefixes = {tuple(context[: i + 1]) for context in contexts for i in range(len(context))}
            assert sizes == [len(prefixes)]
        else:  # the first three contexts that begin with the prompt, and each of the longer ones
            assert sizes == [29, 51, 60, 62]
        for bundle, length, context in zip(cache.bundles.bundle, cache.length, contexts, strict=True):
            alone = sampler._read([context], turn=1).context[:, :, 0, :, :length]
            torch.testing.assert_close(cache.context[:, :, bundle, :, :length], alone, atol=1e-5, rtol=0)


def test_logprobs_in_bf16_are_as_exact_as_the_trainers() -> None:
    model = tiny_model().to(torch.bfloat16)
    contexts, limits = groups_of_rows()
    turns = CachedSampler(model).sample(contexts, limits, 258, range(len(contexts)))
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


def test_contexts_of_one_token_have_an_empty_cache() -> None:
    """All that a row sees is its turn."""
    model = tiny_model()
    contexts = [[i % 3] for i in range(20)]
    turns = CachedSampler(model).sample(contexts, [6] * 20, 258, range(len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    got = torch.cat([torch.tensor(turn.logprobs) for turn in turns])
    torch.testing.assert_close(got, torch.cat(scores), atol=1e-4, rtol=0)


def test_products_of_bf16_are_not_rounded_to_bf16() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 2, 5, 16).bfloat16(), torch.randn(3, 2, 16, 7).bfloat16()
    out = product(a, b)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-5, rtol=0)
