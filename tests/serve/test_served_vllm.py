"""``titan-tree serve`` in front of vLLM itself, on a CPU in fp32: an agent with tools, up to its rows."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support import vllm_server
from titan_tree import TreeTokenizer
from titan_tree.config.toml import load_tables
from titan_tree.models.pretrained import load_pretrained
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.settings import RLRunConfig
from titan_tree.scoring.score_trees import score_paths
from titan_tree.tree.paths import TokenPath

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not vllm_server.IS_INSTALLED, reason="needs the environment of scripts/vllm_cpu.sh"),
]
pytest.importorskip("openai")

from examples.agent_desk import AGENT, AgentDesk  # noqa: E402  # imports openai

ROOT = Path(__file__).parents[2]
QWEN3 = ROOT / "titan_tree" / "components" / "tree_tokenizer" / "qwen3.jinja"
CONTROL, MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SESSIONS = 12


class ThoughtfulDesk(AgentDesk):
    """The desk of the examples, whose turns begin with a thought."""

    def demonstrations(self, draw: Random) -> list[list[Any]]:
        def with_thought(message: Any) -> Any:
            if message["role"] != "assistant":
                return message
            thought = "I look them up." if message.get("tool_calls") else "I add them."
            return message | {"reasoning_content": draw.choice((thought, "Now this.", "Well."))}

        return [list(map(with_thought, messages)) for messages in super().demonstrations(draw)]


def save_bpe(folder: Path, without: str | None = None) -> int:
    """Writes a tokenizer with Qwen3's chat template. Returns the number of its ids.

    Args:
        without: it never makes the tokens that contain this text, though they have ids.
    """
    plain, desk = TreeTokenizer.byte_level("qwen3"), ThoughtfulDesk()
    tools = desk.task(Random(0)).tools
    texts = [plain.render(each, tools) for i in range(50) for each in desk.demonstrations(Random(i))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if without is not None:
        content = json.loads(tokenizer.to_str())
        content["model"]["merges"] = [m for m in content["model"]["merges"] if without not in "".join(m)]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKS + CALLS])
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=QWEN3.read_text()
    )
    saved.save_pretrained(folder)
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with a tokenizer and a chat template, which calls the tool of the desk's agent.

    It has learned to think in other tokens than those that its tokenizer would choose.
    """
    folder = tmp_path_factory.mktemp("policy")
    size = save_bpe(folder / "tokenizer", without="hem")
    keys = [f"data.tokenizer={folder}/tokenizer", f"folder={folder}", f"model.overrides.vocab_size={size}"]
    keys += ["rl.environment=thoughtful", "metrics.loggers=[csv]", "rl.max_turn_tokens=96"]
    keys += [
        "warm_start.steps=100",
        "warm_start.interval=100",
        "warm_start.reward=0",
        "warm_start.measured_tasks=1",
    ]
    with ENVIRONMENTS.registered("thoughtful", ThoughtfulDesk):
        warm = after_warm_start(load_tables(RLRunConfig, ROOT / "examples/agent_desk.toml", keys))
    assert warm.model.hf_path is not None
    snapshot = Path(warm.model.hf_path)
    vllm_server.prepare(snapshot)
    save_bpe(snapshot)
    return snapshot


@pytest.fixture(scope="module")
def vllm(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of vLLM with contexts of at most 1024 tokens."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    server = vllm_server.VLLMServer(snapshot, log, "--max-model-len", "1024")
    try:
        server.start()
        yield server.url
    finally:
        server.kill()


def start(snapshot: Path, vllm: str, folder: Path, log: Path, max_tokens: int) -> subprocess.Popen[bytes]:
    """Starts ``titan-tree serve`` with contexts of at most ``max_tokens``."""
    command = [sys.executable, "-m", "titan_tree", "serve", str(ROOT / "train_configs/serve.toml")]
    command += [f"model.hf_path={snapshot}", f"folder={folder}", f"rl.server.url={vllm}"]
    command += ["rl.server.model=policy", "serve.port=0", f"rl.max_rollout_tokens={max_tokens}"]
    command += ["rl.max_turn_tokens=96"]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)


