"""What each layer keeps for its backward pass, per token and per token copy that arrives for its experts.

A layer is traced on the meta device, as training compiles it: with its activation checkpointing, and with the
operators that exchange tokens. torch.compile's partitioner decides which tensors the forward pass keeps. It
gives other results in other versions of torch, so nothing here is a formula.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_tree.cli.plan.sharding import Sharding
from titan_tree.components.moe import Experts
from titan_tree.components.tree_attention import TreeAttention, operator, plan
from titan_tree.components.tree_attention.backend import PLAIN, Scoring
from titan_tree.components.tree_gdn import TreeGDN
from titan_tree.components.tree_gdn.operator import gated_delta_rule
from titan_tree.distributed import titan
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.distributed.sequence_parallel import AllToAllExchange
from titan_tree.models.block import Block, Mixer
from titan_tree.models.decoder import Decoder
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_shards import TokenShard
from titan_tree.tree.token_tree import TokenTree

POLICIES = {"none": None, "selective": titan.TreeSelectiveAC, "full": titan.FullAC}
TRACED_TOKENS = 1024
BACKEND = "triton"  # it keeps the same tensors as "hopper"
ALONE = Sharding(1)


@dataclass(frozen=True)
class Kept:
    """Bytes that forward passes keep: per token of the rank, and per copy of a token that arrives here."""

    per_token: float
    per_row: float = 0.0

    def of(self, tokens: float, rows: float) -> float:
        """Returns the bytes for that many tokens and arriving copies."""
        return self.per_token * tokens + self.per_row * rows


class LayerMemory:
    """The bytes that the layers of a model keep, traced on first use.

    Args:
        model: on the meta device.
        dtype: of the computation.
        sharding: how ranks share tokens, heads and experts.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype, sharding: Sharding = ALONE) -> None:
        self.model, self.dtype, self.sharding = _shapes_only(model), dtype, sharding
        self._traced: dict[tuple[Any, ...], Kept] = {}

    def kept(self, policy: str) -> Kept:
        """Returns what all layers keep together.

        Args:
            policy: of activation checkpointing, a key of ``POLICIES``.
        """
        layers = [self._layer(block, policy) for block in self.model.blocks]
        return Kept(sum(layer.per_token for layer in layers), sum(layer.per_row for layer in layers))

    def work(self, policy: str) -> Kept:
        """Returns what the backward pass of one layer, the largest, needs besides what it has kept."""
        work = []
        for block in self.model.blocks:
            everything, kept = self._layer(block, "none"), self._layer(block, policy)
            rows = max(everything.per_row - kept.per_row, 0.0)
            work.append(Kept(max(everything.per_token - kept.per_token, 0.0), rows))
        return max(work, key=lambda each: each.of(1, 1))

    def _layer(self, block: Block, policy: str) -> Kept:
        kind = type(block.mixer), type(block.mlp), policy
        if kind not in self._traced:
            with _compiler_settings(self.model):
                self._traced[kind] = _trace(self.model, block, self.dtype, policy, self.sharding)
        return self._traced[kind]


class _Attention(TreeAttention):
    """TreeAttention whose operator sees only shapes."""

    def prepare(self, layout: TreeLayout, windows: Collection[int | None] = (None,)) -> TreeLayout:
        return layout.with_plan({window: plan.prepare(layout, window) for window in windows})

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TreeLayout,
        context: Tensor | None = None,
        scale: float | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        assert layout.attention_plan is not None
        plan = layout.attention_plan[scoring.window]
        return operator.attention(BACKEND, q, k, v, context, layout, plan, 1.0, scoring, False)


