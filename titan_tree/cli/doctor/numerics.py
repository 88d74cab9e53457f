"""Backends, and a self-test, which compares a training step on a tree with the same step path by path."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.cli.doctor import Finding, attempt, problem
from titan_tree.components.backends import ATTENTION_BACKENDS, AUTO, RECURRENCE_BACKENDS
from titan_tree.components.tree_attention import Scoring
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model
from titan_tree.models.tree_model import Execution
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay
from titan_tree.tree.token_tree import TokenTree

CPU = torch.device("cpu")
HEAD_DIM = 64  # all kernels support it
KERNEL_SIZES: dict[str, dict[str, Any]] = {  # families to test, and their sizes that kernels depend on
    "qwen3": {"head_dim": HEAD_DIM},
    "qwen3_moe": {"head_dim": HEAD_DIM},
    "qwen3_5": {"head_dim": HEAD_DIM, "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM},
}
# The initial matrices are small, and the initial states of DeltaNet decay within a token, which hides errors.
# With these values, a wrong mask or a state of another branch changes gradients by 11 to 25 %. Rounding to
# bfloat16 changes them by 1 to 4 %.
MATRIX_SCALE = 2
DECAY = -4.0  # of A_log: the decay per token is about exp(exp(A_log))
MAX_NOISE_RATIO = 3  # largest error, in multiples of the error of training path by path in the same dtype

Gradients = dict[str, Tensor]


def backends() -> Iterator[Finding]:
    """Shows which backends "auto" chooses on this device, and why it skips others."""
    device, dtype = training_device()
    x = torch.empty(1, 1, HEAD_DIM, device=device, dtype=dtype)
    for component, registry, inputs in (
        ("attention", ATTENTION_BACKENDS, (x, x, Scoring(), False)),
        ("recurrence", RECURRENCE_BACKENDS, (x, x, x, x[..., 0], x[..., 0])),
    ):
        chosen = registry.resolve(AUTO, device, *inputs)
        for backend in registry:
            text = "used only if a configuration names it"
            if backend == chosen:
                text = f'"auto" chooses it on {device.type}'
            elif refusal := registry[backend].refusal(*inputs):
                text = f"not used: {refusal.partition(';')[0]}"
            yield Finding(f"{component}/{backend}", text, ok=True if backend == chosen else None)


def self_test() -> Iterator[Finding]:
    """Compares a step of tiny random models on a tree with the same step path by path on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for sizes this small, many threads only wait for each other
    for family in KERNEL_SIZES:
        yield from attempt(family, _test, family, *training_device())
    torch.set_num_threads(threads)


def _test(family: str, device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    loss_error, error, noise = errors(family, device, dtype)
    limit = MAX_NOISE_RATIO * noise
    name = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    text = f"gradients of a tree and of its paths differ by {error:.1e} (limit {limit:.1e}) in {name}"
    if error <= limit and loss_error <= limit:  # False for NaN
        yield Finding(family, text)
        return
    yield problem(
        family,
        f"{text}; losses differ by {loss_error:.1e}",
        "install the versions of constraints.txt, or set model.attention=triton and model.recurrence=triton; "
        "report the output of titan-tree doctor --json",
    )


def errors(family: str, device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Compares a training step of a tiny random model with the same step path by path, on the CPU in float64.

    Args:
        family: a key of ``KERNEL_SIZES``.
        device: the device of the tree, with the backends that "auto" chooses.
        dtype: the dtype in which the tree is computed.
    Returns:
        Relative errors of the loss and of the gradients on the tree, and the error of the gradients path by
        path on the CPU in ``dtype``, which is the noise of rounding.
    """
    model = _random_model(family)
    paths, replay = _random_paths(model)
    alone = [TokenTree.from_paths([path], replay) for path in paths]
    loss, exact = _train(copy.deepcopy(model).double(), CPU, torch.float64, alone)
    _, noisy = _train(copy.deepcopy(model), CPU, dtype, alone)
    tree_loss, gradients = _train(model.to(device), device, dtype, [TokenTree.from_paths(paths, replay)])
    return abs(tree_loss / loss - 1), _distance(gradients, exact), _distance(noisy, exact)


def training_device() -> tuple[torch.device, torch.dtype]:
    """Returns the device that training uses here, and the dtype in which it should compute there."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    return CPU, torch.float32


def _random_model(family: str) -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(family, "debug", **KERNEL_SIZES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(MATRIX_SCALE)
            elif name.endswith("A_log"):
                parameter.fill_(DECAY)
    return model


def _random_paths(model: Decoder) -> tuple[list[TokenPath], Replay]:
    """Returns the paths of a tree with several blocks of attention, and nodes of 1 to 70 tokens.

    They record the experts that the model chooses in float32: rounding must not change the choice.
    """
    rng = np.random.default_rng(0)

    def node(length: int) -> list[int]:
        return rng.integers(model.config.vocab_size, size=length).tolist()

    trunk = node(70)
    branches = [trunk + node(length) for length in (12, 1, 40)]
    token_lists = [trunk, *(branch + node(length) for branch in branches for length in (5, 17, 30))]
    if model.experts is None:
        return [TokenPath(tokens) for tokens in token_lists], "off"
    with torch.no_grad():
        _, experts = tree_logprobs(model, token_lists, return_routed_experts=True)
    pairs = zip(token_lists, experts, strict=True)
    return [TokenPath(tokens, routed_experts=chosen.numpy()) for tokens, chosen in pairs], "first"


def _train(
    model: Decoder, device: torch.device, dtype: torch.dtype, trees: Sequence[TokenTree]
) -> tuple[float, Gradients]:
    """Returns the loss and the gradients of a step with one micro-batch per tree."""
    model.execution = Execution(dtype)
    step = TreeStep(model, TreeLoss("sft"), device)
    loss = step.run(step.prepare([[tree] for tree in trees])).loss.item()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return loss, gradients


def _distance(gradients: Gradients, exact: Gradients) -> float:
    """Returns the norm of the difference, relative to the norm of ``exact``."""
    norms = [
        (torch.linalg.norm(gradients[name] - exact[name]), torch.linalg.norm(exact[name])) for name in exact
    ]
    difference, size = torch.linalg.norm(torch.tensor(norms), dim=0).tolist()
    return difference / size