@pytest.fixture(scope="module")
def served(snapshot: Path, vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yields the URL of ``titan-tree serve`` and its folder."""
    folder = tmp_path_factory.mktemp("served")
    log = folder / "serve.log"
    process = start(snapshot, vllm, folder / "sessions", log, 1024)
    try:
        while (found := re.search(r"OPENAI_BASE_URL=(\S+)/s/SESSION/v1", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield found[1], folder / "sessions"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM, log.read_text()


def name_of(number: int) -> str:
    """Returns the name of a session. Four agents have the same task."""
    return f"desk{number // 4}.{number}"


def play(url: str, number: int, folder: Path) -> None:
    """Runs the agent of the examples on a task, and ends its session with the reward."""
    session, task = f"{url}/s/{name_of(number)}", AgentDesk().task(Random(number // 4))
    folder.mkdir()
    (folder / "task.json").write_text(task.files["task.json"])
    variables = {"OPENAI_BASE_URL": f"{session}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": "policy"}
    ran = subprocess.run(
        [sys.executable, AGENT], cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    httpx.post(f"{session}/end", json={"reward": task.reward(folder, ran.returncode)}).raise_for_status()


def test_rows_have_the_ids_and_logprobs_of_vllm(
    served: tuple[str, Path], snapshot: Path, tmp_path: Path
) -> None:
    """12 agents, 4 at a time. A row's log-probs are those of the weights, to 1e-4 nats."""
    url, folder = served
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: play(url, number, tmp_path / str(number)), range(SESSIONS)))
    calls, rows = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("calls.jsonl", "rows.jsonl")
    )
    assert sorted(row["rollout_id"] for row in rows) == sorted(map(name_of, range(SESSIONS)))  # no fork
    assert {row["group_id"] for row in rows} == {"desk0", "desk1", "desk2"}
    turns = [call for call in calls if "turn" in call]
    contexts: dict[tuple[str, int], list[int]] = {}
    for call in turns:  # what vLLM read: the ids before it, and new ones
        before = [] if call["parent"] is None else contexts[call["session"], call["parent"]]
        contexts[call["session"], call["number"]] = before + call["read"] + call["turn"]
        assert (call["parent"], call["fork"]) == (call["number"] - 1 if call["number"] else None, "")
    assert sum(call["number"] > 0 for call in turns) >= 4
    tokenizer = TreeTokenizer.load(str(snapshot))
    encoded = [tokenizer.encode(tokenizer.decode(call["turn"])) for call in turns]
    assert sum(ids != call["turn"] for ids, call in zip(encoded, turns, strict=True)) >= 4
    scored = score_paths(
        load_pretrained(snapshot, torch.float32), [TokenPath(row["tokens"], row["loss_mask"]) for row in rows]
    )
    for row, score in zip(rows, scored, strict=True):
        *_, last = [key for key in contexts if key[0] == row["rollout_id"]]
        assert row["tokens"] == contexts[last]
        written = [call["turn"] for call in turns if call["session"] == row["rollout_id"]]
        trained = np.flatnonzero(row["loss_mask"])
        assert np.array(row["tokens"])[trained].tolist() == [token for turn in written for token in turn]
        got = np.array([row["rollout_logprobs"][at] for at in trained])
        assert got.mean() < -0.01
        np.testing.assert_allclose(got, score.logprobs.numpy()[trained], rtol=0, atol=1e-4)


def test_contexts_must_fit_vllm(snapshot: Path, vllm: str, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    assert start(snapshot, vllm, tmp_path / "sessions", log, 2048).wait(120) == 2
    assert "expected at most the server's 1,024 tokens, got 2,048; lower it" in log.read_text()
