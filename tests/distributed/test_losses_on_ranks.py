"""Two ranks, and partitions, give the loss, the metrics and the gradients of one rank in one pass.

This holds for every loss, for what a loss can add, and for every advantage estimator.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.processes import process_group, run_ranks
from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_loss.settings import LOSSES
from titan_tree.components.tree_loss.spec import LossSpec
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.advantages import advantages
from titan_tree.data.settings import ADVANTAGES
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

VOCAB, MAX_TOKENS = 64, 24  # of a partition
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "head_dim": 16}
HYBRID: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
# A model, and how two ranks share its work besides its weights.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "dense": ("qwen3", SIZES, {}),
    "hybrid": ("qwen3_5", SIZES | HYBRID, {}),
    "experts": ("qwen3_moe", SIZES, {}),
    "shared tokens": ("qwen3", SIZES, {"sequence_parallel": 2}),
    "sharded experts": ("qwen3_moe", SIZES, {"expert_parallel": 2}),
}
REDUCTIONS = {
    "sft": "rollout_token_mean",
    "grpo": "path_token_mean",
    **dict.fromkeys(("sapo", "gspo", "gspo_token", "gmpo"), "path_token_mean"),
    **dict.fromkeys(("reinforce", "ppo"), "path_mean"),
}

# Name -> arguments of TreeLoss, and the advantage estimator (None: random advantages)
Case = tuple[dict[str, Any], str | None]
BUILT_IN = [name for name in LOSSES if LossSpec.of(name).function.__module__.startswith("titan_tree.")]
CASES: dict[str, Case] = {name: ({"name": name}, None) for name in BUILT_IN}
CASES |= {
    f"correction by {level}": ({"name": "dapo", "correction": correction}, None)
    for level, correction in {
        "token": RolloutCorrection("token", "truncate", high=1.1),
        "sequence": RolloutCorrection("sequence", "mask", 0.5, 1.5),
        "geometric mean": RolloutCorrection("geometric", "reject", 0.9, 1.05),
        "k2 of tokens": RolloutCorrection("token", "reject", high=0.02, estimator="k2"),
        "sum of k3": RolloutCorrection("sequence", "reject", high=0.3, estimator="k3"),
        "largest k3": RolloutCorrection("max", "reject", high=0.1, estimator="k3"),
    }.items()
}
CASES |= {
    "KL penalty": ({"name": "grpo", "kl": KLPenalty(0.1)}, None),
    "KL in rewards": ({"name": "gspo", "kl": KLPenalty(0.1, "k1", as_reward=True), "whiten": True}, None),
    "entropy": ({"name": "sft", "entropy": 0.1}, None),
    "whitened tree_po": ({"name": "reinforce", "whiten": True}, "tree_po"),
}
CASES |= {f"advantage {name}": ({"name": "ppo"}, name) for name in ADVANTAGES}
FEW = ["gspo", "kto", "distill_topk", "correction by sum of k3", "whitened tree_po"]


def make_loss(case: str) -> TreeLoss:
    arguments, _ = CASES[case]
    default = REDUCTIONS.get(arguments["name"], "token_mean")
    return TreeLoss(reduction=LossSpec.of(arguments["name"]).reduction or default, **arguments)


def make_trees(case: str) -> list[TokenTree]:
    """Returns five trees of two turns. Paths share the first turn, and have every field that a loss reads."""
    _, estimator = CASES[case]
    trees = []
    for group in range(5):
        draw = np.random.default_rng(group)

        def tokens(length: int, draw: np.random.Generator = draw) -> list[int]:
            return draw.integers(0, VOCAB, length).tolist()

        prompt, first, paths = tokens(6), [tokens(4), tokens(3)], []
        sides = ["chosen", "rejected", "rejected", "chosen", "mismatched"][: 4 if group == 3 else 5]
        for number, side in enumerate(sides):
            turn, answer = first[number // 3], tokens(int(draw.integers(2, 12)))
            mask = [0] * len(prompt) + [1] * len(turn) + [0, 0] + [1] * len(answer)
            old = draw.normal(-4.2, 0.2, len(mask))
            noise = {
                name: old + draw.normal(0, 0.15, len(mask)) for name in ("ref_logprobs", "rollout_logprobs")
            }
            ids = [*prompt, *turn, 1, 2, *answer]
            path = TokenPath(
                ids,
                mask,
                weight=float(draw.choice([0.5, 1.0, 2.0])),
                advantage=draw.normal(size=len(mask)),
                old_logprobs=old,
                preference=side,
                pair=f"{group}/{number // 2}",
                teacher_topk=[{token: -1.0, (token + 7) % VOCAB: -2.0} for token in ids],
                **noise,
            )
            paths.append(path)
        if estimator is not None:
            rewards = draw.choice([0.0, 0.3, 1.0], len(paths)).tolist()
            for path, own in zip(paths, advantages(estimator, paths, rewards), strict=True):
                path.advantage = own
        trees.append(TokenTree.from_paths(paths))
    return trees


def exact_model(family: str) -> Decoder:
    name, sizes, _ = MODELS[family]
    model = build_model(name, "debug", **sizes)
    model.init_weights(0)
    return model.double()


def outcome(
    model: Decoder, case: str, micro_batches: Sequence[Sequence[TokenTree]], max_tokens: int | None
) -> dict[str, Tensor]:
    """Returns the loss, the metrics and the gradients of one step."""
    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(model, make_loss(case), partitioner=partitioner)
    result = step.run(step.prepare(micro_batches))
    found = {"loss": result.loss} | result.loss_metrics
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        parameter.grad = None
    return found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> None:
    assert got.keys() == want.keys(), where
    for name, value in want.items():
        error = float((got[name] - value).norm() / value.norm().clamp_min(1e-3))
        assert error < 1e-5, (where, name, error)


def on_two_ranks(rank: int, ports: list[int], family: str, file: Path) -> None:
    wanted = torch.load(file)
    with process_group(rank, 2, ports[0]):
        _, _, parallel = MODELS[family]
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize(exact_model(family), mesh, dtype=torch.float64, **parallel)
        assert isinstance(model, Decoder)
        for case, want in wanted.items():
            first, second, third, fourth, fifth = make_trees(case)
            # The second rank has one micro-batch, and runs a dummy batch besides.
            own = [[fourth, fifth]] if rank else [[first], [second, third]]
            if "sequence_parallel" in parallel:  # both ranks have the same trees
                own = [[first, second], [third, fourth, fifth]]
            for max_tokens in (None, MAX_TOKENS):
                where = f"{case}, {max_tokens} tokens, rank {rank}"
                assert_same(outcome(model, case, own, max_tokens), want, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("dense", FEW),  # a loss does not see the family
        *(pytest.param(family, list(CASES), marks=pytest.mark.exhaustive) for family in MODELS),
    ],
    ids=lambda value: value if isinstance(value, str) else "all" if value == list(CASES) else "few",
)
def test_ranks_and_partitions_change_nothing(tmp_path: Path, family: str, cases: list[str]) -> None:
    model, wanted = exact_model(family), {}
    for case in cases:
        trees = make_trees(case)
        wanted[case] = outcome(model, case, [trees], None)
        assert sum(float(value.norm()) for value in wanted[case].values()) > 1e-3
        assert_same(outcome(model, case, [trees[:2], trees[2:]], MAX_TOKENS), wanted[case], case)
    torch.save(wanted, tmp_path / "wanted.pt")
    run_ranks(on_two_ranks, 2, family, tmp_path / "wanted.pt")
