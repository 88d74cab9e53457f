"""What each layer keeps for its backward pass, per token, and per row and copy that its experts receive.

A layer is traced on the meta device, as training compiles it: with its activation checkpointing, and with the
operators that exchange tokens. torch.compile's partitioner decides which tensors the forward pass keeps. It
gives other results in other versions of torch, so nothing here is a formula. docs/decisions says why torch's
memory tracker cannot do this.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_tree.components.backends import ATTENTION_BACKENDS, RECURRENCE_BACKENDS
from titan_tree.components.moe.layer import Experts
from titan_tree.components.recurrence import TreeRecurrence
from titan_tree.components.recurrence.buffers import empty_saved
from titan_tree.components.tree_attention import TreeAttention, block_lists, operator
from titan_tree.distributed import titan
from titan_tree.distributed.experts.exchange import Arrived
from titan_tree.distributed.experts.sharded_experts import ShardedExperts
from titan_tree.distributed.sequence_parallel import AllToAllExchange
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.models.block import Block, Mixer
from titan_tree.models.decoder import Decoder
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

POLICIES = {"none": None, "selective": titan.TreeSelectiveAC, "full": titan.FullAC}
TRACED_TOKENS = 1024
# A backend of attention and of recurrences for the meta device, which no other one accepts. It keeps the same
# tensors as "hopper" and "triton", and computes nothing.
SHAPES: Any = SimpleNamespace(
    refusal=lambda *inputs: None,
    prepare=block_lists.prepare,
    attention=partial(operator.attention, "shapes"),
    empty_saved=empty_saved,
)


class Kept(NamedTuple):
    """Bytes saved for the backward pass."""

    per_token: float  # per token that this rank runs
    per_row: float = 0.0  # per token that arrives for this rank's experts
    per_copy: float = 0.0  # per expert of any token on this rank

    def of(self, tokens: float, rows: float, copies: float) -> float:
        """Returns the bytes for numbers of tokens that run, and of rows and copies that arrive."""
        return self.per_token * tokens + self.per_row * rows + self.per_copy * copies


class LayerTrace:
    """The bytes that the layers of a model keep. Each kind of layer is traced on first use.

    Args:
        model: a model on the meta device, with a dtype in its ``execution``.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = copy.deepcopy(model)
        for module in self.model.modules():
            if isinstance(module, TreeAttention | TreeRecurrence):
                module.backend = "shapes"
        self._traced: dict[tuple[object, ...], Kept] = {}

    def kept(self, policy: str, parallel: ParallelConfig) -> Kept:
        """Returns what all layers keep together with activation checkpointing ``policy``."""
        layers = [self._layer(block, policy, parallel) for block in self.model.blocks]
        return Kept(*map(sum, zip(*layers, strict=True)))

    def recomputed(self, policy: str, parallel: ParallelConfig) -> Kept:
        """Returns what the backward pass of the largest layer needs besides what it has kept."""
        differences = []
        for block in self.model.blocks:
            everything, kept = (self._layer(block, name, parallel) for name in ("none", policy))
            differences.append(Kept(*(max(a - b, 0.0) for a, b in zip(everything, kept, strict=True))))
        return max(differences, key=lambda difference: difference.of(1, 1, 1))

    def _layer(self, block: Block, policy: str, parallel: ParallelConfig) -> Kept:
        sequence_parallel, expert_parallel = parallel.sequence_parallel, parallel.expert_parallel
        # Without copied heads, all numbers of ranks above 1 give the same bytes per token.
        mixers = [block.mixer for block in self.model.blocks]
        fewest = min((mixer.num_heads[name] for mixer in mixers for name in mixer.copied_heads), default=1)
        shared = sequence_parallel if sequence_parallel > fewest else min(sequence_parallel, 2)
        key = type(block.mixer), type(block.mlp), policy, shared, expert_parallel > 1
        if key not in self._traced:
            self._traced[key] = _trace(self.model, block, policy, sequence_parallel, expert_parallel)
        return self._traced[key]


class _TracedError(Exception):
    """Ends a trace: its graph is known, and need not run."""


