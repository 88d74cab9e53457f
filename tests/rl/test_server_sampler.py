"""ServerSampler against HTTP servers on loopback, most of which misbehave on purpose."""

import base64
import io
import threading
from typing import Any

import numpy as np
import pytest

from tests.rl.test_sampling import TOKENIZER, started, tiny_model
from tests.support.cases import for_each
from tests.support.loopback_server import STOP, echo, server, turn
from tests.support.rl_runs import seeds_of
from titan_tree.errors import UserError
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.rollouts import play
from titan_tree.rl.server.server_sampler import ServerSampler
from titan_tree.rl.truncation import Truncation
from titan_tree.tree.paths import ExpertSizes


def test_contexts_that_begin_alike_go_to_the_same_server() -> None:
    """Three rollouts of each of four tasks, shuffled, in two turns. A server keeps its tasks."""
    contexts = [[task, i] for i in range(3) for task in (6, 3, 9, 5)]
    with server(echo) as (first, _), server(echo) as (second, _), server(echo) as (third, seen):
        sampler = ServerSampler([first, second, third, first], "m")
        for _ in range(2):
            turns = sampler.sample(contexts, [5] * 12, [STOP], range(12))
            assert [turn.tokens[0] for turn in turns] == [context[0] for context in contexts]
            contexts = [context + turn.tokens for context, turn in zip(contexts, turns, strict=True)]
    assert [request["prompt"][0] for request in seen] == [6] * 6


def test_every_context_gets_its_own_turn_in_order() -> None:
    contexts = [[i, 1] for i in range(100, 140)]
    with server(echo) as (url, requests):
        sampler = ServerSampler(url, "qwen", api_key="secret", concurrency=8)
        turns = sampler.sample(contexts, [5] * 40, [9, STOP], range(3, 3 + len(contexts)))
        assert sampler.sample(contexts, [5] * 40, [9, STOP], range(3, 3 + len(contexts))) == turns
    assert [turn.tokens[0] for turn in turns] == list(range(100, 140))
    assert all(turn.logprobs == [-0.5] * 3 for turn in turns)
    assert len({request["seed"] for request in requests}) == 40
    first = next(request for request in requests if request["prompt"] == [100, 1])
    expected = {
        "model": "qwen",
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 1,
    }
    expected |= {"return_token_ids": True, "stop_token_ids": [9, STOP], "authorization": "Bearer secret"}
    assert first.items() >= expected.items()


