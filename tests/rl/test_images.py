"""Rollouts with images: contexts, samplers, servers, and the trees that are trained."""

import base64
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.rl.test_sampling import TOKENIZER, Scripted
from tests.rl.test_server_sampler import server
from tests.support.cases import slow_except
from tests.support.colours import Colours, Pages, square
from tests.support.rl_runs import rows, seeds_of, tiny, with_short_turns
from tests.support.vision import IMAGE, image, our_model, path_logprobs, path_of, vision_model
from titan_tree.data.images import load_image
from titan_tree.errors import UserError
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.rl.generate_sampler import GenerateSampler, default_sampler
from titan_tree.rl.rollouts import Chat, Rollout, branches, play, token_paths
from titan_tree.rl.server.server_sampler import ServerSampler
from titan_tree.rl.trainer import RLTrainer
from titan_tree.tree.context import Completion, Context
from titan_tree.tree.paths import TokenPath

STOP = 5
SAMPLERS = {"Qwen3VL": CachedSampler, "Qwen3_5": GenerateSampler, "Qwen3_5Moe": GenerateSampler}
PAD = TOKENIZER.special_tokens["<|image_pad|>"]


@pytest.fixture(autouse=True)
def _environments():
    ENVIRONMENTS.register("colours", Colours)
    ENVIRONMENTS.register("pages", Pages)


def context(*parts) -> Context:
    path = path_of(*parts, loss_tokens=1)
    return Context(path.tokens.tolist(), path.images)


def contexts() -> list[Context]:
    """Returns contexts. The first three have equal ids, and the first and the third are equal."""
    a, b, c = image(2, 3, 0), image(2, 3, 1), image(4, 2, 2)
    first = context([1, 2], a, [3, 4])
    others = context([1, 2, 9]), context([7], a, [5], c, [6], a, [8, 8]), context(c, [11])
    return [first, context([1, 2], b, [3, 4]), context([1, 2], a, [3, 4]), *others]


def continued(before: Context, turn: list[int]) -> TokenPath:
    mask = [0] * len(before) + [1] * len(turn)
    return TokenPath(before + turn, mask, images=before.images)


@pytest.mark.parametrize("kind", slow_except(["Qwen3VL", "Qwen3_5"], SAMPLERS))
def test_logprobs_are_those_of_transformers_on_each_context_alone(kind, tmp_path):
    hf = vision_model(kind)
    sampler = default_sampler(our_model(hf, tmp_path, "frozen"))
    assert isinstance(sampler, SAMPLERS[kind])
    encoded = []
    sampler.model.visual.register_forward_pre_hook(lambda _, inputs: encoded.append(len(inputs[0])))
    limits = [7, 7, 9, 3, 8, 8]
    turns = sampler.sample(contexts(), limits, [STOP], range(10, 16))
    assert encoded == [3]  # the distinct images
    assert turns == sampler.sample(contexts(), limits, [STOP], range(10, 16))
    for before, turn in zip(contexts(), turns, strict=True):
        assert IMAGE not in turn.tokens  # transformers would expect an image
        with torch.no_grad():
            want = path_logprobs(hf, continued(before, turn.tokens))[len(before) - 1 :]
        torch.testing.assert_close(torch.tensor(turn.logprobs), want, atol=1e-5, rtol=0)
    same, other = (sampler.sample(contexts()[i : i + 1], [1], [STOP], [3])[0].logprobs for i in (2, 1))
    (first,) = sampler.sample(contexts()[:1], [1], [STOP], [3])
    assert first.logprobs == same != other


def test_samplers_name_what_they_cannot_read(tmp_path):
    model = our_model(vision_model("Qwen3VL"), tmp_path, "frozen")
    with pytest.raises(UserError, match=r"GenerateSampler: expected Qwen3\.5 for contexts with images, got"):
        GenerateSampler(model).sample(contexts()[:1], [3], [STOP], [0])
    a = image(1, 2, 0)
    with pytest.raises(UserError, match="a context: expected text behind its last image"):
        CachedSampler(model).sample([Context([1, IMAGE, IMAGE], ((1, a),))], [3], [STOP], [0])
    text = our_model(vision_model("Qwen3VL"), tmp_path, "off")
    with pytest.raises(UserError, match="model: expected paths without images, because the model has no tow"):
        CachedSampler(text).sample(contexts()[:1], [3], [STOP], [0])


class Reading(Scripted):
    """Records the contexts that it gets."""

    reads_images = True

    def __init__(self, *turns: str) -> None:
        super().__init__(*turns)
        self.given: list[Context] = []

    def sample(self, contexts, *others):
        self.given += contexts
        return super().sample(contexts, *others)


