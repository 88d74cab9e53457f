"""Tinker's API with the real package as its client: loops, keys, order, restarts, and malformed requests."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import request_conv
from tinker.proto import tinker_public_pb2 as pb

from tests.support.tinker_server import connect, datum, serving
from titan_tree import UserError
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.settings import RLConfig
from titan_tree.serve.agent_server import AgentServer
from titan_tree.serve.settings import ServeConfig
from titan_tree.serve.tinker import api as tinker_api
from titan_tree.serve.tinker import wire
from titan_tree.serve.tinker.api import TinkerAPI, key_of

BASE = "debug/tiny"
TEXT = list(range(65, 77))
ADAM = types.AdamParams(learning_rate=1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerAPI]]:
    with serving(tmp_path_factory.mktemp("tinker")) as started:
        yield started


def adapter(url: str, key: str = "tml-a", seed: int = 1) -> tinker.TrainingClient:
    service = connect(url, key)
    return service.create_lora_training_client(base_model=BASE, rank=4, seed=seed).result()


def losses(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    """Trains on one text. Requests are sent before earlier ones have results, as recipes do."""
    data, found = [datum(TEXT, weights=np.ones(11)), datum([*TEXT[:6], 3, 4], weights=np.ones(7))], []
    for _ in range(steps):
        passed = trainer.forward_backward(data, loss_fn="cross_entropy")
        stepped = trainer.optim_step(ADAM)
        found.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    return found


def test_a_client_trains_saves_and_samples(server: tuple[str, TinkerAPI]) -> None:
    url, _ = server
    trainer = adapter(url)
    assert trainer.get_info().model_data.model_name == BASE
    first, *_, last = losses(trainer, 6)
    assert last < 0.9 * first
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TEXT[:3])
    params = types.SamplingParams(max_tokens=5, seed=1)
    answer = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
    again = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
    assert [s.tokens for s in answer.sequences] == [s.tokens for s in again.sequences]
    assert all(len(s.tokens) == len(s.logprobs) <= 5 for s in answer.sequences)
    assert len({s.sequence_id for s in (*answer.sequences, *again.sequences)}) == 6
    # What the client gets of the prompt is what training reads.
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    passed = trainer.forward([datum(TEXT, weights=np.ones(11))], loss_fn="cross_entropy").result()
    np.testing.assert_allclose(scored[1:], passed.loss_fn_outputs[0]["logprobs"].tolist(), atol=1e-4)


def test_a_loss_of_the_client_trains(server: tuple[str, TinkerAPI]) -> None:
    """The client differentiates its loss by log-probs, and sends weights of any sign."""
    url, _ = server
    trainer, given = adapter(url), [datum(TEXT, weights=np.ones(11))]
    one = trainer.forward_backward(given, loss_fn="cross_entropy").result().metrics["loss:sum"]
    norm = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]
    result = trainer.forward_backward_custom(
        given, lambda data, found: (-3 * sum(x.sum() for x in found), {})
    )
    assert result.result().metrics["loss:sum"] == pytest.approx(3 * one, rel=1e-5)
    thrice = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]
    assert thrice == pytest.approx(3 * norm, rel=1e-5)


def test_several_targets_per_token(server: tuple[str, TinkerAPI]) -> None:
    url, _ = server
    trainer = adapter(url)
    targets, weights = [[66, 9], [67, 8], [3, 68]], [[0.5, 0.5], [1.0, 0.0], [-0.25, 0.25]]
    given = [datum(TEXT[:3], targets, weights=weights), datum(TEXT[:4], weights=np.ones(3))]
    both, plain = trainer.forward(given, loss_fn="cross_entropy").result().loss_fn_outputs
    both = np.array(both["logprobs"].tolist())
    assert both.shape == (3, 2)
    np.testing.assert_allclose(both[[0, 1, 2], [0, 0, 1]], plain["logprobs"].tolist(), atol=1e-6)
    alone = trainer.forward(
        [datum(TEXT[:3], [9, 8, 3], weights=np.ones(3))], loss_fn="cross_entropy"
    ).result()
    expected = alone.loss_fn_outputs[0]["logprobs"].tolist()
    np.testing.assert_allclose(both[[0, 1, 2], [1, 1, 0]], expected, atol=1e-6)


def test_chunks_of_a_call_are_one_forest(
    server: tuple[str, TinkerAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client cuts a call of more than 1,024 data into several requests."""
    url, api = server
    runs: list[int] = []
    run = api._engine.run
    monkeypatch.setattr(api._engine, "run", lambda calls: runs.append(len(calls)) or run(calls))
    trainer = adapter(url)
    given = [datum(TEXT[: 3 + i % 5], weights=np.ones(2 + i % 5)) for i in range(1500)]
    result = trainer.forward_backward(given, loss_fn="cross_entropy").result()
    assert runs == [2]
    assert len(result.loss_fn_outputs) == 1500
    assert result.metrics["distinct_tokens:sum"] == 7
    assert result.metrics["tokens:sum"] == sum(2 + i % 5 for i in range(1500))


