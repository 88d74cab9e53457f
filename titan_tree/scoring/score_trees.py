"""score_trees: log-probs, entropies and experts of all paths of trees. tree_logprobs does it for token lists.

Recorded experts can be replayed by training (tree/routed_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.data.packing import first_fit
from titan_tree.distributed.collectives import call_on_all_ranks, world_size
from titan_tree.distributed.gradient_sync import GradientSync, cast_weights, reshard
from titan_tree.distributed.sequence_parallel import join
from titan_tree.engine.partitions import PartitionRunner
from titan_tree.engine.schedule import in_lockstep, positions
from titan_tree.engine.whole_path_loss import collect_scores
from titan_tree.errors import UserError
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

B = TypeVar("B", Tensor, TreeBatch)
Outputs = Iterable[tuple[TreeBatch, ModelOutput]]


@dataclass(frozen=True)
class PathScores:
    """The scores of one path of T tokens. NaN: the loss mask is 0, or it is the first token."""

    logprobs: Tensor  # [T] fp32, nats, on the model's device
    entropies: Tensor | None = None  # [T] fp32, nats: of the distribution that predicts the token
    routed_experts: Tensor | None = None  # [T, L, k] int16, on the CPU, see ``TokenPath``


@overload
def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
) -> list[Tensor]: ...


@overload
def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    return_routed_experts: Literal[True],
) -> tuple[list[Tensor], list[Tensor]]: ...


def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    return_routed_experts: bool = False,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Returns log p(tokens[t] | tokens[:t]) for t = 1, 2, ... of every list.

    It is ``score_trees`` for one tree of token lists. Lists may be duplicates or prefixes of one another. The
    result is differentiable under ``torch.enable_grad``.

    Args:
        model: on the device that computes.
        token_lists: token ids; each list has at least one.
        max_tokens: maximum tokens of one forward pass; None runs all in one. Larger trees run in partitions.
            Memory then holds one partition, and the keys, values and states of the path above it. This needs
            ``torch.no_grad``.
        temperature: the log-probs are those of logits / temperature.
        return_routed_experts: also return the experts that each token used. The model must have experts.
    Returns:
        One fp32 tensor [len(tokens) - 1] in nats per list, in the order given. On request also one int16
        tensor [len(tokens), L, k] per list, on the CPU, for L layers with k experts per token
        (``TokenPath.routed_experts``).
    Raises:
        UserError: if a list is empty, exceeds the model's positions or its vocabulary (the message has its
            index); for a temperature that is not positive; for max_tokens with gradients enabled; for experts
            of a model without experts.
    """
    paths = [
        TokenPath(np.asarray(tokens), id=str(i), temperature=temperature)
        for i, tokens in enumerate(token_lists)
    ]
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    for path in paths:
        path.check_limits(limits)
    trees = [TokenTree.from_paths(paths)] if paths else []
    partitioner = None if max_tokens is None else TreePartitioner("auto", max_tokens)
    scores = score_trees(model, trees, max_tokens, partitioner, routed_experts=return_routed_experts)
    of_lists = [each for of_tree in scores for each in of_tree]
    logprobs = [each.logprobs[1:] for each in of_lists]
    if not return_routed_experts:
        return logprobs
    return logprobs, [each.routed_experts for each in of_lists if each.routed_experts is not None]