class _DeltaNet(TreeGDN):
    """TreeGDN whose operator sees only shapes."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: TreeLayout,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert layout.chunks is not None
        assert layout.chains is not None
        return gated_delta_rule(BACKEND, q, k, v, g, beta, states, layout.chunks, layout.chains)[0], None


class _TracedError(Exception):
    """Ends a trace: its graph is known, and need not run."""


def _trace(model: Decoder, block: Block, dtype: torch.dtype, policy: str, sharding: Sharding) -> Kept:
    """Returns what the forward pass of a block keeps, its output included."""
    found: list[Kept] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(_outputs(graph))
        return _stop

    holder = nn.Module()
    holder.layers = nn.ModuleList([copy.deepcopy(block).to(dtype)])
    share = TokenShard(num_ranks=sharding.sequence_parallel)
    path = TokenPath([1] * (TRACED_TOKENS * share.num_ranks))
    batch = share.of(TreeBatch.from_trees([TokenTree.from_paths([path])]))
    layout = model.prepare(batch.to("meta").layout)
    sizes = TRACED_TOKENS, model.config.hidden_size
    x = torch.empty(sizes, dtype=dtype, device="meta", requires_grad=True)
    with _exchanges(holder, sharding):
        if policy_class := POLICIES[policy]:
            policy_class(policy_class.Config(preserve_rng_state=False)).apply(holder)
        backend = partial(_partition, keep)
        compiled = torch.compile(holder.layers[0], backend=backend, fullgraph=True, dynamic=True)
        with suppress(_TracedError):
            compiled(x, model.make_rope(layout.positions), layout)
    return found[0]


def _partition(compiler: Callable[..., Any], graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend of torch.compile that chooses what the forward pass keeps, as Inductor does."""
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=select_decomp_table,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        )(graph, inputs)


def _stop(*inputs: Any) -> None:
    raise _TracedError


def _outputs(graph: torch.fx.GraphModule) -> Kept:
    """Returns the bytes of what a graph returns, without its inputs: weights, the layout, and x.

    x is the output of the layer below, which counts there. Views count once.
    """
    given = {_storage(node) for node in graph.graph.find_nodes(op="placeholder") if _is_tensor(node)}
    (output,) = graph.graph.find_nodes(op="output")
    made = {_storage(node): node.meta["val"] for node in output.all_input_nodes if _is_tensor(node)}
    per_token = per_row = 0.0
    for storage, value in made.items():
        if storage in given:
            continue
        if free_unbacked_symbols(value):  # the host learns the number of rows only when it runs
            per_row += value[0].numel() * value.element_size()
        else:
            per_token += int(value.numel()) * value.element_size() / TRACED_TOKENS
    return Kept(per_token, per_row)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _storage(node: torch.fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


def _shapes_only(model: Decoder) -> Decoder:
    """Returns a copy of a model whose attention and DeltaNet only know shapes."""
    model = copy.deepcopy(model)
    replacements = {TreeAttention: _Attention(), TreeGDN: _DeltaNet()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) in replacements:
                module._modules[name] = replacements[type(child)]
    return model


@contextmanager
def _exchanges(holder: nn.Module, sharding: Sharding) -> Iterator[None]:
    """Makes mixers exchange tokens for heads, and experts exchange tokens, with ranks that do not exist."""
    size = max(sharding.sequence_parallel, sharding.expert_parallel)
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        heads, tokens = (
            dist.new_group(list(range(n))) for n in (sharding.sequence_parallel, sharding.expert_parallel)
        )
        for module in holder.modules():
            if isinstance(module, Mixer) and heads.size() > 1:
                module.exchange = AllToAllExchange(heads.group_name, TokenShard(0, heads.size()))
            elif isinstance(module, Experts) and tokens.size() > 1:
                module.dispatcher = ShardedExperts(tokens)
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _compiler_settings(model: Decoder) -> Iterator[None]:
    """Sets what ``parallelize`` sets for the compiler."""
    torch._dynamo.reset()
    duck_shape = torch.fx.experimental._config.use_duck_shape and "states" not in model.cache_streams
    with (
        warnings.catch_warnings(action="ignore"),
        torch._dynamo.config.patch(specialize_float=True, do_not_emit_runtime_asserts=True),
        torch.fx.experimental._config.patch(use_duck_shape=duck_shape),  # type: ignore[attr-defined]
    ):
        yield
