"""Settings that do not fit together are refused, and before a warm start begins."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.rl_runs import tiny
from titan_tree import build_model, save_pretrained
from titan_tree.errors import UserError
from titan_tree.rl.run import check_without_weights, run
from titan_tree.tree.context import Completion

SERVER = ("rl.server.url=http://h:1", "rl.server.model=policy")
KL = "loss.kl.coefficient=0.1"


class Parrot:
    def sample(self, contexts: Any, max_tokens: Any, stops: Any, seeds: Any) -> list[Completion]:
        return [Completion(stops[:1], [-1.0]) for _ in contexts]


@pytest.mark.parametrize("steps", [0, 100])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rl.advantage_options={omega: 1}"], "rl.advantage_options.omega: 'spo' has no such option"),
        (["rl.advantage=group"], "rl.branches: expected 0, because rl.advantage = 'group' would take"),
        (["rl.async_steps=1"], "rl.async_steps: expected 0, because the sampler has no weights of its own"),
        (["rl.async_steps=-1"], "rl.async_steps: expected at least 0, got -1"),
        (["data.replay=first"], "data.replay: expected 'off' without a server"),
        (["model.name=qwen3_moe", "data.replay=first"], "data.replay: expected 'off' without a server"),
        ([*SERVER, "data.replay=first"], "data.replay: expected 'off' for a model without experts"),
        (["rl.reference=/none"], "rl.reference: expected none, because the loss reads no ref_logprobs"),
        ([KL, "rl.reference=/none"], "rl.reference: expected the folder of a snapshot, got '/none'"),
        (
            ["loss.name=sft"],
            "loss.name: expected a loss that reads the advantages of rollouts, such as 'grpo'",
        ),
        (["loss.name=distill"], "rl.reference: expected the teacher's snapshot"),
        (["loss.options={clip: 1}"], "loss 'grpo': unknown option 'clip'"),
        (["loss.correction.level=max"], "loss.correction"),
        (["lora.rank=2", "lora.targets=[x_proj]"], "unknown target of LoRA (lora.targets) 'x_proj'"),
        (["lora.rank=2", "lora.quantize=nf4", "training.compile=true"], "training.compile: expected false"),
        (["rl.server.url=h:1", "rl.server.model=policy"], "rl.server.url: expected a URL such as"),
        (["rl.server.url=http://h:1"], "rl.server.model: expected the name under which vLLM serves"),
        (
            [*SERVER, "rl.server.weights=broadcast"],
            "rl.server.weights: expected one of folder, adapter, got 'broadcast'",
        ),
        (
            [*SERVER, "rl.server.api=sglang"],
            "'rl.server.api' was removed; delete it, and serve the model with vLLM",
        ),
        ([*SERVER, "rl.server.weights=adapter"], 'rl.server.weights: expected "folder" for a model without'),
        (
            [*SERVER, "rl.server.api_key_env=NO_SUCH_KEY"],
            "rl.server.api_key_env: expected the name of an environment variable that is set",
        ),
        (
            [*SERVER, "model.name=qwen3_moe", "router_bias.rate=0.1"],
            "rl.server.url: expected a model without router biases",
        ),
    ],
)
def test_wrong_settings_are_refused_before_the_warm_start(
    tmp_path: Path, overrides: list[str], message: str, steps: int
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        run(tiny(tmp_path, f"warm_start.steps={steps}", *overrides))
    assert steps == 0 or not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [0, 100])
@pytest.mark.parametrize("server", [(), SERVER], ids=["model", "server"])
def test_contexts_that_the_model_cannot_read_are_refused(
    tmp_path: Path, server: tuple[str, ...], steps: int
) -> None:
    """Also those of a server, because the model trains on them. A sampler of Python code may sample fewer."""
    overrides = [f"warm_start.steps={steps}", "model.overrides.max_position_embeddings=110", *server]
    message = "rl.max_rollout_tokens: expected at most the model's 110 positions, got 111; lower it"
    with pytest.raises(UserError, match=message):
        run(tiny(tmp_path, *overrides, "rl.max_rollout_tokens=111"))
    assert not (tmp_path / "warm_start").exists()
    check_without_weights(tiny(tmp_path, *overrides, "rl.max_rollout_tokens=110"))
    if not server:
        check_without_weights(tiny(tmp_path, *overrides, "rl.max_rollout_tokens=111"), Parrot())


def test_a_reference_with_another_vocabulary_is_refused_before_the_warm_start(tmp_path: Path) -> None:
    save_pretrained(build_model("qwen3", "debug", vocab_size=270), tmp_path / "small")
    with pytest.raises(UserError, match=r"rl.reference: expected a model with the 282 token ids .* got 270"):
        run(tiny(tmp_path / "run", "warm_start.steps=100", KL, f"rl.reference={tmp_path}/small"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, 100])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (SERVER, "rl.server.url: expected none together with a sampler that Python code gives"),
        (["rl.async_steps=1"], "rl.async_steps: expected 0, because the sampler has no weights of its own"),
        (
            ["rl.top_p=0.8"],
            r"rl.top_p, rl.top_k and rl.min_p: expected 1, 0 and 0 .* got 0.8, 0, 0.0; remove",
        ),
    ],
)
def test_a_sampler_of_python_code_must_fit_the_settings(
    tmp_path: Path, overrides: list[str], message: str, steps: int
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny(tmp_path, f"warm_start.steps={steps}", *overrides), Parrot())
    assert not list(tmp_path.iterdir())