def _trace(model: Decoder, block: Block, policy: str, sequence_parallel: int, expert_parallel: int) -> Kept:
    """Returns what the forward pass of a block keeps, its output included."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return _stop

    backend = aot_autograd(  # chooses what the forward pass keeps, as Inductor does
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    holder = nn.Module()
    holder.layers = nn.ModuleList([copy.deepcopy(block).to(model.execution.dtype)])
    share = TokenShard(num_ranks=sequence_parallel)
    path = TokenPath([1] * (TRACED_TOKENS * sequence_parallel))
    batch = share.of(TreeBatch.from_trees([TokenTree.from_paths([path])]))
    sizes = TRACED_TOKENS, model.config.hidden_size
    x = torch.empty(sizes, dtype=model.execution.dtype, device="meta", requires_grad=True)
    with _compiler_settings(model), _exchanges(holder, sequence_parallel, expert_parallel):
        layout = model.prepare(batch.to("meta").layout)
        if policy_class := POLICIES[policy]:
            policy_class(policy_class.Config(preserve_rng_state=False)).apply(holder)
        compiled = torch.compile(holder.layers[0], backend=backend, fullgraph=True, dynamic=True)
        with suppress(_TracedError):
            compiled(x, model.make_rope(layout.positions), layout)
    return _outputs(graphs[0])


def _stop(*inputs: object) -> None:
    raise _TracedError


def _outputs(graph: torch.fx.GraphModule) -> Kept:
    """Returns the bytes of what a graph returns, without its inputs: weights, the layout, and x.

    x is the output of the layer below, which counts there. Views count once.
    """

    def by_storage(nodes: list[torch.fx.Node]) -> dict[int, Tensor]:
        values = [node.meta.get("val") for node in nodes]
        return {x.untyped_storage()._cdata: x for x in values if isinstance(x, Tensor)}

    (output,) = graph.graph.find_nodes(op="output")
    inputs = by_storage(list(graph.graph.find_nodes(op="placeholder")))
    # The host learns how many rows arrive and how many copies there are only when it runs: the numbers are
    # symbols.
    gathers = graph.graph.find_nodes(op="call_function", target=torch.ops.titan_tree.gather_tokens.default)
    copies = {str(Arrived(*node.meta["val"]).scale.shape[0]) for node in gathers}
    per_token = per_row = per_copy = 0.0
    for storage, value in by_storage(output.all_input_nodes).items():
        if storage in inputs:
            continue
        if not free_unbacked_symbols(value):
            per_token += int(value.numel()) * value.element_size() / TRACED_TOKENS
        elif str(value.shape[0]) in copies:
            per_copy += value[0].numel() * value.element_size()
        else:
            per_row += value[0].numel() * value.element_size()
    return Kept(per_token, per_row, per_copy)


@contextmanager
def _exchanges(holder: nn.Module, sequence_parallel: int, expert_parallel: int) -> Iterator[None]:
    """Makes mixers exchange tokens for heads, and experts exchange tokens, with ranks that do not exist."""
    world_size = max(sequence_parallel, expert_parallel)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        heads, experts = (dist.new_group(list(range(n))) for n in (sequence_parallel, expert_parallel))
        for module in holder.modules():
            if isinstance(module, Mixer) and sequence_parallel > 1:
                module.exchange = AllToAllExchange(heads.group_name, TokenShard(0, sequence_parallel))
            elif isinstance(module, Experts) and expert_parallel > 1:
                module.dispatcher = ShardedExperts(experts)
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _compiler_settings(model: Decoder) -> Iterator[None]:
    """Registers ``SHAPES``, and sets what ``parallelize`` and Inductor set for the compiler."""
    torch._dynamo.reset()
    duck_shape = torch.fx.experimental._config.use_duck_shape and "states" not in model.cache_streams
    with (
        warnings.catch_warnings(action="ignore"),
        ATTENTION_BACKENDS.registered("shapes", SHAPES),
        RECURRENCE_BACKENDS.registered("shapes", SHAPES),
        torch._functorch.config.patch(unlift_effect_tokens=True),
        torch._dynamo.config.patch(specialize_float=True, do_not_emit_runtime_asserts=True),
        torch.fx.experimental._config.patch(use_duck_shape=duck_shape),  # type: ignore[attr-defined]
    ):
        yield
