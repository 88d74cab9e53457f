"""Unmodified recipes of tinker-cookbook against the server; only data sets that need a download are replaced.

They need the package tinker-cookbook, which the everyday environment does not have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("tinker_cookbook")

import datasets
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.recipes.multiplayer_rl.guess_number import train as guess_number
from tinker_cookbook.rl import train

from tests.support.tinker_server import serving
from tests.support.vllm_server import save_tokenizer
from titan_tree.models.pretrained import build_model, save_pretrained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
# The recipes choose renderers by this name. Here, it is a folder.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    monkeypatch.chdir(tmp_path)
    folder = Path(MODEL)
    save_pretrained(build_model("qwen3", "debug", **sizes), folder)
    save_tokenizer(folder, SPECIAL)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving(tmp_path / "served", MODEL) as (address, _):
        monkeypatch.setenv("TINKER_BASE_URL", address)
        yield address


def logged(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_guess_number(url: str, tmp_path: Path) -> None:
    """A multi-turn environment. What sampling reported and training read are equal log-probs."""
    config = guess_number.CLIConfig(
        model_name=MODEL,
        renderer_name="qwen3_instruct",
        group_size=2,
        batch_size=2,
        max_tokens=4,
        eval_every=0,
        save_every=0,
        max_steps=2,
        log_path=str(tmp_path / "run"),
    )
    asyncio.run(train.main(guess_number.build_config(config)))
    assert len(logged(tmp_path / "run", "optim/kl_sample_train_v2")) == 2
    assert max(logged(tmp_path / "run", "optim/kl_sample_train_v2")) < 1e-9


def test_sl_loop(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns, is stopped, and continues with the optimizer's states from its last checkpoint."""
    chat = [{"role": "user", "content": "Greet me."}, {"role": "assistant", "content": "Good morning."}]
    rows = datasets.Dataset.from_list([{"messages": chat}] * 24)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=rows))
    settings = {"model_name": MODEL, "batch_size": 4, "learning_rate": 5e-3, "lora_rank": 4, "save_every": 2}
    sl_loop.main(sl_loop.Config(log_path=str(tmp_path / "whole"), **settings))
    whole = logged(tmp_path / "whole", "train_mean_nll")
    assert len(whole) == 6
    assert whole[-1] < 0.9 * whole[0]


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """A reward that random text gets: how many of its bytes are capital letters."""
    rows = datasets.Dataset.from_list(
        [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(4)]
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=rows))
    monkeypatch.setattr(rl_loop, "get_reward", lambda text, _: float(sum(c.isupper() for c in text)))
    settings = {"batch_size": 2, "group_size": 4, "max_tokens": 8, "lora_rank": 4, "save_every": 0}
    rl_loop.main(rl_loop.Config(model_name=MODEL, log_path=str(tmp_path / "run"), loss_fn=loss, **settings))
    assert len(logged(tmp_path / "run", "reward/total")) == 2
    assert min(logged(tmp_path / "run", "grad_norm:mean")) > 0
