"""What the sampler reports is what the trainer computes, and rollouts hold the tokens that were sampled."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.support.cases import slow_except
from tests.support.rl_runs import seeds_of
from titan_tree import TreeTokenizer, UserError, build_model, tree_logprobs
from titan_tree.components.lora import LoRA, is_factor
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.tree_model import Execution
from titan_tree.rl import cached_sampler
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import Desk, Reply
from titan_tree.rl.generate_sampler import GenerateSampler
from titan_tree.rl.rollouts import Chat, Rollout, branches, play
from titan_tree.rl.truncation import KeptIds, Truncation
from titan_tree.scoring.score_trees import score_trees
from titan_tree.tree.context import Completion, Ids
from titan_tree.tree.token_tree import TokenTree

TOKENIZER = TreeTokenizer.load("byte")


def tiny_model(name: str = "qwen3", **sizes: object) -> Decoder:
    """Returns a model whose distributions are far from uniform."""
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENIZER.vocab_size, "hidden_size": 32, "head_dim": 16} | sizes
    model = build_model(name, "debug", **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


class Scripted:
    """A sampler whose turns are given."""

    def __init__(self, *turns: str) -> None:
        self.turns = [TOKENIZER.encode(turn) for turn in turns]
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        self.calls.append(([list(context) for context in contexts], list(max_tokens)))
        turns = [self.turns.pop(0)[:limit] for limit in max_tokens]
        return [Completion(turn, [-1.0] * len(turn)) for turn in turns]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize(("tied", "columns"), [(True, 256), (False, 8)])
def test_logprobs_of_the_sampler_are_those_of_the_trainer(
    name: str, tied: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_sampler, "COLUMNS", columns)
    model = tiny_model(name, tie_word_embeddings=tied)
    draw = random.Random(0)
    contexts = [[draw.randrange(256) for _ in range(length)] for length in (1, 30, 7, 30)]
    contexts.append(contexts[1])  # read once
    limits = [25, 3, 40, 12, 33]
    stops = [185, 13]  # end some turns early
    turns = CachedSampler(model).sample(contexts, limits, stops, range(3, 3 + len(contexts)))
    assert turns == CachedSampler(model).sample(contexts, limits, stops, range(3, 3 + len(contexts)))
    assert turns != CachedSampler(model).sample(contexts, limits, stops, range(4, 4 + len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    for context, turn, limit, score in zip(contexts, turns, limits, scores, strict=True):
        assert not {*stops} & {*turn.tokens[:-1]}
        assert len(turn.tokens) == limit or turn.tokens[-1] in stops
        expected = score[len(context) - 1 :]
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [CachedSampler, GenerateSampler])
def test_a_turn_ends_at_the_first_of_several_stop_tokens(kind: Any) -> None:
    sampler, inputs = kind(tiny_model()), ([[1, 2, 3], [4], [5, 6]], [12, 12, 1])
    free = [turn.tokens for turn in sampler.sample(*inputs, [258], range(3))]
    stops = [free[0][5], free[1][3]]
    ends = [next((i for i, t in enumerate(tokens) if t in stops), len(tokens)) for tokens in free]
    turns = sampler.sample(*inputs, stops, range(3))
    assert [turn.tokens for turn in turns] == [t[: end + 1] for t, end in zip(free, ends, strict=True)]
    assert [len(turn.logprobs) for turn in turns] == [6, 4, 1]


def test_layers_of_a_compiled_model_share_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts before and after attention are traced for one row, for more, and on a CPU for reading."""
    model, counts = tiny_model(num_hidden_layers=5), []
    for part in ("_before", "_after"):
        counts.append(CompileCounter())
        traced = torch.compile(
            getattr(cached_sampler, part), backend=counts[-1], fullgraph=True, dynamic=True
        )
        monkeypatch.setattr(cached_sampler, f"_compiled{part}", traced)
    inputs = [[1, 2, 3], [1, 2, 4, 5], [6, 7]], [9, 1, 5], [258], range(3)
    expected = CachedSampler(model).sample(*inputs)
    assert [count.frame_count for count in counts] == [0, 0]
    model.execution = Execution(is_compiled=True)
    assert CachedSampler(model).sample(*inputs) == expected
    assert all(1 <= count.frame_count <= 3 for count in counts)


