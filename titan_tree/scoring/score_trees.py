"""Log-probs, entropies and experts of the paths of trees: score_trees.

score_paths and tree_logprobs do it for paths and token lists, which they merge into one tree.

Recorded experts can be replayed by training (tree/routed_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.edge_statistics import Likeliest
from titan_tree.components.logprobs import EMPTY
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.packing import first_fit
from titan_tree.distributed.collectives import call_on_all_ranks, world_group, world_size
from titan_tree.distributed.gradient_sync import GradientSync, cast_weights, reshard
from titan_tree.distributed.sequence_parallel import join
from titan_tree.engine.forward import Outputs, forward_passes, join_outputs
from titan_tree.engine.schedule import equal_schedule, lineages
from titan_tree.errors import UserError
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.path_fields import TokenTargets
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

B = TypeVar("B", Tensor, TreeBatch)


@dataclass(frozen=True)
class PathScores:
    """The scores of one path of T tokens. NaN: the loss mask is 0, or it is the first token."""

    logprobs: Tensor  # [T] fp32, nats, on the model's device
    entropies: Tensor | None = None  # [T] fp32, nats: of the distribution that predicts the token
    routed_experts: Tensor | None = None  # [T, L, k] int16, on the CPU, see ``TokenPath``
    likeliest: TokenTargets | None = None  # the top_k likeliest tokens in place of each counted one


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
        model: a model on the device that computes.
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
        UserError: if a list is empty, exceeds the model's lineages or its vocabulary (the message has its
            index); for a temperature that is not positive; for max_tokens with gradients enabled; for experts
            of a model without experts.
    """
    paths = [
        TokenPath(np.asarray(tokens), id=str(i), temperature=temperature)
        for i, tokens in enumerate(token_lists)
    ]
    limits = ModelLimits(
        model.config.max_position_embeddings, model.config.vocab_size, images=model.image_limits
    )
    for path in paths:
        path.check_limits(limits)
    path_scores = _score_one_tree(model, paths, max_tokens, routed_experts=return_routed_experts)
    logprobs = [path.logprobs[1:] for path in path_scores]
    if not return_routed_experts:
        return logprobs
    return logprobs, [path.routed_experts for path in path_scores if path.routed_experts is not None]


@torch.no_grad()
def score_paths(
    model: TreeModel, paths: Sequence[TokenPath], max_tokens: int | None = None, entropies: bool = False
) -> list[PathScores]:
    """Returns the scores of all tokens of ``paths``, at each path's temperature and over its sampling mask.

    Tokens of images have no scores.

    Args:
        model: may be sharded over ranks. Every rank then makes the same call, with its own paths.
        paths: paths in any order. Their loss masks have no effect.
        max_tokens: maximum tokens of one forward pass; larger trees run in partitions. None: no limit.
        entropies: also return the entropies of the distributions.
    """
    whole = [
        TokenPath(
            path.tokens,
            _text_mask(path),
            temperature=path.temperature,
            sampling_mask=path.sampling_mask,
            id=path.id,
            images=path.images,
        )
        for path in paths
    ]
    return _score_one_tree(model, whole, max_tokens, entropies=entropies)


def _text_mask(path: TokenPath) -> np.ndarray:
    """Returns a loss mask that counts all tokens but those of images."""
    mask = np.ones(len(path), np.float32)
    for start, image in path.images:
        mask[start : start + len(image)] = 0
    return mask


def _score_one_tree(
    model: TreeModel, paths: Sequence[TokenPath], max_tokens: int | None, **options: bool
) -> list[PathScores]:
    """Merges paths into a tree and returns their scores, see ``score_trees``."""
    trees = [TokenTree.from_paths(paths)] if paths else []
    partitioner = None if max_tokens is None else TreePartitioner("auto", max_tokens)
    return list(chain.from_iterable(score_trees(model, trees, max_tokens, partitioner, **options)))