def score_trees(
    model: TreeModel,
    trees: Sequence[TokenTree],
    max_tokens: int | None = None,
    partitioner: TreePartitioner | None = None,
    *,
    entropies: bool = False,
    routed_experts: bool = False,
) -> list[list[PathScores]]:
    """Returns the scores of each tree's paths, in their order. Each shared token is computed once.

    If the model is sharded over ranks, every rank makes the same call. Weights are used in the dtype of
    training. Without ``max_tokens``, the log-probs are differentiable under ``torch.enable_grad``; weights
    then keep their own dtype.

    Args:
        model: may be sharded over ranks.
        trees: this rank's own; may be empty. Ranks that share tokens pass the same trees.
        max_tokens: of one forward pass; None runs all trees in one. This needs ``torch.no_grad``.
        partitioner: splits trees of more than ``max_tokens`` tokens. None runs each tree in one forward pass.
        entropies: also return the entropies.
        routed_experts: also return the experts. The model must have experts.

    Raises:
        UserError: on all ranks, if paths that share a token that counts have different temperatures; for
            max_tokens with gradients enabled; for experts of a model without experts.
    """
    _check_arguments(model, max_tokens, routed_experts)
    everything = [list(range(len(trees)))] if trees else []
    chosen = everything if max_tokens is None else first_fit(list(map(len, trees)), max_tokens)
    split = one_pass if partitioner is None else partial(partitioner.plan, costs=model.costs())
    forwards: Iterable[_Forward] = _forwards(model, trees, chosen, split)
    is_shared = world_size() > 1 and (isinstance(model.root, FSDPModule) or model.communicates)
    if is_shared:
        forwards = _in_lockstep(model, call_on_all_ranks(lambda: list(forwards)))
    if not torch.is_grad_enabled():
        # A partitioned step keeps weights gathered.
        GradientSync(model, reshard_after_forward=True).hold(False)
    found: list[list[PathScores]] = [[] for _ in trees]
    with nullcontext() if torch.is_grad_enabled() else cast_weights(model):
        for forward in forwards:
            outputs = _outputs(model, forward.partitions, entropies)
            if forward.plan is None:
                for _ in outputs:
                    pass
                continue
            experts = _Experts(model, forward.plan, forward.batches, is_shared) if routed_experts else None
            scores = _path_scores(model, forward.plan.tree, forward.batches, outputs, experts)
            for tree in forward.trees:
                found[tree] = [next(scores) for _ in trees[tree].paths]
    if not torch.is_grad_enabled():
        reshard(model)
    return found


@torch.no_grad()
def path_logprobs(
    model: TreeModel, trees: Sequence[TokenTree], max_tokens: int, partitioner: TreePartitioner | None
) -> list[np.ndarray]:
    """Returns the log-probs [T] of all paths of ``trees``, one after another. See ``score_trees``."""
    scores = score_trees(model, trees, max_tokens, partitioner)
    logprobs = torch.cat([found.logprobs for of_paths in scores for found in of_paths]).cpu()  # one copy
    lengths = [len(path) for tree in trees for path in tree.paths]
    return [found.numpy() for found in logprobs.split(lengths)]


class _Forward(NamedTuple):
    """A forward pass over some trees, or several over their partitions."""

    trees: Sequence[int]
    plan: PartitionPlan | None  # None: this rank only takes part in the communication of others
    batches: Sequence[TreeBatch]  # of the plan
    partitions: Sequence[TreeBatch]  # that this rank runs: its shares of the batches, and dummies


def _forwards(
    model: TreeModel,
    trees: Sequence[TokenTree],
    chosen: Sequence[Sequence[int]],
    split: Callable[[TokenTree], PartitionPlan],
) -> Iterator[_Forward]:
    """Makes the forward passes one at a time, so that a GPU computes one while the host makes the next."""
    for numbers in chosen:
        plan = split(TokenTree.forest([trees[i] for i in numbers]))
        batches = TreeBatch.from_plan(plan, edges="loss")
        yield _Forward(numbers, plan, batches, [model.share.of(batch) for batch in batches])


def _in_lockstep(model: TreeModel, forwards: Sequence[_Forward]) -> list[_Forward]:
    """Adds the dummies that the communication of other ranks needs. Collective."""
    assert dist.group.WORLD is not None
    schedule = in_lockstep([forward.partitions for forward in forwards], 0, dist.group.WORLD, model.share)
    dummies = [_Forward([], None, [], [])] * (len(schedule) - len(forwards))
    scheduled = zip([*forwards, *dummies], schedule, strict=True)
    return [forward._replace(partitions=partitions) for forward, partitions in scheduled]