@pytest.mark.parametrize("sampler", slow_except([CachedSampler], [CachedSampler, GenerateSampler]))
def test_ratios_of_truncated_rollouts_are_1(sampler: type[CachedSampler] | type[GenerateSampler]) -> None:
    """Unchanged weights give the log-probs that the sampler reported, over the ids that it kept."""
    model, draw = tiny_model(), random.Random(0)
    with torch.no_grad():
        model.norm.weight.fill_(8.0)  # sharp distributions
    contexts = [[draw.randrange(256) for _ in range(length)] for length in (1, 9)] * 2
    limits = [9, 3, 16, 12]
    turns = sampler(model, Truncation(top_p=0.8)).sample(contexts, limits, [101], range(4))
    paths = []
    for context, turn in zip(contexts, turns, strict=True):
        rollout = Rollout(episode=Reply(0.0))  # type: ignore[arg-type]
        rollout.read(context)
        rollout.write(*turn)
        rollout.read([7, 7])
        fork = rollout.fork(0)
        fork.write(*turn)
        assert fork.kept == rollout.kept[: len(fork.tokens)]
        paths += rollout.paths(np.ones(len(rollout.tokens)), "rollout")
    with torch.no_grad():
        (scores,) = score_trees(model, [TokenTree.from_paths(paths)])
    sizes = np.concatenate([path.sampling_mask.sizes[path.loss_mask > 0] for path in paths])
    assert 1 < sizes.mean() < 100
    for path, path_scores in zip(paths, scores, strict=True):
        (counted,) = path.loss_mask.nonzero()
        reported = torch.from_numpy(path.old_logprobs[counted])
        ratio = (path_scores.logprobs[counted] - reported).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_truncation_keeps_the_ids_that_its_definitions_name(seed: int) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * 2
    p = logits.double().softmax(-1)
    likeliest = [sorted(range(50), key=row.tolist().__getitem__, reverse=True) for row in p]

    def nucleus(row: torch.Tensor, ids: list[int], top_p: float) -> list[int]:
        mass, kept = 0.0, []
        for i in ids:
            kept.append(i)
            mass += row[i].item() / row[ids].sum().item()
            if mass >= top_p:
                return kept
        return kept

    for truncation, keep in (
        (Truncation(top_p=0.7), lambda row, ids: nucleus(row, ids, 0.7)),
        (Truncation(top_p=1e-6), lambda row, ids: ids[:1]),
        (Truncation(top_k=60), lambda row, ids: ids),
        (Truncation(min_p=0.1), lambda row, ids: [i for i in ids if row[i] >= 0.1 * row.max()]),
        (Truncation(top_p=0.7, top_k=7), lambda row, ids: nucleus(row, ids[:7], 0.7)),
    ):
        truncated = truncation.apply(logits)
        kept = KeptIds.of(truncated, truncation.sizes(truncated).tolist()).rows()
        expected = [sorted(keep(row, ids)) for row, ids in zip(p, likeliest, strict=True)]
        assert [ids.tolist() for ids in kept] == expected
    assert Truncation().apply(logits) is logits
    assert Truncation().sizes(logits) is None


@pytest.mark.parametrize("sampler", slow_except([CachedSampler], [CachedSampler, GenerateSampler]))
def test_the_temperature_divides_logits(sampler: type[CachedSampler] | type[GenerateSampler]) -> None:
    model, truncation = tiny_model(tie_word_embeddings=False), Truncation(top_p=0.8)
    inputs = [[1, 2, 3], [4]], [9, 9], [258], range(2)
    turns = sampler(model, truncation, 0.5).sample(*inputs)
    with torch.no_grad():
        model.output_weight.mul_(2)  # exact
    expected = sampler(model, truncation).sample(*inputs)
    for turn, want in zip(turns, expected, strict=True):
        assert turn[:2] == want[:2]
        assert [ids.tolist() for ids in turn.sampling_mask] == [ids.tolist() for ids in want.sampling_mask]
        assert len(turn.sampling_mask) == len(turn.tokens)


def test_weights_that_are_not_finite_are_named() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="log-probs: expected numbers, got nan; check that its weights"):
        CachedSampler(model).sample([[1, 2]], [3], [258], [0])


def test_updates_of_lora_are_sampled_from() -> None:
    model = tiny_model()
    (base,) = CachedSampler(model).sample([[1, 2, 3]], [20], [258], [0])
    add_lora(model, LoRA(rank=4, alpha=8.0, targets=()))
    for name, parameter in model.named_parameters():
        if is_factor(name):
            torch.nn.init.normal_(parameter, std=0.3)
    (turn,) = CachedSampler(model).sample([[1, 2, 3]], [20], [258], [0])
    assert turn != base
    with torch.no_grad():
        (score,) = tree_logprobs(model, [[1, 2, 3, *turn.tokens]])
    torch.testing.assert_close(torch.tensor(turn.logprobs), score[2:], atol=1e-4, rtol=0)


def test_rows_that_have_ended_do_not_disturb_the_others() -> None:
    """The longest context ends first, and its row stays in the batch until enough others have ended."""
    model = tiny_model()
    contexts, limits = [[1] * 30, *([i] for i in range(2, 11))], [2, *[20] * 9]
    turns = CachedSampler(model).sample(contexts, limits, [999], range(len(contexts)))
    assert list(map(len, (turn.tokens for turn in turns))) == limits
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    for context, turn, score in zip(contexts, turns, scores, strict=True):
        torch.testing.assert_close(torch.tensor(turn.logprobs), score[len(context) - 1 :], atol=1e-4, rtol=0)


