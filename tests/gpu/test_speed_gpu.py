"""Guards against slowness: ratios of speeds that contenders reach side by side in one process.

A ratio hardly depends on the state of the GPU, but other programs on it would disturb the measurement. The
tests therefore run alone: ``./scripts/test.sh -n 0 -s -m speed tests/gpu``, which prints the ratios. Layers
run without torch.compile, which would take longer than the measurements.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks import layouts, ratio
from benchmarks.steps import process_group
from benchmarks.timers import Contender, run_rounds, wall_s
from benchmarks.trees import random_tree
from tests.support.datasets import REAL_DATA, sample_reader
from titan_tree.cli.bench import parse
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.packing import leaf_trees
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.generate_sampler import GenerateSampler
from titan_tree.scoring.score_trees import score_trees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.speed,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the least ratios are those of a Hopper GPU",
    ),
]
MODEL = "--layers 8 --max-tokens 66000 --no-compile"  # of the size of Qwen3-0.6B, which has 28 layers


def arguments(bench: str, line: str) -> Namespace:
    """Returns the arguments of a benchmark."""
    return parse(import_module(f"benchmarks.{bench}"), bench, line.split())


def run(bench: str, line: str) -> Any:
    """Runs a benchmark and returns its rows."""
    return import_module(f"benchmarks.{bench}").run(arguments(bench, line))


def speed_ratio(ours: Callable[[], object], peer: Callable[[], object]) -> float:
    """Returns the peer's seconds over ours: medians of 5 calls in turn, after one call of both."""
    contenders = []
    for call in (ours, peer):
        call()
        contenders.append(Contender("", lambda call=call: [{"s": wall_s(call)}]))
    run_rounds(contenders, 5)
    our_s, peer_s = (contender.median("s") for contender in contenders)
    return peer_s / our_s


def attention(line: str = "--tree chain agent-fine --backends hopper flex --cases plain") -> list[float]:
    chain, _, tree, _ = run("attention", line)  # the second and fourth row are FlexAttention's
    ways = ("forward", "backward")
    beside_chain = [tree[f"{way}_tflops"] / chain[f"{way}_tflops"] for way in ways]
    return [*beside_chain, *(tree[f"{way}_x_flex"] for way in ways)]


def delta_net(line: str = "--tree chain agent-fine") -> list[float]:
    (tree,) = (row for row in run("recurrence", line)[1:] if row["x chain"])
    return [tree["x chain"]]


def experts(line: str = "--routing random --repeat 5 --no-compile") -> list[float]:
    return [run("experts", line)[1]["x transformers"]]  # the first row is the sharded layer


def step_on_a_chain(line: str = f"{MODEL} --max-tokens 16384 --chain 16384 --rounds 5") -> list[float]:
    (row,) = ratio.one_sequence(arguments("ratio", line))
    return [row["of operations"]]


def step_on_a_real_tree(line: str = f"{MODEL} --rounds 5") -> list[float]:
    if not REAL_DATA.is_dir():
        pytest.skip("needs the real rollouts")
    tokenizer = TreeTokenizer.from_tiktoken(REAL_DATA / "qwen.tiktoken.gz", template="chatml")
    reader = sample_reader(REAL_DATA / "tau_airline.jsonl.gz", tokenizer)
    case = layouts.Case("tau-bench", [reader.paths(next(iter(reader.files.groups())))])
    (row,) = layouts.compare([case], arguments("por", line))
    return [row["of operations"]]


def scoring(line: str = MODEL, shape: str = "agent-fine", num_tokens: int = 32_208) -> list[float]:
    args = arguments("por", line)
    tree = random_tree(shape, num_tokens, layouts.vocab_size(args))
    layout_trees = [tree], leaf_trees(tree.paths)
    with process_group() as (mesh, _), torch.no_grad():
        model = layouts.build(args, args.attention, mesh)
        ops = [model.costs().training_flops_of_trees(trees) for trees in layout_trees]
        ours, peer = (partial(score_trees, model, trees, args.max_tokens) for trees in layout_trees)
        return [speed_ratio(ours, peer) * ops[0] / ops[1]]


def sampling(line: str = MODEL, rollouts: int = 64, prompt: int = 1024, length: int = 64) -> list[float]:
    args = arguments("por", line)
    context = random_tree("chain", prompt, layouts.vocab_size(args)).tokens.tolist()
    asked = [context] * rollouts, [length] * rollouts, 0, range(rollouts)  # token 0, the end, is rarely drawn
    with process_group() as (mesh, _):
        model = layouts.build(args, args.attention, mesh)
        ours, peer = (partial(sampler(model).sample, *asked) for sampler in (CachedSampler, GenerateSampler))
        return [speed_ratio(ours, peer)]


# The least ratios are about 5 % below the lower one of an H200 (commit 19231e1) and an H100 (commit 284cba8).
# Scoring includes what the host does before the only forward pass, which takes as long as that pass here.
GUARDS: dict[Callable[..., Sequence[float]], dict[str, float]] = {
    attention: {
        "forward, useful TFLOP/s of the tree / of a chain": 0.80,
        "backward, useful TFLOP/s of the tree / of a chain": 0.79,
        "forward on the tree, speed / FlexAttention's": 1.71,
        "backward on the tree, speed / FlexAttention's": 2.16,
    },
    delta_net: {"tokens/s of the tree / of a chain": 0.87},
    experts: {"speed / transformers'": 1.04},
    step_on_a_chain: {"speed / with plain causal attention": 0.92},
    step_on_a_real_tree: {"speed-up over leaf rows / ratio of operations": 1.0},
    scoring: {"speed-up over leaf rows / ratio of operations": 0.55},
    sampling: {"speed / that of transformers' generate": 3.2},
}


@pytest.mark.parametrize("measure", GUARDS, ids=lambda measure: measure.__name__)
def test_ratios_have_not_fallen(measure: Callable[..., Sequence[float]]) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.fail("other tests run on the same GPU: measure alone, with -n 0")
    least = GUARDS[measure]
    ratios = dict(zip(least, measure(), strict=True))
    print(*(f"{name}: {value:.3f}, at least {least[name]}" for name, value in ratios.items()), sep="\n")
    assert [name for name, value in ratios.items() if value < least[name]] == []
