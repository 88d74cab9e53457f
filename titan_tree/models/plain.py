"""PlainModel: a user's own module on token trees. It calls a ``TreePass`` where tokens mix.

N tokens, d hidden size, H query or key heads, G value heads, D, K and V head dims, W width of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from titan_tree.components.backends import PLAIN
from titan_tree.components.recurrence import TreeGDN, TreeKDA, TreeSSD, tree_causal_conv1d
from titan_tree.components.tree_attention import Scoring, TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.block import LayerOutput
from titan_tree.models.tree_model import CachedRows, TreeModel, matrix_flops
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

CHECKED_TOKENS = 16, 1024  # of each path of the tree that ``PlainModel`` checks: at first, and at most
MAX_ERROR = 0.01  # of its hidden states, relative to the largest one. A kernel with TF32 has 0.001.
# If only the tokens of another branch change, all shapes stay, and most modules give the same bits.
MAX_CHANGE = 1e-5


class Plain(Protocol):
    """What ``PlainModel`` calls of a module."""

    output_weight: Tensor  # [V, d], the output projection: logits are hidden states times its transpose

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree: TreePass) -> Tensor:
        """Returns the hidden states [N, d] that ``output_weight`` projects.

        Args:
            tokens: [N] int64.
            positions: [N] int32, of each token on its path, for positional embeddings.
            tree: computes everything that mixes tokens. Each pass must make the same calls in one order.
        """


@dataclass
class TreePass:
    """One forward pass of a module over a batch: mixes each token with its ancestors.

    In a partition, each call reads what earlier partitions exported, and exports what later ones need.
    """

    layout: TreeLayout
    kernels: tuple[TreeAttention, TreeGDN, TreeKDA, TreeSSD]
    gateway: Iterator[Tensor]  # what earlier partitions exported; empty outside of partitions
    exports: list[Tensor] = field(default_factory=list)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, scoring: Scoring = PLAIN
    ) -> Tensor:
        """Returns softmax(scale q k^T) v over the tokens on the path to each query, see ``TreeAttention``.

        Args:
            q: [N, H, D].
            k, v: [N, Hkv, D], Hkv a divisor of H.
        Returns:
            [N, H, D].
        """
        if self.layout.exports is not None:
            self.exports.append(
                torch.stack([part.index_select(0, self.layout.exports) for part in (k, v)], 1)
            )
        context = next(self.gateway, None)
        return cast(Tensor, self.kernels[0](q, k, v, self.layout, context, scale, scoring))

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the SiLU of a causal depthwise convolution along each path.

        Args:
            x: [N, C].
            weight: [C, W].
        """
        out, tails = tree_causal_conv1d(x, weight, self.layout, next(self.gateway, None))
        if tails is not None:
            self.exports.append(tails)
        return out

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
        """Returns a recurrence along each path, [N, G, V]. Without beta, it is ``TreeSSD``'s.

        With beta, it is that of ``TreeGDN`` for g [N, G], and that of ``TreeKDA`` for g [N, G, K]. The
        arguments are theirs.
        """
        _, gdn, kda, ssd = self.kernels
        gates = (g,) if beta is None else (g, beta)
        rule = ssd if beta is None else gdn if g.ndim == 2 else kda
        out, states = rule(q, k, v, *gates, self.layout, next(self.gateway, None))
        if states is not None:
            self.exports.append(states)
        return cast(Tensor, out)


@dataclass
class _Survey(TreePass):
    """A pass that computes nothing and records what partitions will export."""

    rows: list[CachedRows] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    flops_per_token: int = 0
    flops_per_pair: int = 0

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, scoring: Scoring = PLAIN
    ) -> Tensor:
        if k.shape != v.shape:
            shapes = f"{list(k.shape)} and {list(v.shape)}"
            raise UserError(f"TreePass.attention: expected k and v of one shape, got {shapes}")
        self.rows.append(CachedRows("keys", (2, *k.shape[1:])))
        self.windows.append(scoring.window)
        self.flops_per_pair += 12 * math.prod(q.shape[1:])
        return torch.zeros_like(q)

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        self.rows.append(CachedRows("states", (weight.shape[1] - 1, weight.shape[0])))
        return torch.zeros_like(x)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
        self.rows.append(CachedRows("states", (*v.shape[1:2], *k.shape[2:], *v.shape[2:]), is_wide=True))
        # See ``GatedDeltaNet.flops``. Without the delta rule, no key reads the state.
        self.flops_per_token += (12 if beta is None else 18) * math.prod(self.rows[-1].shape)
        return torch.zeros_like(v)


