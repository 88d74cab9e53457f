"""Controls FSDP2's communication within an optimizer step, and casts the weights that FSDP2 does not gather.

FSDP2 gathers the weights of a block before each forward pass and sums gradients over ranks in each backward
pass. That requires every rank to run the same sequence of passes. ``GradientSync`` makes FSDP2 communicate
less often in two cases:

- Micro-batches: gradients accumulate on each rank, and only the last backward pass sums them over ranks.
- Partitions: ranks run different numbers of passes. Weights are gathered in the first forward pass and kept
  until the last backward pass, so that no pass in between communicates.

A single rank trains a plain model without FSDP2. ``GradientSync`` then does nothing, and ``cast_weights``
replaces FSDP2's mixed precision: it casts each weight once per step. It does the same for experts that only
one rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.moe import Experts
from titan_tree.models.tree_model import TreeModel


class GradientSync:
    """Controls the communication of FSDP2 within an optimizer step. Does nothing for a plain model.

    Args:
        model: plain, or sharded by ``parallelize``.
        reshard_after_forward: whether a block frees its gathered weights after a forward pass if they
            are not held; the argument of ``parallelize``.
    """

    def __init__(self, model: TreeModel, reshard_after_forward: bool) -> None:
        self.root, self.reshard_after_forward = model.root, reshard_after_forward

    def sum_in_backward(self, enabled: bool) -> None:
        """Sets whether the following backward passes sum gradients over ranks or only accumulate them."""
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(enabled)

    def hold(self, enabled: bool = True) -> None:
        """Keeps gathered weights, and sums no gradients, until ``release``.

        ``hold(False)`` restores the usual schedule. Call one of them at the start of each step, because a
        step that failed may have left weights held.
        """
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(not enabled)
            self.root.set_reshard_after_backward(not enabled)
            self.root.set_is_last_backward(not enabled)
            self.root.set_reshard_after_forward(self.reshard_after_forward and not enabled)
            # Weights outside of all other units are needed again in the backward pass, at once.
            self.root.set_reshard_after_forward(False, recurse=False)

    def release(self) -> None:
        """Makes the next backward pass sum gradients and free gathered weights.

        Call it before this rank's last backward pass of the step.
        """
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(True)
            self.root.set_reshard_after_backward(True)
            self.root.set_is_last_backward(True)


def reshard(model: TreeModel) -> None:
    """Frees the weights that FSDP2 has gathered. After an optimizer step, they would be stale."""
    for module in model.root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def cast_weights(model: TreeModel) -> Iterator[None]:
    """Replaces weights by copies in the dtype of the computation while the context is open.

    Each weight is cast once per step instead of once per forward pass, and no autograd graph stores casts. As
    soon as a copy has a gradient, it is added to the gradient of the original weight, in that weight's dtype.
    Weights that FSDP2 shards stay unchanged: FSDP2 does the same when it gathers them.

    torch.compile does not compile again when weights are replaced. They are inputs of its graphs, which
    depend on their dtypes and shapes, and every copy has the same ones.
    """
    dtype = model.compute_dtype
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if dtype not in (None, weight.dtype) and not _is_managed_by_fsdp(model, module):
                    replaced.append((module, name, weight))
                    setattr(module, name, _copy(weight, dtype))
        yield
    finally:
        for module, name, weight in replaced:
            setattr(module, name, weight)


def _is_managed_by_fsdp(model: TreeModel, module: nn.Module) -> bool:
    """Returns whether FSDP2 shards the weights of ``module`` itself. It ignores experts of a single rank."""
    if not isinstance(model.root, FSDPModule):
        return False
    is_sharded = isinstance(module, Experts) and module.dispatcher is not None
    return not is_sharded or isinstance(module, FSDPModule)


def _copy(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Returns a copy in ``dtype`` whose gradients are added to ``weight.grad``."""

    def add_gradient(copy: Tensor) -> None:
        assert copy.grad is not None
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad += copy.grad
        copy.grad = None

    copy = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
    if copy.requires_grad:
        copy.register_post_accumulate_grad_hook(add_gradient)
    return copy