def test_a_server_that_is_started_again_continues_exactly(tmp_path: Path) -> None:
    """Two clients with two adapters. The second server knows no sessions, but what the first one saved."""
    with serving(tmp_path) as (url, _):
        with ThreadPoolExecutor(2) as pool:
            trainers = [adapter(url, f"tml-{name}", seed) for seed, name in enumerate("ab")]
            list(pool.map(lambda trainer: losses(trainer, 2), trainers))
        paths = [trainer.save_state(name="two").result().path for trainer in trainers]
        expected = [losses(trainer, 2) for trainer in trainers]
    assert expected[0] != expected[1]
    with serving(tmp_path) as (url, _):
        services = [connect(url, f"tml-{name}") for name in "ab"]
        for service, path, then in zip(services, paths, expected, strict=True):
            trainer = service.create_training_client_from_state_with_optimizer(path).result()
            assert losses(trainer, 2) == then
            only_weights = service.create_training_client_from_state(path).result()
            got = losses(only_weights, 2)
            assert got[0] == then[0]
            assert got[1] != then[1]
        with pytest.raises(tinker.BadRequestError, match="expected weights that this key has saved here"):
            services[0].create_training_client_from_state(paths[1]).result()


def test_saved_names_are_kept_unless_the_client_overwrites_them(server: tuple[str, TinkerAPI]) -> None:
    url, _ = server
    trainer = adapter(url)
    losses(trainer, 1)
    trainer.save_state(name="x").result()
    with pytest.raises(tinker.RequestFailedError, match="'x' exists already; choose another name"):
        trainer.save_state(name="x").result()
    losses(trainer, 1)
    path = trainer.save_state(name="x", overwrite=True).result().path
    expected = losses(trainer, 1)
    assert losses(connect(url).create_training_client_from_state_with_optimizer(path).result(), 1) == expected
    with pytest.raises(tinker.RequestFailedError, match="path: expected a name of up to 200 letters"):
        trainer.save_state(name="../x").result()


def test_keys_follow_from_the_secret(tmp_path: Path) -> None:
    ann, bob = (key_of("s3cret-of-a-test", user) for user in ("ann", "bob"))
    with serving(tmp_path, secret="s3cret-of-a-test") as (url, _):
        for wrong in ("tml-a", ann.replace("ann", "bob"), "tml-"):
            answer = httpx.post(f"{url}/api/v1/create_session", headers={"X-API-Key": wrong}, content=b"{}")
            assert answer.status_code == 401
        trainer = connect(url, ann).create_lora_training_client(base_model=BASE, rank=2).result()
        body = {"model_id": trainer.model_id, "type": "get_info"}
        headers = {"X-API-Key": bob}
        answer = httpx.post(f"{url}/api/v1/get_info", json=body, headers=headers)
        assert answer.status_code == 404
        assert "unknown, or it has ended" in answer.json()["error"]


def test_requests_run_in_their_order_and_once(server: tuple[str, TinkerAPI]) -> None:
    """Whatever the order in which they arrive, and however often."""
    url, _ = server
    expected = losses(adapter(url), 3)
    trainer = adapter(url)
    data = [datum(TEXT, weights=np.ones(11)), datum([*TEXT[:6], 3, 4], weights=np.ones(7))]
    model, posts = trainer.model_id, []
    for step in range(3):
        asked = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
            model_id=model,
            seq_id=2 * step + 1,
        )
        message = request_conv.forward_backward_request_to_proto(asked).SerializeToString()
        posts.append(("forward_backward", {"content": message}))
        stepped = types.OptimStepRequest(optim_params=ADAM, model_id=model, seq_id=2 * step + 2)
        posts.append(("optim_step", {"json": stepped.model_dump(mode="json")}))
    posts *= 3
    random.Random(5).shuffle(posts)
    headers = {"X-API-Key": "tml-a"}
    for path, content in posts:
        assert httpx.post(f"{url}/api/v1/{path}", headers=headers, **content).status_code == 200
    found = []
    for number in (1, 3, 5):
        from tinker.proto.response_conv import deserialize_forward_backward_output

        asked = {"request_id": f"{model}:{number}", "allow_metadata_only": False}
        answer = httpx.post(f"{url}/api/v1/retrieve_future", json=asked, headers=headers, timeout=60)
        found.append(deserialize_forward_backward_output(answer.content).metrics["loss:sum"])
    assert found == expected