class PlainModel(TreeModel):
    """A module of your own with the contract of titan_tree's models, on one device.

    The forward passes 1, 2, 4, 8, ... also run a small tree and both of its paths alone, and compare the
    hidden states. Later checks have longer paths, and weights that no longer are 0, which may hide an error.

    Args:
        module: has ``hidden_states`` and ``output_weight``, see ``Plain``. It keeps its parameters.
        max_positions: the longest path that the module can read, in tokens.
        attention: the backend of ``TreeAttention``.
        recurrence: the backend of ``TreeGDN``, ``TreeKDA`` and ``TreeSSD``.
    Raises:
        UserError: the module lacks one of them, or has dropout, or mixes tokens without its ``TreePass``.
    """

    def __init__(
        self,
        module: nn.Module,
        max_positions: int = 2**31 - 1,
        attention: str = "auto",
        recurrence: str = "auto",
    ) -> None:
        for name in ("hidden_states", "output_weight"):
            if not hasattr(module, name):
                raise UserError(
                    f"PlainModel: {type(module).__name__} has no {name}; define hidden_states(tokens, "
                    "positions, tree) and output_weight (docs/extending.md)"
                )
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
                raise UserError(
                    f"PlainModel: {name}: expected no dropout, because a token of a tree has one mask for "
                    f"all of its paths, got p = {part.p:g}; set it to 0"
                )
        weight = cast(Plain, module).output_weight
        limits = {"vocab_size": len(weight), "max_position_embeddings": max_positions}
        super().__init__(SimpleNamespace(**limits), attention)
        self.module, self.layers = module, nn.ModuleList()
        rules = TreeGDN(recurrence), TreeKDA(recurrence), TreeSSD(recurrence)
        self.kernels = (self.attention, *rules)
        tokens = torch.zeros(2, dtype=torch.int64, device=weight.device)
        positions = torch.arange(2, dtype=torch.int32, device=weight.device)
        layout = TreeLayout(positions=positions, subtree_end=tokens, key_index=tokens)
        self.survey = _Survey(layout, self.kernels, iter(()))
        with torch.no_grad():
            hidden = self.plain.hidden_states(tokens, positions, self.survey)
        if hidden.shape != (2, weight.shape[1]):
            raise UserError(
                f"PlainModel: {self.family}: expected hidden states [2, {weight.shape[1]}] of 2 tokens, as "
                f"output_weight has shape {list(weight.shape)}, got {list(hidden.shape)}"
            )
        self.cache_streams = [rows.stream for rows in self.survey.rows]
        self.windows = list(dict.fromkeys(self.survey.windows)) or (None,)
        self.num_recurrent_layers = sum(rows.is_wide for rows in self.survey.rows)
        self._num_passes = 0

    @property
    def plain(self) -> Plain:
        return cast(Plain, self.module)

    def run_layers(
        self,
        batch: TreeBatch,
        layout: TreeLayout,
        gateway: Sequence[Tensor],
        embedding: Tensor,
        features: Sequence[Tensor] = (),
    ) -> LayerOutput:
        self._num_passes += 1
        if self._num_passes.bit_count() == 1:
            self._check_paths(int(layout.positions.max()) + 1)
        current = TreePass(layout, self.kernels, iter(gateway))
        return LayerOutput(self.plain.hidden_states(batch.tokens, layout.positions, current), current.exports)

    @torch.no_grad()
    def _check_paths(self, max_tokens: int) -> None:
        """Raises UserError if a token of a tree has other hidden states than on its path alone.

        Args:
            max_tokens: the longest path that the module is known to read.
        """
        least, most = CHECKED_TOKENS
        size = min(max_tokens, least * self._num_passes, most)
        branch, vocab_size = size // 2, self.config.vocab_size
        if vocab_size < 3:  # too few for three branches
            return
        tokens = [token % (vocab_size - 2) for token in range(size)]
        first, second, third = (
            TokenPath([*tokens[:branch], *(token + i for token in tokens[branch:])]) for i in range(3)
        )
        on_tree, one, other = map(self._hidden, ((first, second), (first,), (second,)))
        alone = torch.cat([one, other[branch:]])
        eps = torch.finfo(alone.dtype).eps
        self._check(
            on_tree, alone, max(MAX_ERROR, eps**0.5), "of a tree differ from those of its paths alone"
        )
        with_third, changed = self._hidden((first, third)), self._hidden((second, third))
        for got, expected in ((with_third[:size], on_tree[:size]), (changed[size:], with_third[size:])):
            what = "of one branch change with the tokens of another one"
            self._check(got, expected, max(MAX_CHANGE, 4 * eps), what)

    def _check(self, got: Tensor, expected: Tensor, limit: float, what: str) -> None:
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if error > limit:
            raise UserError(
                f"PlainModel: {self.family}: expected hidden states that depend only on a token's path, but "
                f"those {what} by {error:.2g} of the largest; mix tokens only by tree.attention, tree.conv "
                "and tree.recurrence (docs/extending.md)"
            )

    def _hidden(self, paths: Sequence[TokenPath]) -> Tensor:
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)]).to(self.plain.output_weight.device)
        layout = self.prepare(batch.layout)
        return self.plain.hidden_states(
            batch.tokens, layout.positions, TreePass(layout, self.kernels, iter(()))
        )

    def empty_rows(self, x: Tensor) -> list[Tensor]:
        return [rows.empty(x) for rows in self.survey.rows]

    def layer_flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns the operations of matrices and of the calls of a ``TreePass``, see ``TreeModel``."""
        ends = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding)}
        ends.add(id(self.plain.output_weight))
        flops = matrix_flops(p for p in self.module.parameters() if p.ndim == 2 and id(p) not in ends)
        survey = self.survey
        return (flops + survey.flops_per_token) * num_tokens + survey.flops_per_pair * num_visible_pairs

    @property
    def family(self) -> str:
        return type(self.module).__name__

    @property
    def last_norm(self) -> nn.Module:
        """The whole module, which has no parts that are compiled by themselves."""
        return self.module

    @property
    def embedding_weight(self) -> Tensor:
        """The output projection: the module embeds tokens by itself."""
        return self.plain.output_weight

    @property
    def output_weight(self) -> None:
        return None