def played(sampler, episode: Any = None, number: int = 1, limit: int = 400):
    chat = Chat(TOKENIZER)
    rollouts = chat.start(episode or Pages().episode(random.Random(0)), number)
    play(rollouts, sampler, chat, seeds_of("", rollouts), max_turn_tokens=20, max_rollout_tokens=limit)
    return chat, rollouts


END = "<|im_end|>"
TURNS = [f"{text}{END}" for text in ("x", "xx", "y", "y", "z", "zzz")]  # of two rollouts, turn by turn


def keys(images) -> list[str]:
    return [each.key for _, each in images]


def test_images_travel_with_contexts_branches_and_paths():
    sampler = Reading(*TURNS)
    chat, rollouts = played(sampler, number=2)
    big = load_image(played_url(), "")
    assert len(big) == 64
    for rollout, noise in zip(rollouts, (1, 2), strict=True):
        first, second = rollout.paths(np.ones(len(rollout.tokens)), "r")
        assert keys(first.images) == [square("red").key, square("blue", noise=noise).key]
        assert keys(second.images) == [big.key]
        for path in (first, second):
            for start, each in path.images:
                assert (path.tokens[start : start + len(each)] == PAD).all()
                assert (path.tokens[[start - 1, start + len(each)]] != PAD).all()
            assert (path.tokens == PAD).sum() == sum(len(each) for _, each in path.images)
        text = TOKENIZER.decode(first.tokens[first.images[1][0] + 4 :])
        assert text == f"<|vision_end|>b\n</tool_response>{END}\n<|im_start|>assistant\ny{END}"
    # Turn after turn, the sampler got what the paths hold.
    assert [keys(context.images) for context in sampler.given[2:]] == [
        [square("red").key, square("blue", noise=1).key],
        [square("red").key, square("blue", noise=2).key],
        [big.key],
        [big.key],
    ]
    forks = branches(rollouts, 8, random.Random(0))
    assert {fork.inherited for fork in forks} == {1, 2}
    before = [(list(rollout.tokens), rollout.tokens.images) for rollout in rollouts]
    play(forks, Reading(*TURNS * 6), chat, seeds_of("f", forks), max_turn_tokens=20, max_rollout_tokens=400)
    assert before == [(list(rollout.tokens), rollout.tokens.images) for rollout in rollouts]
    for fork in forks:
        first, second = fork.paths(np.ones(len(fork.tokens)), "f")
        assert keys(first.images) == [square("red").key, square("blue", noise=len(fork.turns[0])).key]
        assert keys(second.images) == [big.key]


def played_url() -> str:
    (part, _) = Pages().episode(random.Random(0)).reply(["", ""]).messages[0]["content"]
    return part["image"]


def test_equal_ids_with_other_images_are_another_state():
    rollouts = []
    for number in range(2):
        rollout = Rollout(episode=None)
        rollout.read(Context([1, *[PAD] * 4, 2], ((1, square("red", noise=number)),)))
        rollout.write([7], [-1.0])
        rollout.end(float(number))
        rollouts.append(rollout)
    paths = token_paths(rollouts, "task", "tree_rl", {})
    assert [path.advantage[-1] for path in paths] == [-0.5, 0.5]  # 0 and 0 if the turns were one node


def test_a_turn_ends_where_it_writes_a_placeholder():
    class Masked(Reading):
        def sample(self, contexts, *others):
            turns = super().sample(contexts, *others)
            return [
                turn._replace(
                    experts=np.zeros((len(context) + len(turn.tokens) - 1, 1, 1), np.int16),
                    sampling_mask=[[token] for token in turn.tokens],
                )
                for context, turn in zip(contexts, turns, strict=True)
            ]

    _, (rollout,) = played(Masked(f"xy<|image_pad|>z{END}"))
    (path,) = rollout.paths(np.ones(len(rollout.tokens)), "r")
    assert TOKENIZER.decode(path.tokens[path.loss_mask > 0]) == "xy<|image_pad|>"
    assert (rollout.reward, rollout.is_cut_off) == (0.0, True)
    assert rollout.kept[-3:] == [[token] for token in rollout.tokens[-3:]]
    assert len(path.routed_experts) == len(path)


def test_samplers_without_images_are_refused():
    with pytest.raises(UserError, match="the sampler: expected one that reads images, because the env"):
        played(Scripted(f"x{END}"))