def test_a_result_that_is_not_ready_makes_the_client_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_api, "WAIT_S", 0.05)
    go = threading.Event()
    with serving(tmp_path) as (url, api):
        step = api._engine.step
        monkeypatch.setattr(api._engine, "step", lambda *given: go.wait() and step(*given))
        trainer = adapter(url)
        trainer.forward_backward([datum(TEXT, weights=np.ones(11))], loss_fn="cross_entropy").result()
        future = trainer.optim_step(ADAM)
        threading.Timer(0.5, go.set).start()
        assert future.result(timeout=60).metrics["grad_norm:mean"] > 0


def test_a_client_ends_its_session(server: tuple[str, TinkerAPI]) -> None:
    url, api = server
    service = connect(url)
    model = service.create_lora_training_client(base_model=BASE, rank=2).result().model_id
    service.close("success").result()
    losses(adapter(url), 1)  # after the end of the session
    assert model not in api._engine._tenants  # type: ignore[attr-defined]


def test_sessions_without_heartbeats_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as (url, api):
        trainer = adapter(url)
        monkeypatch.setattr(tinker_api, "IDLE_S", 0.0)
        connect(url, "tml-b").create_lora_training_client(base_model=BASE, rank=2).result()
        monkeypatch.setattr(tinker_api, "IDLE_S", 900.0)
        assert trainer.model_id not in api._engine._tenants  # type: ignore[attr-defined]
        body, headers = {"model_id": trainer.model_id}, {"X-API-Key": "tml-a"}
        answer = httpx.post(f"{url}/api/v1/get_info", json=body, headers=headers)
        assert (answer.status_code, "it has ended" in answer.text) == (404, True)


REFUSED = [
    ("ppo", datum(TEXT, weights=np.ones(11)), {}, "weights: expected only target_tokens, logprobs"),
    ("cross_entropy", datum(TEXT), {}, "weights: missing; this loss reads target_tokens, weights"),
    ("cross_entropy", datum(TEXT, weights=np.ones(4)), {}, "weights: expected 11 entries, one per token"),
    (
        "cross_entropy",
        datum(TEXT, weights=np.full(11, np.nan)),
        {},
        "weights: expected finite numbers, got nan",
    ),
    ("cross_entropy", datum([1, 2, 999], weights=np.ones(2)), {}, "ids below the model's vocabulary size"),
    (
        "cross_entropy",
        datum(TEXT, np.array(TEXT, np.float32), weights=np.ones(12)),
        {},
        "target_tokens: expected integers, got float32 numbers",
    ),
    (
        "cross_entropy",
        datum(TEXT, weights=np.ones(11)),
        {"beta": 1.0},
        "unknown option of the loss cross_entropy",
    ),
    ("stable_reinforce", datum(TEXT), {}, "what it computes is not published"),
    ("custom", datum(TEXT), {}, "losses of clients run there"),
    (
        "dro",
        datum(TEXT, logprobs=np.ones(11), advantages=np.ones(11)),
        {"beta": "x"},
        "expected a finite number",
    ),
]


@pytest.mark.parametrize(("loss", "given", "options", "expected"), REFUSED)
def test_a_wrong_pass_fails_alone(
    server: tuple[str, TinkerAPI], loss: Any, given: types.Datum, options: Any, expected: str
) -> None:
    url, _ = server
    trainer = adapter(url)
    with pytest.raises(tinker.RequestFailedError, match=expected) as caught:
        trainer.forward_backward([given], loss_fn=loss, loss_fn_config=options).result()
    assert caught.value.category.value == "user"
    assert len(losses(trainer, 1)) == 1  # the requests after it run


def test_what_cannot_be_sampled_is_refused(server: tuple[str, TinkerAPI]) -> None:
    url, _ = server
    sampler = connect(url).create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints(TEXT)
    for params, expected in (
        (types.SamplingParams(max_tokens=0), "max_tokens: expected 1 to"),
        (types.SamplingParams(max_tokens=10**9), "max_tokens: expected 1 to"),
        (types.SamplingParams(max_tokens=1, stop=["x", ""]), "got an empty text"),
        (types.SamplingParams(max_tokens=1, top_p=2.0), "expected 0 < top_p <= 1"),
    ):
        with pytest.raises(tinker.BadRequestError, match=expected):
            sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    with pytest.raises(tinker.BadRequestError, match="topk_prompt_logprobs: expected 0"):
        sampler.sample(
            prompt=prompt,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=1),
            topk_prompt_logprobs=2,
        ).result()


