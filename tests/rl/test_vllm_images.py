"""Rollouts with images that vLLM itself samples, on a CPU in fp32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rl.test_sampling import TOKENIZER
from tests.rl.test_server_runs import check_logprobs, ran
from tests.support import vllm_server
from tests.support.colours import Pages, square
from tests.support.rl_runs import DEMO, TINY
from titan_tree.config.toml import load_tables
from titan_tree.models.pretrained import load_pretrained
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.rl.server.server_sampler import ServerSampler
from titan_tree.rl.settings import RLRunConfig
from titan_tree.scoring.score_trees import score_paths
from titan_tree.tree.context import Context
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath

pytestmark = [
    pytest.mark.slow,  # the everyday suite does not even import this file
    pytest.mark.exhaustive,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not vllm_server.IS_INSTALLED, reason="needs the environment of scripts/vllm_cpu.sh"),
]
PAD, STARTS, ENDS = (
    TOKENIZER.special_tokens[f"<|{name}|>"] for name in ("image_pad", "vision_start", "vision_end")
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server, and its snapshot."""
    folder = tmp_path_factory.mktemp("vision")
    vllm_server.save_vision_snapshot(folder / "hf", TOKENIZER.special_tokens)
    server = vllm_server.VLLMServer(folder / "hf", folder / "server.log", "--max-model-len", "512")
    try:
        server.start()
        yield server.url, folder / "hf"
    finally:
        server.kill()


def test_logprobs_are_those_of_the_model_with_the_image(served: tuple[str, Path]) -> None:
    url, snapshot = served
    draw = np.random.default_rng(0)
    shots = [Image(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((256, 256), (224, 320))]
    changed = shots[1].pixels.copy()
    changed[64:96, 32:64] ^= 255  # a token of 70

    def context(*images: Image) -> Context:
        tokens, at = [40, 41], []
        for image in images:
            at.append((len(tokens) + 1, image))
            tokens += [STARTS, *[PAD] * len(image), ENDS, 50, 51]
        return Context(tokens, tuple(at))

    contexts = [context(*shots), context(shots[0], Image(changed)), context(square("red"), *shots[:1] * 2)]
    turns = ServerSampler(url, "policy").sample(contexts, [12] * 3, [1], [3, 3, 4])
    model = load_pretrained(snapshot, torch.float32, vision="frozen")

    def error(images: Context, sampled: Context, turn: int) -> float:
        path = TokenPath(
            sampled + turns[turn].tokens, images=images.images, loss_mask=np.zeros(len(sampled) + 12)
        )
        logprobs = score_paths(model, [path])[0].logprobs[len(sampled) :].numpy()
        return float(np.abs(logprobs - turns[turn].logprobs).max())

    errors = [error(each, each, turn) for turn, each in enumerate(contexts)]
    assert max(errors) < 2e-5
    assert error(contexts[1], contexts[0], 0) > 0.01  # as if the other image had been shown


def test_a_run_trains_on_what_the_weights_of_each_step_sampled(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    """The tower is trained, so the features of images change with every step."""
    url, snapshot = served
    ENVIRONMENTS.register("pages", Pages)
    keys = [key for key in TINY if not key.startswith("model.")]
    keys += ["model.flavor=null", "model.overrides={}", f"model.hf_path={snapshot}", "model.vision=train"]
    keys += ["rl.environment=pages", f"rl.server.url={url}", "rl.server.model=policy", f"folder={tmp_path}"]
    keys += ["rl.max_rollout_tokens=300", "rl.max_turn_tokens=100", "training.steps=3", "optimizer.lr=0.01"]
    check_logprobs(ran(load_tables(RLRunConfig, DEMO, keys)), [0, 0, 0])
