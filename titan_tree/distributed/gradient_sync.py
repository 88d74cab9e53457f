"""Controls FSDP2's communication within an optimizer step, and casts the weights that FSDP2 does not gather.

FSDP2 gathers the weights of a block before each forward pass and sums gradients over ranks in each backward
pass. ``GradientSync`` can make it communicate once per step: weights are gathered in the first forward pass
and kept until the last backward pass, and only that pass sums gradients over ranks. Passes in between run at
the speed of one GPU, and ranks may run different numbers of them.

A single rank trains a plain model without FSDP2. ``GradientSync`` then does nothing, and ``cast_weights``
replaces FSDP2's mixed precision: it casts each weight once per step. It does the same for experts that only
one rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.moe.layer import Experts
from titan_tree.models.tree_model import TreeModel


class GradientSync:
    """Controls the communication of FSDP2 within an optimizer step. Does nothing for a plain model.

    Args:
        model: plain, or sharded by ``parallelize``.
    """

    def __init__(self, model: TreeModel) -> None:
        self.root = model.root

    def hold(self, enabled: bool = True) -> None:
        """Keeps gathered weights, and sums no gradients, until ``release``.

        ``hold(False)`` restores the usual schedule. Call one of them at the start of each step, because a
        step that failed may have left weights held.
        """
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(not enabled)
            self.root.set_reshard_after_backward(not enabled)
            self.root.set_is_last_backward(not enabled)
            self.root.set_reshard_after_forward(not enabled)
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
def unsharded(model: TreeModel) -> Iterator[None]:
    """Gathers all weights that FSDP2 shards while the context is open. Collective at its start.

    Modules then compute without communication, so ranks may run different numbers of passes. Each rank holds
    all weights in the dtype of the computation, as in a step with partitions.
    """
    reshard(model)  # what a failed step has left gathered may be stale
    try:
        for module in model.root.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        yield
    finally:
        reshard(model)


Cast = tuple[nn.Parameter, nn.Parameter]  # a weight and its copy in the dtype of the computation
# By module and name. Copies stay between steps: making them anew took the host 13 ms of every step of
# Qwen3-0.6B, in which the GPU waited.
_CASTS: WeakKeyDictionary[nn.Module, dict[str, Cast]] = WeakKeyDictionary()


@contextmanager
def cast_weights(model: TreeModel) -> Iterator[None]:
    """Replaces weights by copies in the dtype of the computation while the context is open.

    Each weight is cast once per step instead of once per forward pass, and no autograd graph stores casts. As
    soon as a copy has a gradient, it is added to the gradient of the original weight, in that weight's dtype.
    The first one is not cast if ``grad_dtype`` of the weight is None, which reads and writes fewer bytes.
    Weights that FSDP2 shards stay unchanged: FSDP2 does the same when it gathers them.

    torch.compile does not compile again when weights are replaced. They are inputs of its graphs, which
    depend on their dtypes and shapes, and every copy has the same ones.
    """
    replaced: list[tuple[dict[str, nn.Parameter | None], str, Cast]] = []
    try:
        for module in model.modules():
            weights = module._parameters  # assigned to directly, because Module.__setattr__ is slow
            replaced += [(weights, name, cast) for name, cast in _casts(model, module).items()]
        _update([cast for _, _, cast in replaced])
        for weights, name, (_, copy) in replaced:
            weights[name] = copy
        yield
    finally:
        for weights, name, (weight, _) in replaced:
            weights[name] = weight


def stored_weights(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the weights of a unit of FSDP2 or of a plain module, even while they are replaced.

    Each has the tensor of this rank's part beside it, which counts other changes: those of DTensor's methods
    raise only the version of the DTensor.
    """
    if isinstance(module, FSDPModule):
        group: Any = module._get_fsdp_state()._fsdp_param_group
        weights = [weight.sharded_param for weight in group.fsdp_params]
        yield from ((weight, weight._local_tensor) for weight in weights)
        return
    for each in module.modules():
        originals = {id(copy): weight for weight, copy in _CASTS.get(each, {}).values()}
        weights = [originals.get(id(x), x) for x in each._parameters.values() if x is not None]
        yield from zip(weights, weights, strict=True)


def _casts(model: TreeModel, module: nn.Module) -> dict[str, Cast]:
    """Returns the weights of ``module`` itself that need a cast, with copies, made anew if they changed."""
    dtype = model.execution.dtype
    known = _CASTS.get(module, {})
    casts: dict[str, Cast] = {}
    for name, weight in module._parameters.items():
        if weight is None or dtype in (None, weight.dtype) or _is_managed_by_fsdp(model, module):
            continue
        cast = known.get(name)
        if cast is None or cast[0] is not weight or not _is_alike(cast[1], weight, dtype):
            cast = weight, _copy(weight, dtype)
        casts[name] = cast
    if casts or known:
        _CASTS[module] = casts
    return casts


def _is_alike(copy: nn.Parameter, weight: nn.Parameter, dtype: torch.dtype) -> bool:
    """Returns whether ``copy`` still has the place and the properties that a new copy would have."""
    return (copy.dtype, copy.device, copy.shape, copy.requires_grad) == (
        dtype,
        weight.device,
        weight.shape,
        weight.requires_grad,
    )


@torch.no_grad()
def _update(casts: Sequence[Cast]) -> None:
    """Copies the values of all weights, those of plain tensors in a few kernels."""
    plain = [cast for cast in casts if type(cast[0]) is nn.Parameter]
    if plain:
        weights, copies = zip(*plain, strict=True)
        torch._foreach_copy_(list(copies), list(weights))
    for weight, copy in casts:
        if type(weight) is not nn.Parameter:  # DTensor: experts that a group of ranks shards
            copy.copy_(weight)


def _is_managed_by_fsdp(model: TreeModel, module: nn.Module) -> bool:
    """Returns whether FSDP2 shards the weights of ``module`` itself. It ignores experts of a single rank."""
    if not isinstance(model.root, FSDPModule):
        return False
    is_sharded = isinstance(module, Experts) and module.dispatcher is not None
    return not is_sharded or isinstance(module, FSDPModule)


def _copy(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Returns an uninitialized copy in ``dtype`` whose gradients are added to ``weight.grad``."""

    def add_gradient(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None  # first: without memory for the rest, the copy still stays
        assert gradient is not None
        total = weight.grad  # reading and assigning it takes the host longer than the rest of this function
        if total is None:
            weight.grad = gradient.to(weight.grad_dtype or gradient.dtype)
            return
        if total.dtype != weight.dtype:
            total = weight.grad = total.to(weight.dtype)
        total += gradient

    with torch.inference_mode(False):  # a later step trains with a copy that validation has made
        copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), weight.requires_grad)
    if copy.requires_grad:
        copy.register_post_accumulate_grad_hook(add_gradient)
    return copy