def test_an_image_that_cannot_be_read_is_named():
    episode = Pages().episode(random.Random(0))
    episode.prompt = [{"role": "user", "content": [{"type": "image", "image": "missing.png"}]}]
    with pytest.raises(
        UserError, match=r"messages\[0\]\.content\[0\]\.image: .*missing\.png: cannot be read"
    ):
        played(Reading(), episode)


# Servers: what a request says, and what an answer must say.


SHOT = square("green", 96)  # 3 x 3 tokens
SHOWN = Context([1, 2, *[PAD] * 9, 3, *[PAD] * 4, 4], ((2, SHOT), (12, square("red"))))


def answer(context: list[int], **fields: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in (7, STOP)]
    choice = {"token_ids": [7, STOP], "logprobs": {"content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(context), "completion_tokens": 2}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": context} | fields


def test_a_server_gets_one_placeholder_and_the_pixels_of_each_image():
    with server(lambda request, number: answer(SHOWN)) as (url, requests):
        (turn,) = ServerSampler(url, "m").sample([SHOWN], [5], [STOP], [0])
    assert turn == Completion([7, STOP], [-0.5, -0.5])
    (request,) = requests
    assert request["token_ids"] == [1, 2, PAD, 3, PAD, 4]
    assert request["return_token_ids"] is True
    assert request["sampling_params"]["max_tokens"] == 5
    pixels = [
        np.array(Pillow.open(io.BytesIO(base64.b64decode(part["url"].removeprefix(HEAD)))))
        for part in request["content_parts"]
    ]
    for got, (_, each) in zip(pixels, SHOWN.images, strict=True):
        assert np.array_equal(got, each.pixels)


HEAD = "data:image/png;base64,"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt_token_ids": None},
            "expected 17 prompt_token_ids, with images of 3 x 3, 2 x 2 tokens, got None",
        ),
        ({"prompt_token_ids": [1, 2, PAD, 3, PAD, 4]}, "2 x 2 tokens, got 6; use vLLM 0.32 or later"),
        ({"prompt_token_ids": [*SHOWN[:-1], 5]}, "2 x 2 tokens, got 17; use vLLM"),
    ],
)
def test_a_server_that_expands_images_otherwise_ends_the_run(fields, message):
    with (
        server(lambda request, number: answer(SHOWN, **fields)) as (url, _),
        pytest.raises(UserError, match=message),
    ):
        ServerSampler(url, "m").sample([SHOWN], [5], [STOP], [0])


# Runs.


def small(folder: Path, environment: str, *overrides: str):
    options = [f"rl.environment={environment}", "model.name=qwen3", "model.vision=train"]
    return tiny(folder, *options, "model.overrides.head_dim=32", "rl.max_turn_tokens=6", *overrides)


@pytest.mark.parametrize("name", slow_except(["qwen3"], ["qwen3", "qwen3_5"]))
def test_the_trainer_computes_what_the_sampler_recorded(name, tmp_path):
    """The reference, before the first step, is the policy. Trees share the images of the prompts."""
    options = [f"model.name={name}", "loss.name=decoupled_ppo", "rl.branches=2", "training.steps=2"]
    options += ["loss.kl.coefficient=0.1", "rl.advantage=spo", "rl.min_p=0.02"]
    trainer = with_short_turns(RLTrainer(small(tmp_path, "pages", *options)))
    trained, add = [], trainer.add_logprobs

    def record(trees):
        add(trees)
        trained.extend(trees)

    trainer.add_logprobs = record
    before = trainer.model.visual.get_parameter("patch_embed.proj.weight").detach().clone()
    trainer.train()
    trainer.close()
    assert not torch.equal(trainer.model.visual.get_parameter("patch_embed.proj.weight"), before)
    first, second = trained[:2], trained[2:]
    assert len(first) == len(second) == 2
    for tree in first:
        assert len(tree.paths) == 10
        assert len(tree.images) < sum(len(path.images) for path in tree.paths)
        for path in tree.paths:
            counted = path.loss_mask > 0
            own, recorded = path.old_logprobs[counted], path.rollout_logprobs[counted]
            sampled = recorded != -5.0  # the others end short turns
            assert np.abs(own - recorded)[sampled].max() < 1e-4
            assert np.abs(own - path.ref_logprobs[counted]).max() < 1e-5
    assert all(
        np.isfinite(path.old_logprobs[path.loss_mask > 0]).all() for tree in second for path in tree.paths
    )
    assert all(float(row["grad_norm"]) > 0 for row in rows(tmp_path))
