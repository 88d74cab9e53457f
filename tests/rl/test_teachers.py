"""Teachers of rollouts, as snapshots and as a server of vLLM, against transformers on every rollout alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.test_reference import exported, make
from tests.support.rl_runs import Letters, rows
from tests.support.rollout_server import RolloutServer, rollout_server
from titan_tree.errors import UserError
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.tree.paths import TokenPath

K = 4
OPTIONS = (
    "rl.environment=taught",
    "loss.name=distill_topk",
    "loss.reduction=token_mean",
    f"rl.teacher.top_k={K}",
)


class Taught(Letters):
    """Tasks of two teachers."""

    def episode(self, draw: random.Random) -> Any:
        episode = super().episode(draw)
        episode.teacher = "large" if draw.random() < 0.5 else "served"
        return episode


def log_p(hf: Any, tokens: Any) -> torch.Tensor:
    """Returns the log-probs [T - 1, V] of one path, run alone."""
    with torch.no_grad():
        return hf(torch.tensor([list(map(int, tokens))])).logits[0, :-1].float().log_softmax(-1)


class TeacherServer(RolloutServer):
    """Answers as vLLM does to prompt_logprobs: with the likeliest ids and the prompt's own, null first."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "teacher"}]}
        assert (path, body["model"], body["max_tokens"]) == ("/v1/completions", "teacher", 1)
        self.samples.append(body)
        entries: list[Any] = [None]
        for token, row in zip(body["prompt"][1:], log_p(self.hf, body["prompt"]), strict=True):
            ids = [token, *row.topk(body["prompt_logprobs"]).indices.tolist()]
            entries.append({str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": "x"} for i in ids})
        return {"choices": [{"prompt_logprobs": entries, "text": "x"}]}


def teachers(folder: Path) -> list[Any]:
    """Returns two models of transformers, in folder/large and folder/served."""
    found = []
    for seed, name in enumerate(("large", "served")):
        trainer = make(folder / f"{name} run", f"training.seed={seed + 7}")
        with torch.no_grad():
            trainer.model.embedding_weight.mul_(8.0)  # far from uniform predictions
        found.append(exported(trainer.model, folder / name))
        trainer.close()
    return found


def check(path: TokenPath, hf: Any, has_label: bool) -> None:
    want, targets = log_p(hf, path.tokens), path.teacher_topk
    assert targets is not None
    assert ((targets.sizes > 0) == (path.loss_mask > 0)).all()
    for t in np.flatnonzero(targets.sizes):
        got, row = targets.of_tokens(np.array([t])), want[t - 1]
        ids = {*row.topk(K).indices.tolist(), *([int(path.tokens[t])] if has_label else [])}
        assert {*got.ids.tolist()} == ids
        assert got.logprobs == pytest.approx(row[got.ids].numpy(), abs=1e-5)


def test_each_task_is_taught_by_its_teacher(tmp_path: Path) -> None:
    ENVIRONMENTS.register("taught", Taught)
    large, served = teachers(tmp_path)
    server = TeacherServer(served)
    with rollout_server(server) as url:
        models = f"rl.teacher.models={{large: {tmp_path}/large, served: {url}}}"
        trainer = make(tmp_path / "run", *OPTIONS, models, "training.steps=1", "data.global_batch_groups=6")
        student = exported(trainer.model, tmp_path / "student")
        trainer.train()
        trainer.close()
    assert {path.teacher for path in trainer.seen} == {"large", "served"}
    divergences = []
    for path in trainer.seen:
        is_served = path.teacher == "served"
        check(path, served if is_served else large, has_label=is_served)
        own = log_p(student, path.tokens)
        for t in np.flatnonzero(path.loss_mask[1:]):
            targets = path.teacher_topk.of_tokens(np.array([t + 1]))
            p, q = torch.from_numpy(targets.logprobs).exp(), own[t][targets.ids].exp()
            p, q = (torch.cat([x, 1 - x.sum()[None]]) for x in (p, q))
            divergences.append(float((p * (p / q).log()).sum()))
    assert float(rows(tmp_path / "run")[0]["loss"]) == pytest.approx(np.mean(divergences), rel=1e-3)
    prompts = {tuple(body["prompt"]) for body in server.samples}
    assert len(prompts) == len(server.samples)
    assert prompts <= {tuple(path.tokens.tolist()) for path in trainer.seen if path.teacher == "served"}


def test_wrong_teachers_are_refused(tmp_path: Path) -> None:
    ENVIRONMENTS.register("taught", Taught)
    with pytest.raises(
        UserError, match=r"^rl\.teacher\.models: expected the teachers of the loss 'distill_topk'"
    ):
        make(tmp_path / "none", *OPTIONS)
    with pytest.raises(UserError, match=r"^rl\.teacher\.models: expected none for the loss"):
        make(tmp_path / "unread", "rl.teacher.models={a: /none}")
    with pytest.raises(UserError, match=r"^rl\.teacher\.models: expected the folder of a snapshot, or the"):
        make(tmp_path / "missing", *OPTIONS, "rl.teacher.models={a: /none}")
    with pytest.raises(
        UserError, match=r"rl\.teacher\.models: expected a table of folders and addresses by name"
    ):
        make(tmp_path / "number", *OPTIONS, "rl.teacher.models={a: 3}")
    with pytest.raises(
        UserError, match=r"^rl\.top_p, rl\.top_k and rl\.min_p: expected 1, 0 and 0 with a server"
    ):
        make(tmp_path / "cut", *OPTIONS, "rl.teacher.models={a: 'http://h:1'}", "rl.top_p=0.9")
    large, _ = teachers(tmp_path)
    trainer = make(
        tmp_path / "unnamed", *OPTIONS, f"rl.teacher.models={{a: {tmp_path}/large, b: {tmp_path}/served}}"
    )
    with pytest.raises(
        UserError, match=r"^rl\.teacher\.models: expected a task whose teacher is one of a, b, got"
    ):
        trainer.train()
    trainer.close()
    server = TeacherServer(large)
    with rollout_server(server) as url:
        trainer = make(
            tmp_path / "old", *OPTIONS[1:], "rl.environment=letters", f"rl.teacher.models={{a: {url}}}"
        )
        answer = server.answer
        server.answer = lambda path, body: {"choices": [{"text": "x"}]}  # type: ignore[method-assign]
        with pytest.raises(
            UserError, match=r"expected prompt_logprobs, with each of the \d+ tokens in an entry"
        ):
            trainer.train()
        trainer.close()
        server.answer = answer  # type: ignore[method-assign]
