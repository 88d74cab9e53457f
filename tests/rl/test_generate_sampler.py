"""GenerateSampler reports the log-probs of the trained model, samples what plain transformers would, copies
nothing, and refuses what transformers cannot compute."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.rl.test_sampling import tiny_model
from tests.support.cases import exhaustive, slow_except
from tests.support.hf_families import hf_family
from tests.support.oracle import tree_model
from titan_tree import UserError, tree_logprobs
from titan_tree.components.lora import LoRA, is_factor
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.models.decoder import Decoder
from titan_tree.models.llama import Llama
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.transformers import TransformersModel
from titan_tree.models.transformers.generation import generating
from titan_tree.models.transformers.support import SUPPORTED
from titan_tree.models.tree_model import Execution, TreeModel
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.generate_sampler import GenerateSampler, default_sampler
from titan_tree.tree.context import Completion

STOP = 5
LENGTHS, LIMITS = (1, 30, 7, 30, 13), (25, 3, 40, 12, 33)
NATIVE = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3 untied": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {},
    "qwen3_5": {},
    "qwen3_5_moe": {"tie_word_embeddings": False},
    "qwen3_next": {},
}


def native(name: str, **sizes: Any) -> Decoder:
    """Returns a small model in which all weights matter."""
    model = tiny_model(name.split()[0], **{"vocab_size": 64} | NATIVE[name] | sizes)
    with torch.no_grad():
        model.norm.weight.add_(4.0)  # sharp distributions
        for parameter in model.parameters():
            if parameter.ndim != 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def layers_of_transformers(name: str, **sizes: Any) -> TransformersModel:
    """Returns a small model of transformers."""
    model = TransformersModel(hf_family(name, **sizes))
    with torch.no_grad():
        model.last_norm.get_parameter("weight").add_(
            40.0 if name == "cohere2" else 4.0
        )  # sharp distributions
    return model


def small(name: str, **sizes: Any) -> TreeModel:
    """Returns one of both kinds."""
    return native(name, **sizes) if name in NATIVE else layers_of_transformers(name, **sizes)


def random_contexts(vocab_size: int = 64) -> list[list[int]]:
    """Returns contexts of unequal length, and one of them twice."""
    draw = random.Random(0)
    contexts = [[draw.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
    return [*contexts, contexts[1]]


def trained_logprobs(
    model: TreeModel, contexts: Sequence[list[int]], turns: Sequence[Completion]
) -> list[Tensor]:
    """Returns what the model computes in training for the tokens of each turn."""
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    return [score[len(context) - 1 :].cpu() for context, score in zip(contexts, scores, strict=True)]


def assert_trained_logprobs(
    model: TreeModel, contexts: Sequence[list[int]], turns: Sequence[Completion]
) -> None:
    for turn, expected in zip(turns, trained_logprobs(model, contexts, turns), strict=True):
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)


def check(model: TreeModel) -> None:
    """Samples two turns, with tokens to read between them."""
    sampler, contexts, limits = GenerateSampler(model), random_contexts(), [*LIMITS, 9]
    state = torch.get_rng_state()
    turns = sampler.sample(contexts, limits, [STOP], range(3, 3 + len(contexts)))
    assert torch.equal(torch.get_rng_state(), state)
    assert turns == GenerateSampler(model).sample(contexts, limits, [STOP], range(3, 3 + len(contexts)))
    assert turns != sampler.sample(contexts, limits, [STOP], range(4, 4 + len(contexts)))
    for turn, limit in zip(turns, limits, strict=True):
        assert STOP not in turn.tokens[:-1]
        assert len(turn.tokens) == limit or turn.tokens[-1] == STOP
        assert len(turn.tokens) == len(turn.logprobs)
    mean = sum(sum(turn.logprobs) for turn in turns) / sum(len(turn.tokens) for turn in turns)
    assert mean > -0.9 * math.log(64)  # far from uniform
    assert_trained_logprobs(model, contexts, turns)
    read = [list(range(7, 7 + i)) for i in range(len(turns))]
    contexts = [a + turn.tokens + b for a, turn, b in zip(contexts, turns, read, strict=True)]
    turns = sampler.sample(contexts, limits[::-1], [STOP], range(5, 5 + len(contexts)))
    assert_trained_logprobs(model, contexts, turns)


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["qwen3 untied", "qwen3_5", "qwen3_moe"],
        exhaustive(["qwen3_5_moe", "qwen3_next"], NATIVE),  # they have the parts of the others
    ),
)
def test_logprobs_are_those_of_the_trained_decoder(name: str) -> None:
    check(native(name))


# Among the first ones are windows shorter than the contexts, sinks, soft caps and scaled logits.
FAMILIES = ["mistral", "gpt_oss", "gemma2", "gemma3_text", "cohere2", "qwen3_next"]
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(SUPPORTED - set(FAMILIES))]


@pytest.mark.parametrize("name", slow_except(["mistral", "gpt_oss"], [*FAMILIES, *OTHERS]))
def test_logprobs_are_those_of_a_trained_model_of_transformers(name: str) -> None:
    check(layers_of_transformers(name))


@pytest.mark.parametrize("name", slow_except(["qwen3"], ["qwen3", "qwen3_moe", "gpt_oss"]))
def test_updates_of_lora_are_sampled_from(name: str) -> None:
    model = small(name)
    (base,) = GenerateSampler(model).sample([[1, 2, 3]], [20], [STOP], [0])
    targets = ("q_proj", "experts.down_proj") if name == "qwen3_moe" else ()
    add_lora(model, LoRA(rank=4, alpha=8.0, targets=targets))
    for parameter_name, parameter in model.named_parameters():
        if is_factor(parameter_name):
            torch.nn.init.normal_(parameter, std=0.3)
    (turn,) = GenerateSampler(model).sample([[1, 2, 3]], [20], [STOP], [0])
    assert turn != base
    check(model)


def test_biases_of_routers_are_sampled_from() -> None:
    model = native("qwen3_moe")
    contexts, limits = random_contexts(), [*LIMITS, 9]
    before = GenerateSampler(model).sample(contexts, limits, [STOP], range(len(contexts)))
    assert model.experts is not None
    model.experts.add_router_biases()
    for bias in model.experts.router_biases().values():
        bias.copy_(torch.linspace(-1, 1, len(bias)))  # always the same experts
    turns = GenerateSampler(model).sample(contexts, limits, [STOP], range(len(contexts)))
    assert turns != before
    assert_trained_logprobs(model, contexts, turns)


def greedy(model: PreTrainedModel, context: list[int], limit: int) -> list[int]:
    """Returns the most probable turn, as plain transformers samples it from one context alone."""
    tokens = torch.tensor([context])
    options = {"do_sample": False, "eos_token_id": STOP, "pad_token_id": STOP, "max_new_tokens": limit}
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return out[0, len(context) :].tolist()


PEAKED = ["qwen3", "llama", "qwen3_5_text", "mistral", "gpt_oss"]


@pytest.mark.parametrize("name", slow_except(["qwen3", "mistral"], PEAKED))
def test_a_peaked_model_says_what_plain_transformers_says(name: str) -> None:
    hf = hf_family(name)
    with torch.no_grad():
        hf.base_model.norm.weight.mul_(1000.0)
    contexts, limits = random_contexts(), [*LIMITS, 9]
    expected = [greedy(hf, context, limit) for context, limit in zip(contexts, limits, strict=True)]
    model = TransformersModel(hf) if name in ("mistral", "gpt_oss") else tree_model(hf)
    turns = GenerateSampler(model).sample(contexts, limits, [STOP], range(len(contexts)))
    assert [turn.tokens for turn in turns] == expected
    assert len({turn[0] for turn in expected}) >= 4


def test_tokens_are_sampled_from_the_whole_distribution() -> None:
    """The frequencies of 4,000 first tokens match the probabilities, also beyond the 50 likeliest tokens."""
    model = native("qwen3_moe", vocab_size=100)
    with torch.no_grad():
        model.norm.weight.sub_(3.0)
    turns = GenerateSampler(model).sample([[1, 2, 3]] * 4000, [1] * 4000, [7], range(4000))
    counts = torch.bincount(torch.tensor([turn.tokens[0] for turn in turns]), minlength=100)
    with torch.no_grad():
        scores = tree_logprobs(model, [[1, 2, 3, token] for token in range(100)])
    logprob = torch.stack([score[-1] for score in scores])
    probability = logprob.exp()
    error = (counts / 4000 - probability).abs()
    assert (error <= 4 * (probability * (1 - probability) / 4000).sqrt() + 1e-4).all(), (counts, probability)
    assert (counts > 0).sum() > 60
    # Another temperature would change the mean log-prob.
    mean = (probability * logprob).sum()
    variance = (probability * (logprob - mean).square()).sum()
    assert ((counts * logprob).sum() / 4000 - mean).abs() < 4 * (variance / 4000).sqrt()


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_context_of_one_token_beside_one_of_two(name: str) -> None:
    """Its padding must not enter the states of recurrent layers."""
    model, contexts = small(name), [[5], [9, 3], [7]]
    turns = GenerateSampler(model).sample(contexts, [6, 4, 6], [STOP], range(3))
    assert_trained_logprobs(model, contexts, turns)


def test_equal_contexts_are_read_once() -> None:
    model = native("qwen3_5")
    sizes: list[tuple[int, ...]] = []
    model.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    GenerateSampler(model).sample(random_contexts(), [2] * 6, [63], range(6))
    assert sizes == [(5, 29), (6, 1), (6, 1)]


def weights_of(model: torch.nn.Module) -> set[int]:
    return {id(weight) for weight in model.parameters()}


@pytest.mark.parametrize("name", [*NATIVE, "gemma3_text"])
def test_no_weight_is_copied(name: str) -> None:
    model = small(name)
    made = generating(model)
    assert weights_of(made) == weights_of(model)
    dtypes: set[torch.dtype] = set()

    def note(_: torch.nn.Module, __: tuple[Tensor, ...], out: Tensor) -> None:
        dtypes.update({out.dtype, *(weight.dtype for weight in made.parameters())})

    model.last_norm.register_forward_hook(note)
    model.execution = Execution(torch.bfloat16)
    GenerateSampler(model).sample([[1, 2]], [3], [STOP], [0])
    assert dtypes == {torch.bfloat16}
    assert weights_of(made) == weights_of(model)  # the casts are gone
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def alone(model: TreeModel, contexts: Sequence[list[int]], turns: Sequence[Completion]) -> Tensor:
    """Returns log-probs of all turns, from each context alone, without padding and caches."""
    made, found = generating(model), []
    for context, turn in zip(contexts, turns, strict=True):
        tokens = torch.tensor([context + turn.tokens], device=model.embedding_weight.device)
        with torch.no_grad():
            logprobs = made(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, tokens[0, 1:, None])[len(context) - 1 :, 0].cpu())
    return torch.cat(found)


def assert_bf16_is_as_exact_as_training(name: str, device: str = "cpu", **sizes: Any) -> None:
    """Compares the sampler with the model that it calls, and this model with training, in bf16.

    The second comparison takes random turns. Sampled ones would be biased: a token whose log-prob is too high
    is sampled more often.
    """
    model, rounded = small(name, **sizes).to(device), small(name, **sizes).to(device, torch.bfloat16)
    exact = small(name, **sizes).double()
    model.execution = Execution(torch.bfloat16)
    contexts, limits = random_contexts(), [*LIMITS, 9]
    turns = GenerateSampler(model).sample(contexts, limits, [STOP], range(len(contexts)))
    own = torch.cat([torch.tensor(turn.logprobs) for turn in turns])
    want = torch.cat(trained_logprobs(exact, contexts, turns))
    called = alone(rounded, contexts, turns)
    assert (own - called).abs().mean() < 1.5 * (called - want).abs().mean()

    draw = random.Random(0)
    turns = [Completion([draw.randrange(64) for _ in range(60)], []) for _ in contexts]
    trained, want = (torch.cat(trained_logprobs(each, contexts, turns)) for each in (rounded, exact))
    error, error_of_training = (
        (each - want).abs().mean() for each in (alone(rounded, contexts, turns), trained)
    )
    assert error < 1.5 * error_of_training


@pytest.mark.parametrize("name", slow_except(["qwen3", "mistral"], ["qwen3", "qwen3_5_moe", "mistral"]))
def test_the_sampler_uses_the_dtype_of_training(name: str) -> None:
    assert_bf16_is_as_exact_as_training(name)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe", "mistral"])
def test_the_sampler_uses_the_current_weights(name: str) -> None:
    model = small(name)
    sampler = GenerateSampler(model)
    before = sampler.sample([[1, 2]], [8], [STOP], [0])
    with torch.no_grad():
        model.embedding_weight.mul_(-1)
    turns = sampler.sample([[1, 2]], [8], [STOP], [0])
    assert turns != before
    assert_trained_logprobs(model, [[1, 2]], turns)


@pytest.mark.parametrize("name", ["qwen3_5", "mistral"])
def test_checkpointed_blocks_are_sampled_from(name: str) -> None:
    model = small(name)
    parallelize(model, OneRank("cpu"), dtype=torch.float32, activation_checkpoint="selective")
    check(model)


def test_the_fast_sampler_serves_dense_models_only() -> None:
    assert isinstance(default_sampler(native("qwen3")), CachedSampler)
    assert isinstance(default_sampler(native("qwen3_moe")), GenerateSampler)
    assert isinstance(default_sampler(TransformersModel(hf_family("llama"))), GenerateSampler)


def test_contexts_beyond_the_models_positions_are_refused() -> None:
    model = native("qwen3_moe", max_position_embeddings=16)
    with pytest.raises(
        UserError, match="max_rollout_tokens: expected at most the model's 16 positions, got 18"
    ):
        GenerateSampler(model).sample([[1] * 8], [10], [STOP], [0])


def test_models_that_transformers_does_not_implement_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native("llama")
    with monkeypatch.context() as patch:
        patch.setattr(Llama.Config, "to_hf", lambda self: {"model_type": "lama"})
        with pytest.raises(UserError, match=r"got llama: .*; pass RLTrainer another sampler") as error:
            GenerateSampler(model)
    assert "\n" not in str(error.value)
    extra = torch.nn.Parameter(torch.zeros(3))
    model.layers[1].register_parameter("scale", extra)
    with pytest.raises(UserError, match=r"layers\.1\.scale: only one of the two has it"):
        GenerateSampler(model)