def score_trees(
    model: TreeModel,
    trees: Sequence[TokenTree],
    max_tokens: int | None = None,
    partitioner: TreePartitioner | None = None,
    *,
    entropies: bool = False,
    routed_experts: bool = False,
    top_k: int = 0,
) -> list[list[PathScores]]:
    """Returns the scores of each tree's paths, in their order. Each shared token is computed once.

    If the model is sharded over ranks, every rank makes the same call. Weights are used in the dtype of
    training. Without ``max_tokens``, the log-probs are differentiable under ``torch.enable_grad``; weights
    then keep their own dtype.

    Args:
        model: may be sharded over ranks.
        trees: this rank's own; may be empty. Ranks that share tokens pass the same trees.
        max_tokens: maximum tokens of one forward pass; None runs all trees in one pass. A maximum needs
            ``torch.no_grad``.
        partitioner: splits trees of more than ``max_tokens`` tokens. None runs each tree in one forward pass.
        entropies: also return the entropies.
        routed_experts: also return the experts. The model must have experts.
        top_k: also return so many of the likeliest tokens.

    Raises:
        UserError: max_tokens is set with gradients enabled, or experts are asked of a model without experts.
            All ranks raise it.
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
        GradientSync(model).hold(False)
    scores_by_tree: list[list[PathScores]] = [[] for _ in trees]
    with nullcontext() if torch.is_grad_enabled() else cast_weights(model):
        for forward in forwards:
            outputs = _outputs(model, forward.partitions, entropies, top_k)
            if forward.plan is None:
                for _ in outputs:
                    pass
                continue
            experts = _Experts(model, forward.plan, forward.batches, is_shared) if routed_experts else None
            path_scores = _path_scores(model, forward.plan.tree, forward.batches, outputs, experts)
            for tree in forward.trees:
                scores_by_tree[tree] = [next(path_scores) for _ in trees[tree].paths]
    if not torch.is_grad_enabled():
        reshard(model)
    return scores_by_tree


@torch.no_grad()
def set_teacher_topk(
    model: TreeModel,
    trees: Sequence[TokenTree],
    top_k: int,
    *,
    max_tokens: int,
    partitioner: TreePartitioner | None,
) -> None:
    """Sets ``teacher_topk`` of all paths of trees to the likeliest tokens under ``model``. See above."""
    scores = score_trees(model, trees, max_tokens, partitioner, top_k=top_k)
    for tree, of_tree in zip(trees, scores, strict=True):
        for path, path_scores in zip(tree.paths, of_tree, strict=True):
            path.teacher_topk = path_scores.likeliest


@torch.no_grad()
def set_logprobs(
    model: TreeModel,
    trees: Sequence[TokenTree],
    field: Literal["old_logprobs", "ref_logprobs"],
    *,
    max_tokens: int,
    partitioner: TreePartitioner | None,
) -> None:
    """Sets a field of all paths of trees to their log-probs under ``model``. See ``score_trees``."""
    scores = chain.from_iterable(score_trees(model, trees, max_tokens, partitioner))
    if not trees:
        return
    logprobs = torch.cat([path.logprobs for path in scores]).cpu()  # one copy
    paths = [path for tree in trees for path in tree.paths]
    for path, values in zip(paths, logprobs.split(list(map(len, paths))), strict=True):
        setattr(path, field, values.numpy())


class _Forward(NamedTuple):
    """A forward pass over some trees, or several over their partitions."""

    trees: Sequence[int]
    plan: PartitionPlan | None  # None: this rank only takes part in the communication of others
    batches: Sequence[TreeBatch]  # the plan's
    partitions: Sequence[TreeBatch]  # what this rank runs: its token shards of the batches, and dummies


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
        yield _Forward(numbers, plan, batches, [model.token_shard.of(batch) for batch in batches])


def _in_lockstep(model: TreeModel, forwards: Sequence[_Forward]) -> list[_Forward]:
    """Adds the dummies that the communication of other ranks needs. Collective."""
    partitions = [forward.partitions for forward in forwards]
    schedule = equal_schedule(partitions, world_group(), token_shard=model.token_shard)
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


def _outputs(model: TreeModel, partitions: Sequence[TreeBatch], entropies: bool, top_k: int) -> Outputs:
    """Returns the batch and the output of each partition. A single one has gradients, if they are enabled."""
    device = next(model.parameters()).device
    batches = [_pinned(device, batch) for batch in partitions]
    statistics = [Likeliest(top_k, "ids"), Likeliest(top_k, "logprobs")] if top_k else []
    if torch.is_grad_enabled() and len(batches) == 1:
        batch = batches[0].to(device, non_blocking=True)
        return iter([(batch, model(batch, entropy=entropies, statistics=statistics))])
    return forward_passes(model, batches, device, entropy=entropies, statistics=statistics)


class _Experts:
    """Collects the experts of each token of a plan from the outputs of its partitions."""

    def __init__(
        self, model: TreeModel, plan: PartitionPlan, batches: Sequence[TreeBatch], is_shared: bool
    ) -> None:
        order = list(range(len(batches)))
        if is_shared:  # ranks in lockstep run partitions in this order
            order.sort(key=lineages(batches).__getitem__)
        self._model = model
        self._partitions = [plan.partitions[i] for i in order]
        self._num_tokens = len(plan.tree)
        self.by_token = torch.empty(0, dtype=torch.int16)  # [N, L, k] on the CPU

    def record(self, outputs: Outputs) -> Outputs:
        partitions = iter(self._partitions)
        for batch, out in outputs:
            if not batch.is_dummy:
                # A token that several partitions run is recorded where its edges are scored.
                partition = next(partitions)
                used = self._join(torch.stack(out.routed_experts, dim=1), len(partition)).cpu()
                if not self.by_token.numel():
                    self.by_token = used.new_full((self._num_tokens, *used.shape[1:]), -1)
                scored = torch.from_numpy(partition.scores)
                self.by_token[torch.from_numpy(partition.own_tokens).long()[scored]] = used[scored]
            yield batch, out

    def _join(self, used: Tensor, num_tokens: int) -> Tensor:
        """Joins the experts of the ranks that share the tokens of a partition, [n, L, k] int16."""
        group = self._model.execution.sequence_group
        if group is None:
            return used.short()
        tokens = self._model.token_shard.tokens(num_tokens)
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
    num_edges = sum(len(batch.edge_label) for batch in batches)
    if experts is not None:
        outputs = experts.record(outputs)
    scores = join_outputs(outputs, num_edges, model.execution.sequence_group)
    edge = torch.cat([batch.edge_number[batch.pairs.edge] for batch in batches])
    if len(batches) > 1:  # else the pairs are in the order of ``TokenTree.path_index``
        path = torch.cat([batch.pairs.path_number[batch.pairs.path] for batch in batches])
        edge = edge[(path * num_edges + edge).argsort()]  # along a path, edges have ascending numbers
    edge = _to(device, edge)
    is_counted = np.concatenate([path.loss_mask > 0 for path in tree.paths])
    is_counted[tree.path_offsets[:-1]] = False  # nothing predicts the first token of a path
    counted = _to(device, torch.from_numpy(is_counted.nonzero()[0]))
    lengths = list(map(len, tree.paths))

    def by_path(values: Tensor) -> Sequence[Tensor]:
        nan = values.new_full((len(is_counted),), torch.nan)
        return nan.index_put((counted,), values[edge]).split(lengths)

    nothing = [None] * len(tree.paths)
    columns = zip(
        by_path(scores.logprobs),
        nothing if scores.entropy is None else by_path(scores.entropy),
        nothing
        if experts is None
        else experts.by_token[torch.from_numpy(tree.path_index).long()].split(lengths),
        _likeliest(scores, edge, is_counted, tree.path_offsets) if scores.statistics else nothing,
        strict=True,
    )
    for of_path in columns:
        yield PathScores(*of_path)


def _likeliest(
    scores: ModelOutput, edge: Tensor, is_counted: np.ndarray, path_offsets: np.ndarray
) -> list[TokenTargets | None]:
    """Returns the likeliest tokens of each path. ``is_counted`` [N_flat] selects tokens with an ``edge``."""
    by_name = {
        name.of: x.cpu().numpy() for name, x in scores.statistics.items() if isinstance(name, Likeliest)
    }
    edges, kept = edge.cpu().numpy(), by_name["logprobs"] > EMPTY / 2  # not outside of a sampling mask
    sizes = np.zeros(len(is_counted), np.int32)
    sizes[is_counted] = kept.sum(1)[edges]
    ids, logprobs = (by_name[name][edges][kept[edges]] for name in ("ids", "logprobs"))
    targets = TokenTargets(sizes, ids.astype(np.int32), logprobs.astype(np.float32))
    by_path = (targets.of_tokens(np.arange(*span)) for span in pairwise(path_offsets))
    return [of_path if len(of_path.ids) else None for of_path in by_path]


def _pinned(device: torch.device, value: B) -> B:
    """Returns a batch or a tensor in memory from which ``device`` copies without making the host wait."""
    return value.pin_memory() if device.type == "cuda" else value


def _to(device: torch.device, value: Tensor) -> Tensor:
    """Returns a tensor of the host on ``device``. The host does not wait for a GPU."""
    return _pinned(device, value).to(device, non_blocking=True)
