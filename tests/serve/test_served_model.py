"""What is recorded of a model that samples has the log-probs of ``tree_logprobs``."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from tests.support.agents import USER, follow
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.models.pretrained import build_model
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.model_recorder import ModelRecorder
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLConfig
from titan_tree.scoring.score_trees import score_paths
from titan_tree.serve.request import Request
from titan_tree.tree.paths import TokenPath


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_logprobs_of_sessions_are_those_of_trees(name):
    """Eight agents at once have three turns each. Fp32, 1e-4 nats."""
    torch.manual_seed(0)
    model, chat = build_model(name, "debug", vocab_size=264), Chat(TreeTokenizer.byte_level("chatml"))
    recorder = ModelRecorder(chat, RLConfig(max_turn_tokens=24))
    names, until = [f"task.{i}" for i in range(8)], threading.Event()

    async def agent(session):
        request = Request(messages=[USER])
        for turn in range(3):
            answer = await recorder.turn(session, request, digest=str(turn), is_retry=False)
            request = follow(request, answer, USER)

    async def agents():
        try:
            await asyncio.gather(*map(agent, names))
        finally:
            until.set()

    thread = threading.Thread(target=lambda: asyncio.run(agents()))
    thread.start()
    recorder.run(default_sampler(model), until)
    thread.join()
    sessions = [recorder.take(session) for session in names]
    assert [len(session.calls) for session in sessions] == [3] * 8
    paths = [path for session in sessions for path in session.paths()]
    assert len({tuple(path.tokens) for path in paths}) > 1
    scored = score_paths(model, [TokenPath(path.tokens, path.mask) for path in paths], 4096)
    for path, score in zip(paths, scored, strict=True):
        trained = np.flatnonzero(path.mask)
        got, want = np.array(path.logprobs)[trained], score.logprobs.numpy()[trained]
        assert np.abs(got - want).max() < 1e-4