def test_tokens_are_sampled_from_the_models_distribution() -> None:
    """The frequencies of 4,000 first tokens match the probabilities."""
    model = tiny_model(vocab_size=8)
    turns = CachedSampler(model).sample([[1, 2, 3]] * 4000, [1] * 4000, [7], range(4000))
    counts = torch.bincount(torch.tensor([turn.tokens[0] for turn in turns]), minlength=8)
    with torch.no_grad():
        probability = torch.stack([tree_logprobs(model, [[1, 2, 3, t]])[0][-1] for t in range(8)]).exp()
    error = (counts / 4000 - probability).abs()
    assert (error <= 4 * (probability * (1 - probability) / 4000).sqrt() + 1e-4).all(), (counts, probability)


def test_the_sampler_uses_the_current_weights_in_the_dtype_of_training() -> None:
    model = tiny_model()
    sampler = CachedSampler(model)
    before = sampler.sample([[1, 2]], [8], [258], [0])
    with torch.no_grad():
        model.embed_tokens.weight.mul_(-1)
    assert sampler.sample([[1, 2]], [8], [258], [0]) != before
    model.execution = Execution(torch.bfloat16)
    (turn,) = sampler.sample([[1, 2]], [8], [258], [0])
    assert model.embed_tokens.weight.dtype == torch.float32
    exact = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        exact.embed_tokens.weight.mul_(-1)
        (score,) = tree_logprobs(exact, [[1, 2, *turn.tokens]])
    torch.testing.assert_close(torch.tensor(turn.logprobs), score[1:], atol=0.1, rtol=0)


def test_other_models_and_long_contexts_are_refused() -> None:
    with pytest.raises(UserError, match="expected a dense decoder"):
        CachedSampler(tiny_model("qwen3_moe"))
    with pytest.raises(
        UserError, match="max_rollout_tokens: expected at most the model's 16 positions, got 18"
    ):
        CachedSampler(tiny_model(max_position_embeddings=16)).sample([[1] * 8], [10], [258], [0])


def started(number: int = 1) -> tuple[Chat, list[Rollout]]:
    chat = Chat(TOKENIZER)
    return chat, chat.start(Desk().episode(random.Random(0)), number)


def test_a_rollout_has_the_tokens_of_the_rendered_conversation() -> None:
    chat, (rollout,) = started()
    episode = rollout.episode
    calls, answer = "".join(f"?{item}" for item in episode.items), episode.answer
    play(
        [rollout],
        Scripted(f"{calls}<|im_end|>", f"{answer}<|im_end|>"),
        chat,
        ["seed"],
        max_turn_tokens=20,
        max_rollout_tokens=200,
    )
    tools = [{"role": "tool", "content": str(episode.count[item])} for item in episode.items]
    said = [{"role": "assistant", "content": text} for text in (calls, answer)]
    (path,) = TOKENIZER.samples([*episode.prompt, said[0], *tools, said[1]], turns="whole")
    length = len(rollout.tokens)  # the template adds a line break
    assert rollout.tokens == path.tokens[:length].tolist()
    assert rollout.mask == path.loss_mask[:length].tolist()
    assert not path.loss_mask[length:].any()
    assert (rollout.reward, rollout.turns, rollout.is_cut_off) == (1.0, [calls, answer], False)
    assert [-x for x in rollout.logprobs] == rollout.mask


@pytest.mark.parametrize("template", ["chatml", "qwen3"])  # qwen3 changes earlier turns
def test_the_template_renders_prompts_and_observations(template: str) -> None:
    """Between turns stands what a template renders there, without the turns themselves."""
    tokenizer = TreeTokenizer.byte_level(template)
    chat = Chat(tokenizer)
    assert chat.ends == [tokenizer.special_tokens["<|im_end|>"]]
    tools = [{"type": "function", "function": {"name": "stock", "parameters": {}}}]
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt.append({"role": "user", "content": "<|im_end|>"})
    (rollout,) = chat.start(SimpleNamespace(prompt=prompt, tools=tools), 1)
    text = tokenizer.render(prompt, tools, add_generation_prompt=True)
    assert tokenizer.decode(rollout.tokens) == text
    assert rollout.mask == [0] * len(rollout.tokens)
    for role, rendered in {
        "tool": "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n",
        "user": "<|im_start|>user\n12<|im_end|>\n",
    }.items():
        observed = chat.observation([{"role": role, "content": "12"}], chat.ends[0])
        assert tokenizer.decode(observed) == f"\n{rendered}<|im_start|>assistant\n"


