"""Certifies that a configuration's training step on trees equals the step on every path alone.

subject.py     the model and the first trees of a configuration
numbers.py     what a step computes on trees: outputs of layers, log-probs, the loss and its gradients
reference.py   the same from every path alone, through the unmodified model of transformers
checks.py      compares both, in multiples of the noise of rounding; leaks; determinism
sampler.py     the sampler's log-probs against the trainer's, with a cause for each token
report.py      the text, the JSON and the page of a certificate
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from titan_tree.certify.checks import Check, compare, leaks, repeats
from titan_tree.certify.numbers import Numbers, score, train_step
from titan_tree.certify.reference import OwnReference, Reference, TransformersReference, snapshot
from titan_tree.certify.sampler import compare_sampler
from titan_tree.certify.subject import Subject, opened
from titan_tree.distributed.collectives import call_on_rank_0, world_size
from titan_tree.errors import UserError
from titan_tree.run.checkpoint.export import gathered_weights
from titan_tree.run.config import Config


@dataclasses.dataclass
class Certificate:
    """The result of ``certify``.

    Attributes:
        verdict: one line.
        facts: what was certified, and with what it was compared.
    """

    passed: bool
    verdict: str
    facts: dict[str, str]
    checks: list[Check]


def certify(config: Config, max_tokens: int = 4096) -> Certificate:
    """Certifies the first step of a configuration of training or of reinforcement learning. Collective.

    Args:
        max_tokens: maximum sum of the lengths of the paths that are compared.

    Raises:
        UserError: see ``opened``; or the GPU is out of memory.
    """
    with opened(config, max_tokens) as subject, _out_of_memory_as_user_error():
        step, micro_batches = subject.tree_step, subject.own_micro_batches()
        on_trees = train_step(step, micro_batches)
        checks = [repeats(on_trees, train_step(step, micro_batches))]
        if world_size() == 1:
            on_trees.scores = score(step, micro_batches)
            checks.insert(0, leaks(step, micro_batches))
        weights = gathered_weights(step.model, torch.float32)
        return call_on_rank_0(lambda: _certificate(subject, on_trees, checks, weights))


def _certificate(
    subject: Subject, on_trees: Numbers, checks: Sequence[Check], weights: dict[str, Tensor]
) -> Certificate:
    step, precision = subject.tree_step, f"in {subject.config.training.dtype}"
    if world_size() == 1:  # the reference needs the memory
        step.model.to("cpu")
    exact, noisy, reference = _alone(subject, weights)
    if world_size() == 1:
        step.model.to(step.device)
    checks = [*compare(on_trees, exact, noisy, subject), *checks]
    if on_trees.scores and exact.scores and noisy.scores:
        sampler = compare_sampler(subject, on_trees.scores, exact.scores, noisy.scores)
        checks += [sampler] if sampler else []
    failed = next((check for check in checks if check.passed is False), None)
    verdict = f"FAILED {precision}: {failed.name}: {failed.found}" if failed else ""
    if failed is None:
        gradients = next(check for check in checks if check.name == "gradients")
        verdict = (
            f"PASSED: trees equal every path alone through {reference}, {precision}; gradients differ by "
            f"{gradients.error:.1e}, noise floor {gradients.floor:.1e}"
        )
    return Certificate(failed is None, verdict, _facts(subject) | {"against": reference}, checks)


def _alone(subject: Subject, weights: dict[str, Tensor]) -> tuple[Numbers, Numbers, str]:
    """Returns the step on every path alone in more than the dtype of training, and in that dtype.

    The third value names the model that computed it.
    """
    step, config = subject.tree_step, subject.config
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    with TemporaryDirectory() as folder:

        def make(dtype: torch.dtype) -> Reference:
            return TransformersReference(path, step.model, weights, dtype, step.device)

        try:
            path = snapshot(step.model, config, weights, folder)
            first = make(wide)
            name = f"the unmodified {type(first.module).__name__} of transformers"
        except UserError as error:
            make = partial(OwnReference, config, weights)
            first, name = make(wide), f"titan_tree's own model ({error})"
        exact = first.step(subject.paths, step.loss)
        del first
        return exact, make(dtype).step(subject.paths, step.loss), name


@contextmanager
def _out_of_memory_as_user_error() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "titan-tree certify: the GPU is out of memory; lower --tokens, or use a GPU that holds the "
            f"weights and gradients of the reference in float32 ({reason})"
        ) from None


def _facts(subject: Subject) -> dict[str, str]:
    config, model, trees = subject.config, subject.tree_step.model, subject.trees
    weights = config.model.hf_path or f"{config.model.flavor}, random weights"
    lora = "" if model.lora is None else f", LoRA of rank {model.lora.rank}"
    ranks = f", {world_size()} ranks" if world_size() > 1 else ""
    names = ", ".join(tree.paths[0].id.rpartition("/")[0] or tree.paths[0].id for tree in trees[:3])
    more = f" and {len(trees) - 3} more" if len(trees) > 3 else ""
    paths, flat, distinct = len(subject.paths), sum(map(len, subject.paths)), sum(map(len, trees))
    tokens = f"{flat:,} tokens, {distinct:,} distinct"
    if flat == distinct:
        tokens += "; they share nothing, so this says little about trees"
    return {
        "model": f"{model.family} {weights}, {model.num_parameters():,} parameters{lora}",
        "step": f"loss {config.loss.name}, {config.training.dtype}, {subject.tree_step.device.type}{ranks}",
        "data": f"{subject.source}: {names}{more}; {paths} paths of {tokens}",
    }
