"""Rows: what all integrations share. The rows of a framework's batch become a forest, and values come back.

    rows [B, T] or jagged -> Rows -> a tree, or one TreeBatch -> values per edge [E] -> values per row token

Two ways lead from rows to gradients. In one pass, ``Rows.batch`` runs through a model, ``Rows.by_token``
returns differentiable log-probs, and the framework computes its loss and calls backward. With partitions,
``TreeStep`` runs forward and backward passes on ``Rows.tree`` with a ``RowLoss``.

S tokens of all rows together, padding included; E edges and F (edge, path) pairs of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_loss.loss import GlobalStatistics, TreeLoss
from titan_tree.components.tree_loss.spec import LossSpec
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.images import PathImages
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Rows:
    """The rows of a framework's batch, merged by equal prefixes. Every distinct token is computed once.

    Make them with ``padded`` or ``jagged``.

    >>> tokens = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 0]])
    >>> rows = Rows.padded(tokens, real=tokens > 0)
    >>> batch = rows.batch()
    >>> print(batch.tokens.tolist(), batch.edge_label.tolist())
    [5, 6, 7, 8] [6, 7, 8]
    >>> rows.by_token(torch.tensor([-0.1, -0.2, -0.3]), batch)
    tensor([[ 0.0000, -0.1000, -0.2000,  0.0000],
            [-0.1000, -0.3000,  0.0000,  0.0000]])
    """

    tree: TokenTree
    index: Tensor  # [F] int64: of each pair, the index of the token that predicts among the S tokens
    shape: torch.Size  # shape of the framework's tokens: [B, T] or [S]

    @staticmethod
    def padded(
        tokens: Tensor,
        real: Tensor,
        scored: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        images: Sequence[PathImages] | None = None,
    ) -> Rows:
        """Returns the rows of a padded batch.

        Args:
            tokens: [B, T] integers.
            real: [B, T], nonzero for tokens and 0 for padding, which may be on both sides of a row.
            scored: [B, T], nonzero for the tokens whose log-probs are wanted. None: all.
            temperature: divides the logits, one number or [B].
            images: those of each row, see ``TokenPath``; None: no images.
        Raises:
            UserError: a row is empty or has padding between tokens, or a temperature is not positive.
        """
        is_real = real.bool().cpu().numpy()
        starts = is_real & ~np.pad(is_real, ((0, 0), (1, 0)))[:, :-1]
        if (number := starts.sum(1)).max(initial=0) > 1:
            raise UserError(
                f"row {number.argmax()}: expected padding before and after the tokens only, got padding "
                "between them; remove it"
            )
        lengths = is_real.sum(1)
        first = np.arange(len(is_real)) * is_real.shape[1] + is_real.argmax(1)
        return _make_rows(tokens, first, lengths, scored, temperature, images)

    @staticmethod
    def jagged(
        tokens: Tensor, offsets: Tensor, scored: Tensor | None = None, temperature: float | Tensor = 1.0
    ) -> Rows:
        """Returns the rows of a batch without padding.

        Args:
            tokens: [S] integers.
            offsets: [B + 1] integers: row r is ``tokens[offsets[r]:offsets[r + 1]]``.
            scored: [S], nonzero for the tokens whose log-probs are wanted. None: all.
            temperature: divides the logits, one number or [B].
        Raises:
            UserError: a row is empty, or a temperature is not positive.
        """
        bounds = offsets.cpu().numpy().astype(np.int64)
        return _make_rows(tokens, bounds[:-1], np.diff(bounds), scored, temperature)

    def batch(self) -> TreeBatch:
        """Returns the rows as a batch for one forward pass, with the edges that ``scored`` chose."""
        return TreeBatch.from_trees([self.tree], edges="loss")

    def by_token(self, values: Tensor, batch: TreeBatch) -> Tensor:
        """Returns the values of edges for every token of the rows, in the shape of the framework's tokens.

        An entry speaks of the token after it. It is 0 if that token was not scored, at the last token of a
        row, and in padding. Differentiable.

        Args:
            values: [E].
            batch: the result of ``batch``, or TreeStep's batch of ``tree``, on the device of ``values``.
        """
        index = self.index.to(values.device)
        flat = values.new_zeros(self.shape.numel()).index_put((index,), values[batch.pairs.edge])
        return flat.view(self.shape)


class ByToken(Protocol):
    """What gives the values of edges in a framework's order, such as ``Rows``."""

    def by_token(self, values: Tensor, batch: TreeBatch) -> Tensor:
        """Returns the values of the edges of ``batch``. Differentiable."""
        ...