def test_sampled_tokens_are_kept_although_their_text_has_other_tokens() -> None:
    chat, (rollout,) = started()
    text = "<tool_call>"  # one control token, or eleven bytes
    tokens = [*text.encode(), chat.ends[0]]
    sampler = Scripted("")
    sampler.turns = [tokens]
    play([rollout], sampler, chat, ["seed"], max_turn_tokens=20, max_rollout_tokens=200)
    assert rollout.turns == [text]
    assert rollout.tokens[rollout.starts[0] :] == tokens != TOKENIZER.encode(f"{text}<|im_end|>")


def test_limits_cut_rollouts_off_without_a_reward() -> None:
    chat, rollouts = started(3)
    size = len(rollouts[0].tokens)
    right = "".join(f"?{item}" for item in rollouts[0].episode.items)
    sampler = Scripted(f"{right}<|im_end|>", "x" * 30, f"{right}<|im_end|>")
    play(rollouts[:2], sampler, chat, ["a", "b"], max_turn_tokens=20, max_rollout_tokens=size + 20)
    assert sampler.calls[0][1] == [20, 20]
    for rollout in rollouts[:2]:  # the first one has no room for the observation, the second for its turn
        assert (rollout.reward, rollout.is_cut_off, len(rollout.turns)) == (0.0, True, 1)
    assert len(rollouts[1].tokens) == size + 20
    with pytest.raises(UserError, match=f"expected more than the {size} tokens of a prompt, got {size}"):
        play(
            rollouts[2:],
            sampler,
            chat,
            seeds_of("", rollouts[2:]),
            max_turn_tokens=20,
            max_rollout_tokens=size,
        )
    empty = Rollout(episode=rollouts[2].episode)
    with pytest.raises(UserError, match="expected a prompt of at least one token, got none"):
        play([empty], sampler, chat, ["a"], max_turn_tokens=20, max_rollout_tokens=size)


def test_forks_share_exactly_what_precedes_the_turn() -> None:
    chat, rollouts = started(2)
    model = tiny_model()
    right = "".join(f"?{item}" for item in rollouts[0].episode.items)
    play(
        rollouts,
        Scripted(*[f"{right}<|im_end|>"] * 2, "1<|im_end|>", "2<|im_end|>"),
        chat,
        seeds_of("", rollouts),
        max_turn_tokens=20,
        max_rollout_tokens=200,
    )
    for original in rollouts:
        original.logprobs = [-0.5 * mask for mask in original.mask]
    forks = branches(rollouts, 5, random.Random(0))
    assert len(forks) == 5
    for fork in forks:
        assert (fork.inherited, fork.reward, fork.turns) == (1, None, [right])
    copies = [(list(r.tokens), list(r.logprobs), list(r.turns)) for r in rollouts]
    seeds = seeds_of("forks", forks)
    play(forks, CachedSampler(model), chat, seeds, max_turn_tokens=20, max_rollout_tokens=200)
    assert copies == [
        (r.tokens, r.logprobs, r.turns) for r in rollouts
    ]  # they share no list with their forks
    at = rollouts[0].starts[1]
    for fork in forks:
        assert fork.tokens[:at] == rollouts[0].tokens[:at]
        assert fork.logprobs[:at] == rollouts[0].logprobs[:at]
        assert fork.reward is not None
        with torch.no_grad():
            (score,) = tree_logprobs(model, [fork.tokens])
        own = torch.tensor(fork.logprobs[at:]), score[at - 1 :]
        mask = torch.tensor(fork.mask[at:])
        torch.testing.assert_close(own[0] * mask, own[1] * mask, atol=1e-4, rtol=0)
    assert branches(started(2)[1], 3, random.Random(0)) == []  # no turn to fork at


def test_a_reward_that_is_no_number_is_refused() -> None:
    chat, (rollout,) = started()
    rollout.episode = type("Wrong", (), {"reply": lambda self, turns: Reply(None, float("nan"))})()
    with pytest.raises(UserError, match="reward: expected a finite number, got nan after the turns"):
        play([rollout], Scripted("a<|im_end|>"), chat, ["seed"], max_turn_tokens=20, max_rollout_tokens=200)


def test_the_seed_decides_the_rollouts() -> None:
    model = tiny_model()

    def tokens(seed: str) -> list[list[int]]:
        chat, rollouts = started(3)
        play(
            rollouts,
            CachedSampler(model),
            chat,
            seeds_of(seed, rollouts),
            max_turn_tokens=12,
            max_rollout_tokens=200,
        )
        return [rollout.tokens for rollout in rollouts]

    assert tokens("a") == tokens("a") != tokens("b")
    assert len(set(map(tuple, tokens("a")))) == 3  # equal contexts get different turns