def test_malformed_requests_get_one_line_each(
    server: tuple[str, TinkerAPI], caplog: pytest.LogCaptureFixture
) -> None:
    """300 of them, while another session trains as if there were none."""
    url, _ = server
    expected, trainer = losses(adapter(url), 3), adapter(url)
    found: list[float] = []
    training = threading.Thread(target=lambda: found.extend(losses(trainer, 3)))
    draw, model = random.Random(3), adapter(url, "tml-other").model_id
    session = model.partition(":")[0]
    valid = {
        "create_session": {"tags": [], "user_metadata": None, "sdk_version": "0"},
        "create_model": {
            "session_id": session,
            "model_seq_id": 3,
            "base_model": BASE,
            "lora_config": {"rank": 2},
        },
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "x"},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 1},
        "load_weights": {"session_id": session, "model_seq_id": 9, "path": "tinker://x", "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE},
        "asample": {
            "sampling_session_id": session,
            "seq_id": 1,
            "prompt": {"chunks": []},
            "sampling_params": {},
        },
        "retrieve_future": {"request_id": f"{model}:99"},
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": "tinker://x"},
        "session_heartbeat": {"session_id": "x"},
    }
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum(TEXT)], loss_fn="ppo"),
        model_id="x",
        seq_id=1,
    )
    message = request_conv.forward_backward_request_to_proto(asked).SerializeToString()
    wrong = (None, -1, "x", [], {}, 1e400, "tinker://../..", {"rank": -1}, "\ud800")
    training.start()
    with caplog.at_level(logging.WARNING), httpx.Client(headers={"X-API-Key": "tml-other"}) as client:
        for index in range(300):
            path = draw.choice([*valid, "forward_backward"])
            if path == "forward_backward":
                content = bytearray(message)
                for _ in range(draw.randint(1, 4)):
                    content[draw.randrange(len(content))] = draw.randrange(256)
                body = bytes(content[: draw.randrange(len(content))] if draw.random() < 0.5 else content)
            elif draw.random() < 0.2:
                body = bytes(draw.randrange(256) for _ in range(draw.randrange(60)))
            else:
                changed: dict[str, Any] = dict(valid[path])
                changed[draw.choice([*changed, "other"])] = draw.choice(wrong)
                body = json.dumps(changed).encode()
            answer = client.post(f"{url}/api/v1/{path}", content=body, timeout=60)
            assert answer.status_code < 500, (index, path, body, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert "\n" not in error, (index, path, error)
                assert 8 < len(error) < 400, (index, path, error)
    training.join()
    assert found == expected
    assert not [record for record in caplog.records if record.exc_info]


def test_the_package_gives_no_warnings(
    server: tuple[str, TinkerAPI], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = server
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses(adapter(url), 1)
    assert any("train_unembed has no effect" in record.message for record in caplog.records)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_requests_after_one_that_cannot_be_read_run(server: tuple[str, TinkerAPI]) -> None:
    """Each has a number, for which later ones wait: data with an image, and weights that do not exist."""
    url, _ = server
    trainer = adapter(url)
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    given = types.Datum(model_input=image, loss_fn_inputs={"target_tokens": np.array([1])})
    with pytest.raises(tinker.RequestFailedError, match="expected text as token ids, got image"):
        trainer.forward([given], loss_fn="cross_entropy").result(timeout=30)
    with pytest.raises(tinker.RequestFailedError, match="expected weights that this key has saved here"):
        trainer.load_state("tinker://x/weights/x").result(timeout=30)
    assert len(losses(trainer, 1)) == 1


def test_samples_have_the_weights_that_overwrote_others(server: tuple[str, TinkerAPI]) -> None:
    url, _ = server
    trainer, service = adapter(url), connect(url)

    def logprobs() -> list[float | None]:
        path = trainer.save_state(name="x", overwrite=True).result().path
        sampler = service.create_sampling_client(model_path=path).result()
        return list(sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result())

    before = logprobs()
    losses(trainer, 1)
    assert logprobs() != before


@pytest.mark.parametrize("point", ["rmtree", "replace"])
def test_a_server_that_dies_while_it_overwrites_has_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Between any two of its steps. What it left is gone, also that of an earlier process of its number."""
    with serving(tmp_path) as (url, _):
        trainer = adapter(url)
        path = trainer.save_state(name="x").result().path
        losses(trainer, 1)
        with monkeypatch.context() as patch:
            if point == "rmtree":
                patch.setattr(tinker_api, "_publish", lambda new: None)
            else:
                patch.setattr(tinker_api, "_publish", lambda new: shutil.rmtree(new.with_name("x")))
            trainer.save_state(name="x", overwrite=True).result()
        expected = losses(trainer, 2)
    folder = next(tmp_path.glob("tinker/*/weights"))
    half = folder / f".x~.{os.getpid()}.tmp"
    half.mkdir()
    with serving(tmp_path) as (url, _):
        assert [each.name for each in folder.iterdir()] == ["x"]
        trainer = connect(url).create_training_client_from_state_with_optimizer(path).result()
        assert losses(trainer, 2) == expected
        half.mkdir()


def test_a_session_may_end_before_its_requests_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run, and its models and snapshots are then forgotten."""
    go = threading.Event()
    with serving(tmp_path) as (url, api):
        create, engine = api._engine.create, api._engine
        service = connect(url)
        trainer = service.create_lora_training_client(base_model=BASE, rank=2).result()
        monkeypatch.setattr(engine, "create", lambda *given: go.wait() and create(*given))
        other = connect(url, "tml-b").create_lora_training_client(base_model=BASE, rank=2)
        headers, model = {"X-API-Key": "tml-a"}, trainer.model_id
        saved = {"model_id": model, "path": "kept", "seq_id": 1}
        sampled = {"model_id": model, "sampling_session_seq_id": 7, "seq_id": 2}
        for path, body in (("save_weights", saved), ("save_weights_for_sampler", sampled)):
            assert httpx.post(f"{url}/api/v1/{path}", json=body, headers=headers).status_code == 200
        service.close("success").result()
        go.set()
        other.result()
        losses(adapter(url), 1)
        assert next(tmp_path.glob("tinker/*/weights")).joinpath("kept", "tinker.json").is_file()
        assert not [name for name in (*engine._tenants, *engine._sampled) if model[:32] in name]  # type: ignore[attr-defined]


def test_a_server_that_ends_while_it_computes_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop is gone when the result arrives."""
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    go = threading.Event()
    with serving(tmp_path) as (url, api):
        monkeypatch.setattr(api._engine, "step", lambda *given: {"waited": float(go.wait())})
        model = adapter(url).model_id
        stepped = {"model_id": model, "seq_id": 1, "adam_params": {}}
        answer = httpx.post(f"{url}/api/v1/optim_step", json=stepped, headers={"X-API-Key": "tml-a"})
        assert answer.status_code == 200
        threading.Timer(2.0, go.set).start()
    assert go.is_set()
    assert not failed


def test_results_are_forgotten_some_time_after_a_client_has_fetched_them(
    server: tuple[str, TinkerAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    monkeypatch.setattr(tinker_api, "KEPT_S", 0.5)
    asked, headers = {"request_id": f"{adapter(url).model_id}:0"}, {"X-API-Key": "tml-a"}

    def status() -> int:
        return httpx.post(f"{url}/api/v1/retrieve_future", json=asked, headers=headers).status_code

    assert status() == 200
    time.sleep(1.0)
    assert status() == 410


def test_a_client_that_hangs_up_is_no_error(
    server: tuple[str, TinkerAPI], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = server
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as half:
        half.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        losses(adapter(url), 1)  # others do not wait
    losses(adapter(url), 1)
    assert not [record for record in caplog.records if record.exc_info]


def tensors(shape: tuple[int, ...], **arrays: list[int]) -> pb.Tensor:
    content = {name: np.array(x, np.int64).tobytes() for name, x in arrays.items()}
    if "dense" in content:
        return pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, **content)
    return pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, sparse_csr=pb.SparseCsr(**content))


@pytest.mark.parametrize(
    "tensor",
    [
        tensors((2**32, 2**32), dense=[]),
        tensors((-1, 3), values=[], crow_indices=[], col_indices=[]),
        tensors((4, 2**62), values=[], crow_indices=[0] * 5, col_indices=[]),
        tensors((1, 2**31), values=[], crow_indices=[0, 0], col_indices=[]),
    ],
)
def test_sizes_that_overflow_are_refused(tensor: pb.Tensor) -> None:
    asked = pb.ForwardBackwardRequest()
    asked.data.add().loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    with pytest.raises(UserError, match=r"data\[0\].target_tokens: expected"):
        wire.read_pass(asked)


def test_no_key_of_agents_is_one_of_this_api() -> None:
    server = AgentServer(ModelRecorder(None, RLConfig()), ServeConfig(), "m", "s3cret-of-a-test")  # type: ignore[arg-type]
    assert server.key("tinker/end") not in key_of("s3cret-of-a-test", "end")
