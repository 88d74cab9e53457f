"""Tree sequence parallelism: the P ranks of a group run the same trees, and each one 1/P of every layer.

Embedding, norms, projections, MLPs, routers and the loss treat tokens one by one. There, rank r has the r-th
shard of the tokens (``TokenShard``). Attention, the convolution and Gated DeltaNet mix tokens, but
treat heads one by one. Around them, an all-to-all gives each rank all N tokens of 1/P of the heads, and
another one takes the outputs back (DeepSpeed-Ulysses, arXiv:2309.14509). The load is therefore even, whatever
the shape of a tree, and the kernels see the layout, plan, chunks and gateway rows of the whole batch.

Gradients need no collective of their own: each rank's gradient of a weight is that of its tokens or of its
heads, and FSDP2 sums it over all ranks. If there are fewer key heads than ranks, several ranks hold a copy of
the same head; the exchange is the transpose of the copy in the backward pass, so their gradients add up.

The exchange consists of custom operators, so that a compiled block has no graph break. They also rearrange
the numbers: with views of unknown sizes in its graph, torch.compile took minutes. All sizes follow from N,
which the host knows, so nothing waits for the device.

Letters: n tokens of this rank, N of its group, P ranks, H heads of a tensor, D numbers per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.distributed.collectives import named_group
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.tree.batch import TokenShard


def check_heads(model: Decoder, num_ranks: int) -> None:
    """Raises UserError if ``num_ranks`` ranks cannot share the heads of a layer."""
    for block in model.blocks:
        if num_ranks > 1 and not block.mixer.num_heads:
            raise UserError(
                f"parallel.sequence_parallel: expected 1 for a {model.config.title} model, whose layers "
                f"cannot share heads between ranks, got {num_ranks}"
            )
        for name, number in block.mixer.num_heads.items():
            is_copied = name in block.mixer.copied_heads
            if number % num_ranks and not (is_copied and num_ranks % number == 0):
                expected = "a divisor or a multiple" if is_copied else "a divisor"
                raise UserError(
                    f"parallel.sequence_parallel: expected {expected} of {name}, {number}, got {num_ranks}"
                )


def shard_sequence(model: Decoder, group: dist.ProcessGroup) -> None:
    """Makes mixers exchange tokens for heads with the adjacent ranks of ``group``, in place."""
    for block in model.blocks:
        block.mixer.exchange = AllToAllExchange(group.group_name, TokenShard(group.rank(), group.size()))


class AllToAllExchange:
    """Exchanges tokens for heads within a group of ranks. It implements the protocol of models/block.py.

    Args:
        group: name of the process group.
        token_shard: the tokens of this rank.
    """

    def __init__(self, group: str, token_shard: TokenShard) -> None:
        self.group, self.token_shard = group, token_shard

    def num_local_heads(self, num_heads: int) -> int:
        """Returns how many of the heads a rank holds. Several ranks hold the same head if there are few."""
        return max(num_heads // self.token_shard.num_ranks, 1)

    def local_heads(self, num_heads: int) -> slice:
        first = self.token_shard.rank * num_heads // self.token_shard.num_ranks
        return slice(first, first + self.num_local_heads(num_heads))

    def to_heads(self, tensors: list[Tensor], num_tokens: int) -> list[Tensor]:
        """Exchanges the rank's tokens of all heads, [n, H, D] each, for all tokens of its heads. Collective.

        Args:
            num_tokens: N.
        Returns:
            [N, num_local_heads(H), D] each.
        """
        return to_heads(tensors, num_tokens, self.group)

    def to_tokens(self, x: Tensor, num_local_tokens: int) -> Tensor:
        """Returns [N, H / P, D] to the ranks of the tokens, as [n, H, D]. Collective.

        Args:
            num_local_tokens: n.
        """
        (of_local_tokens,) = to_tokens(
            [x], num_local_tokens, [x.shape[1] * self.token_shard.num_ranks], self.group
        )
        return of_local_tokens


@torch.library.custom_op("titan_tree::to_heads", mutates_args=())
def to_heads(tensors: list[Tensor], num_tokens: int, group: str) -> list[Tensor]:
    """Exchanges [n, H, D] for [N, h, D], see ``AllToAllExchange``. Copies heads if ranks outnumber them."""
    ranks = named_group(group)
    size, received = ranks.size(), TokenShard(num_ranks=ranks.size()).sizes(num_tokens)
    result = []
    for x in tensors:
        copies = x.repeat_interleave(size // x.shape[1], dim=1) if x.shape[1] < size else x
        by_rank = copies.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # [P n, h, D]
        out = x.new_empty(num_tokens, *by_rank.shape[1:])
        dist.all_to_all_single(out, by_rank.contiguous(), received, [len(x)] * size, group=ranks)
        result.append(out)
    return result


@torch.library.custom_op("titan_tree::to_tokens", mutates_args=())
def to_tokens(tensors: list[Tensor], num_local_tokens: int, num_heads: list[int], group: str) -> list[Tensor]:
    """Exchanges [N, h, D] for [n, H, D]. The transpose of ``to_heads``: it sums copies of the same head."""
    ranks = named_group(group)
    size, result = ranks.size(), []
    for x, heads in zip(tensors, num_heads, strict=True):
        by_rank = x.new_empty(size * num_local_tokens, *x.shape[1:])
        sent = TokenShard(num_ranks=size).sizes(len(x))
        dist.all_to_all_single(by_rank, x.contiguous(), [num_local_tokens] * size, sent, group=ranks)
        local = by_rank.unflatten(0, (size, num_local_tokens)).transpose(0, 1).flatten(1, 2)  # [n, P h, D]
        result.append(local.unflatten(1, (heads, -1)).sum(2) if heads < size else local.contiguous())
    return result


@to_heads.register_fake
def _(tensors: list[Tensor], num_tokens: int, group: str) -> list[Tensor]:
    size = named_group(group).size()
    return [x.new_empty(num_tokens, max(x.shape[1] // size, 1), x.shape[2]) for x in tensors]


@to_tokens.register_fake
def _(tensors: list[Tensor], num_local_tokens: int, num_heads: list[int], group: str) -> list[Tensor]:
    sizes = zip(tensors, num_heads, strict=True)
    return [x.new_empty(num_local_tokens, heads, x.shape[2]) for x, heads in sizes]


def _setup_to_heads(ctx: Any, inputs: tuple[list[Tensor], int, str], output: list[Tensor]) -> None:
    tensors, _, ctx.group = inputs
    ctx.num_local_tokens, ctx.num_heads = tensors[0].shape[0], [x.shape[1] for x in tensors]


def _setup_to_tokens(
    ctx: Any, inputs: tuple[list[Tensor], int, list[int], str], output: list[Tensor]
) -> None:
    tensors, _, _, ctx.group = inputs
    ctx.num_tokens = tensors[0].shape[0]


def _to_heads_backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return to_tokens(gradients, ctx.num_local_tokens, ctx.num_heads, ctx.group), None, None


def _to_tokens_backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None, None, None]:
    return to_heads(gradients, ctx.num_tokens, ctx.group), None, None, None


to_heads.register_autograd(_to_heads_backward, setup_context=_setup_to_heads)
to_tokens.register_autograd(_to_tokens_backward, setup_context=_setup_to_tokens)


def join(values: Tensor, index: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """Joins what the ranks of a group have computed for their own edges or tokens. Collective.

    Every rank must derive the same loss from the result. The gradient of a rank's own values is then
    complete, and the backward pass does not communicate.

    Args:
        values: [n, ...], of this rank.
        index: [n] int64, the index of each value in the result.
        size: N.
        group: None if this rank has all values.
    Returns:
        [N, ...]
    """
    return _Join.apply(values, index, size, group)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, size: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(index)
        # A sum with zeros needs no sizes of other ranks, so the host need not wait for them.
        joined = values.new_zeros(size, *values.shape[1:]).index_copy(0, index, values)
        if group is not None:
            dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return gradients[0][index], None, None, None