@pytest.mark.parametrize(
    "failure",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", b"nonsense\r\n", 503, 429, 500, 1.0],
    ids=["dropped", "truncated", "no http", "unavailable", "too many", "error", "slow"],
)
def test_failed_requests_are_sent_again_with_the_same_seed(
    failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failed: set[int] = set()

    def fails_once(request: dict[str, Any], number: int) -> Any:
        if (prompt := request["prompt"][0]) not in failed:
            failed.add(prompt)
            return failure
        return echo(request, number)

    with server(fails_once) as (url, requests):
        turns = ServerSampler(url, "m", timeout_s=0.5).sample([[8], [9]], [5, 5], [STOP], range(2))
    assert [turn.tokens[0] for turn in turns] == [8, 9]
    seeds = [(request["prompt"][0], request["seed"]) for request in requests]
    assert len(seeds) == 4
    assert len(set(seeds)) == 2
    assert "attempt 1 of 5 failed" in caplog.text


def test_a_server_that_never_answers_ends_the_run() -> None:
    with server(lambda request, number: b"") as (url, requests):
        sampler = ServerSampler(url, "m", attempts=3)
        with pytest.raises(UserError, match=r"no answer after 3 attempts, the last one failed with Remote"):
            sampler.sample([[1]], [5], [STOP], [0])
        assert len(requests) == 3
    with pytest.raises(UserError, match=r"no answer after 2 attempts.*Connection refused"):
        ServerSampler(url, "m", attempts=2).sample([[1]], [5], [STOP], [0])


@for_each(
    ("answer", "message"),
    [
        (400, "refused a request with status 400: .*on purpose"),
        (401, "refused a request with status 401"),
        ({}, "expected one choice with token_ids"),
        (
            {"choices": [{"text": "no ids"}], "usage": {}},
            "got no 'token_ids' in .*; use a version of vLLM that knows return_token",
        ),
        (turn([1, STOP], usage={"prompt_tokens": 1}), "got no 'completion_tokens' in "),
        (turn([1, STOP], usage={"snekot_noitelpmoc": 2, "prompt_tokens": 1}), "got no 'completion_tokens'"),
        (turn([1, STOP], usage={"completion_tokens": 2, "prompt_tokens": None}), "of the context, got None"),
        (turn([1, 2, STOP], [-1.0, -1.0]), "got 3, 2 and 3; the server loses tokens"),
        (turn([1, 2, STOP], usage={"completion_tokens": 4}), "got 3, 3 and 4; the server loses tokens"),
        (turn([1, 2, 3, 4, 5, STOP]), "from 1 to 5, got 6, 6 and 6"),
        (turn([]), "from 1 to 5, got 0, 0 and 0"),
        (turn([1, 2]), r"a stop token of \[7\] or has 5 tokens, got 2 tokens that end with \[1, 2\]"),
        (turn([1, STOP, 2, STOP]), r"expected a turn that ends with a stop token of \[7\]"),
        (turn([1, STOP], [None, -1.0]), "numbers as token_logprobs"),
        (turn(["1", STOP]), "expected integer token_ids"),
        (turn([1, STOP], [3.0, -1.0]), r"numbers as token_logprobs, from -1000 to 0, .* got 3\.0"),
        (turn([1, STOP], [-9999.0, -1.0]), "of tokens that can be sampled, got -9999"),
        (turn([-1, STOP]), "expected integer token_ids, at least 0, got -1"),
        (turn([True, STOP]), "expected integer token_ids, at least 0, got True"),
        (turn([10**400, STOP]), "expected integer token_ids, at least 0, got 1000"),
        (turn([1, STOP], [-(10**400), -1.0]), "numbers as token_logprobs, from -1000 to 0, .* got -1000"),
        (turn([1, STOP], usage={"completion_tokens": "x" * 10**5}), r"got 2, 2 and 'xxx.*xxx'; the server"),
        ({"choices": [turn([1, STOP])["choices"][0]] * 2}, "expected one choice with token_ids"),
        (
            turn([1, STOP], usage={"completion_tokens": 2, "prompt_tokens": 3}),
            "expected the server to read all 1 tokens of the context, got 3; start it with a longer",
        ),
        (
            turn([1, STOP]) | {"model": "other"},
            r"expected an answer of the model '.*', got one of 'other'; check rl\.server\.url",
        ),
        (
            turn([1, STOP], prompt_token_ids=[1])
            | {"choices": [turn([1, STOP])["choices"][0] | {"prompt_token_ids": [2]}]},
            r"expected the token ids of the context, \[1\], as prompt_token_ids, got \[2\]; the server",
        ),
        (
            turn([1, STOP])
            | {"choices": [turn([1, STOP])["choices"][0] | {"prompt_token_ids": None}]}
            | {"prompt_token_ids": [2]},
            r"expected the token ids of the context, \[1\], as prompt_token_ids, got \[2\]; the server",
        ),
        (
            turn([1, STOP]) | {"prompt_token_ids": [2]},
            r"expected the token ids of the context, \[1\], as prompt_token_ids, got \[2\]; the server",
        ),
    ],
)
def test_wrong_answers_are_reported(answer: Any, message: str) -> None:
    with server(lambda request, number: answer) as (url, requests):
        with pytest.raises(UserError, match=message):
            ServerSampler(url, "m").sample([[1]], [5], [STOP], [0])
        assert len(requests) == 1


@pytest.mark.parametrize("has_ids", [False, True])
def test_answers_that_do_not_name_their_context_are_reported_once(
    has_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: dict[str, Any], number: int) -> Any:
        return echo(request, number) | ({"prompt_token_ids": request["prompt"]} if has_ids else {})

    with server(answer) as (url, _):
        sampler = ServerSampler(url, "m")
        for _ in range(2):
            sampler.sample([[8], [9]], [5, 5], [STOP], range(2))
    said = f"{url}: its answers have no prompt_token_ids, so nothing checks that an answer continues"
    assert caplog.text.count(said) == (0 if has_ids else 1)


def test_one_wrong_answer_among_many_is_not_lost() -> None:
    def wrong_once(request: dict[str, Any], number: int) -> Any:
        return turn([1, 2]) if request["prompt"] == [125] else echo(request, number)

    with server(wrong_once) as (url, _), pytest.raises(UserError, match="got 2 tokens that end with"):
        ServerSampler(url, "m").sample([[i] for i in range(100, 150)], [5] * 50, [STOP], range(50))


TRUNCATION = Truncation(top_p=0.9, top_k=20, min_p=0.1)
MASK = [[3, 5], [STOP]]


def masked(mask: Any = MASK, logprobs: Any = (-0.25, 0.0)) -> dict[str, Any]:
    """Returns an answer with the ids that sampling kept."""
    answer = turn([5, STOP])
    content = [{"token_id": 5, "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
    answer["choices"][0] |= {"logprobs": {"content": content}, "sampling_mask": mask}
    return answer


def test_servers_that_truncate_return_what_they_kept() -> None:
    with server(lambda request, number: masked()) as (url, requests):
        sampler = ServerSampler(url, "m", truncation=TRUNCATION)
        (completion,) = sampler.sample([[1, 2]], [5], [STOP], [0])
    assert completion.sampling_mask == MASK
    assert completion.logprobs == [-0.25, 0.0]
    assert sampler.vllm.sampling_path([]) == "/inference/v1/generate"
    (request,) = requests
    settings = request["sampling_params"]
    assert [settings[name] for name in ("top_p", "top_k", "min_p", "temperature")] == [0.9, 20, 0.1, 1.0]
    assert settings["stop_token_ids"] == [STOP]
    assert (request["model"], request["token_ids"]) == ("m", [1, 2])
    assert (settings["logprobs"], settings["n"], settings["max_tokens"]) == (1, 1, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": None}, "expected a sampling mask of 2 tokens, got None; start vLLM with --return-s"),
        ({"mask": [[5]]}, r"expected a sampling mask of 2 tokens, got \[\[5\]\]; start vLLM"),
        ({"mask": [[3, 4], [STOP]]}, r"sampling mask: expected the sampled id 5 among .* got \[3, 4\]; use"),
        ({"mask": [[5, "6"], [STOP]]}, "lists of integers as sampling mask, at least 0, got '6'"),
        ({"mask": [[*range(21)], [STOP]]}, r"at most rl.top_k = 20 different ids, got 21: \[0, "),
        ({"mask": [[5, 3, 5], [STOP]]}, r"at most rl.top_k = 20 different ids, got 3: \[5, 3, 5\]"),
        ({"logprobs": (-0.25, -0.5)}, "0 for its only id, got -0.5; start vLLM with --logprobs-mode"),
    ],
)
def test_wrong_sampling_masks_are_reported(changes: dict[str, Any], message: str) -> None:
    with server(lambda request, number: masked(**changes)) as (url, requests):
        with pytest.raises(UserError, match=message):
            ServerSampler(url, "m", truncation=TRUNCATION).sample([[1]], [5], [STOP], [0])
        assert len(requests) == 1


def test_a_misspelled_setting_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown key of \[rl.server\] 'timout_s'; did you mean 'timeout_s'"):
        ServerSampler("http://127.0.0.1:1", "m", timout_s=3)


def test_truncation_by_a_server_needs_a_bound() -> None:
    with pytest.raises(UserError, match=r"rl.top_k: expected at least 1 with rl.top_p or .* got 0; set it"):
        ServerSampler("http://127.0.0.1:1", "m", truncation=Truncation(top_p=0.9))


SIZES = ExpertSizes(num_layers=2, top_k=3, num_experts=8)


def routes(length: int) -> np.ndarray:
    """Returns experts [length, 2, 3] that differ from row to row."""
    draw = np.random.default_rng(length)
    return np.stack([[draw.permutation(8)[:3] for _ in range(2)] for _ in range(length)])


def npy(rows: np.ndarray, old: bytes = b"", new: bytes = b"") -> str:
    """Returns an .npy file in base64, with ``new`` in place of ``old``."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue().replace(old, new, 1)).decode()


def as_vllm(rows: Any, prompt: Any = None) -> dict[str, Any]:
    answer = turn([5, STOP])
    answer["choices"][0]["routed_experts"] = rows
    return answer | {"prompt_routed_experts": prompt}


@pytest.mark.parametrize(
    "answer",
    [
        as_vllm(npy(routes(4).astype(np.uint8))),
        as_vllm(routes(4)[3:].tolist(), routes(4)[:3].tolist()),
        as_vllm([*routes(4)[3:].tolist(), [[0, 1, 2]] * 2], routes(4)[:3].tolist()),
    ],
    ids=[".npy", "lists", "a row for the last token"],
)
def test_experts_of_all_tokens_but_the_last_one_are_kept(answer: Any) -> None:
    """The context has three tokens and the turn two; the model has not read the last one."""
    with server(lambda request, number: answer) as (url, _):
        (completion,) = ServerSampler(url, "m", experts=SIZES).sample([[1, 2, 3]], [5], [STOP], [0])
    assert completion.experts.dtype == np.int16
    assert np.array_equal(completion.experts, routes(4))


@for_each(
    ("answer", "message"),
    [
        (turn([5, STOP]), "expected routed_experts, got none; start the server with --enable"),
        (
            as_vllm(npy(routes(3))),
            r"expected 4 rows of 2 layers and 3 experts, got an array of shape \(3,",
        ),
        (as_vllm(npy(routes(9))), r"expected 4 rows .* got an array of shape \(9, 2, 3\)"),
        (as_vllm(npy(np.tile(routes(4), (1, 2, 1)))), r"got an array of shape \(4, 4, 3\)"),
        (as_vllm(npy(routes(4) + 8)), "expected ids from 0 to 7, .* got int64 from 8 to 15"),
        (as_vllm("AAAA"), "routed_experts: .*; use another version of vLLM"),
        (as_vllm("?"), "routed_experts: .*; use another version of vLLM"),
        (as_vllm(npy(routes(4), b"(4, 2, 3)", b"(4, 2, 3))")), "routed_experts: .*; use"),
        (as_vllm(npy(routes(4), b"(4, 2, 3)", b"(10**4,)")), "routed_experts: .*; use"),
        (as_vllm(npy(routes(4), b"(4,", b"(4000000000000000,")), "routed_experts: "),
        (as_vllm([[["1"] * 3] * 2], routes(4)[:3].tolist()), r"ids from 0 to 7, .* got <U21;"),
        (as_vllm([[[None] * 3] * 2], routes(4)[:3].tolist()), r"ids from 0 to 7, .* got object;"),
        (as_vllm([[[1, 2, 3]]], [[[1, 2, 3]] * 2] * 3), "routed_experts: .*; use another version of vLLM"),
    ],
)
def test_wrong_experts_are_reported(answer: Any, message: str) -> None:
    with server(lambda request, number: answer) as (url, _), pytest.raises(UserError, match=message):
        ServerSampler(url, "m", experts=SIZES).sample([[1, 2, 3]], [5], [STOP], [0])


def test_rollouts_from_a_server_are_those_of_its_model() -> None:
    """The server samples with CachedSampler, so it returns real turns and log-probs."""
    model = tiny_model()
    lock = threading.Lock()

    def complete(request: dict[str, Any], number: int) -> dict[str, Any]:
        with lock:
            sampler, stops = CachedSampler(model), request["stop_token_ids"]
            (own,) = sampler.sample([request["prompt"]], [request["max_tokens"]], stops, [request["seed"]])
        return turn(own.tokens, own.logprobs)

    chat, rollouts = started(3)
    with server(complete) as (url, requests):
        sampler, seeds = ServerSampler(url, "m"), seeds_of("seed", rollouts)
        play(rollouts, sampler, chat, seeds, max_turn_tokens=12, max_rollout_tokens=200)
    assert len(requests) >= 3
    for rollout in rollouts:
        assert rollout.reward is not None
        assert TOKENIZER.decode(rollout.tokens).startswith("<|im_start|>user\n")
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 3
