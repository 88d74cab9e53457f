"""Random partitions of a forest, and training over them."""

import copy
import random

import numpy as np
import pytest
import torch

from tests.support.oracle import assert_same, in_one_pass, random_groups, relative_error
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.models.weights import CHECKPOINTED
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, in_tree_order
from titan_tree.tree.token_tree import TokenTree

CPU = torch.device("cpu")


class RandomCuts:
    """A partitioner that cuts each edge with probability ``share``.

    The token below a cut joins an existing child partition or starts a new one.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share, self.random = share, random.Random(seed)

    def plan(self, tree: TokenTree, costs: object = None) -> PartitionPlan:
        predecessor = tree.predecessor.tolist()
        parents, members = [-1], [[]]
        of: list[int] = []
        for token, before in enumerate(predecessor):
            part = 0 if before < 0 else of[before]
            if before >= 0 and self.random.random() < self.share:
                siblings = [p for p, parent in enumerate(parents) if parent == part]
                if not siblings or self.random.random() < 0.5:
                    parents.append(part)
                    members.append([])
                    siblings.append(len(parents) - 1)
                part = siblings[-1]
            of.append(part)
            members[part].append(token)

        order, stack = [], [0]
        while stack:
            order.append(stack.pop())
            stack += [p for p, parent in enumerate(parents) if parent == order[-1]]
        rank = {part: i for i, part in enumerate(order)} | {-1: -1}
        partitions = []
        for part in order:
            context = set()
            for token in members[part]:
                while (token := predecessor[token]) >= 0:
                    context |= {token} if of[token] != part else set()
            partitions.append(
                in_tree_order(tree, rank[parents[part]], np.array(members[part]), np.array(sorted(context)))
            )
        return PartitionPlan(tree, "random", tuple(partitions))


def forest_of(groups) -> TokenTree:
    return TokenTree.forest([TokenTree.from_paths(paths) for paths in groups])


def in_partitions(model, plan, reduction="path_mean"):
    """Returns the SFT loss of a plan and the gradients, by parameter name."""
    tree_loss = TreeLoss("sft", reduction)
    z = tree_loss.normalizer(plan.tree.paths)
    total = []

    def compute_loss(batch, out):
        loss, _ = tree_loss(out.logprobs, batch, z)
        total.append(loss.item())
        return loss

    model.zero_grad(set_to_none=True)
    train_micro_batch(model, TreeBatch.from_plan(plan), compute_loss, next(model.parameters()).device)
    return sum(total), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_parallelized_equals(model, checkpoint):
    """Asserts that activation checkpointing, or compilation with "none", changes no gradient by over 1e-5."""
    parallelized = parallelize(
        copy.deepcopy(model),
        OneRank(),
        dtype=torch.float32,
        compile=checkpoint == "none",
        activation_checkpoint=checkpoint,
    )
    groups = random_groups(0, max_length=20)
    want, got = in_one_pass(model, groups), in_one_pass(parallelized, groups)
    names = {name: name.replace(CHECKPOINTED, "") for name in got[2]}
    assert_same((got[0], got[1], {names[name]: gradient for name, gradient in got[2].items()}), want, 1e-5)
    loss, cut = in_partitions(parallelized, RandomCuts(0.4).plan(forest_of(groups)))
    assert loss == pytest.approx(want[1], rel=1e-5)
    for name, gradient in cut.items():
        assert relative_error(gradient, want[2][names[name]]) < 1e-5, name