def _check_arguments(model: TreeModel, max_tokens: int | None, routed_experts: bool) -> None:
    if max_tokens is not None and torch.is_grad_enabled():
        raise UserError(
            "tree_logprobs: max_tokens: expected gradients to be disabled, because they would keep all "
            "partitions in memory; call it under torch.no_grad(), or train with TreeStep"
        )
    if routed_experts and model.experts is None:
        raise UserError(
            "tree_logprobs: return_routed_experts: expected a model with experts, but this model has none"
        )


def _outputs(model: TreeModel, partitions: Sequence[TreeBatch], entropies: bool) -> Outputs:
    """Returns the batch and the output of each partition. A single one has gradients, if they are enabled."""
    device = next(model.parameters()).device
    if len(partitions) > 1:
        return PartitionRunner(model, partitions, device, entropy=entropies).outputs()
    batch = _to(device, partitions[0])
    return [(batch, model(batch, entropy=entropies))]


class _Experts:
    """Collects the experts of each token of a plan from the outputs of its partitions."""

    def __init__(
        self, model: TreeModel, plan: PartitionPlan, batches: Sequence[TreeBatch], is_shared: bool
    ) -> None:
        order = list(range(len(batches)))
        if is_shared:  # ranks in lockstep run partitions in this order
            order.sort(key=positions(batches).__getitem__)
        self._model = model
        self._partitions = [plan.partitions[i] for i in order]
        self._num_tokens = len(plan.tree)
        self.of_tokens = torch.empty(0, dtype=torch.int16)  # [N, L, k] on the CPU

    def keep(self, outputs: Outputs) -> Iterator[tuple[TreeBatch, ModelOutput]]:
        partitions = iter(self._partitions)
        for batch, out in outputs:
            if not batch.is_dummy:
                # A token that several partitions run is recorded where its edges are scored.
                partition = next(partitions)
                used = self._of_all(torch.stack(out.routed_experts, dim=1), len(partition)).cpu()
                if not self.of_tokens.numel():
                    self.of_tokens = used.new_full((self._num_tokens, *used.shape[1:]), -1)
                scored = torch.from_numpy(partition.scores)
                self.of_tokens[torch.from_numpy(partition.own_tokens).long()[scored]] = used[scored]
            yield batch, out

    def _of_all(self, used: Tensor, num_tokens: int) -> Tensor:
        """Joins the experts of the ranks that share the tokens of a partition, [n, L, k] int16."""
        group = self._model.sequence_group
        if group is None:
            return used.short()
        tokens = self._model.share.tokens(num_tokens)
        place = torch.arange(tokens.start, tokens.stop, device=used.device)
        return join(used.int(), place, num_tokens, group).short()


def _path_scores(
    model: TreeModel,
    tree: TokenTree,
    batches: Sequence[TreeBatch],
    outputs: Outputs,
    experts: _Experts | None,
) -> Iterator[PathScores]:
    """Yields the scores of each path of a forest. The host does not wait for a GPU."""
    device = next(model.parameters()).device
    edge_token = _to(device, torch.cat([batch.edge_token for batch in batches]).sort().values)
    kept = outputs if experts is None else experts.keep(outputs)
    scores = collect_scores(kept, edge_token, model.sequence_group)
    index = torch.from_numpy(tree.path_index)
    is_counted = np.concatenate([path.loss_mask > 0 for path in tree.paths])
    is_counted[tree.path_offsets[:-1]] = False  # nothing predicts the first token of a path
    counted, of_path = _to(device, torch.from_numpy(is_counted)), _to(device, index).long()
    lengths = list(map(len, tree.paths))

    def by_path(values: Tensor) -> Sequence[Tensor]:
        of_tokens = values.new_full((len(tree),), torch.nan).index_put((edge_token,), values)
        return torch.where(counted, of_tokens[of_path], torch.nan).split(lengths)

    columns = {name: by_path(values) for name, values in scores.items()}
    nothing = [None] * len(tree.paths)
    used = nothing if experts is None else experts.of_tokens[index.long()].split(lengths)
    for scored in zip(columns["logprobs"], columns.get("entropy", nothing), used, strict=True):
        yield PathScores(*scored)


def _to(device: torch.device, value: B) -> B:
    """Returns a batch or a tensor of the host on ``device``. The host does not wait for a GPU."""
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
