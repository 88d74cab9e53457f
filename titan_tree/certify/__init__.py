"""Certifies that a configuration's training step on trees equals the step on every path alone.

certified_step.py  the model and the first trees of a configuration
numbers.py         what a step computes on trees: outputs of layers, log-probs, the loss and its gradients
reference.py       the same from every path alone, through the unmodified model of transformers
checks.py          compares both, in multiples of the noise of rounding; leaks; determinism
sampler.py         the sampler's log-probs against the trainer's, with a cause for each token
report.py          the text, the JSON and the page of a certificate
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from titan_tree.certify.certified_step import CertifiedStep, opened
from titan_tree.certify.checks import Comparison, compare, leaks, repeats
from titan_tree.certify.numbers import Numbers, score, train_step
from titan_tree.certify.reference import OwnReference, Reference, TransformersReference, snapshot
from titan_tree.certify.sampler import compare_sampler
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
    checks: list[Comparison]


def certify(config: Config, max_tokens: int = 4096) -> Certificate:
    """Certifies the first step of a configuration of training or of reinforcement learning. Collective.

    Args:
        max_tokens: maximum sum of the lengths of the paths that are compared.

    Raises:
        UserError: see ``opened``; or the GPU is out of memory.
    """
    with opened(config, max_tokens) as certified, _out_of_memory_as_user_error():
        step, micro_batches = certified.tree_step, certified.own_micro_batches()
        on_trees = train_step(step, micro_batches)
        checks = [repeats(on_trees, train_step(step, micro_batches))]
        if world_size() == 1:
            on_trees.scores = score(step, micro_batches)
            checks.insert(0, leaks(step, micro_batches))
        weights = gathered_weights(step.model, torch.float32)
        return call_on_rank_0(lambda: _certificate(certified, on_trees, checks, weights))


def _certificate(
    certified: CertifiedStep, on_trees: Numbers, checks: Sequence[Comparison], weights: dict[str, Tensor]
) -> Certificate:
    step, precision = certified.tree_step, f"in {certified.config.training.dtype}"
    if world_size() == 1:  # the reference needs the memory
        step.model.to("cpu")
    exact, noisy, reference = _alone(certified, weights)
    if world_size() == 1:
        step.model.to(step.device)
    checks = [*compare(on_trees, exact, noisy, certified), *checks]
    if on_trees.scores and exact.scores and noisy.scores:
        sampler = compare_sampler(certified, on_trees.scores, exact.scores, noisy.scores)
        checks += [sampler] if sampler else []
    failed = next((check for check in checks if check.passed is False), None)
    verdict = f"FAILED {precision}: {failed.name}: {failed.found}" if failed else ""
    if failed is None:
        gradients = next(check for check in checks if check.name == "gradients")
        verdict = (
            f"PASSED: trees equal every path alone through {reference}, {precision}; gradients differ by "
            f"{gradients.error:.1e}, noise floor {gradients.floor:.1e}"
        )
    return Certificate(failed is None, verdict, _facts(certified) | {"against": reference}, checks)


def _alone(certified: CertifiedStep, weights: dict[str, Tensor]) -> tuple[Numbers, Numbers, str]:
    """Returns the step on every path alone in more than the dtype of training, and in that dtype.

    The third value names the model that computed it.
    """
    step, config = certified.tree_step, certified.config
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
        exact = first.step(certified.paths, step.loss)
        del first
        return exact, make(dtype).step(certified.paths, step.loss), name


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


def _facts(certified: CertifiedStep) -> dict[str, str]:
    config, model, trees = certified.config, certified.tree_step.model, certified.trees
    weights = config.model.hf_path or f"{config.model.flavor}, random weights"
    lora = "" if model.lora is None else f", LoRA of rank {model.lora.rank}"
    ranks = f", {world_size()} ranks" if world_size() > 1 else ""
    names = ", ".join(tree.paths[0].id.rpartition("/")[0] or tree.paths[0].id for tree in trees[:3])
    more = f" and {len(trees) - 3} more" if len(trees) > 3 else ""
    paths, flat, distinct = len(certified.paths), sum(map(len, certified.paths)), sum(map(len, trees))
    tokens = f"{flat:,} tokens, {distinct:,} distinct"
    if flat == distinct:
        tokens += "; they share nothing, so this says little about trees"
    return {
        "model": f"{model.family} {weights}, {model.num_parameters():,} parameters{lora}",
        "step": f"loss {config.loss.name}, {config.training.dtype}, {certified.tree_step.device.type}{ranks}",
        "data": f"{certified.source}: {names}{more}; {paths} paths of {tokens}",
    }