class RowLoss(TreeLoss):
    """Any loss of the log-probs of rows, for ``TreeStep(model, RowLoss(rows, function))``.

    ``TreeStep.run(step.prepare([[rows.tree]]))`` then adds the gradient of the loss to ``parameter.grad``.
    The loss may depend on all rows: TreeStep scores trees that are partitioned in a pass of their own.

    Args:
        rows: those of the only micro-batch of the step.
        function: maps log-probs and entropies (None without ``entropy``), which are laid out like
            ``Rows.by_token``, to a loss, 0-dim. It is called once per step.
        entropy: whether the function needs entropies.
    Attributes:
        value: the loss of this rank, 0-dim, detached. ``StepResult.loss`` sums the values of all ranks.
    """

    value: Tensor

    def __init__(
        self, rows: ByToken, function: Callable[[Tensor, Tensor | None], Tensor], entropy: bool = False
    ) -> None:
        super().__init__()
        self.spec = LossSpec(self.spec.function, needs_whole_paths=True, compares_paths=True)
        self.rows, self.row_function, self.with_entropy = rows, function, entropy

    @property
    def needs_entropy(self) -> bool:
        return self.with_entropy

    def __call__(
        self,
        logprobs: Tensor,
        batch: TreeBatch,
        normalizer: float,
        entropy: Tensor | None = None,
        statistics: GlobalStatistics | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of all rows, and the number of scored tokens. See ``TreeLoss``.

        Args:
            normalizer: has no effect: the function normalizes its loss itself.
            statistics: have no effect either.
        """
        by_token = self.rows.by_token
        loss = self.row_function(
            by_token(logprobs, batch), None if entropy is None else by_token(entropy, batch)
        )
        self.value = loss.detach()
        return loss, {"token_weight": batch.pairs.loss_mask.sum()}

    @torch.enable_grad()
    def not_finite(
        self,
        logprobs: Tensor,
        batch: TreeBatch,
        entropy: Tensor | None = None,
        statistics: GlobalStatistics | None = None,
    ) -> Tensor:
        """Returns [F] bool: the pairs by whose log-prob the loss has a derivative that is not finite."""
        leaf = logprobs.detach().requires_grad_()
        loss, _ = self(leaf, batch, 1.0, entropy)
        (derivatives,) = torch.autograd.grad(loss, leaf)
        return ~derivatives.isfinite()[batch.pairs.edge]


def _make_rows(
    tokens: Tensor,
    first: np.ndarray,
    lengths: np.ndarray,
    scored: Tensor | None,
    temperature: float | Tensor,
    images: Sequence[PathImages] | None = None,
) -> Rows:
    """Makes ``Rows`` of tokens in any shape.

    Args:
        first: [B] index of each row's first token among all tokens.
        lengths: [B] tokens of each row.
    """
    flat = tokens.flatten().cpu().numpy()
    mask = np.ones(len(flat), bool) if scored is None else scored.flatten().bool().cpu().numpy()
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).cpu().expand(len(first)).numpy()
    spans = [slice(start, start + length) for start, length in zip(first, lengths, strict=True)]
    paths = [
        TokenPath(flat[span], loss_mask=mask[span], temperature=value, id=str(row), images=shown)
        for row, (span, value, shown) in enumerate(
            zip(spans, temperatures.tolist(), images or [()] * len(spans), strict=True)
        )
    ]
    index = [span.start + mask[span][1:].nonzero()[0] for span in spans]  # nothing predicts a first token
    return Rows(TokenTree.from_paths(paths), torch.from_numpy(np.concatenate(index)), tokens.shape)
