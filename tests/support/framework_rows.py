"""Five rows of two prompts, as frameworks sample them, and their losses in plain PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.hf_families import VOCAB, hf_family
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.transformers import TransformersModel
from titan_tree.scoring.score_trees import score_paths
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

DRAW = torch.Generator().manual_seed(0)


def draw_tokens(number: int) -> list[int]:
    return torch.randint(3, VOCAB, (number,), generator=DRAW).tolist()


def noise(number: int) -> Tensor:
    return torch.randn(number, generator=DRAW)


PROMPTS = [draw_tokens(7)] * 3 + [draw_tokens(4)] * 2
SHARED = draw_tokens(3)
RESPONSES = [SHARED + draw_tokens(4), SHARED + draw_tokens(2), SHARED, draw_tokens(6), draw_tokens(5)]
MASKS = [torch.ones(len(r)) for r in RESPONSES]
MASKS[0][2:4] = 0.0  # of a tool
MASKS[3][0] = 0.0
ADVANTAGES = [0.7, -1.1, 0.4, 1.3, -0.2]
TEMPERATURE = 0.8


def reference(temperature: float = TEMPERATURE) -> tuple[torch.nn.Module, list[Tensor], list[Tensor]]:
    """Returns a model, and log-probs and entropies [R] of each response alone, with gradients."""
    model, logprobs, entropies = hf_family("qwen3"), [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        log_p = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs.append(log_p.gather(1, ids[0, len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return model, logprobs, entropies


CURRENT = [logprobs.detach() for logprobs in reference()[1]]
OLD = [logprobs + 0.3 * noise(len(logprobs)) for logprobs in CURRENT]
SAMPLED = [logprobs + 0.1 * noise(len(logprobs)) for logprobs in OLD]


def per_sample(values: list[Tensor], fill: float) -> list[list[float]]:
    return [[fill] * len(p) + v.tolist() for p, v in zip(PROMPTS, values, strict=True)]


def clipped(logprobs: Tensor, old: Tensor, advantage: Any, clip: float = 0.2) -> Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


def check_scores(paths: Sequence[TokenPath], to_rows: Callable[[list[Tensor]], Any], want: Any) -> None:
    """Checks log-probs of paths in a framework's layout. ``want`` makes the layout of values per response."""
    model = TransformersModel(hf_family("qwen3"))
    _, logprobs, entropies = reference()
    for max_tokens in (None, 12):
        scores = score_paths(model, paths, max_tokens, entropies=True)
        found = [score.logprobs for score in scores], [score.entropies for score in scores]
        for got, expected in zip(found, (logprobs, entropies), strict=True):
            rows, wanted = to_rows(got), want([value.detach() for value in expected])
            assert len(rows) == len(wanted)
            for row, each in zip(rows, wanted, strict=True):
                counted = ~each.isnan()
                assert row.shape == each.shape
                torch.testing.assert_close(row[counted], each[counted], rtol=1e-5, atol=1e-5)


def check_step(paths: Sequence[TokenPath], loss: TreeLoss, formula: Callable[[list[Tensor]], Tensor]) -> None:
    """Compares loss and gradients of a step with a framework's own formula of the log-probs of responses."""
    plain, logprobs, _ = reference()
    want = formula(logprobs)
    want.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for max_tokens in (None, 12):
        hf = hf_family("qwen3")
        names = {id(p): name for name, p in hf.named_parameters()}
        model = TransformersModel(hf)
        partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
        step = TreeStep(model, loss, partitioner=partitioner)
        result = step.run(step.prepare([[TokenTree.from_paths(paths)]]))
        torch.testing.assert_close(result.loss, want.detach(), rtol=1e-5, atol=1e-6)
        for parameter in model.parameters():
            expected = gradients[names[id(parameter)]]
            assert (parameter.grad - expected).norm() <= 2e-5 * expected.norm(), names[id(parameter)]
