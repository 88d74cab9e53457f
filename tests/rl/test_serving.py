"""``titan-tree serve`` refuses what would end it later."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from titan_tree import UserError
from titan_tree.config.toml import load_tables
from titan_tree.rl import serving
from titan_tree.rl.serving import serve
from titan_tree.rl.settings import RLRunConfig
from titan_tree.serve.agent_server import AgentServer
from titan_tree.tree.context import Completion

SERVE = Path(__file__).parents[2] / "train_configs" / "serve.toml"
TINY = ["model.flavor=debug", "model.overrides.vocab_size=282", "data.tokenizer=byte", "serve.port=0"]


def test_contexts_must_fit_the_model(tmp_path: Path) -> None:
    keys = [*TINY, f"folder={tmp_path}/sessions", "model.overrides.max_position_embeddings=512"]
    expected = "rl.max_rollout_tokens: expected at most the model's 512 tokens, got 32,768; lower it"
    with pytest.raises(UserError, match=re.escape(expected)):
        serve(load_tables(RLRunConfig, SERVE, keys))
    assert not (tmp_path / "sessions").exists()


def test_a_turn_that_another_server_refuses_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets status 500, and may try again. It does not see the other server's address."""
    asked, over = [], threading.Event()

    class Refusing:
        def sample(self, contexts: Any, limits: Any, stops: Any, seeds: Any) -> list[Completion]:
            asked.append(contexts)
            if len(asked) == 1:
                raise UserError("http://secret:1: refused a request")
            return [Completion([65, stops[0]], [-1.0, -1.0]) for _ in contexts]

    def watch(_: object, stopped: threading.Event) -> None:
        over.wait()
        stopped.set()

    urls: list[str] = []
    start = AgentServer.start
    monkeypatch.setattr(AgentServer, "start", lambda server: urls.append(start(server)) or urls[0])
    monkeypatch.setattr(serving, "_sampler", lambda *_: (Refusing(), None))
    monkeypatch.setattr(serving, "_watch", watch)
    config = load_tables(RLRunConfig, SERVE, [*TINY, f"folder={tmp_path}", "rl.max_rollout_tokens=512"])
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, config)
        try:
            while not urls:
                over.wait(0.01)
            body = {"model": "debug", "messages": [{"role": "user", "content": "hi"}]}
            answers = [httpx.post(f"{urls[0]}/s/a/v1/chat/completions", json=body) for _ in range(2)]
        finally:
            over.set()
        served.result()
    assert [answer.status_code for answer in answers] == [500, 200]
    assert "secret" not in answers[0].text
    assert answers[1].json()["choices"][0]["message"]["content"] == "A"
